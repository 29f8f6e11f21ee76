"""`Assigner`: assigns batches to workers and sends the requests.

whole:   batch k by worker k mod n (torch's rule), or by the least busy worker
chunks:  a batch by all workers, each a part of it, in the same slot
groups:  several small batches by one worker, in one message each way
"""

from __future__ import annotations

import pickle
from typing import Any

from penstock.loader.executors.process.assembly import Assembly, Part, Plan, ProcessBatch
from penstock.loader.executors.process.pool import Pool
from penstock.loader.interrupts import raised_by_signal_handler

__all__ = ["Assigner"]

_WORTH_A_CHUNK = 2e-3
"""Seconds of work below which sending a chunk to another worker costs more than it saves."""


class Assigner:
    """Assigns the batches of one epoch iterator to the workers of a pool.

    Args:
        pool: the workers; `Pool.load` is the number of parts assigned to each.
        plan: the dispatch policy.
        assembly: tells whether a batch fits in its slot.
    """

    def __init__(self, pool: Pool, plan: Plan, assembly: Assembly) -> None:
        self._pool = pool
        self._plan = plan
        self._assembly = assembly

    def group(self, depth: int) -> int:
        """Return how many batches are sent together, with ``depth`` in flight."""
        return max(1, min(self._plan.group, depth // (2 * self._pool.config.workers)))

    def least_busy(self) -> int:
        """Return the least busy worker."""
        return min(range(self._pool.config.workers), key=self._pool.load.__getitem__)

    def hand_out(self, batches: list[ProcessBatch], worker: int) -> None:
        """Send batches, to this worker first. A batch whose indices cannot be pickled gets that error as its answer."""
        if len(batches) > 1:
            self._hand_out_group(batches, worker)
        else:
            self._hand_out_one(batches[0], worker)

    def _hand_out_group(self, batches: list[ProcessBatch], worker: int) -> None:
        """Send batches to one worker in one message, which it answers in one message."""
        for batch in batches:
            size = len(batch.request.indices)
            known = self._plan.chunks and size and batch.slot is not None and self._assembly.fits(size, batch.slot)
            batch.parts = [Part(worker, 0, size if known else -1)]
        try:
            message = pickle.dumps(("group", [self.message(batch, 0) for batch in batches]), protocol=5)
        except Exception as error:  # sending them one by one shows which batch it is
            if raised_by_signal_handler(error):
                raise
            for batch in batches:
                self._give(batch)
            return
        for batch in batches:
            batch.missing = 1
        self._pool.load[worker] += len(batches)
        self._pool.post(worker, message)

    def _hand_out_one(self, batch: ProcessBatch, worker: int) -> None:
        size = len(batch.request.indices)
        if not self._plan.chunks or not size:
            self.give_whole(batch, worker)
            return
        chunks = self._chunks(size)
        known = batch.slot is not None and self._assembly.fits(size, batch.slot)
        if (chunks < 2 and not known) or (batch.slot is not None and not known):
            self.give_whole(batch, worker)
            return
        load = list(self._pool.load)
        for part in range(chunks):
            begin, end = part * size // chunks, (part + 1) * size // chunks
            batch.parts.append(Part(worker, begin, end))
            load[worker] += 1
            worker = min(range(self._pool.config.workers), key=load.__getitem__)
        self._give(batch)

    def _chunks(self, size: int) -> int:
        plan, config = self._plan, self._pool.config
        most = min(size, config.workers * config.threads)
        if plan.eager or not plan.sample_seconds:
            return most  # costs are unknown, and the consumer waits for the first batch
        return max(1, min(most, int(size * plan.sample_seconds / _WORTH_A_CHUNK)))

    def give_whole(self, batch: ProcessBatch, worker: int) -> None:
        """Send a batch to one worker as a whole."""
        batch.parts = [Part(worker, 0, -1)]
        batch.beside.clear()
        self._give(batch)

    def _give(self, batch: ProcessBatch) -> None:
        """Send all parts of a batch."""
        try:
            messages = [pickle.dumps(self.message(batch, number), protocol=5) for number in range(len(batch.parts))]
        except Exception as error:
            if raised_by_signal_handler(error):
                raise
            batch.parts, batch.missing = batch.parts[:1], 0
            batch.parts[0].answer = "unsent", error
            return
        batch.missing, batch.message_bytes = len(messages), 0
        for part, message in zip(batch.parts, messages, strict=True):
            self._pool.load[part.worker] += 1
            self._pool.post(part.worker, message)

    def message(self, batch: ProcessBatch, number: int) -> tuple[Any, ...]:
        """Return the request message for a part."""
        part = batch.parts[number]
        head = batch.run, batch.number, None if batch.slot is None else batch.slot.address
        if part.end < 0:
            return "make", *head, batch.request.packed()
        chunk = number, part.begin, part.end, len(batch.request.indices)
        return "chunk", *head, chunk, batch.request.packed(part.begin, part.end)
