"""`ProcessExecutor`: makes batches in a pool of worker processes.

    a batch, or a group of small ones in one message  ->  one worker  ->  answers  ->  Done

Invariant: a slot is lent for a batch number, and returns when that batch is answered, in whichever epoch; so a late
worker never writes into another batch.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import RingError, WorkerError
from penstock.loader.exceptions import rebuild
from penstock.loader.executors.base import Began, Done, Event, Executor, Lost, PendingBatch
from penstock.loader.executors.process.assembly import Assembly, ProcessBatch, Workload
from penstock.loader.executors.process.pack import SMALL
from penstock.loader.executors.process.pool import Pool
from penstock.loader.executors.process.ring import AHEAD
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult
from penstock.plan.stream_plan import EpochStart

__all__ = ["ProcessExecutor"]

_DEATH_CLOSE_TIMEOUT_S = 0.5
"""Seconds for workers to end when an error must be reported at once."""


class ProcessExecutor(Executor):
    """Makes batches in worker processes.

    Args:
        pool: the workers. A newer executor over the same pool ends an older one.
        work: who may make the batches, and what they cost.
        epoch: passed to stream datasets; None for none.
        states: states of users' objects to resume from, by worker.
        has_states: whether users' objects may have states.
        persistent: whether the workers stay after this epoch iterator.
        release: called when this executor no longer needs the pool.
    """

    def __init__(
        self,
        pool: Pool,
        work: Workload,
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
        self._work = work
        self._persistent = persistent
        self._release: Callable[[], None] | None = release
        self._assembly = Assembly(pool, work)
        self._wanted: dict[int, ProcessBatch] = {}  # by number
        self._ended: set[int] = set()  # workers whose streams have ended
        self._one_was_had = False
        self._run = 0
        with pool.turn():
            self._hear_of_earlier_passes()
            self._run = pool.begin(epoch, states)

    def _hear_of_earlier_passes(self) -> None:
        """Process messages since the last epoch iterator ended. Batches that dead workers owed it are dropped."""
        self.receive(self.pool.wait(0.0))
        for worker in self.pool.dead():
            for batch in self._owed(worker):
                self._take_in(worker, "skipped", batch.run, batch.number, None, None, [], 0, 0)

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
        if config.max_bytes_in_flight is not None and not self._work.sized:
            return 1  # until their size is known
        light, ring = self._work.light and self._one_was_had, self.pool.ring  # the consumer waits for the first batch
        begun = config.small_batch_depth if light else config.depth
        limit, beside = config.max_bytes_in_flight, self._work.messages.largest
        if self.ahead and self._work.ahead:
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
        return max(1, min(self._work.group, depth // (2 * self.workers)))

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
        """Send batches to a worker in one message, which it answers in one message.

        A batch whose indices cannot be pickled is done at once, with an error.
        """
        messages = [batch.message() for batch in batches]
        try:
            data = pickle.dumps(messages[0] if len(messages) == 1 else ("group", messages), protocol=5)
        except Exception as error:
            if len(batches) > 1:  # sending them one by one shows which batch it is
                return [event for batch in batches for event in self.submit([batch], worker)]
            batches[0].answer = "unsent", error
            return [Done(batches[0])]
        for batch in batches:
            batch.missing = True
        self.pool.load[worker] += len(batches)
        self.pool.post(worker, data)
        return []

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
            for kind, run, number, payload, metrics, room in answers:
                if kind != "begun":
                    events += self._take_in(worker, kind, run, number, payload, metrics, frame.buffers, nbytes, room)
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
        batch.answer, batch.missing = (kind, payload), False
        if metrics is not None:
            batch.metrics = BatchMetrics(*metrics)
        batch.beside = beside
        if kind == "end" and run == self._run:
            batch.ended = True
            self._ended.add(worker)
            self._wanted.pop(number, None)
        self._work.messages.add(nbytes)
        if self._wanted.get(number) is not batch:
            self._assembly.give_back(batch)
        return [Done(batch)]

    def collect(self, batch: PendingBatch, number: int) -> BatchResult:
        """Return a batch over its slot, which is leased until the consumer drops the batch; or its error.

        Raises:
            RingError: too little memory for a ring.
        """
        assert isinstance(batch, ProcessBatch)
        del self._wanted[batch.number]
        self._one_was_had = True
        worker = batch.worker
        assert batch.answer is not None
        kind, payload = batch.answer
        if kind in ("error", "unsent"):
            self._assembly.give_back(batch)
            if kind == "unsent":
                batch.answer = None  # the error's traceback refers to the batch
                return BatchResult(None, BatchMetrics(), number, worker, error=payload)
            told, state = payload
            return BatchResult(None, BatchMetrics(), number, worker, state, error=rebuild(told))
        try:
            return self._assembly.result(batch, number)
        except RingError:
            raise
        except Exception as error:  # an object that cannot be unpickled
            if self.over:
                raise
            return BatchResult(None, BatchMetrics(), number, worker, error=error)

    # Failures.

    def _lost(self, worker: int) -> list[Event]:
        """Return the events of a worker's death."""
        lost = self._owed(worker)
        if self._work.stream and worker in self._ended:
            events: list[Event] = []
            for batch in lost:  # its stream had ended
                events += self._take_in(worker, "end", batch.run, batch.number, None, None, [], 0, 0)
            return events
        why = f"{self.pool.obituary(worker)} It was {self._whereabouts(worker)}"
        mine: list[PendingBatch] = [batch for batch in lost if self._wanted.get(batch.number) is batch]
        at = [(self._wanted[number], key) for key, number in self.pool.at(worker) if number in self._wanted]
        # Its threads were loading several samples, one of which is the cause: each gets a share of the blame.
        blame: list[tuple[PendingBatch, int, float]] = [(batch, key, 1 / len(at)) for batch, key in at]
        return [Lost(worker, mine, blame or [(batch, 0, 1.0) for batch in mine], why)]

    def _owed(self, worker: int) -> list[ProcessBatch]:
        """Return the unanswered batches of a worker, of all epoch iterators."""
        return [batch for batch in list(self.pool.batches.values()) if batch.missing and batch.worker == worker]

    def replace(self, lost: Lost) -> list[PendingBatch]:
        """Replace a dead worker, and send its unanswered batches to the new one."""
        worker, load = lost.worker, self.pool.load
        owed = self._owed(worker)
        load[worker] = 0
        self.pool.restart(worker)
        self.pool.send(worker, ("begin", self._run, None, None))
        for batch in owed:
            load[worker] += 1
            self.pool.send(worker, batch.message())
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
        if not isinstance(first, ProcessBatch) or not first.missing:
            return ""
        pid = self.pool.members[first.worker].process.pid
        return f": worker {first.worker} (pid {pid}) was {self._whereabouts(first.worker)}"

    # The end.

    def drop(self, pending: Sequence[PendingBatch]) -> None:
        """End the epoch iterator. Slots of batches in progress return through `receive`, or with the pool."""
        for batch in self._wanted.values():
            if not batch.missing and (batch.run, batch.number) in self.pool.batches:
                self._assembly.give_back(batch)
        self._wanted.clear()
        release, self._release = self._release, None
        if release is not None:
            if self._run == self.pool.run and not (self._persistent and self._work.stream):
                self.pool.stop()
            release()

    def abort(self) -> None:
        """End the workers at once; their ring is not reused."""
        self.pool.broken = True
        self.pool.close(_DEATH_CLOSE_TIMEOUT_S)

    def close(self, patience: float) -> None:
        """End the workers; kill them after ``patience`` seconds."""
        self.pool.close(patience)
