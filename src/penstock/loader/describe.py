"""`describe`: a loader in three lines: its data, its executor and its position."""

from __future__ import annotations

import reprlib
from typing import Any

from torch.utils.data import Subset

from penstock.loader.config import LoaderConfig
from penstock.wording import counted

__all__ = ["describe"]


def describe(loader: Any) -> str:
    """Return a description of a `DataLoader`. Reads no data and moves no generator."""
    config: LoaderConfig = loader.running_config
    batches = "from the sampler"
    if config.batch_size is not None:
        batches = f"of {counted(config.batch_size, 'sample')}{', full ones only' if config.drop_last else ''}"
    if config.kind == "inline":
        makers = "the caller's thread"
    else:
        makers = counted(config.workers, {"thread": "thread", "process": "process", "ray": "Ray worker"}[config.kind])
        if config.threads > 1:
            makers += f" of {counted(config.threads, 'thread')}"
    seed = "" if config.seed is None else f", seed {config.seed}"
    delivered = counted(loader.pipeline.position.num_delivered, "batch")
    return (
        f"{type(loader).__name__} of {_data(loader.dataset)}\n"
        f"  batches: {batches}, made in {makers}\n"
        f"  state: epoch {loader.epoch}, {delivered} delivered{seed}; split by {loader.splits}"
    )


def _data(dataset: Any) -> str:
    """Return a dataset in one line, which stays short for a list of a million samples."""
    if isinstance(dataset, Subset):
        return f"{type(dataset).__name__} of {_data(dataset.dataset)}"
    if isinstance(dataset, list | tuple | dict):
        return reprlib.repr(dataset)
    if repr(dataset) == object.__repr__(dataset):
        return type(dataset).__name__
    return repr(dataset).partition("\n")[0]
