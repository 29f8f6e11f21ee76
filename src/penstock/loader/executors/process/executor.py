"""`ProcessExecutor`: makes batches in a pool of worker processes.

    whole   -> one worker                                                       chunks -> all workers, in the same slot
    answers -> a batch is done when all its parts are answered -> Done

Invariant: a slot is lent for a batch number, and returns when every part of that batch is answered, in whichever epoch;
so a late worker never writes into another batch.
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
from penstock.loader.interrupts import raised_by_signal_handler
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult
from penstock.plan.stream_plan import EpochStart

__all__ = ["ProcessExecutor"]

_DEATH_CLOSE_TIMEOUT_S = 0.5
"""Seconds for workers to end when an error must be reported at once."""


class ProcessExecutor(Executor):
    """Makes batches in worker processes.

    Args:
        pool: the workers. A newer executor over the same pool ends an older one.
        plan: the dispatch policy; it keeps measurements between epoch iterators.
        epoch: passed to stream datasets; None for none.
        states: states of users' objects to resume from, by worker.
        has_states: whether users' objects may have states.
        persistent: whether the workers stay after this epoch iterator.
        release: called when this executor no longer needs the pool.
    """

    def __init__(
        self,
        pool: Pool,
        plan: Plan,
        *,
        epoch: EpochStart,
        states: dict[int, Any],
        has_states: bool,
        persistent: bool,
        release: Callable[[], None],
    ) -> None:
        super().__init__()
        self.pool = pool
        self.workers = pool.config.workers
        self.tells_begin = has_states
        self._plan = plan
        self._persistent = persistent
        self._release: Callable[[], None] | None = release
        self._assembly = Assembly(pool, plan)
        self._assigner = Assigner(pool, plan, self._assembly)
        self._wanted: dict[int, ProcessBatch] = {}  # by number
        self._ended: set[int] = set()  # workers whose streams have ended
        self._one_was_had = False
        self._run = 0
        with pool.turn():
            self._hear_of_earlier_passes()
            self._run = pool.begin(epoch, states)
            self._assembly.tell_layout()  # replaced workers do not know it

    def _hear_of_earlier_passes(self) -> None:
        """Process messages since the last epoch iterator ended. Batches that dead workers owed it are dropped."""
        self.receive(self.pool.wait(0.0))
        for worker in self.pool.dead():
            for batch, part in self._owed(worker):
                self._take_in(worker, "skipped", batch.run, batch.number, part, None, None, [], 0, 0)

    def turn(self) -> Any:
        """Return the pool's lock, since epoch iterators share the pool."""
        return self.pool.turn()

    @property
    def processes(self) -> list[Any]:
        """Return the worker processes."""
        return [member.process for member in self.pool.members]

    @property
    def over(self) -> bool:  # type: ignore[override]
        """Whether the pipes are closed."""
        return self.pool.life.over

    def check(self) -> Exception | None:
        """Return why no more batches can be submitted; None if they can."""
        if self._run != self.pool.run:
            return RuntimeError("a newer iterator of this DataLoader has taken over its persistent workers")
        if self.pool.closed:
            return WorkerError(
                "the workers of this DataLoader have ended: it was closed, or this is a fork of its process"
            )
        return None

    # Requests.

    @property
    def depth(self) -> int:
        """Return how many batches may be in flight now."""
        config = self.pool.config
        if config.max_bytes_in_flight is not None and not self._plan.sized:
            return 1  # until their size is known
        light, ring = self._plan.light and self._one_was_had, self.pool.ring  # the consumer waits for the first batch
        begun = config.small_batch_depth if light else config.depth
        limit, beside = config.max_bytes_in_flight, self._plan.messages.largest
        if self.ahead and self._plan.ahead:
            begun = max(begun, min(config.depth + self.ahead, config.small_batch_depth))
        if limit is None and begun > config.depth:
            begun = max(config.depth, min(begun, AHEAD // max(1, ring.slot_bytes + beside)))
        most = min(begun, ring.in_flight) if ring.slot_bytes else begun
        if limit is not None and beside > SMALL:  # pickled objects do not use slots
            most = min(most, max(1, limit // (ring.slot_bytes + beside)))
        return most

    @property
    def idle(self) -> bool:
        """Return whether a worker is idle."""
        return self._one_was_had and not all(self.pool.load)

    def has_room(self, pending: int) -> bool:
        """Return whether a slot is free: dropped batches of an earlier epoch iterator may hold all of them."""
        ring = self.pool.ring
        return not pending or not ring.slot_bytes or ring.has_free

    def group(self, depth: int) -> int:
        """Return how many batches are sent together."""
        return self._assigner.group(depth)

    def choose(self, workers: Sequence[int], share: int | None) -> int | None:
        """Return the least busy worker."""
        load = self.pool.load
        worker = min(workers, key=load.__getitem__)
        return worker if share is None or load[worker] < share else None

    def pending(self, number: int, request: BatchRequest) -> PendingBatch:
        """Return a batch to submit, with a slot if one is free."""
        batch = ProcessBatch(number, request, self._run, self.pool.ring.lend())
        self._wanted[number] = batch
        self.pool.batches[self._run, number] = batch
        return batch

    def submit(self, batches: Sequence[Any], worker: int) -> list[Event]:
        """Send batches; batches whose indices cannot be pickled are done at once, with an error."""
        self._assigner.hand_out(list(batches), worker)
        return [Done(batch) for batch in batches if not batch.missing]

    def drained(self) -> None:
        """Let the workers end while the consumer uses the last batch."""
        if not self._persistent:
            self.pool.dismiss()

    # Answers.

    def arrived(self) -> list[Event]:
        """Return new events."""
        return self.receive(self.pool.wait(0.0))

    def wait(self, deadline: float | None) -> list[tuple[int, int]]:
        """Wait for answers, or the death of a worker."""
        return self.pool.wait(deadline)

    @property
    def waiting(self) -> bool:
        """Whether the executor only waits."""
        return self.pool.polling

    @waiting.setter
    def waiting(self, value: bool) -> None:
        self.pool.polling = value

    def receive(self, news: list[tuple[int, int]]) -> list[Event]:
        """Return the events of batches and workers."""
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
        """Process an answer of a worker, of ``nbytes`` bytes; ``room`` is the new size of a slot that grew."""
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
        """Return a batch over its slot, which is leased until the consumer drops the batch; or its error.

        Raises:
            RingError: too little memory for a ring.
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
                    batch.parts.clear()  # the error's traceback refers to the batch
                    return BatchResult(None, BatchMetrics(), number, worker, error=payload)
                told, state = payload
                return BatchResult(None, BatchMetrics(), number, worker, state, error=rebuild(told))
        try:
            return self._assembly.result(batch, number)
        except RingError:
            raise
        except Exception as error:  # an object that cannot be unpickled
            if self.over or raised_by_signal_handler(error):
                raise
            return BatchResult(None, BatchMetrics(), number, worker, error=error)

    # Failures.

    def _lost(self, worker: int) -> list[Event]:
        """Return the events of a worker's death."""
        lost = self._owed(worker)
        if self._plan.stream and worker in self._ended:
            events: list[Event] = []
            for batch, _ in lost:  # its stream had ended
                events += self._take_in(worker, "end", batch.run, batch.number, 0, None, None, [], 0, 0)
            return events
        why = f"{self.pool.obituary(worker)} It was {self._whereabouts(worker)}"
        mine: list[PendingBatch] = [batch for batch, _ in lost if self._wanted.get(batch.number) is batch]
        at = [(self._wanted[number], key) for key, number in self.pool.at(worker) if number in self._wanted]
        # Its threads were loading several samples, one of which is the cause: each gets a share of the blame.
        blame: list[tuple[PendingBatch, int, float]] = [(batch, key, 1 / len(at)) for batch, key in at]
        return [Lost(worker, mine, blame or [(batch, 0, 1.0) for batch in mine], why)]

    def _owed(self, worker: int) -> list[tuple[ProcessBatch, int]]:
        """Return the unanswered parts of a worker, of all epoch iterators."""
        return [
            (batch, number)
            for batch in list(self.pool.batches.values())
            for number, part in enumerate(batch.parts)
            if part.worker == worker and part.answer is None
        ]

    def replace(self, lost: Lost) -> list[PendingBatch]:
        """Replace a dead worker, and send its unanswered parts to the new one."""
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
        """Return the samples that a worker's threads are loading, or were loading when it died."""
        places = []
        for key, number in self.pool.at(worker):
            batch = self._wanted.get(number)
            if batch is not None and key in batch.request.keys:
                places.append(f"at sample {batch.request.indices[batch.request.keys.index(key)]!r}")
            else:
                places.append(f"at batch {number} of this pass")
        return " and ".join(places) or "at no sample"

    def culprit(self, first: PendingBatch | None, pending: Sequence[PendingBatch]) -> str:
        """Return the hanging worker and its sample."""
        for part in first.parts if isinstance(first, ProcessBatch) else []:
            if part.answer is None:
                pid = self.pool.members[part.worker].process.pid
                return f": worker {part.worker} (pid {pid}) was {self._whereabouts(part.worker)}"
        return ""

    # The end.

    def drop(self, pending: Sequence[PendingBatch]) -> None:
        """End the epoch iterator. Slots of batches in progress return through `receive`, or with the pool."""
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
        """End the workers at once; their ring is not reused."""
        self.pool.broken = True
        self.pool.close(_DEATH_CLOSE_TIMEOUT_S)

    def close(self, patience: float) -> None:
        """End the workers; kill them after ``patience`` seconds."""
        self.pool.close(patience)
