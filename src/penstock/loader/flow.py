"""`Flow`: how far ahead. How many batches may be in flight, and how many go together in one message.

    usually                       prefetch_factor batches for each worker
    small, quickly made batches   up to sixteen times as many, in groups: their hand-over costs more than the work
    a late batch                  more, while finished batches wait for it and workers are idle
    max_bytes_in_flight           fewer, by the largest of the last batches; one until it is known

This is the only place that decides it, for all executors. `Window` asks.
"""

from __future__ import annotations

from collections import deque

from penstock.loader.config import LoaderConfig
from penstock.loader.messages import BatchResult
from penstock.loader.sizes import AHEAD, LIGHT
from penstock.loader.statistics import size_of

__all__ = ["Flow"]

_LAST = 8
"""Number of batches after which a large one is forgotten."""

_QUICK, _RAY_QUICK = 1e-3, 10e-3
"""A batch that takes fewer seconds is quick. Ray needs three milliseconds of CPU time to send one."""

_GROUP, _RAY_GROUP = 2e-3, 30e-3
"""Seconds that a group takes at most."""


class Flow:
    """How far ahead the workers of a loader are. It keeps what it has learned between epoch iterators.

    Args:
        config: the loader's settings, with the number of workers that it has now.
        ahead: whether more batches than usual may be in flight. Users see it in draws of persistent workers.
    """

    def __init__(self, config: LoaderConfig, *, ahead: bool) -> None:
        self.config = config
        self._ahead = ahead
        self._limit = config.max_bytes_in_flight
        self._ray = config.kind == "ray"
        self._quick, self._group = (_RAY_QUICK, _RAY_GROUP) if self._ray else (_QUICK, _GROUP)
        self._sizes: deque[int] = deque(maxlen=_LAST)
        self._sample_seconds = 0.0  # time to load one sample, smoothed
        self._batch_seconds = 0.0
        self._extra = 0  # batches beyond the usual ones, because one is late
        self._first = True  # whether the consumer waits for its first batch

    def begin(self) -> None:
        """Start an epoch iterator: its consumer waits for the first batch, and no others should delay it."""
        self._extra, self._first = 0, True

    def limit_bytes(self, most: int | None) -> None:
        """Limit the bytes in flight also by what the executor has for them."""
        self._limit = min((each for each in (most, self.config.max_bytes_in_flight) if each is not None), default=None)

    def ahead(self) -> tuple[int, int]:
        """Return how many batches may be in flight now, and how many go to a worker together at most.

        The first is 0 if each batch is made on demand.
        """
        config, limit = self.config, self._limit
        most, size = config.depth, max(self._sizes, default=0)
        if limit is not None and not size:
            # On Ray, one for each worker, since they start slowly.
            return min(config.workers if self._ray else 1, most), 1
        # Quickly made, and small: on Ray the object store is the limit.
        light = 0 < self._batch_seconds < self._quick and (self._ray or size <= LIGHT)
        if self._ahead and not self._first:
            more = config.small_batch_depth if light else min(most + self._extra, config.small_batch_depth)
            if limit is None:
                more = min(more, AHEAD // max(1, size))
            most = max(most, more)
        if limit is not None:
            most = max(1, min(most, limit // max(1, size)))
        together = self._ahead and light and (config.pure or config.in_order)
        return most, max(1, int(self._group / self._batch_seconds)) if together else 1

    def learn(self, result: BatchResult) -> None:
        """Note what a batch cost that the consumer gets now."""
        self._first = False
        metrics = result.metrics
        if metrics.samples:
            seconds, before = (metrics.fetch + metrics.collate) / metrics.samples, self._sample_seconds
            self._sample_seconds = seconds = before + (seconds - before) * 0.1 if before else seconds
            self._batch_seconds = seconds * metrics.samples
        if result.error is None and (result.nbytes or self._limit is not None):
            self._sizes.append(result.nbytes or size_of(result.batch))

    def stall(self) -> None:
        """Allow more batches: finished ones wait for a late one, and workers are idle."""
        self._extra += self.config.workers
