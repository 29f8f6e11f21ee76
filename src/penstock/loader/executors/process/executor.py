"""`ProcessExecutor`: has batches made by a pool of worker processes.

    whole   -> one worker                                                       chunks -> all workers, in the same slot
    answers -> a batch is done when all its parts are answered -> Done

Invariant: a slot is lent with a batch's number and comes back when every part of that batch is answered, whichever pass
wants it; so a late writer writes into nobody else's batch.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import RingError, WorkerError
from penstock.loader.exceptions import rebuild
from penstock.loader.executors.base import Began, Done, Event, Executor, Lost, PendingBatch
from penstock.loader.executors.process.assembly import Assembly, Plan, ProcessBatch
from penstock.loader.executors.process.assign import Assigner
from penstock.loader.executors.process.pack import SMALL
from penstock.loader.executors.process.pool import Pool
from penstock.loader.executors.process.ring import AHEAD
from penstock.loader.interrupts import is_of_signal_handler
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult
from penstock.plan.stream_plan import EpochStart

__all__ = ["ProcessExecutor"]

_DEATH_CLOSE_TIMEOUT_S = 0.5
"""Seconds that the workers are given to end where somebody is to be told at once why."""


class ProcessExecutor(Executor):
    """Makes batches in worker processes.

    Args:
        pool: the workers. An older executor over the same pool says so when a newer one begins.
        plan: how work is handed out; keeps what was learned from pass to pass.
        epoch: told to data sets of streams; None for none.
        states: of users' objects, by worker, to go on from.
        tells_states: whether users' objects may have states.
        persistent: whether the workers go on after this pass.
        release: called when this executor is done with the pool.
    """

    def __init__(
        self,
        pool: Pool,
        plan: Plan,
        *,
        epoch: EpochStart,
        states: dict[int, Any],
        tells_states: bool,
        persistent: bool,
        release: Callable[[], None],
    ) -> None:
        super().__init__()
        self.pool = pool
        self.workers = pool.config.workers
        self.tells_begin = tells_states
        self._plan = plan
        self._persistent = persistent
        self._release: Callable[[], None] | None = release
        self._assembly = Assembly(pool, plan)
        self._assigner = Assigner(pool, plan, self._assembly)
        self._wanted: dict[int, ProcessBatch] = {}  # by number
        self._ended: set[int] = set()  # workers whose streams have come to their end
        self._one_was_had = False
        self._run = 0
        with pool.turn():
            self._hear_of_earlier_passes()
            self._run = pool.begin(epoch, states)
            self._assembly.tell_layout()  # which workers that were replaced do not know

    def _hear_of_earlier_passes(self) -> None:
        """Take in what was said since the last of them was left. What a dead worker owed them nobody wants."""
        self.receive(self.pool.wait(0.0))
        for worker in self.pool.dead():
            for batch, part in self._owed(worker):
                self._take_in(worker, "skipped", batch.run, batch.number, part, None, None, [], 0, 0)

    def turn(self) -> Any:
        """Return the pool's lock: passes share the pool."""
        return self.pool.turn()

    @property
    def processes(self) -> list[Any]:
        """The worker processes."""
        return [member.process for member in self.pool.members]

    @property
    def over(self) -> bool:  # type: ignore[override]
        """Whether the pipes are closed."""
        return self.pool.life.over

    def check(self) -> Exception | None:
        """Return why nobody can be asked any more."""
        if self._run != self.pool.run:
            return RuntimeError("a newer iterator of this DataLoader has taken over its persistent workers")
        if self.pool.closed:
            return WorkerError(
                "the workers of this DataLoader have ended: it was closed, or this is a fork of its process"
            )
        return None

    # Asking.

    @property
    def depth(self) -> int:
        """Batches that may be in flight at the moment."""
        config = self.pool.config
        if config.max_bytes_in_flight is not None and not self._plan.sized:
            return 1  # until it is known how large they are
        light, ring = self._plan.light and self._one_was_had, self.pool.ring  # the first batch is waited for
        begun = config.light if light else config.depth
        limit, beside = config.max_bytes_in_flight, self._plan.messages.largest
        if self.ahead and self._plan.ahead:
            begun = max(begun, min(config.depth + self.ahead, config.light))
        if limit is None and begun > config.depth:
            begun = max(config.depth, min(begun, AHEAD // max(1, ring.slot_bytes + beside)))
        most = min(begun, ring.in_flight) if ring.slot_bytes else begun
        if limit is not None and beside > SMALL:  # pickled objects lie in no slot
            most = min(most, max(1, limit // (ring.slot_bytes + beside)))
        return most

    @property
    def idle(self) -> bool:
        """Whether a worker has nothing to do."""
        return self._one_was_had and not all(self.pool.load)

    def has_room(self, pending: int) -> bool:
        """Return whether there is a slot for one more: unwanted batches of an earlier pass may have all."""
        ring = self.pool.ring
        return not pending or not ring.slot_bytes or ring.has_free

    def group(self, depth: int) -> int:
        """Return how many batches are handed out together."""
        return self._assigner.group(depth)

    def choose(self, workers: Sequence[int], share: int | None) -> int | None:
        """Return the worker with the least to do."""
        load = self.pool.load
        worker = min(workers, key=load.__getitem__)
        return worker if share is None or load[worker] < share else None

    def pending(self, number: int, request: BatchRequest) -> PendingBatch:
        """Return a batch that can be submitted here, with a slot if there is one."""
        batch = ProcessBatch(number, request, self._run, self.pool.ring.lend())
        self._wanted[number] = batch
        self.pool.batches[self._run, number] = batch
        return batch

    def submit(self, batches: Sequence[Any], worker: int) -> list[Event]:
        """Send out batches; those with indices that do not pickle are done at once."""
        self._assigner.hand_out(list(batches), worker)
        return [Done(batch) for batch in batches if not batch.missing]

    def drained(self) -> None:
        """Let the workers end while the consumer is busy with the last batch."""
        if not self._persistent:
            self.pool.dismiss()

    # Answers.

    def arrived(self) -> list[Event]:
        """Return what has come since."""
        return self.receive(self.pool.wait(0.0))

    def wait(self, deadline: float | None) -> list[tuple[int, int]]:
        """Wait for answers, and for the end of a worker."""
        return self.pool.wait(deadline)

    @property
    def waiting(self) -> bool:
        """Whether nothing but waiting is under way."""
        return self.pool.polling

    @waiting.setter
    def waiting(self, value: bool) -> None:
        self.pool.polling = value

    def receive(self, news: list[tuple[int, int]]) -> list[Event]:
        """Return what became of batches and workers."""
        frames, dead = self.pool.receive(news)
        events: list[Event] = []
        for worker, frame in frames:
            answer = pickle.loads(frame.message)
            answers = answer if type(answer) is list else (answer,)
            nbytes = len(frame.message) // len(answers)
            for kind, run, number, index, payload, metrics, room in answers:
                if kind != "begun":
                    events += self._take_in(
                        worker, kind, run, number, index, payload, metrics, frame.buffers, nbytes, room
                    )
                elif run == self._run:
                    events.append(Began(worker, payload))
        for worker in dead:
            events += self._lost(worker)
        return events

    def _take_in(
        self,
        worker: int,
        kind: str,
        run: int,
        number: int,
        index: int,
        payload: Any,
        metrics: Any,
        beside: Any,
        nbytes: int,
        room: int,
    ) -> list[Event]:
        """Note an answer of a worker, of so many bytes; ``metrics`` packed, or None; ``room``: of a slot that grew."""
        self.pool.load[worker] -= 1
        batch: ProcessBatch = self.pool.batches[run, number]
        if room and batch.slot is not None:
            batch.slot.size = max(batch.slot.size, room)
        part = batch.parts[index]
        part.answer = kind, payload
        batch.missing -= 1
        if metrics is not None:
            if batch.metrics is None:
                batch.metrics = BatchMetrics(*metrics)
            else:
                batch.metrics.add(BatchMetrics(*metrics))
        if beside:
            batch.beside[index] = beside
        batch.message_bytes += nbytes
        if kind == "end" and run == self._run:
            batch.ended = True
            self._ended.add(worker)
            self._wanted.pop(number, None)
        if batch.missing:
            return []
        self._plan.messages.add(batch.message_bytes)
        if self._wanted.get(number) is not batch:
            self._assembly.give_back(batch)
        elif not self._assembly.fits_together(batch):
            batch.metrics = None
            self._assigner.give_whole(batch, self._assigner.least_busy())
        return [] if batch.parts[0].answer is None else [Done(batch)]

    def collect(self, batch: PendingBatch, number: int) -> BatchResult:
        """Return a batch over its slot, which is lent until the consumer drops it; or its error.

        Raises:
            RingError: there is too little memory for a ring.
        """
        assert isinstance(batch, ProcessBatch)
        del self._wanted[batch.number]
        self._one_was_had = True
        worker = batch.parts[0].worker
        for part in batch.parts:
            assert part.answer is not None
            kind, payload = part.answer
            if kind in ("error", "unsent"):
                self._assembly.give_back(batch)
                if kind == "unsent":
                    batch.parts.clear()  # the error holds the batch by its traceback
                    return BatchResult(None, BatchMetrics(), number, worker, error=payload)
                told, state = payload
                return BatchResult(None, BatchMetrics(), number, worker, state, error=rebuild(told))
        try:
            return self._assembly.result(batch, number)
        except RingError:
            raise
        except Exception as error:  # an object that does not unpickle
            if self.over or is_of_signal_handler(error):
                raise
            return BatchResult(None, BatchMetrics(), number, worker, error=error)

    # Faults.

    def _lost(self, worker: int) -> list[Event]:
        """A worker died: return what was lost with it."""
        lost = self._owed(worker)
        if self._plan.stream and worker in self._ended:
            events: list[Event] = []
            for batch, _ in lost:  # there was no more to come from it
                events += self._take_in(worker, "end", batch.run, batch.number, 0, None, None, [], 0, 0)
            return events
        why = f"{self.pool.obituary(worker)} It was {self._whereabouts(worker)}"
        mine: list[PendingBatch] = [batch for batch, _ in lost if self._wanted.get(batch.number) is batch]
        at = [(self._wanted[number], key) for key, number in self.pool.at(worker) if number in self._wanted]
        # Its threads were at several samples, and one of them did it: each gets its share of the blame.
        blame: list[tuple[PendingBatch, int, float]] = [(batch, key, 1 / len(at)) for batch, key in at]
        return [Lost(worker, mine, blame or [(batch, 0, 1.0) for batch in mine], why)]

    def _owed(self, worker: int) -> list[tuple[ProcessBatch, int]]:
        """Return the parts of batches, of all passes, that a worker has not answered."""
        return [
            (batch, number)
            for batch in list(self.pool.batches.values())
            for number, part in enumerate(batch.parts)
            if part.worker == worker and part.answer is None
        ]

    def replace(self, lost: Lost) -> list[PendingBatch]:
        """Start a worker in the place of a dead one, and ask it for what that one owed."""
        worker, load = lost.worker, self.pool.load
        owed = self._owed(worker)
        load[worker] = 0
        self.pool.restart(worker)
        self.pool.send(worker, ("begin", self._run, None, None))
        if self._plan.layout is not None:
            self.pool.send(worker, ("layout_is", self._plan.layout))
        for batch, number in owed:
            load[worker] += 1
            self.pool.send(worker, self._assigner.message(batch, number))
        return []

    def _whereabouts(self, worker: int) -> str:
        """Return the samples that the threads of a worker are at, or were when it died."""
        places = []
        for key, number in self.pool.at(worker):
            batch = self._wanted.get(number)
            if batch is not None and key in batch.request.keys:
                places.append(f"at sample {batch.request.indices[batch.request.keys.index(key)]!r}")
            else:
                places.append(f"at batch {number} of this pass")
        return " and ".join(places) or "at no sample"

    def culprit(self, first: PendingBatch | None, pending: Sequence[PendingBatch]) -> str:
        """Return which worker hangs, and at which sample."""
        for part in first.parts if isinstance(first, ProcessBatch) else []:
            if part.answer is None:
                pid = self.pool.members[part.worker].process.pid
                return f": worker {part.worker} (pid {pid}) was {self._whereabouts(part.worker)}"
        return ""

    # The end.

    def drop(self, pending: Sequence[PendingBatch]) -> None:
        """End the pass. Batches that are still being made come back in `receive`, or with the pool."""
        for batch in self._wanted.values():
            if not batch.missing and (batch.run, batch.number) in self.pool.batches:
                self._assembly.give_back(batch)
        self._wanted.clear()
        release, self._release = self._release, None
        if release is not None:
            if self._run == self.pool.run and not (self._persistent and self._plan.stream):
                self.pool.stop()
            release()

    def abort(self) -> None:
        """End the workers at once; their ring is not used again."""
        self.pool.broken = True
        self.pool.close(_DEATH_CLOSE_TIMEOUT_S)

    def close(self, patience: float) -> None:
        """End the workers, in so many seconds before they are killed."""
        self.pool.close(patience)
