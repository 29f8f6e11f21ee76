"""`RayExecutor`: which worker of the cluster makes what, and what is done about those that are lost, silent or slow.

    any worker may make any batch, again too: the keys of its samples travel with it; streams: worker k mod n

lost     what it owed is made by others; a batch that three were lost over: sample by sample, see `make_carefully`
silent   for longer than the deadline: as if it were lost, since a network that is cut says nothing
slow     the batch that the consumer waits for takes three times as long as others: made once more, elsewhere (hedged)

Invariant: a batch is done once, however many workers made it; what comes later is dropped.
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
from penstock.loader.interrupts import is_of_signal_handler
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult
from penstock.loader.window import CLOSED

__all__ = ["RayExecutor"]

_SLOW = 3.0
"""Times as long as others, after which a batch is made once more."""

_SHORTEST = 0.05
"""Seconds below which no batch is called slow."""

_AT_WORK = 2
"""Calls of a worker that it may have begun, see `Worker`."""


class RayExecutor(Executor):
    """Has batches made in the cluster.

    Args:
        fetcher: what the workers have a copy of.
        state: workers, memory, what was learned; kept from pass to pass.
        turns: whether it matters who makes a batch.
        prefetch: batches in flight for each worker.
        light: the same for batches that are made quickly.
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
        self._wanted: dict[int, RayBatch] = {}  # in the order of their numbers
        self._told: set[int] = set()  # workers whose beginning was reported
        self._later: list[Event] = []  # that came while a batch was made sample by sample
        self._asked, self._full = time.monotonic(), False
        self.workers = state.actors.count
        self.tells_begin = turns
        self.planned = prefetch * self.workers

    def turn(self) -> Any:
        """Return the lock of the workers."""
        return self._actors.turn()

    @property
    def waiting(self) -> bool:
        """Whether nothing but waiting is under way."""
        return self._actors.waiting

    @waiting.setter
    def waiting(self, value: bool) -> None:
        self._actors.waiting = value

    @property
    def over(self) -> bool:  # type: ignore[override]
        """Whether the workers were ended."""
        return self._actors.closed

    def check(self) -> Exception | None:
        """Return why nobody can be asked any more."""
        if self._run != self._actors.run:
            return RuntimeError("a newer iterator of this DataLoader has taken over its workers")
        if self._actors.closed:
            return WorkerError(
                "the workers of this DataLoader have ended: it was closed, or this is a fork of its process"
            )
        return None

    # Asking.

    @property
    def depth(self) -> int:
        """Batches that may be in flight at the moment."""
        ready = self._actors.ready()
        nodes = {member.node.id for member in ready if member.node is not None}
        each = self._light if self._state.group(2) > 1 else self._prefetch
        return self._state.budget.depth(each * max(1, len(ready)), len(nodes))

    def has_room(self, pending: int) -> bool:
        """Return whether batches can be asked for: where workers take turns, none may be left out."""
        return not self._turns or len(self._actors.ready()) == self._actors.count

    def group(self, depth: int) -> int:
        """Return how many batches are asked for together, so that each worker has two calls to answer."""
        return 1 if self._turns else self._state.group(depth // (2 * max(1, len(self._actors.ready()))))

    def choose(self, workers: Sequence[int], share: int | None) -> int | None:
        """Return who would be done with the next batch first; None if no node has room for it."""
        if not self._turns:
            member = self._choose_member()
            return None if member is None else member.number
        members = self._actors.members
        worker = min(workers, key=lambda number: members[number].owed)
        return worker if share is None or members[worker].owed < share else None

    def _choose_member(self, but: Member | None = None) -> Member | None:
        """Return who makes the next batch; None if nobody should be given more.

        Args:
            but: not this one; nor, if it can be helped, its neighbours, for it may be the node that is gone.
        """
        now, typical = time.monotonic(), self._state.typical
        members = [member for member in self._actors.ready() if member is not but and self._fits(member)]
        if but is not None:
            members = [member for member in members if member.node != but.node] or members
        return min(members, key=lambda member: member.expected(typical, now), default=None)

    def _fits(self, member: Member) -> bool:
        """Return whether a node may make one batch more, by its object store."""
        assert member.node is not None
        others = (m for m in self._actors.ready() if m.node is not None and m.node.id == member.node.id)
        return sum(other.owed for other in others) < self._state.budget.on_node(member.node.store)

    def pending(self, number: int, request: BatchRequest) -> PendingBatch:
        """Return a batch that can be submitted here."""
        batch = self._wanted[number] = RayBatch(number, request)
        try:
            batch.packed = cloudpickle.dumps(request.packed())
        except Exception as error:  # indices that do not pickle: raised in the place of this batch
            if is_of_signal_handler(error):
                raise
            batch.finish("raise", error)
        return batch

    def submit(self, batches: Sequence[RayBatch], worker: int) -> list[Event]:
        """Ask a worker for batches; those that cannot be sent are done at once."""
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
        """A worker needs rows of a manifest that it has not; likely those of the batch's other samples, too."""
        length = len(self._state.manifests[key])
        likely = batch.request.indices if batch.request.place is None and key not in batch.wanted else []
        likely = [index for index in likely if type(index) is int and 0 <= index < length]
        batch.wanted.setdefault(key, set()).update(rows, likely)

    # Answers.

    def arrived(self) -> list[Event]:
        """Return what has come since; the consumer has just asked."""
        events = self.receive(self._actors.wait(0))
        self._actors.waiting = False
        self._asked = time.monotonic()
        self._full = bool(self._wanted) and all(batch.finished for batch in self._wanted.values())
        return events

    def wait(self, deadline: float | None) -> list[Any]:
        """Wait for answers, and until somebody is late."""
        moments = deadline, self._slow_at(self._first()), self._silent_at()
        until = min((moment for moment in moments if moment is not None), default=None)
        return self._actors.wait(None if until is None else max(0.0, until - time.monotonic()))

    def receive(self, news: list[Any]) -> list[Event]:
        """Return what became of batches and workers; have what is late made elsewhere."""
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
            if batch.finished:  # it was made twice, and this one was slower
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
        """Note an answer of a worker."""
        kind, payload, metrics, seconds, _ = answer
        if kind == "rows":
            key, rows = payload
            call.member.far.add(key)
            self._want(batch, key, rows)
            if self._actors.members.get(call.member.number) is call.member:
                self._ask([batch], call.member)
                return []
            return [] if batch.calls or not batch.collate else [Again([batch])]  # it was lost a moment ago
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
        """Return a batch in memory that is the consumer's; or its error.

        Raises:
            RingError: there is too little memory.
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
            except Exception as error:  # an object that does not unpickle
                if self.over or is_of_signal_handler(error):
                    raise
                result = BatchResult(None, metrics, number, worker, error=error)
            metrics.hand_over += time.perf_counter() - start
        self._adapt(time.monotonic() - self._asked)
        return result

    def _adapt(self, waited: float) -> None:
        """Have more workers, or fewer, where that is allowed."""
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
        """A worker is gone, and another one starts in its place."""
        if self._turns:
            self._actors.close()
            why = (
                f"worker {member.number} on node {member.place} was lost, and with it what its copy of the data set "
                "was at: an iterable data set, or one with a state of its own, cannot go on without. Resume from the "
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
        """A worker has not made batches: of those that it had begun, one may be the reason."""
        for batch in begun:
            batch.lost.append(member.place)
            batch.why = error
            if not batch.collate and batch.is_hopeless():
                batch.finish("raise", batch.despair())
        mine: list[PendingBatch] = [batch for batch in (*begun, *queued) if batch.collate and not batch.calls]
        blame: list[tuple[PendingBatch, int, float]] = [(batch, 0, 1.0) for batch in begun if batch.collate]
        return [Lost(member.number, mine, blame, f"worker {member.number} on node {member.place} was lost: {error}")]

    def replace(self, lost: Lost) -> list[PendingBatch]:
        """Return what others have to make; a worker has been started already in the place of the one that is gone."""
        return [batch for batch in lost.batches if isinstance(batch, RayBatch) and not batch.finished]

    def isolate(self, batch: PendingBatch) -> None:
        """Have a batch that workers were lost over made sample by sample, when it is its turn."""
        assert isinstance(batch, RayBatch)
        batch.finish("careful")

    def _make_carefully(self, batch: RayBatch, number: int) -> BatchResult:
        """Make a batch sample by sample. Meanwhile others may have the turn."""
        turn, metrics = self.turn(), BatchMetrics()
        turn.release()
        try:
            value, metrics = make_carefully(batch.request, self._fetcher, self._make_alone)
            result = BatchResult(value, metrics, number, way="message")
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            result = BatchResult(None, metrics, number, error=error)
        finally:
            turn.acquire()
        if self._actors.closed:
            raise WorkerError(CLOSED)  # it is no sample's fault
        return result

    def _make_alone(self, request: BatchRequest) -> Any:
        """Return the only sample of a request, made by a worker that does nothing else meanwhile.

        Raises:
            WorkerError: it takes its workers with it.
            Exception: what the data set raises.
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
        """Return the batch that is waited for."""
        return next(iter(self._wanted.values()), None)

    def _silent_at(self) -> float | None:
        """Return when the next worker is given up."""
        limit = self._actors.options.deadline
        begun = [member.begun(member.calls[0]) for member in self._actors.ready() if member.calls]
        return min(begun) + limit if limit is not None and begun else None

    def _give_up_silent(self) -> list[Event]:
        """Take whoever has been silent for too long for lost."""
        limit, now = self._actors.options.deadline, time.monotonic()
        events: list[Event] = []
        if limit is not None:
            for member in self._actors.ready():
                if member.calls and now >= member.begun(member.calls[0]) + limit:
                    error = WorkerError(f"no answer for {limit:g} s, which is RayOptions(deadline=)")
                    events += self._lose(member, self._actors.replace(member), error)
        return events

    def _slow_at(self, first: RayBatch | None) -> float | None:
        """Return when the batch that the consumer waits for is taking too long; None if nobody else may make it."""
        if first is None or first.finished or first.hedged or len(first.calls) != 1 or self._turns:
            return None
        typical = self._state.typical
        if not typical or not self._actors.options.hedge or len(self._actors.ready()) < 2:
            return None
        call = first.calls[0]
        return call.member.begun(call) + max(_SHORTEST, _SLOW * typical * len(call.items))

    def _hedge(self, first: RayBatch | None) -> None:
        """Have the batch that the consumer waits for made once more, if it takes too long."""
        moment = self._slow_at(first)
        if first is None or moment is None or time.monotonic() < moment:
            return
        first.hedged = True  # once, whether there is room for it or not
        if (member := self._choose_member(but=first.calls[0].member)) is not None:
            self._state.hedged += 1
            self._ask([first], member)

    def culprit(self, first: PendingBatch | None, pending: Sequence[PendingBatch]) -> str:
        """Return who has not answered, and what it was asked for."""
        if not isinstance(first, RayBatch) or not first.calls:
            return f": {len(self._actors.ready())} of {len(self._actors.members)} workers have started"
        member, indices = first.calls[0].member, first.request.indices
        return f": worker {member.number} on node {member.place} owes batch {first.number}, samples {indices[:8]}"

    # The end.

    def drop(self, pending: Sequence[PendingBatch]) -> None:
        """End the pass: the workers stop."""
        self._fetcher = None
        self._wanted.clear()
        if self._run == self._actors.run:
            self._actors.stop()

    def close(self, patience: float) -> None:
        """End the workers at once."""
        self._actors.close()
