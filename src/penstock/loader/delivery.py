"""What the consumer holds: an iterator that counts the batches it hands out."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory as pin

from penstock.samplers.base import BatchPass

__all__ = ["WORKER_NAMES", "Delivery", "Progress", "pinned", "skip_batches", "timed_out"]


WORKER_NAMES = ("_workers", "_shutdown_workers")
"""Of torch's iterator over worker processes: private, but programs read them."""


class Progress:
    """How far the consumer of one pass has got. The loader keeps this, not the iterator, so that an iterator that the
    caller drops can go at once. ``run`` is None where a foreign data set is batched by torch.
    """

    def __init__(self, run: BatchPass | None, skipped: int = 0) -> None:
        self.run = run
        self.count = skipped


class Delivery:
    """The iterator of a loader.

    Args:
        batches: what an executor makes.
        progress: counted up with every batch, and with every one that failed, since the next call goes on behind it.
        finished: called once, at the end of the pass.
    """

    def __init__(self, batches: Iterator[Any], progress: Progress, finished: Callable[[Progress], None]) -> None:
        self._batches = batches
        self._progress = progress
        self._finished: Callable[[Progress], None] | None = finished

    def __iter__(self) -> Delivery:
        return self

    def __getattr__(self, name: str) -> Any:
        if name in WORKER_NAMES:
            return getattr(self._batches, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            if self._finished is not None:
                self._finished(self._progress)
                self._finished = None
            raise
        except Exception as error:
            if not _is_timeout(error):  # the next call waits for the same batch again
                self._progress.count += 1
            raise
        self._progress.count += 1
        return batch


_TIMED_OUT = "DataLoader timed out after"


def timed_out(seconds: float | None) -> str:
    """torch's words."""
    return f"{_TIMED_OUT} {seconds} seconds"


def _is_timeout(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and str(error).startswith(_TIMED_OUT)


def skip_batches(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """Resume a foreign iterable data set, which only it can do exactly: what has been had is made again and dropped."""
    if not count:
        return batches
    warnings.warn(
        f"this data set has no order that Penstock knows: its first {count} batches are made again and dropped",
        stacklevel=4,
    )
    return itertools.islice(batches, count, None)


def pinned(batches: Iterator[Any], device: str) -> Iterator[Any]:
    """The batches in pinned memory; without an accelerator they come as they are, and torch's warning is given."""
    if not torch.accelerator.is_available():
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, "
            "then device pinned memory won't be used.",
            stacklevel=4,
        )
        return batches
    return map(partial(pin, device=device or None), batches)
