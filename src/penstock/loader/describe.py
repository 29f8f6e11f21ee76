"""`describe`: a loader in three lines: what it reads, what makes batches, where its consumer is."""

from __future__ import annotations

import reprlib
from typing import Any

from torch.utils.data import Subset

from penstock.errors import PartitionError
from penstock.loader.config import LoaderConfig
from penstock.wording import counted

__all__ = ["describe"]


def describe(loader: Any) -> str:
    """Return what a `DataLoader` says of itself. Asking reads no data, and moves no generator."""
    config: LoaderConfig = loader.running_config
    position = loader.pipeline.position
    seed = "" if config.seed is None else f", seed {config.seed}"
    return (
        f"{type(loader).__name__} of {_data(loader.dataset)}\n"
        f"  batches: {_batches(config)}, made by {_makers(config)}\n"
        f"  state: epoch {loader.epoch}, {counted(position.had, 'batch')} had{seed}; split by {_splitter(loader)}"
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


def _splitter(loader: Any) -> str:
    try:
        return str(loader.splits)
    except PartitionError:
        # RANK without WORLD_SIZE, for example, as long as the process group is not there. The first iter() says more.
        return "ranks that are not known yet"


def _batches(config: LoaderConfig) -> str:
    if config.batch_size is None:
        return "as the sampler says"
    return f"of {counted(config.batch_size, 'sample')}{', full ones only' if config.drop_last else ''}"


def _makers(config: LoaderConfig) -> str:
    if config.kind == "inline":
        return "the caller's thread"
    if config.kind == "thread":
        return counted(config.workers, "thread")
    each = f" of {counted(config.threads, 'thread')}" if config.threads > 1 else ""
    return f"{counted(config.workers, 'Ray worker' if config.kind == 'ray' else 'process')}{each}"
