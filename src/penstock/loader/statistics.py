"""`Statistics`: what a loader delivered, how long its consumer waited, and what the workers did.

    request   batch   request  batch    request
     |---wait----|-train-|-wait--|-train---|       the consumer's clock; `seconds` = wait + train
     ready, depth        ready, depth              finished and allowed batches in flight at the request

Invariant: only the time between the first request and the end of an epoch counts. Pauses between epochs (validation, a
checkpoint) are neither waiting nor training. Numbers grow until `Statistics.reset`. Cost: about 2 µs per batch, and
memory for a few dozen numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from penstock.cores import Ticks, cores, ticks
from penstock.loader.config import LoaderConfig
from penstock.loader.messages import BatchMetrics, BatchResult

__all__ = ["Statistics", "size_of"]

# isinstance with a union takes four times as long as with a tuple.
_TEXT, _LISTS, _ARRAYS, _NUMBERS = (str, bytes, bytearray), (list, tuple), (np.ndarray, np.generic), (int, float)
# Number of items of a list that are measured. The others are assumed to be alike.
_SIZED = 16


class Statistics:
    """Counters of one loader. Picklable. Exact while one consumer at a time iterates.

    Call `begin` at the first request of an epoch, and one of `delivered`, `failed`, `waited` and `ended` after each
    request.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set all counters to zero."""
        self._config = LoaderConfig()
        self.passes = self.batches = self.bytes = self.failures = self.restarts = 0
        self.wait = self.start = self.train = 0.0
        self.work = BatchMetrics()
        self.ready = self.allowed = self.asked = 0
        self.copies = self.copied_ahead = 0
        self.copy = 0.0
        self.ways: Counter[str] = Counter()
        # Ticks of the cores at the first request.
        self._ticks: Ticks | None = None
        # Time of the last delivery; 0 at the start of an iterator.
        self._last = 0.0
        # Whether the next batch is the first one of its iterator.
        self._first = True

    def begin(self, config: LoaderConfig) -> None:
        """Record the first request of an epoch iterator."""
        self.runs(config)
        if not self.passes:
            self._ticks = ticks()
        self.passes += 1
        self._last, self._first = 0.0, True

    def runs(self, config: LoaderConfig) -> None:
        """Record a change of executor.

        Queues of different settings are not comparable, so the queue's counters restart.
        """
        before, self._config = self._config, config
        if (config.kind, config.num_workers, config.depth) != (before.kind, before.num_workers, before.depth):
            self.ready = self.allowed = self.asked = 0

    def delivered(self, result: BatchResult, nbytes: int, wait: float, ready: int, depth: int) -> None:
        """Record a batch that the consumer received.

        Args:
            result: the batch with its metrics.
            nbytes: size of the batch in bytes, see `size_of`.
            wait: seconds between request and delivery.
            ready: number of finished batches at the time of the request.
            depth: number of batches that may be in flight now.
        """
        self.waited(wait)
        if self._first:
            self._first = False
            self.start += wait
        # No batch is ready at an iterator's first request, whatever limits the run.
        else:
            self.ready += ready
            self.allowed += depth
            self.asked += 1
        self.batches += 1
        self.bytes += nbytes
        self.work.add(result.metrics)
        self.ways[result.way] += 1

    def copied(self, seconds: float, *, ahead: bool) -> None:
        """Record the copy of a delivered batch to the device.

        Args:
            seconds: time of its thread to copy into pinned memory and to start the copy to the device.
            ahead: whether the copy had started before the request.
        """
        self.copies += 1
        self.copied_ahead += ahead
        self.copy += seconds

    def failed(self, wait: float) -> None:
        """Record an error that the consumer received after ``wait`` seconds."""
        self.waited(wait)
        self.failures += 1

    def ended(self, wait: float) -> None:
        """Record the end of the epoch, reported after ``wait`` seconds."""
        self.waited(wait)
        self._last = 0.0

    def waited(self, wait: float) -> None:
        """Record ``wait`` seconds without a batch, such as a timeout of a batch that is still being made."""
        now = perf_counter()
        self.wait += wait
        if self._last:
            self.train += max(0.0, now - wait - self._last)
        self._last = now

    def stats(self, errors: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return all statistics as one JSON-serialisable dict; `docs/loader.md` describes it.

        Args:
            errors: the counts of the failure log.
        """
        seconds, config = self.wait + self.train, self._config
        before, now, cores_busy = self._ticks, ticks(), None
        if before is not None and now is not None and now[1] > before[1]:
            # The share of time since the first request, with any program.
            cores_busy = min(1.0, max(0.0, (now[0] - before[0]) / (now[1] - before[1])))
        return {
            "executor": config.kind,
            "workers": config.num_workers,
            "threads_per_worker": config.threads_per_worker,
            "processes": config.workers if config.forks_workers else 0,
            "persistent_workers": config.persistent_workers,
            "cores": cores(),
            "cores_busy": cores_busy,
            "passes": self.passes,
            "batches": self.batches,
            "samples": self.work.samples,
            "bytes": self.bytes,
            "seconds": seconds,
            "batches_per_second": _ratio(self.batches, seconds),
            "samples_per_second": _ratio(self.work.samples, seconds),
            "bytes_per_second": _ratio(self.bytes, seconds),
            "wait_seconds": self.wait,
            "wait_share": _ratio(self.wait, seconds),
            "first_batch_seconds": self.start,
            "train_seconds": self.train,
            "train_share": _ratio(self.train, seconds),
            "stages": self.work.by_stage(),
            "cpu_seconds": self.work.cpu,
            "queue": {
                "requests": self.asked,
                "ready": _ratio(self.ready, self.asked),
                "depth": _ratio(self.allowed, self.asked) if self.asked else float(config.depth),
                "prefetch": max(config.depth, round(_ratio(self.allowed, self.asked))),
                "occupancy": _ratio(self.ready, self.allowed),
            },
            "ways": dict(self.ways),
            "copies": {"batches": self.copies, "ahead": self.copied_ahead, "seconds": self.copy},
            "errors": dict(errors or {}),
            "failed_batches": self.failures,
            "restarts": self.restarts,
        }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def size_of(batch: Any) -> int:
    """Return the bytes of the tensors, arrays, text and numbers in a batch.

    Takes about 1 µs for two tensors. For long lists it measures some items and estimates the rest, and for sparse
    tensors their indices. Objects of other types count as 0.
    """
    if type(batch) is torch.Tensor and batch.layout is torch.strided:
        return batch.nbytes
    try:
        return _size(batch)
    except Exception:
        # A structure that contains itself, or a user's mapping that fails, must not lose the batch.
        return 0


def _size(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        if batch.layout in (torch.strided, torch.jagged):
            return batch.nbytes
        # About an index in each dimension for each value of a sparse tensor.
        return batch._nnz() * (batch.element_size() + 8 * batch.dim())
    if isinstance(batch, _TEXT):
        return len(batch)
    if isinstance(batch, _ARRAYS):
        return batch.nbytes
    if isinstance(batch, _NUMBERS):
        return 8
    items: Sequence[Any] = ()
    if isinstance(batch, _LISTS):
        items = batch
    elif isinstance(batch, Mapping):
        items = list(batch.values())
    elif is_dataclass(batch):
        items = [getattr(batch, field.name) for field in fields(batch)]
    count = len(items)
    if count <= _SIZED:
        return sum(map(_size, items))
    return sum(_size(items[k * count // _SIZED]) for k in range(_SIZED)) * count // _SIZED
