"""Where each worker of a loader is, as far as its consumer has had its batches, in states of the user's own objects.

    worker:    batch k  ->  Snapshots.take(...)  ->  Made.state     frozen right then, whatever is prefetched later
    consumer:  WorkerStates.delivered(made)                         keeps the newest snapshot of each worker
               WorkerStates.state()                                 snapshot + batches since it, for each worker
    resume:    WorkerStates.load(state), .resume(worker)  ->  worker: reopen(...) or restore(...)

Invariant: a state is a snapshot and how many batches the *consumer* has had since it, pass by pass. Nothing is ever
taken at the end of a stream: what an object does there is done again on resume, once, as it was done before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from penstock.errors import StateError
from penstock.loader.snapshots import Frozen, Resume, Snapshots, capture, freeze, has_state, reopen, restore, thaw
from penstock.loader.work import Made
from penstock.plan.cursor import State, read_int

__all__ = [
    "Consumer",
    "Frozen",
    "LayoutError",
    "Resume",
    "Snapshots",
    "Trail",
    "WorkerStates",
    "capture",
    "has_state",
    "reopen",
    "restore",
]


class LayoutError(StateError, AssertionError):
    """A state of so many workers, loaded into another number: AssertionError is what torchdata raises."""


class Trail:
    """Where something is: the newest snapshot, and how many batches have been had since, pass by pass: none, [2, 0] for
    two in the pass of the snapshot, of which that is all, and none yet in the next.
    """

    def __init__(self, snapshot: Frozen | None = None, since: Iterable[int] = ()) -> None:
        self.snapshot = snapshot
        self.since = list(since)

    def step(self, snapshot: Frozen | None) -> None:
        """One batch more, and the snapshot after it if one was taken."""
        if snapshot is not None:
            self.snapshot, self.since = snapshot, [0]
        else:
            self.since = self.after(1).since

    def begin(self) -> None:
        """A new pass. One of which nothing was had leaves no trace; without a state a pass owes nothing to the last."""
        if self.snapshot is None:
            self.since = []
        elif self.since and (len(self.since) == 1 or self.since[-1]):
            self.since.append(0)

    def after(self, count: int) -> Trail:
        """Another one, which has had so many batches more."""
        since = self.since or [0]
        return Trail(self.snapshot, [*since[:-1], since[-1] + count] if count else self.since)

    def state(self) -> State:
        """As part of a loader's state."""
        head = {} if self.snapshot is None else {"snapshot": thaw(self.snapshot)}
        return {**head, "since": list(self.since)}

    @classmethod
    def of(cls, state: Any, *, of: str) -> Trail:
        """From a state.

        Raises:
            StateError: it is damaged.
        """
        since = state.get("since") if isinstance(state, Mapping) else None
        snapshot = state.get("snapshot") if isinstance(state, Mapping) else None
        counts = isinstance(since, list) and all(type(n) is int and n >= 0 for n in since)
        if not counts or not isinstance(snapshot, Mapping | None):
            raise StateError(f"the state of this {of} is damaged: resume from another one, or start anew without one")
        return cls(None if snapshot is None else freeze(dict(snapshot)), cast(list[int], since))


class WorkerStates:
    """The consumer's side: where each worker is, as far as the consumer has had its batches.

    Args:
        num_workers: 0 for inline, which is a worker with the number 0. A stream's share is the same for 0 and 1.
        stream: whether batches come from iterators that the workers hold, so that each worker's place matters.
        initial: `capture` of the data set and collate function before anything began, without an iterator; or what
            takes it, called when it is first needed, and where new workers get copies of them as they are then.

    ``next`` is the worker whose batch comes next, in a stream that is read in turn; a resumed pass asks all workers,
    also those that had ended: they end again. ``number`` counts passes and loaded states.
    """

    def __init__(
        self, num_workers: int, *, stream: bool, initial: Frozen | Callable[[], Frozen | None] | None = None
    ) -> None:
        self.num_workers = num_workers
        self.stream = stream
        self.next = 0
        self._source = self._initial = initial
        self._known: list[Trail] | None = None
        self._loaded: Frozen | None = None
        self._resuming = False
        self.number = 0

    @property
    def _count(self) -> int:
        return max(1, self.num_workers)

    @property
    def _trails(self) -> list[Trail]:
        if self._known is None:
            self._known = self._untouched()
        return self._known

    def _untouched(self) -> list[Trail]:
        initial = self._initial = self._initial() if callable(self._initial) else self._initial
        if initial is not None and self.stream and "dataset" not in thaw(initial):
            initial = None  # a collate function does not say where a stream is
        return [Trail(initial) for _ in range(self._count)]

    def begin(self, *, fresh: bool) -> None:
        """A pass begins, or the last one has ended (then the next call changes nothing more).

        Args:
            fresh: with new workers, which have never seen anything; else with those of the last pass, or (inline)
                with the same objects.
        """
        self.number += 1
        self._resuming, self._loaded = self._loaded is not None, None
        if self._resuming:
            return
        self.next = 0
        if fresh:
            self._initial = self._source  # somebody may have told the data set of another epoch since
            self._known = self._untouched()
        for trail in self._trails:
            trail.begin()

    def consumer(self) -> Consumer:
        """For the iterator of the pass that has begun: it tells what it hands out, until another pass begins."""
        return Consumer(self, self.number)

    def delivered(self, made: Made) -> None:
        """The consumer receives a batch."""
        self._step(made.worker, made.state)

    def failed(self, worker: int) -> None:
        """The consumer receives an error in the place of a batch of this worker."""
        self._step(worker, None)

    def _step(self, worker: int, snapshot: Frozen | None) -> None:
        if not self.stream and snapshot is None:
            return  # nothing to count: map-style batches belong to the sampler
        self._trails[worker].step(snapshot)
        self.next = (worker + 1) % self._count

    @property
    def dropped(self) -> int:
        """Batches that are made again and dropped on resume because nobody has a state; for a warning."""
        return sum(sum(trail.since) for trail in self._trails if self.stream and trail.snapshot is None)

    def state(self) -> State | None:
        """Deep copies, JSON-serialisable if the user's states are; None if there is nothing to say."""
        if self._loaded is not None:
            return thaw(self._loaded)
        if not self.stream and all(trail.snapshot is None for trail in self._trails):
            return None
        workers = {str(number): trail.state() for number, trail in enumerate(self._trails)}
        return {"num_workers": self.num_workers, "next": self.next, "workers": workers}

    def read(self, state: Mapping[str, Any] | None) -> tuple[list[Trail], int]:
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
        trails = [Trail.of(entries[str(number)], of=of) for number in range(count)]
        following = read_int(state, "next", of=of)
        if count != self._count:
            trails, following = self._deal(trails, count), 0
        if following >= self._count:
            raise StateError(f"the state of this {of} is damaged: worker {following} of {self._count} comes next")
        return trails, following

    def load(self, state: Mapping[str, Any] | None, known: tuple[list[Trail], int] | None = None) -> None:
        """Go on from a state at the next `begin`; ``known`` is what `read` returned for it, if it was asked.

        Raises:
            StateError: what `read` raises; nothing has changed then.
        """
        trails, following = self.read(state) if known is None else known
        self.number += 1
        self._known, self.next = trails, following
        self._loaded = None if state is None else freeze(dict(state))

    def _deal(self, trails: list[Trail], count: int) -> list[Trail]:
        """For another number of workers: what is the same for all does not depend on it."""
        first = trails[0]
        untouched = not any(trail.since for trail in trails)
        if (self.stream and not untouched) or not all(_same(trail.snapshot, first.snapshot) for trail in trails):
            raise LayoutError(
                f"this state is of {count} workers and the loader has {self._count}: the data set is dealt to workers "
                "and each has a state of its own. Resume with the same num_workers"
            )
        return [Trail(first.snapshot) for _ in range(self._count)]

    def resume(self, worker: int) -> Resume | None:
        """For `reopen` or `restore` in a worker, picklable; None for one that begins as it is: in a pass that was not
        loaded all do.
        """
        trail = self._trails[worker]
        if not (self._resuming or self._loaded is not None) or (trail.snapshot is None and not trail.since):
            return None
        return Resume(trail.snapshot, list(trail.since))


class Consumer:
    """What `WorkerStates` hears of one iterator; nothing of an older one that goes on beside."""

    def __init__(self, states: WorkerStates, number: int) -> None:
        self._states = states
        self._number = number

    def delivered(self, made: Made) -> None:
        """The consumer receives a batch."""
        if (made.state is not None or self._states.stream) and self._states.number == self._number:
            self._states.delivered(made)

    def failed(self, worker: int) -> None:
        """The consumer receives an error in the place of a batch of this worker."""
        if self._states.number == self._number:
            self._states.failed(worker)


def _same(one: Frozen | None, other: Frozen | None) -> bool:
    if one is None or other is None or one == other:
        return one is other or one == other
    try:
        return bool(thaw(one) == thaw(other))
    except Exception:  # tensors and arrays compare by element
        return False
