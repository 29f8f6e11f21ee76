"""`ProcessBatches`: which worker makes what, and how batches come back in order.

    tasks -> number 0, 1, 2 ... -> whole batches: worker k mod n (torch's rule), or the one with the least to do
                                -> chunks: all workers make parts of the *next* batch first, in the same slot
    results -> the batch with the smallest number, once all its parts are there -> consumer

Invariant: a slot is lent with a batch's number and comes back when every part of that batch is answered, whichever pass
wants it; so a late writer writes into nobody else's batch.
"""

from __future__ import annotations

import itertools
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from penstock.errors import RingError, WorkerError
from penstock.loader.assembly import Assembly, Batch, Plan
from penstock.loader.assign import Assigner
from penstock.loader.delivery import CLOSED, PATIENCE, timed_out
from penstock.loader.process import Pool
from penstock.loader.remote import rebuild
from penstock.loader.snapshots import Snapshot
from penstock.loader.work import Made, Task, Work
from penstock.plan.opening import Told

__all__ = ["ProcessBatches"]

_ATTEMPTS = 3
"""How many workers may die at a sample."""

_HURRY = 0.5
"""Seconds that the other workers are given to end when one has died: that is to be told at once."""


class ProcessBatches:
    """Batches of the tasks, made by a pool; an iterator of `Made`.

    Args:
        tasks: what is to be made; pulled from in the consumer's thread. What it raises is raised behind the batches
            planned before it.
        pool: does the work. An older iterator over the same pool ends with an error when a newer one begins.
        plan: how work is handed out; keeps what was learned from pass to pass.
        epoch: told to data sets of streams; None for none.
        states: of users' objects, by worker, to go on from.
        first: worker of the first batch, where batches go by turns.
        timeout: seconds to wait for a batch, 0 for ever; then RuntimeError in torch's words.
        persistent: whether the workers go on after this pass.
        release: called when the iterator is done with the pool.

    Attributes:
        number: of the batch that was last returned or raised, in the order of the tasks; of a stream's batch, how many
            were returned or raised before.
        worker: that it came from.
        first_states: snapshots of workers that have begun; complete as soon as a batch is handed out.
        failed_state: snapshot right after the batch that was raised last.
    """

    def __init__(
        self,
        tasks: Iterator[Task],
        pool: Pool,
        plan: Plan,
        *,
        epoch: Told,
        states: dict[int, Any],
        first: int,
        timeout: float,
        persistent: bool,
        release: Callable[[], None],
    ) -> None:
        self._tasks: Iterator[Task] | None = tasks
        self._sampler_error: Exception | None = None
        self.pool = pool
        self._plan = plan
        self._timeout = timeout
        self._persistent = persistent
        self._release: Callable[[], None] | None = release
        with pool.turn():
            self._run = pool.begin(epoch, states)
        self._begun: dict[int, Snapshot | None] = {}  # first snapshots, until a batch is handed out
        self._waits_for_begun = True
        self.first_states: dict[int, Snapshot] = {}
        self.failed_state: Snapshot | None = None
        self._numbers = itertools.count()
        self._open: dict[int, Batch] = {}  # of this pass, in the order of their numbers
        self._load = pool.load  # parts that each worker has to make, of all passes
        self._dead: str | None = None
        self._held: Made | None = None  # taken out of the ring, and not handed over yet
        self._assembly = Assembly(pool, plan)
        self._assigner = Assigner(pool, plan, self._assembly, first)
        self._ready = 0
        self.number, self.worker = -1, 0
        self.depth = self._room()
        """Batches that may be in flight."""
        with pool.turn():
            self._fill()

    def __iter__(self) -> ProcessBatches:
        return self

    @property
    def _workers(self) -> list[Any]:
        """The processes: private in torch, but programs read it."""
        return [member.process for member in self.pool.members]

    def _shutdown_workers(self) -> None:
        self.end(PATIENCE)

    def ready(self) -> int:
        """Batches that are finished and not yet delivered."""
        return self._ready

    def _room(self) -> int:
        """Batches that may be in flight."""
        config = self.pool.config
        if config.max_bytes_in_flight is not None and not self._plan.sized:
            return 1  # until it is known how large they are
        light = self._plan.light and self.number >= 0  # the first batch is waited for
        return min(config.light if light else config.depth, self.pool.ring.in_flight)

    def __next__(self) -> Made:
        self._check()
        try:
            return self._next()
        except BaseException as error:  # Ctrl-C: while waiting harmless, elsewhere something may be half done
            if not isinstance(error, Exception) and not self.pool.polling:
                self._dead = "this iterator of the DataLoader was interrupted: begin a new one"
                self.pool.broken = True
                self.pool.close(_HURRY)
                self.close()
            raise
        finally:
            self.pool.polling = False

    def _next(self) -> Made:
        deadline = time.monotonic() + self._timeout if self._timeout else None
        turn = self.pool.turn()
        while True:
            with turn:
                self._heed_closing()
                if self._held is None and (batch := self._head()) is not None and self._all_begun(batch):
                    self._held = self._deliver(batch)
                self._fill()
                if self._held is not None:
                    if self._tasks is None and not self._open and not self._persistent:
                        self.pool.dismiss()  # they end while the consumer is busy with the last batch
                    made, self._held = self._held, None
                    return made
                if not self._open and self._tasks is None:
                    self._finish()
            events = self.pool.wait(deadline)
            with turn:
                self._heed_closing()
                self._take(events, deadline)

    def _heed_closing(self) -> None:
        """Another thread may have closed the pool."""
        if self.pool.life.over and self._held is None:
            self._dead = CLOSED
            self.close()
            raise WorkerError(CLOSED)

    def _check(self) -> None:
        """Whether there is anybody to ask."""
        if self._dead is not None:
            raise WorkerError(self._dead)
        if self._release is None and self._held is None:
            raise StopIteration
        if self._run != self.pool.run:
            raise RuntimeError("a newer iterator of this DataLoader has taken over its persistent workers")
        if self.pool.closed:
            raise WorkerError(
                "the workers of this DataLoader have ended: it was closed, or this is a fork of its process"
            )

    def _deliver(self, batch: Batch) -> Made:
        del self._open[batch.number]
        self._ready -= 1
        self.worker = batch.parts[0].worker
        self.number = self.number + 1 if self._plan.stream else batch.number
        for part in batch.parts:
            assert part.answer is not None
            kind, payload = part.answer
            if kind in ("error", "unsent"):
                self._assembly.give_back(batch)
                if kind == "unsent":
                    raise payload
                told, self.failed_state = payload
                raise rebuild(told)
        try:
            return self._assembly.made(batch, self.number)
        except RingError:
            self.close()
            raise

    def _finish(self) -> None:
        error, self._sampler_error = self._sampler_error, None
        self.close()
        try:
            raise StopIteration if error is None else error
        finally:
            del error  # its traceback holds this frame

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:  # modules may be empty by then
        if not _ending() and getattr(self, "_release", None) is not None:
            self.close()

    def close(self) -> None:
        """Nothing more is wanted of the workers. Idempotent."""
        with self.pool.turn():
            self._close()

    def end(self, patience: float) -> None:
        """The loader is closed: the workers end, in so many seconds before they are killed."""
        if self._release is not None:
            self._dead = self._dead or CLOSED
        self.pool.close(patience)
        # Another thread may be inside, with a sampler that takes its time: it ends by itself when it is back.
        if self.pool.life.lock.acquire(blocking=False):
            try:
                self._close()
            finally:
                self.pool.life.lock.release()

    def _close(self) -> None:
        self._tasks = None
        for batch in self._open.values():  # those that are still being made come back in `_take_in`, or with the pool
            if not batch.missing and (batch.run, batch.number) in self.pool.batches:
                self._assembly.give_back(batch)
        self._open.clear()
        release, self._release = self._release, None
        if release is not None:
            if self._run == self.pool.run and not (self._persistent and self._plan.stream):
                self.pool.stop()
            release()

    # Handing out.

    def _fill(self) -> None:
        if self._tasks is None:
            return
        self.depth = depth = self._room()
        group = self._assigner.group(depth)
        while self._tasks is not None and len(self._open) < depth and self._has_slot():
            if group > 1 and self._open and len(self._open) + group > depth:
                return
            worker = self._assigner.next_worker(depth)
            if worker is None:
                return
            batches: list[Batch] = []
            while len(batches) < group and (batch := self._next_batch()) is not None:
                batches.append(batch)
            if not batches:
                return
            self._assigner.hand_out(batches, worker)
            self._ready += sum(not batch.missing for batch in batches)

    def _has_slot(self) -> bool:
        """Whether a batch can be begun: those of an earlier pass, unwanted, may have the slots for a moment more. To be
        asked before anybody's turn is taken.
        """
        ring = self.pool.ring
        return not self._open or not ring.slot_bytes or ring.has_free

    def _next_batch(self) -> Batch | None:
        """The next batch, to be made; None if there is none, or no room for it."""
        if self._tasks is None or not self._has_slot():
            return None
        try:
            task = next(self._tasks, None)
        except Exception as error:  # raised in its place, behind the batches that were planned before
            self._sampler_error = error
            task = None
        if task is None:
            self._tasks = None
            return None
        batch = Batch(self._run, next(self._numbers), task, self.pool.ring.lend())
        self._open[batch.number] = batch
        self.pool.batches[self._run, batch.number] = batch
        return batch

    # Taking in.

    def _head(self) -> Batch | None:
        """The batch to be delivered next, if it is finished."""
        if not self._ready:
            return None
        for batch in list(itertools.islice(self._open.values(), 1 if self._plan.in_order else None)):
            if not batch.missing:
                if batch.parts[0].answer != ("end", None):
                    return batch
                del self._open[batch.number]
                self._ready -= 1
                self._assembly.give_back(batch)
                return self._head()
        return None

    def _all_begun(self, batch: Batch) -> bool:
        """Return whether a batch may be handed out. The first one of a worker with a state waits for the first
        snapshots of all workers: a state has to say where those are that nothing was had of.
        """
        if self._waits_for_begun:
            stateful = self._begun.get(batch.parts[0].worker) is not None
            if stateful and len(self._begun) < self.pool.config.workers:
                return False
            self._waits_for_begun = False
            self.first_states = {worker: first for worker, first in self._begun.items() if first is not None}
        return True

    def _take(self, events: list[tuple[int, int]], deadline: float | None) -> None:
        frames, dead = self.pool.receive(events)
        for worker, frame in frames:
            answer = pickle.loads(frame.message)
            for kind, run, number, index, payload, work in answer if type(answer) is list else (answer,):
                if kind != "begun":
                    self._take_in(worker, kind, run, number, index, payload, work, frame.buffers)
                elif run == self._run:
                    self._begun[worker] = payload
        for worker in dead:
            self._lost(worker)
        if not frames and not dead and deadline is not None and time.monotonic() >= deadline:
            raise WorkerError(timed_out(self._timeout) + self._culprit())

    def _take_in(
        self, worker: int, kind: str, run: int, number: int, index: int, payload: Any, work: Any, beside: Any
    ) -> None:
        """An answer of a worker; ``work`` packed, or None."""
        self._load[worker] -= 1
        batch = self.pool.batches[run, number]
        part = batch.parts[index]
        part.answer = kind, payload
        batch.missing -= 1
        if work is not None:
            if batch.work is None:
                batch.work = Work(*work)
            else:
                batch.work.add(Work(*work))
        if beside:
            batch.beside[index] = beside
        if kind == "end" and run == self._run:
            self._assigner.ended.add(worker)  # what else it was asked for, it answers in the same way
            if len(self._assigner.ended) == self.pool.config.workers:
                self._tasks = None
        if batch.missing:
            return
        if run != self._run or number not in self._open:
            self._assembly.give_back(batch)
        elif not self._assembly.fits_together(batch):
            batch.work = None
            self._assigner.give_whole(batch, self._assigner.least_busy())
        if not batch.missing:
            self._ready += 1

    # Faults.

    def _lost(self, worker: int) -> None:
        """A worker died: an error, or its parts of this pass's batches are made again by a new one."""
        obituary = self.pool.obituary(worker)
        lost = [
            (batch, number)
            for batch in list(self.pool.batches.values())
            for number, part in enumerate(batch.parts)
            if part.worker == worker and part.answer is None
        ]
        if self._plan.stream and worker in self._assigner.ended:
            for batch, _ in lost:  # there was no more to come from it
                self._take_in(worker, "end", batch.run, batch.number, 0, None, None, [])
            return
        wanted = [batch for batch, _ in lost if batch.run == self._run and batch.number in self._open]
        place = self._whereabouts(worker)
        blamed = [(self._open[number], key) for key, number in self.pool.at(worker) if number in self._open]
        # The worker's threads were at several samples, and one of them did it: each gets its share of the blame.
        blame = 1 / max(len(blamed), 1)
        for batch, key in blamed or [(batch, 0) for batch in wanted]:
            batch.deaths[key] = batch.deaths.get(key, 0) + blame
        worn_out = any(round(max(batch.deaths.values(), default=0), 6) >= _ATTEMPTS for batch in wanted)
        if not self._plan.restart or worn_out:
            self._dead = f"{obituary} It was {place}{', as were workers before it' if worn_out else ''}."
            self.pool.broken = True
            self.pool.close(_HURRY)  # the others may be at something long
            self.close()
            raise WorkerError(self._dead)
        self._load[worker] = 0
        self.pool.restart(worker)
        self.pool.send(worker, ("begin", self._run, None, None))
        if self._plan.layout is not None:
            self.pool.send(worker, ("layout_is", self._plan.layout))
        for batch, number in lost:
            self._load[worker] += 1
            self.pool.send(worker, self._assigner.message(batch, number))

    def _whereabouts(self, worker: int) -> str:
        """The samples that the threads of a worker are at, or were when it died."""
        places = []
        for key, number in self.pool.at(worker):
            batch = self._open.get(number)
            if batch is not None and key in batch.task.keys:
                places.append(f"at sample {batch.task.indices[batch.task.keys.index(key)]!r}")
            else:
                places.append(f"at batch {number} of this pass")
        return " and ".join(places) or "at no sample"

    def _culprit(self) -> str:
        """Which worker hangs, and at which sample."""
        head = next(iter(self._open.values()), None)
        for part in [] if head is None else head.parts:
            if part.answer is None:
                pid = self.pool.members[part.worker].process.pid
                return f": worker {part.worker} (pid {pid}) was {self._whereabouts(part.worker)}"
        return ""
