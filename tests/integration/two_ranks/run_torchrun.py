"""A plain loop under torchrun: loaders that say how the ranks share the samples, and one that does not."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch.distributed as dist
from common import HOW, KINDS, SEED, Rows, make, run, told, write

import penstock as ps


def read(kind: str) -> Any:
    """Two epochs."""
    if kind in ("share", "shards", "ours"):
        loader = make(kind)
    else:
        data = Rows()
        sampler = ps.DistributedSampler(data, shuffle="global" if kind == "global" else True, seed=SEED)
        loader = ps.DataLoader(data, sampler=sampler, **HOW)
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([batch.tolist() for batch in loader])
    return [told(loader, epochs)]


def main() -> None:
    """Write what each kind of data gave, and what was said of a loader that nobody deals."""
    dist.init_process_group("gloo")
    run({kind: functools.partial(read, kind) for kind in KINDS})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        rows = [[batch.tolist() for batch in make("global")] for _ in range(2)]
    write("undealt", {"rows": rows[0], "said": [str(each.message) for each in said]})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
