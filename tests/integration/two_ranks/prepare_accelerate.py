"""`Accelerator.prepare` makes loaders anew for their rank."""

from __future__ import annotations

import functools
from typing import Any

from accelerate import DataLoaderConfiguration
from common import BATCH, HOW, KINDS, ROWS, SEED, Rows, launch, make, told

import penstock as ps


def prepare(kind: str) -> Any:
    """Two epochs of a prepared loader."""
    from penstock.integrations.accelerate import Accelerator

    prepared = Accelerator(cpu=True).prepare(make(kind))
    epochs = [[batch.tolist() for batch in prepared] for _ in range(2)]
    return [told(prepared.base_dataloader, epochs)]


def prepare_groups() -> Any:
    """Of a batch sampler that deals what it forms."""
    from penstock.integrations.accelerate import Accelerator

    batches = ps.GroupedBatchSampler(ps.RandomSampler(Rows(), shuffle="global", seed=SEED), [0] * ROWS, BATCH)
    loader: Any = ps.DataLoader(Rows(), batch_sampler=batches, **{**HOW, "batch_size": 1})
    prepared = Accelerator(cpu=True).prepare(loader)
    epochs = [[batch.tolist() for batch in prepared] for _ in range(2)]
    return [told(prepared.base_dataloader, epochs)]


def dispatch() -> Any:
    """Rank 0 reads all, and sends each rank its part."""
    from penstock.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    return [row for batch in accelerator.prepare(make("global")) for row in batch.tolist()]


if __name__ == "__main__":
    kinds = {kind: functools.partial(prepare, kind) for kind in KINDS}
    launch({**kinds, "groups": prepare_groups, "dispatched": dispatch})
