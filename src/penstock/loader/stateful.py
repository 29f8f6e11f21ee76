"""Positions of a loader's workers, as states of the user's own objects, for the batches its consumer has received.

    worker:    begin  ->  first snapshot; batch k  ->  BatchResult.state    frozen at once, whatever is prefetched
    consumer:  WorkerStates.begun(worker, snapshot), .delivered(result)  store the newest snapshot of each worker
               WorkerStates.state()                                  snapshot + batches since it, for each worker
    resume:    WorkerStates.load(state), .resume(worker)  ->  the worker that it came from

Invariants: a state is a snapshot and the number of batches that the *consumer* has received since. No snapshot is taken
at the end of an iterator, so a resume repeats once what an object does there. Workers never get the state of the
trainer's copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, TypeGuard

from penstock.errors import StateError
from penstock.loader.messages import BatchResult
from penstock.loader.snapshots import Snapshot
from penstock.plan.cursor import State, read_int
from penstock.plan.user_states import Frozen, freeze, same_states, thaw

__all__ = ["Consumer", "LayoutError", "WorkerState", "WorkerStates"]


class LayoutError(StateError, AssertionError):
    """A state for another number of workers. torchdata raises AssertionError here."""


class WorkerState:
    """The position of one worker: its newest snapshot, and the requests since.

    Args:
        snapshot: snapshot of the user's objects; None if none has a state, or nothing was delivered.
        since: number of requests to each iterator of the dataset since the snapshot. [2, 0] means: the snapshot's
            iterator got two requests and was then left or ended, and the next one got none yet. Empty if none has
            started.
        failed: numbers of the requests that were answered by an error, counted over all of ``since``.
        collate: snapshot after the last delivered batch, if the dataset has no state. ``snapshot`` is then from the
            start of the iterator, whose batches are made again.
    """

    def __init__(
        self,
        snapshot: Snapshot | None = None,
        since: Iterable[int] = (),
        failed: Iterable[int] = (),
        collate: Snapshot | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.since = list(since)
        self.failed = list(failed)
        self.collate = collate

    def copy(self) -> WorkerState:
        """Return an independent copy."""
        return WorkerState(self.snapshot, self.since, self.failed, self.collate)

    @property
    def places(self) -> bool:
        """Whether the snapshot contains a stream's position."""
        return self.snapshot is not None and self.snapshot.places

    @property
    def in_iterator(self) -> bool:
        """Whether the position is known to be inside an iterator, and not before the next one."""
        return bool(self.since) and (self.since[-1] > 0 or len(self.since) == 1)

    def begun(self, snapshot: Snapshot) -> None:
        """Record the snapshot of an iterator that has started and yielded nothing yet.

        If there was an earlier iterator and this snapshot is not exact yet, it is ignored: the earlier iterator's
        snapshot and the batches since are exact.
        """
        if len(self.since) < 2 or snapshot.opens or not snapshot.places:
            self.keep(snapshot)

    def keep(self, snapshot: Snapshot) -> None:
        """Replace the position by a snapshot."""
        self.snapshot, self.since, self.failed, self.collate = snapshot, [0], [], None

    def delivered(self, snapshot: Snapshot | None) -> None:
        """Record one more batch, and the snapshot after it, if one was taken."""
        if snapshot is not None and snapshot.places:
            self.keep(snapshot)
            return
        self._count()
        if snapshot is not None:
            self.collate = snapshot

    def record_error(self) -> None:
        """Record an error in place of a batch."""
        self.failed.append(sum(self.since))
        self._count()

    def _count(self) -> None:
        since = self.since or [0]
        self.since = [*since[:-1], since[-1] + 1]

    def next_iterator(self, *, over: bool) -> None:
        """Record the start of another iterator.

        Args:
            over: the previous iterator got another request and had ended. False: it was left.
        """
        if self.snapshot is None or not self.snapshot.places:
            # The dataset's position is unknown, so it starts again.
            self.snapshot, self.since, self.failed, self.collate = self.collate or self.snapshot, [], [], None
        elif self.snapshot.owners == {"iterator"}:
            # An ended iterator leaves no state behind.
            self.snapshot, self.since, self.failed = None, [], []
        else:
            since = self.since or [0]
            self.since = [*since[:-1], since[-1] + over, 0]

    def leave(self) -> None:
        """Record the start of another iterator if the position is inside one."""
        if self.in_iterator:
            self.next_iterator(over=False)

    def state(self) -> State:
        """Return the entry for a loader's state."""
        snapshots = {"snapshot": self.snapshot, "collate": self.collate}
        state: State = {name: thaw(taken.states) for name, taken in snapshots.items() if taken is not None}
        return {**state, "since": list(self.since), **({"failed": list(self.failed)} if self.failed else {})}

    @classmethod
    def read(cls, state: Any, *, of: str) -> WorkerState:
        """Return the position from an entry made by `state`.

        Raises:
            StateError: the entry is damaged.
        """
        state = state if isinstance(state, Mapping) else {}
        since, failed = state.get("since"), state.get("failed", [])
        taken = [state.get("snapshot"), state.get("collate")]
        if not (_is_counts(since) and _is_counts(failed) and all(isinstance(one, Mapping | None) for one in taken)):
            raise StateError(f"the state of this {of} is damaged: resume from another one, or start without one")
        snapshot, collate = (None if one is None else Snapshot.of(one) for one in taken)
        return cls(snapshot, since, failed, collate)


def _is_counts(numbers: Any) -> TypeGuard[list[int]]:
    return isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)


_VALUES = ("next", "base_seed", "number", "resumes", "_known", "_loaded", "_resuming", "_between")
"""Attributes of `WorkerStates` that `WorkerStates.begin` changes."""
_values_of = attrgetter(*_VALUES)


class WorkerStates:
    """The positions of all workers according to the batches that the consumer has received.

    Args:
        num_workers: number of workers; 0 means inline, which counts as worker 0. A stream's share is the same for 0 and
            1.
        stream: whether batches come from the workers' iterators, so that the position of each worker matters.
        initial: takes the states of objects in the trainer's process while no batch is made. None if workers have
            their own copies: only those are asked, and a worker that delivered nothing starts fresh.

    ``next`` is the worker of the next batch, if a stream's workers take turns. A resumed epoch asks all workers, also
    those that had ended; they end again. ``number`` counts iterators and loaded states. ``resumes`` is True after a
    state was loaded, until the next iterator. ``base_seed`` is the seed of workers that outlive an iterator; None if
    the seed is the iterator's own.
    """

    def __init__(self, num_workers: int, *, stream: bool, initial: Callable[[], Snapshot | None] | None = None) -> None:
        self.num_workers = num_workers
        self.stream = stream
        self.next = 0
        self.base_seed: int | None = None
        self._initial = initial
        self._known: list[WorkerState] | None = None
        self._loaded: Frozen | None = None
        self._resuming = False
        # Whether no iterator runs.
        self._between = True
        self.resumes = False
        self.number = 0

    @property
    def _count(self) -> int:
        return max(1, self.num_workers)

    @property
    def _workers(self) -> list[WorkerState]:
        if self._known is None:
            self._known = self._untouched()
        return self._known

    def _untouched(self) -> list[WorkerState]:
        initial = None if self._initial is None else self._initial()
        return [WorkerState(initial) for _ in range(self._count)]

    def begin(self, *, fresh: bool) -> None:
        """Record the start of an iterator. A running one is left.

        Args:
            fresh: whether its workers are new. Otherwise they are the ones of the last iterator, or (inline) the same
                objects.
        """
        self._next_run(fresh=fresh, over=False)
        self._between = False

    def saved(self) -> tuple[Any, ...]:
        """Return what `undo` needs, before a `begin`."""
        return _values_of(self)

    def undo(self, saved: tuple[Any, ...]) -> None:
        """Undo a `begin`, because its iterator could not begin."""
        for name, value in zip(_VALUES, saved, strict=True):
            setattr(self, name, value)

    def finish(self, *, fresh: bool) -> None:
        """Record that the consumer has received all batches of an iterator.

        Args:
            fresh: whether the next iterator has new workers.
        """
        self._next_run(fresh=fresh, over=True)
        self._between = True

    def _next_run(self, *, fresh: bool, over: bool) -> None:
        self.number += 1
        self.resumes, self._resuming, self._loaded = False, self._loaded is not None, None
        if self._resuming:
            return
        self.next = 0
        if fresh:
            self._known = self.base_seed = None
        elif not self.stream:
            if self._initial is not None:
                # Asked when a state is, after the loader's own draws for it: their state may contain the generators.
                self._known = None
        elif not self._between:
            # In copies: an iterator that cannot begin changes nothing.
            self._known = [worker.copy() for worker in self._workers]
            for worker in self._known:
                worker.next_iterator(over=over)

    def consumer(self) -> Consumer:
        """Return an object through which the current iterator reports its deliveries, until another one starts."""
        return Consumer(self, self.number)

    def begun(self, worker: int, snapshot: Snapshot) -> None:
        """Record the first snapshot of a worker that has yielded nothing yet."""
        if self.stream:
            self._workers[worker].begun(snapshot)
        else:
            self._kept(worker, snapshot)

    def _kept(self, worker: int, snapshot: Snapshot) -> None:
        if self._known is None:
            self._known = [WorkerState() for _ in range(self._count)]
        self._known[worker].keep(snapshot)

    def delivered(self, result: BatchResult) -> None:
        """Record a delivered batch."""
        if self.stream:
            self._workers[result.worker].delivered(result.state)
        elif result.state is not None:
            self._kept(result.worker, result.state)
        self._turn(result.worker)

    def failed(self, worker: int, snapshot: Snapshot | None = None) -> None:
        """Record that the consumer received an error in place of a worker's batch.

        Args:
            worker: number of the worker.
            snapshot: snapshot right after the error. Batches of streams are made again instead, and fail again.
        """
        if self.stream:
            self._workers[worker].record_error()
        elif snapshot is not None:
            self._kept(worker, snapshot)
        self._turn(worker)

    def _turn(self, worker: int) -> None:
        # If no object has a state, any worker may make any batch of a map-style dataset.
        if self.stream or self._workers[worker].snapshot is not None:
            self.next = (worker + 1) % self._count

    @property
    def dropped(self) -> int:
        """Number of batches that a resume makes again and drops because no object has a state; for a warning."""
        return sum(sum(worker.since) for worker in self._workers if not worker.places) if self.stream else 0

    def leave(self) -> None:
        """Make the starting iterator start from the beginning, even if the loaded state is inside an iterator."""
        self.next = 0
        self._known = [worker.copy() for worker in self._workers]
        for worker in self._known:
            worker.leave()

    def state(self, *, left: bool = False) -> State | None:
        """Return deep copies, JSON-serialisable if the user's states are; None if there are no states.

        Args:
            left: whether the next iterator starts from the beginning, even if workers are inside an iterator.
        """
        if self._loaded is not None and not left:
            return thaw(self._loaded)
        known = self._untouched() if self._known is None else [worker.copy() for worker in self._known]
        if not self.stream and all(worker.snapshot is None for worker in known):
            return None
        seed = {} if self.base_seed is None else {"base_seed": self.base_seed}
        for worker in known if left else ():
            worker.leave()
        workers = {str(number): worker.state() for number, worker in enumerate(known)}
        return {"num_workers": self.num_workers, "next": 0 if left else self.next, **seed, "workers": workers}

    def read(self, state: Mapping[str, Any] | None) -> tuple[list[WorkerState], int]:
        """Return the positions of the workers and the next worker from a state, for `load`.

        Raises:
            LayoutError: the number of workers differs, and the positions depend on it.
            StateError: the state is damaged.
        """
        if state is None:
            return self._untouched(), 0
        of = "loader's workers"
        if not isinstance(state, Mapping):
            raise StateError(f"the state of this {of} must be a dict, got {type(state).__name__}")
        entries = state.get("workers")
        count = max(1, read_int(state, "num_workers", of=of))
        if not isinstance(entries, Mapping) or len(entries) != count or set(entries) != {str(n) for n in range(count)}:
            raise StateError(f"the state of this {of} is damaged: it needs the workers 0 to {count - 1}")
        if "base_seed" in state:
            read_int(state, "base_seed", of=of, below=1 << 63)
        workers = [WorkerState.read(entries[str(number)], of=of) for number in range(count)]
        following = read_int(state, "next", of=of)
        if count != self._count:
            workers, following = self._for_other_number(workers, count), 0
        if following >= self._count:
            raise StateError(f"the state of this {of} is damaged: worker {following} of {self._count} comes next")
        return workers, following

    def load(self, state: Mapping[str, Any] | None, known: tuple[list[WorkerState], int] | None = None) -> None:
        """Resume from a state at the next `begin`. ``known`` is the result of `read`, if already called.

        Raises:
            StateError: from `read`; nothing has changed then.
        """
        workers, following = self.read(state) if known is None else known
        self.number += 1
        self.resumes = True
        self._known, self.next = workers, following
        self.base_seed = None if state is None else state.get("base_seed")
        self._loaded = None if state is None else freeze(dict(state))

    def follow(self, other: WorkerStates) -> None:
        """Resume from a state that was loaded into other worker states since their last iterator, if any.

        Args:
            other: states for the same dataset, perhaps with another number of workers.

        Raises:
            LayoutError: the state does not fit the number of workers here.
        """
        if other.resumes:
            self.load(None if other._loaded is None else thaw(other._loaded))

    def _for_other_number(self, workers: list[WorkerState], count: int) -> list[WorkerState]:
        """Return the states for another number of workers. That is possible if all workers have the same one."""
        if self.stream and not any(worker.since for worker in workers):
            # Nothing was delivered, so they start fresh, unless the objects live in the trainer's process.
            snapshot = None if self._initial is None else workers[0].snapshot
            return [WorkerState(snapshot) for _ in range(self._count)]
        # Generators are removed, because their seed contains the worker's number.
        first, *others = (None if one.snapshot is None else one.snapshot.without_generators() for one in workers)
        if self.stream or not all(_same(one, first) for one in others):
            raise LayoutError(
                f"this state is of {count} workers and the loader has {self._count}: the dataset is split among "
                "workers and each has its own state. Resume with the same num_workers"
            )
        return [WorkerState(first) for _ in range(self._count)]

    def resume(self, worker: int) -> WorkerState | None:
        """Return the picklable state that a worker resumes from; None if it starts fresh.

        All workers start fresh in an iterator without a loaded state.
        """
        if not (self._resuming or self._loaded is not None):
            return None
        known = self._workers[worker]
        return None if known.snapshot is None and not known.since else known.copy()


class Consumer:
    """The reports of one iterator to `WorkerStates`. Reports of an older iterator are ignored."""

    def __init__(self, states: WorkerStates, number: int) -> None:
        self._states = states
        self.stream = states.stream
        self._number = number

    def begun(self, first: dict[int, Snapshot]) -> None:
        """Record the first snapshots of workers, by number, and remove them from the dict."""
        while first:
            worker, snapshot = first.popitem()
            if self._states.number == self._number:
                self._states.begun(worker, snapshot)

    def delivered(self, result: BatchResult) -> None:
        """Record a delivered batch of a stream, or one with states."""
        if self._states.number == self._number:
            self._states.delivered(result)

    def failed(self, worker: int, snapshot: Snapshot | None) -> None:
        """Record that the consumer received an error in place of a worker's batch."""
        if self._states.number == self._number:
            self._states.failed(worker, snapshot)


def _same(one: Snapshot | None, other: Snapshot | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or same_states(thaw(one.states), thaw(other.states))
