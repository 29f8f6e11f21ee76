"""Small things that programs import: ranks and workers, seeds, repetition, and the switch of the secure mode."""

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
"""Whether the secure mode is on, which a program switches by ``wds.utils.enforce_security = True``.

Then ``pipe:`` commands, pickles and torch objects are refused although they are allowed. So are files of this machine
as shards: whoever names the shards could otherwise have any file read. It travels to workers with a pipeline."""


class PipelineStage:
    """The base of stages of one's own: ``run(src)`` gets an iterator and returns one."""

    def invoke(self, *args: Any, **kw: Any) -> Any:
        """What `run` does, unless that is overridden alone."""
        raise NotImplementedError(f"{type(self).__name__} needs run(src), which returns an iterator")

    def run(self, src: Any = None) -> Any:
        """Turn one iterator into another."""
        return self.invoke(src)


def pytorch_worker_info(group: Any = None) -> tuple[int, int, int, int]:
    """Rank, world size, worker, number of workers."""
    world, worker = distributed.current(process_group=group), distributed.worker()
    return world.rank, world.world_size, worker.id, worker.total


def pytorch_worker_seed(group: Any = None) -> int:
    """A number that differs between workers: rank times 1000, and the worker."""
    rank, _, worker, _ = pytorch_worker_info(group=group)
    return rank * 1000 + worker


def make_seed(*args: Any) -> int:
    """31 bits out of whatever is given, the same in every process."""
    return mix(*(int.from_bytes(repr(arg).encode(), "little") for arg in args)) >> 33


def guess_batchsize(batch: Any) -> int:
    """The length of a batch: of its first field, where it is a tuple or list."""
    return len(batch[0] if isinstance(batch, tuple | list) else batch)


def repeatedly(
    source: Iterable[Any],
    nepochs: int | None = None,
    nbatches: int | None = None,
    nsamples: int | None = None,
    batchsize: Callable[..., int] = guess_batchsize,
) -> Iterator[Any]:
    """The items of a source over and over: so many times, so many items, or so many samples in them."""
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
