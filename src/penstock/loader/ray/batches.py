"""`RayBatches`: which worker makes what, and how batches come back in order, whoever is lost on the way.

    tasks -> number 0, 1, 2 ... -> the worker that would be done first      any worker may make any batch, again too:
                                -> streams: worker k mod n, as in torch       the keys of its samples travel with it
    answers -> the batch with the smallest number -> one copy -> consumer

Invariant: a batch is delivered once, however many workers made it; what comes later is dropped.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from ray import cloudpickle

from penstock.errors import WorkerError
from penstock.loader.delivery import CLOSED, timed_out
from penstock.loader.ray.ahead import Ahead
from penstock.loader.ray.careful import make_carefully, sample_of
from penstock.loader.ray.far import rows_for
from penstock.loader.ray.faults import Faults, node_of
from penstock.loader.ray.jobs import Batch, Desk, Rules
from penstock.loader.ray.member import Answer, Call, Member
from penstock.loader.remote import rebuild
from penstock.loader.snapshots import Snapshot
from penstock.loader.work import Made, Task, Work

__all__ = ["RayBatches"]


class RayBatches:
    """Batches of the tasks, made in the cluster; an iterator of `Made`.

    Args:
        tasks: what is to be made; pulled from in the consumer's thread. What it raises is raised behind the batches
            planned before it.
        maker: what the workers have a copy of.
        desk: workers, memory, what was learned.
        rules: how work is dealt.
        first: worker of the first batch, where they take turns.

    Attributes:
        number: of the batch that was last returned or raised, in the order of the tasks; of a stream's batch, how many
            were returned or raised before.
        worker: that it came from, where they take turns.
        first_states: snapshots of workers that have begun; complete as soon as a batch is handed out.
        failed_state: snapshot right after the batch that was raised last.
    """

    def __init__(self, tasks: Iterator[Task], maker: Any, desk: Desk, rules: Rules, *, first: int) -> None:
        self._tasks = Ahead(tasks)
        self._maker = maker
        self._desk = desk
        self._actors = desk.actors
        self._rules = rules
        self._faults = Faults(desk, rules)
        self._turn = first
        self._ended: set[int] = set()
        self._numbers = itertools.count()
        self._open: dict[int, Batch] = {}  # in the order of their numbers
        self._run = desk.actors.run
        self._over = False
        self._dead: str | None = None
        self.number, self.worker = -1, 0
        self.first_states: dict[int, Snapshot] = {}
        self.failed_state: Snapshot | None = None
        self._waits_for_begun = rules.turns
        with self._actors.turn():
            self._fill()

    def __iter__(self) -> RayBatches:
        return self

    def ready(self) -> int:
        """Batches that are made and not handed out."""
        return sum(batch.done for batch in self._open.values())

    @property
    def depth(self) -> int:
        """Batches that may be begun at the moment."""
        ready = self._actors.ready()
        nodes = {member.node.id for member in ready if member.node is not None}
        each = self._rules.light if self._desk.group(2) > 1 else self._rules.prefetch
        return self._desk.budget.depth(each * max(1, len(ready)), len(nodes))

    def __next__(self) -> Made:
        if self._dead is not None:
            raise WorkerError(self._dead)
        if self._over:
            raise StopIteration
        self._check()
        try:
            return self._next()
        except BaseException as error:  # Ctrl-C: while waiting harmless, elsewhere something may be half done
            if not isinstance(error, Exception) and not self._actors.waiting:
                self._dead = "this iterator of the DataLoader was interrupted: begin a new one"
                self.close()
            raise
        finally:
            self._actors.waiting = False

    def _next(self) -> Made:
        begin = time.monotonic()
        deadline = begin + self._rules.timeout if self._rules.timeout else None
        turn = self._actors.turn()
        with turn:
            self._receive(self._actors.wait(0))
            full = self.ready() >= len(self._open) > 0
        while True:
            with turn:
                self._heed_closing()
                batch = self._head()
                self._fill()
                if batch is not None and self._all_begun(batch):
                    break
                if not self._open and self._tasks.over:
                    self._finish()
            self._wait(self._first(), deadline)
        waited = time.monotonic() - begin
        made = self._deliver(batch)
        with turn:
            if not self._actors.closed:
                self._fill()
                self._adapt(waited, full)
        return made

    def _all_begun(self, batch: Batch) -> bool:
        """Return whether a batch may be handed out. The first one of a worker with a state waits for the first
        snapshots of all workers: a state has to say where those are that nothing was had of.
        """
        if self._waits_for_begun:
            begun = self._actors.begun
            if batch.worker not in begun or (begun[batch.worker] is not None and len(begun) < self._actors.count):
                return False
            self._waits_for_begun = False
            self.first_states = {worker: first for worker, first in begun.items() if first is not None}
        return True

    def _heed_closing(self) -> None:
        """Another thread may have closed the loader."""
        if self._actors.closed:
            self._dead = self._dead or CLOSED
            self.close()
            raise WorkerError(self._dead)

    def close(self) -> None:
        """Nothing more is wanted of the workers. Idempotent."""
        with self._actors.turn():
            if self._over:
                return
            self._over = True
            self._tasks.end()
            self._maker = None
            self._open.clear()
            if self._run == self._actors.run:
                self._actors.stop()

    def end(self, patience: float) -> None:
        """The loader is closed: the workers end at once."""
        if not self._over:
            self._dead = self._dead or CLOSED
        self._actors.close()
        self.close()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:  # modules may be empty by then
        if not _ending() and not getattr(self, "_over", True):
            self.close()

    def _check(self) -> None:
        """Whether there is anybody to ask."""
        if self._run != self._actors.run:
            raise RuntimeError("a newer iterator of this DataLoader has taken over its workers")
        if self._actors.closed:
            raise WorkerError(
                "the workers of this DataLoader have ended: it was closed, or this is a fork of its process"
            )

    def _finish(self) -> None:
        error, self._tasks.error = self._tasks.error, None
        self.close()
        try:
            raise StopIteration if error is None else error
        finally:
            del error  # its traceback holds this frame

    # Handing out.

    def _fill(self) -> None:
        """Have as much made as may be, and as much planned as torch has."""
        self._deal()
        self._tasks.plan(self._rules.prefetch * self._actors.count - len(self._open))

    def _deal(self) -> None:
        if self._rules.turns and len(self._actors.ready()) < self._actors.count:
            return  # each worker has its share, so none can be left out
        depth, again = self.depth, self._faults.again
        group = self._group(depth)
        while again or (not self._tasks.over and len(self._open) < depth):
            if not again and group > 1 and self._open and len(self._open) + group > depth:
                return  # a little later, then all together
            member = self._choose()
            if member is None:
                return
            batches = [again.popleft()] if again else self._next_batches(group)
            if batches:
                self._ask(batches, member)

    def _group(self, depth: int) -> int:
        """Batches that are asked for together, so that each worker has two calls to answer."""
        return 1 if self._rules.turns else self._desk.group(depth // (2 * max(1, len(self._actors.ready()))))

    def _next_batches(self, count: int) -> list[Batch]:
        """So many of the tasks, if there are; those left out that cannot be sent."""
        found: list[Batch] = []
        while len(found) < count and (batch := self._next_batch()) is not None:
            if not batch.done:
                found.append(batch)
        return found

    def _next_batch(self) -> Batch | None:
        """The next one of the tasks."""
        task = self._tasks.next()
        if task is None:
            return None
        batch = Batch(next(self._numbers), task)
        self._open[batch.number] = batch
        try:
            batch.packed = cloudpickle.dumps(task.packed())
        except Exception as error:  # indices that do not pickle: raised in the place of this batch
            batch.finish("raise", error)
        return batch

    def _ask(self, batches: list[Batch], member: Member) -> None:
        wanted: dict[str, set[int]] = {}
        for batch in batches:
            batch.worker = member.number
            for key in member.far:
                self._want(batch, key, [])
                wanted.setdefault(key, set()).update(batch.wanted[key])
        rows = rows_for(self._desk.manifests, wanted) if wanted else None
        tasks, collate = [batch.packed for batch in batches], batches[0].collate
        call = self._actors.ask(member, batches, tasks, collate=collate, rows=rows)
        for batch in batches:
            batch.calls.append(call)

    def _want(self, batch: Batch, key: str, rows: list[int]) -> None:
        """A worker needs rows of a manifest that it has not; likely those of the batch's other samples, too."""
        length = len(self._desk.manifests[key])
        likely = batch.task.indices if batch.task.place is None and key not in batch.wanted else []
        likely = [index for index in likely if type(index) is int and 0 <= index < length]
        batch.wanted.setdefault(key, set()).update(rows, likely)

    def _choose(self, but: Member | None = None) -> Member | None:
        """Who makes the next batch; None if nobody should be given more.

        Args:
            but: not this one; nor, if it can be helped, its neighbours, for it may be the node that is gone.
        """
        if self._rules.turns:
            count = self._actors.count
            for _ in range(count):
                number, self._turn = self._turn, (self._turn + 1) % count
                if number not in self._ended:
                    return self._actors.members[number]
            return None
        now, typical = time.monotonic(), self._desk.typical
        members = [member for member in self._actors.ready() if member is not but and self._has_room(member)]
        if but is not None:
            members = [member for member in members if member.node != but.node] or members
        return min(members, key=lambda member: member.expected(typical, now), default=None)

    def _has_room(self, member: Member) -> bool:
        """Whether a node may make one batch more, by its object store."""
        assert member.node is not None
        others = (m for m in self._actors.ready() if m.node is not None and m.node.id == member.node.id)
        return sum(other.owed for other in others) < self._desk.budget.on_node(member.node.store)

    def _adapt(self, waited: float, full: bool) -> None:
        """More workers, or fewer, where that is allowed."""
        if self._rules.turns:
            return
        actors, ready = self._actors, self._actors.ready()
        change = self._desk.elastic.observe(waited, full, len(actors.members), len(actors.members) - len(ready))
        if change > 0:
            actors.add()
        elif change < 0 and (idle := [member for member in ready if not member.calls]):
            actors.remove(max(idle, key=lambda member: member.number))

    # Taking in.

    def _first(self) -> Batch | None:
        """The batch that is waited for."""
        return next(iter(self._open.values()), None)

    def _head(self) -> Batch | None:
        """The batch to be delivered next, if it is finished."""
        for batch in list(itertools.islice(self._open.values(), 1 if self._rules.in_order else None)):
            if batch.done:
                if batch.answer[0] != "end":
                    return batch
                del self._open[batch.number]
                return self._head()
        return None

    def _wait(self, first: Batch | None, deadline: float | None) -> None:
        """Wait for news, and look at what is late.

        Args:
            first: the batch that is waited for.
            deadline: of the consumer's patience.
        """
        faults = self._faults
        moments = deadline, faults.slow_at(first), faults.given_up_at()
        until = min((moment for moment in moments if moment is not None), default=None)
        found = self._actors.wait(None if until is None else max(0.0, until - time.monotonic()))
        with self._actors.turn():
            self._heed_closing()
            self._receive(found)
            if first is None or not first.done:
                self._look_after(first, deadline)

    def _look_after(self, first: Batch | None, deadline: float | None) -> None:
        """What is late, if anything is."""
        faults, now = self._faults, time.monotonic()
        if (moment := faults.given_up_at()) is not None and now >= moment:
            faults.give_up()
        if first is not None and (moment := faults.slow_at(first)) is not None and now >= moment:
            first.hedged = True  # once, whether there is room for it or not
            if (member := self._choose(but=first.calls[0].member)) is not None:
                self._desk.hedged += 1
                self._ask([first], member)
        if deadline is not None and now >= deadline:
            raise WorkerError(timed_out(self._rules.timeout) + self._culprit(first))

    def _receive(self, found: list[Any]) -> None:
        self._take_in(self._actors.receive(found))

    def _take_in(self, answers: list[Answer]) -> None:
        for calls, value, error, lost in answers:
            if lost is not None:
                self._faults.lost(lost, calls, error)
                continue
            (call,) = calls
            buffers = iter(() if value is None else value[1:])
            said = itertools.repeat(None) if value is None else cloudpickle.loads(value[0])
            for batch, answer in zip(call.items, said, strict=False):
                batch.calls.remove(call)
                beside = [] if answer is None else list(itertools.islice(buffers, answer[-1]))
                if batch.done:  # it was made twice, and this one was slower
                    if answer is not None and answer[0] == "batch":
                        call.member.took(answer[3])
                    continue
                if answer is not None:
                    self._understand(batch, call, answer, beside)
                elif self._rules.turns:
                    batch.finish("raise", error)
                else:
                    self._faults.make_again(batch, call.member, error)

    def _understand(self, batch: Batch, call: Call, answer: tuple[Any, ...], beside: list[Any]) -> None:
        """An answer of a worker."""
        kind, payload, work, seconds, _ = answer
        if kind == "rows":
            key, rows = payload
            call.member.far.add(key)
            self._want(batch, key, rows)
            if self._actors.members.get(call.member.number) is call.member:
                self._ask([batch], call.member)
            elif not batch.calls:  # it was lost a moment ago
                self._faults.again.append(batch)
            return
        batch.worker = call.member.number
        batch.finish(kind, payload, Work(*work), beside)
        if kind == "end":
            self._ended.add(call.member.number)
            if len(self._ended) == self._actors.count:
                self._tasks.end()
        elif kind == "batch" and batch.collate:
            nbytes = sum(array.nbytes for array in beside) + len(payload[0])
            self._desk.budget.learn(nbytes)
            self._desk.took(seconds)
            self._actors.learn(call.member, seconds, work[0], nbytes)

    def _deliver(self, batch: Batch) -> Made:
        del self._open[batch.number]
        self.worker = batch.worker if self._rules.turns else 0
        self.number = self.number + 1 if self._rules.stream else batch.number
        kind, payload, work, arrays = batch.take()
        if kind == "careful":
            made = make_carefully(batch.task, self._maker, self._make_alone)
            self._heed_closing()  # it is no sample's fault
            return Made(*made, self.number, way="message")
        if kind == "raise":
            raise payload
        if kind == "error":
            raise rebuild(payload)
        start = time.perf_counter()
        data, state = payload
        value, way = self._desk.landing.land(data, arrays)
        work.hand_over += time.perf_counter() - start
        return Made(value, work, self.number, self.worker, state, way)

    def _culprit(self, first: Batch | None) -> str:
        """Who has not answered, and what it was asked for."""
        if first is None or not first.calls:
            return f": {len(self._actors.ready())} of {len(self._actors.members)} workers have started"
        member, indices = first.calls[0].member, first.task.indices
        return f": worker {member.number} on node {node_of(member)} owes batch {first.number}, samples {indices[:8]}"

    def _make_alone(self, task: Task) -> Any:
        """The only sample of a task, by a worker that does nothing else meanwhile.

        Raises:
            WorkerError: it takes its workers with it.
            Exception: what the data set raises.
        """
        batch = Batch(-1, task, cloudpickle.dumps(task.packed()), collate=False)
        again = self._faults.again
        again.append(batch)
        while not batch.done:
            with self._actors.turn():
                idle = [member for member in self._actors.ready() if not member.calls]
                if batch in again and idle:
                    again.remove(batch)
                    self._ask([batch], idle[0])
            self._wait(batch, None)
        return sample_of(batch)
