"""Where each worker of a loader is, as far as its consumer has had its batches, in states of the user's own objects.

    worker:    begin  ->  first snapshot; batch k  ->  BatchResult.state    frozen right then, whatever is prefetched
    consumer:  WorkerStates.begun(worker, snapshot), .delivered(result)  keeps the newest snapshot of each worker
               WorkerStates.state()                                  snapshot + batches since it, for each worker
    resume:    WorkerStates.load(state), .resume(worker)  ->  the worker that it came from

Invariants: a state is a snapshot and how many batches the *consumer* has had since it. Nothing is ever taken at the end
of an iterator: what an object does there is done again on resume, once, as it was done before. Workers are never given
the state of the trainer's copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

from penstock.errors import StateError
from penstock.loader.messages import BatchResult
from penstock.loader.snapshots import Snapshot
from penstock.plan.cursor import State, read_int
from penstock.plan.user_states import Frozen, freeze, same_states, thaw

__all__ = ["Consumer", "LayoutError", "WorkerState", "WorkerStates"]


class LayoutError(StateError, AssertionError):
    """A state of so many workers, loaded into another number: AssertionError is what torchdata raises."""


class WorkerState:
    """Where one worker is: its newest snapshot, and what it was asked for since.

    Args:
        snapshot: of the user's objects; None if none has a state, or nothing was had.
        since: of each iterator of the dataset since the snapshot, how often it was asked for a batch. [2, 0] says that
            the snapshot's iterator was asked twice, then left or found to be over, and that the next one was not asked
            yet. Empty if none has begun.
        failed: those questions that an error answered, counted over all of ``since``.
        collate: snapshot after the batch that the consumer had last, where the dataset has no state: then ``snapshot``
            is that of the beginning of the iterator, whose batches are made again.
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
        """Return one that goes on by itself."""
        return WorkerState(self.snapshot, self.since, self.failed, self.collate)

    @property
    def places(self) -> bool:
        """Whether the snapshot says where a stream is."""
        return self.snapshot is not None and self.snapshot.places

    @property
    def in_iterator(self) -> bool:
        """Whether the state is known to be within an iterator, and not before the next one."""
        return bool(self.since) and (self.since[-1] > 0 or len(self.since) == 1)

    def begun(self, snapshot: Snapshot) -> None:
        """Note the snapshot of an iterator that has begun and given nothing yet.

        With an earlier iterator the snapshot of that, and the batches since, say more than one that is not exact yet.
        """
        if len(self.since) < 2 or snapshot.opens or not snapshot.places:
            self.keep(snapshot)

    def keep(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot, whatever was before."""
        self.snapshot, self.since, self.failed, self.collate = snapshot, [0], [], None

    def delivered(self, snapshot: Snapshot | None) -> None:
        """Count one batch more, and keep the snapshot after it if one was taken."""
        if snapshot is not None and snapshot.places:
            self.keep(snapshot)
            return
        self._count()
        if snapshot is not None:
            self.collate = snapshot

    def failed_once(self) -> None:
        """Count an error in the place of a batch."""
        self.failed.append(sum(self.since))
        self._count()

    def _count(self) -> None:
        since = self.since or [0]
        self.since = [*since[:-1], since[-1] + 1]

    def next_iterator(self, *, over: bool) -> None:
        """Count an iterator more.

        Args:
            over: the one before was asked for a batch once more, and had none. False: it was left.
        """
        if self.snapshot is None or not self.snapshot.places:
            # Nobody knows where the dataset is, and it begins again.
            self.snapshot, self.since, self.failed, self.collate = self.collate or self.snapshot, [], [], None
        elif self.snapshot.owners == {"iterator"}:
            # An iterator that is over leaves nothing behind.
            self.snapshot, self.since, self.failed = None, [], []
        else:
            since = self.since or [0]
            self.since = [*since[:-1], since[-1] + over, 0]

    def leave(self) -> None:
        """Count an iterator more, if the state is within one."""
        if self.in_iterator:
            self.next_iterator(over=False)

    def state(self) -> State:
        """Return it as part of a loader's state."""
        snapshots = {"snapshot": self.snapshot, "collate": self.collate}
        state: State = {name: thaw(taken.states) for name, taken in snapshots.items() if taken is not None}
        return {**state, "since": list(self.since), **({"failed": list(self.failed)} if self.failed else {})}

    @classmethod
    def read(cls, state: Any, *, of: str) -> WorkerState:
        """Return what `state` gave.

        Raises:
            StateError: it is damaged.
        """
        state = state if isinstance(state, Mapping) else {}
        since, failed = state.get("since"), state.get("failed", [])
        taken = [state.get("snapshot"), state.get("collate")]
        if not (_is_counts(since) and _is_counts(failed) and all(isinstance(one, Mapping | None) for one in taken)):
            raise StateError(f"the state of this {of} is damaged: resume from another one, or start anew without one")
        snapshot, collate = (None if one is None else Snapshot.of(one) for one in taken)
        return cls(snapshot, since, failed, collate)


def _is_counts(numbers: Any) -> TypeGuard[list[int]]:
    return isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)


class WorkerStates:
    """The consumer's side: where each worker is, as far as the consumer has had its batches.

    Args:
        num_workers: 0 for inline, which is a worker with the number 0. A stream's share is the same for 0 and 1.
        stream: whether batches come from iterators that the workers hold, so that each worker's place matters.
        initial: takes the states of objects that live in the trainer's process, before anything began. None where
            workers have copies of their own: nobody but them is asked, and one that nothing was had of begins as new.

    ``next`` is the worker whose batch comes next, in a stream that is read in turn; a resumed epoch asks all workers,
    also those that had ended: they end again. ``number`` counts runs and loaded states, and
    ``resumes`` says that a state was loaded since the last run. ``base_seed`` is that of the
    workers that outlive a run; None if it is the run's own.
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
        self._between = True  # no run is under way
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
        """Note that a run begins; one that is under way is left.

        Args:
            fresh: with new workers, which have never seen anything; else with those of the last run, or (inline)
                with the same objects.
        """
        self._next_run(fresh=fresh, over=False)
        self._between = False

    def finish(self, *, fresh: bool) -> None:
        """Note that a run is over: the consumer has had everything.

        Args:
            fresh: whether the next run has new workers.
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
        elif not self._between and self.stream:
            for worker in self._workers:
                worker.next_iterator(over=over)

    def consumer(self) -> Consumer:
        """Return what the iterator of the run that has begun tells of what it hands out, until another run begins."""
        return Consumer(self, self.number)

    def begun(self, worker: int, snapshot: Snapshot) -> None:
        """Note the first snapshot of a worker, after which it has given nothing yet."""
        if self.stream:
            self._workers[worker].begun(snapshot)
        else:
            self._workers[worker].keep(snapshot)

    def delivered(self, result: BatchResult) -> None:
        """Note that the consumer has a batch."""
        worker = self._workers[result.worker]
        if self.stream:
            worker.delivered(result.state)
        elif result.state is not None:
            worker.keep(result.state)
        self._turn(result.worker)

    def failed(self, worker: int, snapshot: Snapshot | None = None) -> None:
        """Note that the consumer has an error in the place of a batch of this worker.

        Args:
            worker: its number.
            snapshot: right after the error. Batches of streams are made again instead, and fail again.
        """
        if self.stream:
            self._workers[worker].failed_once()
        elif snapshot is not None:
            self._workers[worker].keep(snapshot)
        self._turn(worker)

    def _turn(self, worker: int) -> None:
        # Where nobody has a state, any worker may make any batch of a map-style dataset.
        if self.stream or self._workers[worker].snapshot is not None:
            self.next = (worker + 1) % self._count

    @property
    def dropped(self) -> int:
        """Batches that are made again and dropped on resume because nobody has a state; for a warning."""
        return sum(sum(worker.since) for worker in self._workers if self.stream and not worker.places)

    def leave(self) -> None:
        """Let the run that begins now begin anew, whatever iterators workers were in as the loaded state says."""
        self.next = 0
        for worker in self._workers:
            worker.leave()

    def state(self, *, left: bool = False) -> State | None:
        """Return deep copies, JSON-serialisable if the user's states are; None if there is nothing to say.

        Args:
            left: the next run begins anew, whatever iterators workers are in.
        """
        if self._loaded is not None and not left:
            return thaw(self._loaded)
        if not self.stream and all(worker.snapshot is None for worker in self._workers):
            return None
        seed = {} if self.base_seed is None else {"base_seed": self.base_seed}
        known = [worker.copy() for worker in self._workers]
        for worker in known if left else ():
            worker.leave()
        workers = {str(number): worker.state() for number, worker in enumerate(known)}
        return {"num_workers": self.num_workers, "next": 0 if left else self.next, **seed, "workers": workers}

    def read(self, state: Mapping[str, Any] | None) -> tuple[list[WorkerState], int]:
        """Return where each worker is to go on, and which one comes next, as a state says; for `load`.

        Raises:
            LayoutError: the workers were others in number, and what they have had depends on that.
            StateError: the state is damaged.
        """
        if state is None:
            return self._untouched(), 0
        of = "loader's workers"
        if not isinstance(state, Mapping):
            raise StateError(f"the state of this {of} is a dict, got {type(state).__name__}")
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
        """Go on from a state at the next `begin`; ``known`` is what `read` returned for it, if it was asked.

        Raises:
            StateError: what `read` raises; nothing has changed then.
        """
        workers, following = self.read(state) if known is None else known
        self.number += 1
        self.resumes = True
        self._known, self.next = workers, following
        self.base_seed = None if state is None else state.get("base_seed")
        self._loaded = None if state is None else freeze(dict(state))

    def follow(self, other: WorkerStates) -> None:
        """Go on from the state that was loaded into other ones since their last run, if there was one.

        Args:
            other: of the same dataset, maybe with another number of workers.

        Raises:
            LayoutError: the state does not fit the workers here.
        """
        if other.resumes:
            self.load(None if other._loaded is None else thaw(other._loaded))

    def _for_other_number(self, workers: list[WorkerState], count: int) -> list[WorkerState]:
        """Return the states for another number of workers: what is the same for all does not depend on it."""
        if self.stream and not any(worker.since for worker in workers):
            # Nothing was had: they begin as new, if their objects are not the trainer's.
            snapshot = None if self._initial is None else workers[0].snapshot
            return [WorkerState(snapshot) for _ in range(self._count)]
        # Generators are seeded by the number of the worker.
        first, *others = (None if one.snapshot is None else one.snapshot.without_generators() for one in workers)
        if self.stream or not all(_same(one, first) for one in others):
            raise LayoutError(
                f"this state is of {count} workers and the loader has {self._count}: the dataset is dealt to workers "
                "and each has a state of its own. Resume with the same num_workers"
            )
        return [WorkerState(first) for _ in range(self._count)]

    def resume(self, worker: int) -> WorkerState | None:
        """Return what a worker is to go on from, picklable; None for one that begins as it is: in a run that was not
        loaded all do.
        """
        known = self._workers[worker]
        if not (self._resuming or self._loaded is not None) or (known.snapshot is None and not known.since):
            return None
        return known.copy()


class Consumer:
    """What `WorkerStates` hears of one iterator; nothing of an older one that goes on beside."""

    def __init__(self, states: WorkerStates, number: int) -> None:
        self._states = states
        self._number = number

    def begun(self, first: dict[int, Snapshot]) -> None:
        """Note the first snapshots of workers, by their numbers, once."""
        while first:
            worker, snapshot = first.popitem()
            if self._states.number == self._number:
                self._states.begun(worker, snapshot)

    def delivered(self, result: BatchResult) -> None:
        """Note that the consumer has a batch."""
        if (result.state is not None or self._states.stream) and self._states.number == self._number:
            self._states.delivered(result)

    def failed(self, worker: int, snapshot: Snapshot | None) -> None:
        """Note that the consumer has an error in the place of a batch of this worker."""
        if self._states.number == self._number:
            self._states.failed(worker, snapshot)


def _same(one: Snapshot | None, other: Snapshot | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or same_states(thaw(one.states), thaw(other.states))
