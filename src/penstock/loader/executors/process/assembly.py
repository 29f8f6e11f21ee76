"""Assemble batches from the workers' answers, as views of their slots; and measure the batches.

The first batches are sent through the pipe, since their size is still unknown. They determine the size of the ring's
slots.
"""

from __future__ import annotations

import time
from typing import Any

from penstock.loader.arena import aligned
from penstock.loader.executors.base import PendingBatch
from penstock.loader.executors.process.pack import unpack
from penstock.loader.executors.process.pool import Pool
from penstock.loader.executors.process.ring import LIGHT, Slot
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult
from penstock.loader.sizes import RecentSizes

__all__ = ["Assembly", "ProcessBatch", "Workload"]

_LITTLE = 1e-3
"""A batch that takes fewer seconds is quick; a group of batches sent together takes no longer than this, either."""


class Workload:
    """Who may make the batches of a loader, and what they cost: shared by its epoch iterators.

    Args:
        free: whether any worker may make any batch; else batch k is made by worker k mod n.
        stream: whether each worker iterates over a stream.
        in_order: False delivers batches as soon as they are ready.
        restart: whether dead workers are replaced.
        ahead: whether more batches than configured may be in flight if they are small and quick to make.
    """

    def __init__(self, *, free: bool, stream: bool, in_order: bool, restart: bool, ahead: bool) -> None:
        self.free = free
        self.stream = stream
        self.in_order = in_order
        self.restart = restart
        self.ahead = ahead
        self.sample_seconds = 0.0  # time to load one sample, smoothed
        self.sized = False  # whether the size of batches is known
        self.messages = RecentSizes()  # bytes of recent batches' answers, without their slots
        self.light = False  # whether batches are small and quick to make, so that many may be in flight
        self.group = 1  # batches sent together, since sending costs more than making them


class ProcessBatch(PendingBatch):
    """A batch in progress.

    Attributes:
        run: the number of its epoch iterator.
        slot: the memory that it is written to.
        missing: whether it was sent to its worker, which has not answered.
        answer: kind and content of the answer.
        beside: buffers sent beside the answer.
    """

    __slots__ = ("answer", "beside", "metrics", "missing", "run", "slot")

    def __init__(self, number: int, request: BatchRequest, run: int, slot: Slot | None) -> None:
        super().__init__(number, request)
        self.run = run
        self.slot = slot
        self.metrics: BatchMetrics | None = None
        self.missing = False
        self.answer: tuple[str, Any] | None = None
        self.beside: list[Any] = []

    def message(self) -> tuple[Any, ...]:
        """Return the message that requests it."""
        address = None if self.slot is None else self.slot.address
        return "make", self.run, self.number, address, self.request.packed()


class Assembly:
    """Assembles batches from the answers of workers.

    Args:
        pool: the workers and the ring.
        work: the costs of batches, which are updated.
    """

    def __init__(self, pool: Pool, work: Workload) -> None:
        self._pool = pool
        self._ring = pool.ring
        self._work = work

    def give_back(self, batch: ProcessBatch) -> None:
        """Return the slot of a dropped or finished batch to the ring."""
        del self._pool.batches[batch.run, batch.number]
        if batch.slot is not None:
            self._ring.give_back(batch.slot)
            batch.slot = None

    def result(self, batch: ProcessBatch, number: int) -> BatchResult:
        """Return the finished batch.

        Raises:
            RingError: too little memory for a ring.
        """
        start = time.perf_counter()
        value, way, state = self._unpacked(batch)
        metrics = batch.metrics or BatchMetrics()
        if metrics.samples:
            self._learn_cost((metrics.fetch + metrics.collate) / metrics.samples, metrics.samples)
        metrics.hand_over += time.perf_counter() - start
        return BatchResult(value, metrics, number, batch.worker, state, way)

    def _learn_cost(self, seconds: float, samples: int) -> None:
        """Update the estimated cost of a sample."""
        work, before = self._work, self._work.sample_seconds
        work.sample_seconds = seconds = before + (seconds - before) * 0.1 if before else seconds
        work.sized = True
        seconds *= samples
        # Batches without slots may be large, too: files as bytes, long texts.
        small = max(self._ring.slot_bytes, work.messages.largest) <= LIGHT
        work.light = work.ahead and small and seconds < _LITTLE
        together = work.light and (work.free or work.in_order)
        work.group = int(_LITTLE / seconds) if together and seconds else 1

    def _unpacked(self, batch: ProcessBatch) -> tuple[Any, str, Any]:
        assert batch.answer is not None
        data, table, state = batch.answer[1]
        beside = iter(batch.beside)
        here, way = self._take_out(batch, [piece for piece in table if piece[0] >= 0])
        arrays = iter(here)
        value = unpack(data, [next(arrays if offset >= 0 else beside) for offset, _ in table])
        if table:
            self._ring.learn(sum(aligned(size) for _, size in table))
        return value, way if len(here) == len(table) else "pipe", state

    def _take_out(self, batch: ProcessBatch, pieces: list[tuple[int, int]]) -> tuple[list[Any], str]:
        """Return arrays over ranges of the batch's slot, which they now lease, and how they were transferred."""
        slot, batch.slot = batch.slot, None
        self.give_back(batch)
        if slot is None or not pieces:
            if slot is not None:
                self._ring.give_back(slot)
            return [], "pipe"
        if not self._ring.short:
            return self._ring.lease(slot, pieces), "ring"
        arrays = self._ring.copy(slot, pieces)
        self._pool.warn_copies()  # this raises if warnings are errors
        return arrays, "copy"
