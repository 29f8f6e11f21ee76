"""`RayExecutor`: assigns batches to workers of the cluster, and handles lost, silent and slow workers.

    any worker may make any batch, even again: sample keys are sent with it; streams: worker k mod n

lost     other workers make its batches; a batch that lost three workers is made sample by sample
silent   for longer than the deadline: treated as lost, since a broken network reports nothing
slow     the batch that the consumer waits for takes three times as long as others: another worker makes it, too (hedge)

Invariant: a batch is done once, even if several workers make it; later results are dropped.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from ray import cloudpickle

from penstock.errors import RingError, WorkerError
from penstock.loader.exceptions import rebuild
from penstock.loader.executors.base import Again, Began, Done, Event, Executor, Lost, PendingBatch
from penstock.loader.executors.ray.isolate_bad_sample import make_carefully
from penstock.loader.executors.ray.jobs import RayBatch, RayRunState
from penstock.loader.executors.ray.member import Answer, Call, Member
from penstock.loader.executors.ray.remote_manifest import rows_for
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult
from penstock.loader.window import CLOSED

__all__ = ["RayExecutor"]

_SLOW = 3.0
"""A batch that takes this many times as long as others is hedged."""

_SHORTEST = 0.05
"""A batch is never slow below this many seconds."""

_AT_WORK = 2
"""Calls that a worker may have started, see `Worker`."""


class RayExecutor(Executor):
    """Makes batches in the cluster.

    Args:
        fetcher: the workers hold a copy of it.
        state: workers, memory and measurements, which stay between epoch iterators.
        turns: whether it matters which worker makes a batch.
        prefetch: batches in flight per worker.
        light: the same for cheap batches.
    """

    isolates = True

    def __init__(self, fetcher: Any, state: RayRunState, *, turns: bool, prefetch: int, light: int) -> None:
        super().__init__()
        self._fetcher = fetcher
        self._state = state
        self._actors = state.actors
        self._turns = turns
        self._prefetch, self._light = prefetch, light
        self._run = state.actors.run
        self._wanted: dict[int, RayBatch] = {}  # in order of their numbers
        self._told: set[int] = set()  # workers whose start was reported
        self._later: list[Event] = []  # events that arrived while a batch was made sample by sample
        self._asked, self._full = time.monotonic(), False
        self.workers = state.actors.count
        self.tells_begin = turns
        self.planned = prefetch * self.workers

    def turn(self) -> Any:
        """Return the workers' lock."""
        return self._actors.turn()

    @property
    def waiting(self) -> bool:
        """Whether the executor only waits."""
        return self._actors.waiting

    @waiting.setter
    def waiting(self, value: bool) -> None:
        self._actors.waiting = value

    @property
    def over(self) -> bool:  # type: ignore[override]
        """Whether the workers were ended."""
        return self._actors.closed

    def check(self) -> Exception | None:
        """Return why no more batches can be submitted; None if they can."""
        if self._run != self._actors.run:
            return RuntimeError("a newer iterator of this DataLoader has taken over its workers")
        if self._actors.closed:
            return WorkerError(
                "the workers of this DataLoader have ended: it was closed, or this is a fork of its process"
            )
        return None

    # Requests.

    @property
    def depth(self) -> int:
        """Return how many batches may be in flight now."""
        ready = self._actors.ready()
        nodes = {member.node.id for member in ready if member.node is not None}
        each = self._light if self._state.group(2) > 1 else self._prefetch
        return self._state.budget.depth(each * max(1, len(ready)), len(nodes))

    def has_room(self, pending: int) -> bool:
        """Return whether batches can be submitted: if workers take turns, all must be ready."""
        return not self._turns or len(self._actors.ready()) == self._actors.count

    def group(self, depth: int) -> int:
        """Return how many batches are requested together, so that each worker has two calls."""
        return 1 if self._turns else self._state.group(depth // (2 * max(1, len(self._actors.ready()))))

    def choose(self, workers: Sequence[int], share: int | None) -> int | None:
        """Return the worker that would finish the next batch first; None if no node has room."""
        if not self._turns:
            member = self._choose_member()
            return None if member is None else member.number
        members = self._actors.members
        worker = min(workers, key=lambda number: members[number].owed)
        return worker if share is None or members[worker].owed < share else None

    def _choose_member(self, but: Member | None = None) -> Member | None:
        """Return the worker for the next batch; None if all are busy enough.

        Args:
            but: exclude this worker, and if possible others on its node, which may be lost.
        """
        now, typical = time.monotonic(), self._state.typical
        members = [member for member in self._actors.ready() if member is not but and self._fits(member)]
        if but is not None:
            members = [member for member in members if member.node != but.node] or members
        return min(members, key=lambda member: member.expected(typical, now), default=None)

    def _fits(self, member: Member) -> bool:
        """Return whether the object store of a worker's node has room for one more batch."""
        assert member.node is not None
        others = (m for m in self._actors.ready() if m.node is not None and m.node.id == member.node.id)
        return sum(other.owed for other in others) < self._state.budget.on_node(member.node.store)

    def pending(self, number: int, request: BatchRequest) -> PendingBatch:
        """Return a batch to submit."""
        batch = self._wanted[number] = RayBatch(number, request)
        try:
            batch.packed = cloudpickle.dumps(request.packed())
        except Exception as error:  # indices that cannot be pickled: raised in place of this batch
            batch.finish("raise", error)
        return batch

    def submit(self, batches: Sequence[RayBatch], worker: int) -> list[Event]:
        """Request batches from a worker; batches that cannot be sent are done at once, with an error."""
        sent = [batch for batch in batches if not batch.finished]
        if sent:
            self._ask(sent, self._actors.members[worker])
        return [Done(batch) for batch in batches if batch.finished]

    def _ask(self, batches: list[RayBatch], member: Member) -> None:
        wanted: dict[str, set[int]] = {}
        for batch in batches:
            batch.worker = member.number
            for key in member.far:
                self._want(batch, key, [])
                wanted.setdefault(key, set()).update(batch.wanted[key])
        rows = rows_for(self._state.manifests, wanted) if wanted else None
        requests, collate = [batch.packed for batch in batches], batches[0].collate
        call = self._actors.ask(member, batches, requests, collate=collate, rows=rows)
        for batch in batches:
            batch.calls.append(call)

    def _want(self, batch: RayBatch, key: str, rows: list[int]) -> None:
        """Note the missing manifest rows of a worker, and the rows of the batch's other samples."""
        length = len(self._state.manifests[key])
        likely = batch.request.indices if batch.request.place is None and key not in batch.wanted else []
        likely = [index for index in likely if type(index) is int and 0 <= index < length]
        batch.wanted.setdefault(key, set()).update(rows, likely)

    # Answers.

    def arrived(self) -> list[Event]:
        """Return new events; called when the consumer asks for a batch."""
        events = self.receive(self._actors.wait(0))
        self._actors.waiting = False
        self._asked = time.monotonic()
        self._full = bool(self._wanted) and all(batch.finished for batch in self._wanted.values())
        return events

    def wait(self, deadline: float | None) -> list[Any]:
        """Wait for answers, or until a worker is late."""
        moments = deadline, self._slow_at(self._first()), self._silent_at()
        until = min((moment for moment in moments if moment is not None), default=None)
        return self._actors.wait(None if until is None else max(0.0, until - time.monotonic()))

    def receive(self, news: list[Any]) -> list[Event]:
        """Return the events of batches and workers; move late batches to other workers."""
        events, self._later = self._later, []
        for answer in self._actors.receive(news):
            events += self._take_in(answer)
        begun = self._actors.begun
        events += [Began(worker, begun[worker]) for worker in begun if worker not in self._told]
        self._told.update(begun)
        first = self._first()
        if first is None or not first.finished:
            events += self._give_up_silent()
            self._hedge(first)
        return events

    def _take_in(self, answer: Answer) -> list[Event]:
        calls, value, error, lost = answer
        if lost is not None:
            return self._lose(lost, calls, error)
        (call,) = calls
        events: list[Event] = []
        unmade: list[RayBatch] = []
        buffers = iter(() if value is None else value[1:])
        said = itertools.repeat(None) if value is None else cloudpickle.loads(value[0])
        for batch, one in zip(call.items, said, strict=False):
            batch.calls.remove(call)
            beside = [] if one is None else list(itertools.islice(buffers, one[-1]))
            if batch.finished:  # another worker was faster
                if one is not None and one[0] == "batch":
                    call.member.took(one[3])
            elif one is not None:
                events += self._understand(batch, call, one, beside)
            elif self._turns:
                batch.finish("raise", error)
                events.append(Done(batch))
            else:
                unmade.append(batch)
        return [*events, *self._make_again(unmade, [], call.member, error)] if unmade else events

    def _understand(self, batch: RayBatch, call: Call, answer: tuple[Any, ...], beside: list[Any]) -> list[Event]:
        """Process an answer of a worker."""
        kind, payload, metrics, seconds, _ = answer
        if kind == "rows":
            key, rows = payload
            call.member.far.add(key)
            self._want(batch, key, rows)
            if self._actors.members.get(call.member.number) is call.member:
                self._ask([batch], call.member)
                return []
            return [] if batch.calls or not batch.collate else [Again([batch])]  # its worker was just lost
        batch.worker = call.member.number
        batch.finish(kind, payload, BatchMetrics(*metrics), beside)
        batch.ended = kind == "end"
        if batch.ended:
            self._wanted.pop(batch.number, None)
        elif kind == "batch" and batch.collate:
            nbytes = sum(array.nbytes for array in beside) + len(payload[0])
            self._state.budget.learn(nbytes)
            self._state.took(seconds)
            self._actors.learn(call.member, seconds, metrics[0], nbytes)
        return [Done(batch)]

    def collect(self, batch: PendingBatch, number: int) -> BatchResult:
        """Return a batch in memory owned by the consumer; or its error.

        Raises:
            RingError: too little memory.
            WorkerError: the loader was closed.
        """
        assert isinstance(batch, RayBatch)
        del self._wanted[batch.number]
        worker = batch.worker if self._turns else 0
        kind, payload, metrics, arrays = batch.take()
        if kind == "careful":
            result = self._make_carefully(batch, number)
        elif kind == "raise":
            result = BatchResult(None, BatchMetrics(), number, worker, error=payload)
        elif kind == "error":
            result = BatchResult(None, BatchMetrics(), number, worker, error=rebuild(payload))
        else:
            start = time.perf_counter()
            data, state = payload
            try:
                value, way = self._state.receive_buffer.land(data, arrays)
                result = BatchResult(value, metrics, number, worker, state, way)
            except RingError:
                raise
            except Exception as error:  # an object that cannot be unpickled
                if self.over:
                    raise
                result = BatchResult(None, metrics, number, worker, error=error)
            metrics.hand_over += time.perf_counter() - start
        self._adapt(time.monotonic() - self._asked)
        return result

    def _adapt(self, waited: float) -> None:
        """Adapt the number of workers, within its limits."""
        if self._turns:
            return
        actors, ready = self._actors, self._actors.ready()
        change = self._state.elastic.observe(waited, self._full, len(actors.members), len(actors.members) - len(ready))
        if change > 0:
            actors.add()
        elif change < 0 and (idle := [member for member in ready if not member.calls]):
            actors.remove(max(idle, key=lambda member: member.number))

    # Lost.

    def _lose(self, member: Member, calls: list[Call], error: Exception | None) -> list[Event]:
        """Replace a lost worker; return the events."""
        if self._turns:
            self._actors.close()
            why = (
                f"worker {member.number} on node {member.place} was lost, and with it what its copy of the dataset "
                "was at: an iterable dataset, or one with a state of its own, cannot go on without. Resume from the "
                f"last state_dict(). Ray says: {error}"
            )
            return [Lost(member.number, [], [], why)]
        begun: list[RayBatch] = []
        queued: list[RayBatch] = []
        for place, call in enumerate(calls):
            for batch in call.items:
                batch.calls.remove(call)
                if not batch.finished:
                    (begun if place < _AT_WORK else queued).append(batch)
        return self._make_again(begun, queued, member, error)

    def _make_again(
        self, begun: list[RayBatch], queued: list[RayBatch], member: Member, error: Exception | None
    ) -> list[Event]:
        """Return the events of a worker that failed: one of the batches it had started may be the cause."""
        for batch in begun:
            batch.lost.append(member.place)
            batch.why = error
            if not batch.collate and batch.is_hopeless():
                batch.finish("raise", batch.despair())
        mine: list[PendingBatch] = [batch for batch in (*begun, *queued) if batch.collate and not batch.calls]
        blame: list[tuple[PendingBatch, int, float]] = [(batch, 0, 1.0) for batch in begun if batch.collate]
        return [Lost(member.number, mine, blame, f"worker {member.number} on node {member.place} was lost: {error}")]

    def replace(self, lost: Lost) -> list[PendingBatch]:
        """Return the batches that other workers must make; a replacement was already started."""
        return [batch for batch in lost.batches if isinstance(batch, RayBatch) and not batch.finished]

    def isolate(self, batch: PendingBatch) -> None:
        """Make a batch that lost several workers sample by sample, when it is collected."""
        assert isinstance(batch, RayBatch)
        batch.finish("careful")

    def _make_carefully(self, batch: RayBatch, number: int) -> BatchResult:
        """Make a batch sample by sample. Other threads may take the lock meanwhile."""
        turn, metrics = self.turn(), BatchMetrics()
        turn.release()
        try:
            value, metrics = make_carefully(batch.request, self._fetcher, self._make_alone)
            result = BatchResult(value, metrics, number, way="message")
        except Exception as error:
            result = BatchResult(None, metrics, number, error=error)
        finally:
            turn.acquire()
        if self._actors.closed:
            raise WorkerError(CLOSED)  # not the fault of a sample
        return result

    def _make_alone(self, request: BatchRequest) -> Any:
        """Return the only sample of a request, loaded by an otherwise idle worker.

        Raises:
            WorkerError: it kills its workers.
            Exception: an error of the dataset.
        """
        batch = RayBatch(-1, request, cloudpickle.dumps(request.packed()), collate=False)
        while True:
            with self.turn():
                if batch.finished:
                    return batch.sample()
                idle = [member for member in self._actors.ready() if not member.calls]
                if idle and not batch.calls:
                    self._ask([batch], idle[0])
            news = self.wait(None)
            with self.turn():
                if self._actors.closed:
                    raise WorkerError(CLOSED)
                self._later = self.receive(news)

    # Silent and slow.

    def _first(self) -> RayBatch | None:
        """Return the batch that the consumer waits for."""
        return next(iter(self._wanted.values()), None)

    def _silent_at(self) -> float | None:
        """Return when the next silent worker counts as lost."""
        limit = self._actors.options.deadline
        begun = [member.begun(member.calls[0]) for member in self._actors.ready() if member.calls]
        return min(begun) + limit if limit is not None and begun else None

    def _give_up_silent(self) -> list[Event]:
        """Treat workers that were silent for too long as lost."""
        limit, now = self._actors.options.deadline, time.monotonic()
        events: list[Event] = []
        if limit is not None:
            for member in self._actors.ready():
                if member.calls and now >= member.begun(member.calls[0]) + limit:
                    error = WorkerError(f"no answer for {limit:g} s, which is RayOptions(deadline=)")
                    events += self._lose(member, self._actors.replace(member), error)
        return events

    def _slow_at(self, first: RayBatch | None) -> float | None:
        """Return when the batch that the consumer waits for becomes slow; None if no other worker may make it."""
        if first is None or first.finished or first.hedged or len(first.calls) != 1 or self._turns:
            return None
        typical = self._state.typical
        if not typical or not self._actors.options.hedge or len(self._actors.ready()) < 2:
            return None
        call = first.calls[0]
        return call.member.begun(call) + max(_SHORTEST, _SLOW * typical * len(call.items))

    def _hedge(self, first: RayBatch | None) -> None:
        """Request the batch that the consumer waits for from another worker, if it is slow."""
        moment = self._slow_at(first)
        if first is None or moment is None or time.monotonic() < moment:
            return
        first.hedged = True  # once, even if no worker has room
        if (member := self._choose_member(but=first.calls[0].member)) is not None:
            self._state.hedged += 1
            self._ask([first], member)

    def culprit(self, first: PendingBatch | None, pending: Sequence[PendingBatch]) -> str:
        """Return the worker that has not answered, and its request."""
        if not isinstance(first, RayBatch) or not first.calls:
            return f": {len(self._actors.ready())} of {len(self._actors.members)} workers have started"
        member, indices = first.calls[0].member, first.request.indices
        return f": worker {member.number} on node {member.place} owes batch {first.number}, samples {indices[:8]}"

    # The end.

    def drop(self, pending: Sequence[PendingBatch]) -> None:
        """End the epoch iterator and stop the workers."""
        self._fetcher = None
        self._wanted.clear()
        if self._run == self._actors.run:
            self._actors.stop()

    def close(self, patience: float) -> None:
        """End the workers at once."""
        self._actors.close()
