"""Assemble batches from the workers' answers: views of the slot, or joined chunks; and measure the batches.

The first batches are sent through the pipe, since their size and structure are still unknown. They determine the size
of the ring's slots and, if batches are made in chunks, the columns that chunks write their rows into.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from penstock.loader.arena import Column, aligned
from penstock.loader.executors.base import PendingBatch
from penstock.loader.executors.process.pack import SMALL, unpack
from penstock.loader.executors.process.pool import Pool
from penstock.loader.executors.process.ring import LIGHT, Slot
from penstock.loader.executors.process.rows import Layout, join, join_texts, layout_of, unflatten
from penstock.loader.interrupts import raised_by_signal_handler
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult
from penstock.loader.sizes import RecentSizes

__all__ = ["Assembly", "Part", "Plan", "ProcessBatch"]

_LITTLE = 1e-3
"""A batch that takes fewer seconds is quick; a group of batches sent together takes no longer than this, either."""

_MISFITS = 3
"""After this many batches with a different layout, batches are no longer made in chunks."""


class Plan:
    """The dispatch policy of a loader, and measurements of its batches, shared by its epoch iterators.

    Args:
        chunks: whether a batch may be made in parts, by several workers or threads.
        free: whether any worker may make any batch; else batch k is made by worker k mod n.
        stream: whether each worker iterates over a stream.
        in_order: False delivers batches as soon as they are ready.
        restart: whether dead workers are replaced.
        eager: make chunks even if they are little work.
        ahead: whether more batches than configured may be in flight if they are small and quick to make.
    """

    def __init__(
        self, *, chunks: bool, free: bool, stream: bool, in_order: bool, restart: bool, eager: bool = False, ahead: bool
    ) -> None:
        self.chunks = chunks
        self.free = free
        self.stream = stream
        self.in_order = in_order
        self.restart = restart
        self.eager = eager
        self.ahead = ahead
        self.layout: Layout | None = None
        self.misfits = 0
        self.sample_seconds = 0.0  # time to load one sample, smoothed
        self.sized = False  # whether the size of batches is known
        self.messages = RecentSizes()  # bytes of recent batches' answers, without their slots
        self.light = False  # whether batches are small and quick to make, so that many may be in flight
        self.group = 1  # batches sent together, since sending costs more than making them


class Part:
    """A part of a batch and the worker that makes it; ``end`` is -1 for the whole batch."""

    __slots__ = ("answer", "begin", "end", "worker")

    def __init__(self, worker: int, begin: int, end: int) -> None:
        self.worker = worker
        self.begin = begin
        self.end = end
        self.answer: tuple[str, Any] | None = None


class ProcessBatch(PendingBatch):
    """A batch in progress."""

    __slots__ = ("beside", "message_bytes", "metrics", "missing", "parts", "run", "slot", "value")

    def __init__(self, number: int, request: BatchRequest, run: int, slot: Slot | None) -> None:
        super().__init__(number, request)
        self.run = run
        self.slot = slot
        self.metrics: BatchMetrics | None = None
        self.parts: list[Part] = []
        self.beside: dict[int, list[Any]] = {}  # buffers sent beside the answers, by part
        self.value: Any = None  # joined chunks that were sent through the pipe
        self.message_bytes = 0  # of all answers
        self.missing = 0


class Assembly:
    """Assembles batches from the answers of workers.

    Args:
        pool: the workers and the ring.
        plan: the dispatch policy, whose measurements are updated.
    """

    def __init__(self, pool: Pool, plan: Plan) -> None:
        self._pool = pool
        self._ring = pool.ring
        self._plan = plan
        self._columns: dict[int, tuple[list[Column], list[tuple[int, int]]]] = {}  # by batch size

    def fits(self, size: int, slot: Slot) -> bool:
        """Return whether a batch of ``size`` samples with the known layout fits in a slot."""
        if self._plan.layout is None:
            return False
        _, pieces = self._columns_of(size)
        return sum(pieces[-1]) <= slot.size

    def _columns_of(self, size: int) -> tuple[list[Column], list[tuple[int, int]]]:
        """Return the columns of a batch of ``size`` samples, and their ranges in the slot."""
        found = self._columns.get(size)
        if found is None:
            assert self._plan.layout is not None
            columns = self._plan.layout.columns(size)
            found = columns, [(column.offset, size * column.row_bytes) for column in columns]
            if len(self._columns) < 64:
                self._columns[size] = found
        return found

    def give_back(self, batch: ProcessBatch) -> None:
        """Return the slot of a dropped or finished batch to the ring."""
        del self._pool.batches[batch.run, batch.number]
        if batch.slot is not None:
            self._ring.give_back(batch.slot)
            batch.slot = None

    def fits_together(self, batch: ProcessBatch) -> bool:
        """Return whether the answers can be assembled into a batch; if not, one worker must make it."""
        if len(batch.parts) == 1 and batch.parts[0].end < 0:
            return True
        kinds = {part.answer[0] for part in batch.parts if part.answer is not None}
        if "error" in kinds or kinds == {"rows"}:
            return True
        if kinds == {"batch"}:  # chunks sent through the pipe
            try:
                if self._join(batch):
                    return True
            except Exception as error:  # an object that cannot be unpickled: raised in place of this batch
                if raised_by_signal_handler(error):
                    raise
                batch.parts[0].answer = "unsent", error
                return True
            self._plan.chunks = False
        self._plan.misfits += 1
        if self._plan.misfits >= _MISFITS:
            self._plan.chunks = False
        return False

    def _join(self, batch: ProcessBatch) -> bool:
        """Join chunks that came through the pipe; return whether they fit together."""
        chunks = [
            unpack(part.answer[1][0], batch.beside.get(number, ()))  # type: ignore[index]
            for number, part in enumerate(batch.parts)
        ]
        joined = join(chunks, [part.end - part.begin for part in batch.parts])
        if joined is None:
            return False
        batch.value, layout = joined
        self._learn_layout(layout)
        return True

    def result(self, batch: ProcessBatch, number: int) -> BatchResult:
        """Return the finished batch.

        Raises:
            RingError: too little memory for a ring.
        """
        start = time.perf_counter()
        state = None
        if len(batch.parts) == 1 and batch.parts[0].end < 0:
            value, way, state = self._whole(batch)
        elif batch.value is not None:
            value, way = batch.value, "pipe"
            self.give_back(batch)
            if self._plan.layout is not None:
                self._ring.learn(self._plan.layout.nbytes(len(batch.request.indices)))
        else:
            value, way = self._rows(batch)
        metrics = batch.metrics or BatchMetrics()
        if metrics.samples:
            self._learn_cost((metrics.fetch + metrics.collate) / metrics.samples, metrics.samples)
        metrics.hand_over += time.perf_counter() - start
        return BatchResult(value, metrics, number, batch.parts[0].worker, state, way)

    def _learn_cost(self, seconds: float, samples: int) -> None:
        """Update the estimated cost of a sample."""
        plan, before = self._plan, self._plan.sample_seconds
        plan.sample_seconds = seconds = before + (seconds - before) * 0.1 if before else seconds
        plan.sized = True
        seconds *= samples
        # Batches without slots may be large, too: files as bytes, long texts.
        small = max(self._ring.slot_bytes, plan.messages.largest) <= LIGHT
        plan.light = plan.ahead and small and seconds < _LITTLE
        together = plan.light and not plan.eager and (plan.free or plan.in_order)
        plan.group = int(_LITTLE / seconds) if together and seconds else 1

    def _whole(self, batch: ProcessBatch) -> tuple[Any, str, Any]:
        assert batch.parts[0].answer is not None
        data, table, state = batch.parts[0].answer[1]
        beside = iter(batch.beside.get(0, ()))
        here, way = self._take_out(batch, [piece for piece in table if piece[0] >= 0])
        arrays = iter(here)
        value = unpack(data, [next(arrays if offset >= 0 else beside) for offset, _ in table])
        if table:
            self._ring.learn(sum(aligned(size) for _, size in table))
        if len(here) == len(table):
            return value, way, state
        if self._plan.chunks and self._plan.layout is None:
            layout = layout_of(value, len(batch.request.indices))
            if layout is None:
                self._plan.chunks = False
            else:
                self._learn_layout(layout)
        return value, "pipe", state

    def _rows(self, batch: ProcessBatch) -> tuple[Any, str]:
        layout, size, slot = self._plan.layout, len(batch.request.indices), batch.slot
        assert layout is not None
        assert slot is not None
        columns, pieces = self._columns_of(size)
        memory = self._ring.memory(slot)
        small = iter([memory[begin : begin + nbytes].copy() for begin, nbytes in pieces if nbytes <= SMALL])
        del memory
        self._ring.learn(sum(pieces[-1]))
        arrays, way = self._take_out(batch, [piece for piece in pieces if piece[1] > SMALL])
        large = iter(arrays)
        tensors = [
            torch.frombuffer(next(small if nbytes <= SMALL else large), dtype=column.dtype).view(size, *column.row)
            for column, (_, nbytes) in zip(columns, pieces, strict=True)
        ]
        texts = join_texts([part.answer[1] for part in batch.parts if part.answer is not None])
        return unflatten(layout.spec, tensors, texts), way

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

    def _learn_layout(self, layout: Layout) -> None:
        if self._plan.layout is None:
            self._plan.layout = layout
            self.tell_layout()

    def tell_layout(self) -> None:
        """Send the layout of rows to all workers, if it is known."""
        if self._plan.layout is not None:
            for number in range(self._pool.config.workers):
                self._pool.send(number, ("layout_is", self._plan.layout))
