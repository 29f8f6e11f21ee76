"""Utilities that programs import: ranks and workers, seeds, repetition, and secure mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from penstock import distributed
from penstock.hashing import mix

__all__ = [
    "PipelineStage",
    "enforce_security",
    "guess_batchsize",
    "make_seed",
    "pytorch_worker_info",
    "pytorch_worker_seed",
    "repeatedly",
]

enforce_security = False
"""Whether secure mode is on; set it with ``wds.utils.enforce_security = True``.

Secure mode refuses ``pipe:`` commands, pickles and torch objects even if they are allowed. It also refuses local files
as shards, since the author of the shard list could otherwise read any file. It is passed to workers with a pipeline."""


class PipelineStage:
    """The base class of custom stages: ``run(src)`` gets an iterator and returns one."""

    def invoke(self, *args: Any, **kw: Any) -> Any:
        """Call `run`; subclasses may override either."""
        raise NotImplementedError(f"{type(self).__name__} needs run(src), which returns an iterator")

    def run(self, src: Any = None) -> Any:
        """Turn one iterator into another."""
        return self.invoke(src)


def pytorch_worker_info(group: Any = None) -> tuple[int, int, int, int]:
    """Return (rank, world size, worker, number of workers)."""
    world, worker = distributed.current(process_group=group), distributed.worker()
    return world.rank, world.world_size, worker.id, worker.total


def pytorch_worker_seed(group: Any = None) -> int:
    """Return a number that differs between workers: rank * 1000 + worker."""
    rank, _, worker, _ = pytorch_worker_info(group=group)
    return rank * 1000 + worker


def make_seed(*args: Any) -> int:
    """Hash the arguments to 31 bits, the same in every process."""
    return mix(*(int.from_bytes(repr(arg).encode(), "little") for arg in args)) >> 33


def guess_batchsize(batch: Any) -> int:
    """Return the length of a batch: that of its first field if it is a tuple or list."""
    return len(batch[0] if isinstance(batch, tuple | list) else batch)


def repeatedly(
    source: Iterable[Any],
    nepochs: int | None = None,
    nbatches: int | None = None,
    nsamples: int | None = None,
    batchsize: Callable[..., int] = guess_batchsize,
) -> Iterator[Any]:
    """Repeat the items of a source: ``nepochs`` times, or up to ``nbatches`` items or ``nsamples`` samples."""
    epochs = batches = samples = 0
    while True:
        begun = batches
        for item in source:
            yield item
            batches += 1
            if nbatches is not None and batches >= nbatches:
                return
            if nsamples is not None:
                samples += batchsize(item)
                if samples >= nsamples:
                    return
        epochs += 1
        if batches == begun or (nepochs is not None and epochs >= nepochs):
            return
