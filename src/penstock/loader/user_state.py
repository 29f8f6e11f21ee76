"""States of the user's own objects: dataset, its iterator, collate function. By worker, for the batches received.

    worker:    first snapshot, before the first batch; then one with each batch   frozen, whatever is prefetched
    consumer:  UserStates.begun(first snapshots), .delivered(worker, snapshot)     the newest snapshot of each worker
               UserStates.state()                                  snapshot + number of requests since it, by worker
    resume:    UserStates.load(state), .begin().resumed            each back to the worker that it came from

An object takes part if it has ``state_dict()`` and ``load_state_dict(state)``, the protocol of torchdata's
StatefulDataLoader. A Penstock dataset that opens streams has its stream's `cursor` instead.

Invariants: a state depends only on batches that the *consumer* has received. No snapshot is taken at the end of an
iterator, so a resume repeats once what an object does there. Workers never get the state of the trainer's copy.
"""

from __future__ import annotations

import base64
import copy
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import StateError
from penstock.plan.cursor import State, read_int
from penstock.plan.stream import is_opened
from penstock.plan.user_states import freeze, same_states, states_of, thaw

__all__ = [
    "LayoutError",
    "Snapshot",
    "UserStates",
    "WorkerGenerators",
    "WorkerState",
    "preserved_generators",
    "take_snapshot",
]


class LayoutError(StateError, AssertionError):
    """A state for another number of workers. torchdata raises AssertionError here."""


# Where the objects live.


Snapshot = dict[str, bytes]
"""The states of one worker's objects, frozen, by owner: stream, dataset, iterator, collate_fn, generators."""

_PLACES = frozenset(("stream", "dataset", "iterator"))
"""Owners whose states contain a stream's position."""


def take_snapshot(
    dataset: Any, iterator: Any, collate_fn: Any, generators: WorkerGenerators | None = None, *, first: bool = False
) -> Snapshot | None:
    """Return the current states of a worker's objects, frozen; None if no object has one. That takes 1 µs.

    Args:
        dataset, iterator, collate_fn: the worker's objects. The iterator is None for map-style datasets, and for
            iterable ones before ``iter()``.
        generators: generators of the worker process; those that were used become part of the snapshot. None in the
            trainer's process, whose generators belong to the trainer.
        first: whether the objects have yielded nothing yet: the result is None if one of them has no state so early.
    """
    try:
        if not is_opened(dataset):
            states = states_of(dataset=dataset, iterator=iterator, collate_fn=collate_fn)
        else:
            # The loader determines the epoch.
            states = states_of(collate_fn=collate_fn)
            if iterator is not None:
                states["stream"] = iterator.cursor()
    except AttributeError:
        # Attributes may be created as late as in the first next(). One that never exists raises after the first batch.
        if first:
            return None
        raise
    if not states:
        return None
    if generators is not None and (drawn := generators.drawn()):
        states["generators"] = drawn
    return _frozen(states)


def _frozen(states: Mapping[str, Any]) -> Snapshot:
    return {name: freeze(state) for name, state in states.items()}


class WorkerGenerators:
    """The global generators (Python, NumPy, torch) of a worker process that nothing else draws from.

    A resumed worker is seeded in the same way, so an unused generator needs no state. Create this object after seeding
    and before the first draw.
    """

    def __init__(self) -> None:
        self._first = _generators()

    def drawn(self) -> State:
        """Return the states of the generators that were used since, as JSON (takes 50 µs if none was)."""
        states: State = {}
        for name, (values, words) in _generators().items():
            first_values, first_words = self._first[name]
            if values != first_values or not np.array_equal(words, first_words):
                # Half of torch's words are zero.
                states[name] = [*values, base64.b64encode(zlib.compress(words.astype("<u4").tobytes())).decode()]
        return states

    def restore(self, states: Mapping[str, Any]) -> None:
        """Set the generators that have a state in a snapshot, and reset the others to the worker's initial seeds.

        Raises:
            StateError: a state is damaged.
        """
        try:
            generators = {**self._first}
            for name, (*values, text) in states.get("generators", {}).items():
                data = zlib.decompress(base64.b64decode(text, validate=True))
                generators[name] = values, np.frombuffer(data, "<u4").astype(np.uint32)
            (version, gauss), words = generators["python"]
            random.setstate((version, tuple(words.tolist()), gauss))
            (kind, *numbers), words = generators["numpy"]
            np.random.set_state((kind, words, *numbers))
            torch.set_rng_state(torch.from_numpy(generators["torch"][1].view(np.uint8)))
        except (TypeError, ValueError, RuntimeError, zlib.error) as error:
            raise StateError(f"the state of a generator in this state cannot be read: {error}") from error


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch at the end of the block."""
    python, legacy, own = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(own)


_Generators = dict[str, tuple[list[Any], npt.NDArray[np.uint32]]]
"""A few values and many words, by the generator's name."""


def _generators() -> _Generators:
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=True)
    kind, keys, *numbers = legacy
    return {
        "python": ([version, gauss], np.array(words, np.uint32)),
        "numpy": ([kind, *numbers], keys),
        "torch": ([], torch.get_rng_state().numpy().view(np.uint32)),
    }


# Where the consumer is.


class WorkerState(NamedTuple):
    """The position of one worker: its newest snapshot, and how many requests it has answered since.

    Attributes:
        snapshot: snapshot of the user's objects; empty if none has a state, or nothing was delivered.
        since: for a stream, the number of answered requests since the snapshot. If the snapshot has no position, the
            number since the start of the iterator: the snapshot is then loaded after those batches are made again.
        failed: how many of them were answered by an error.
        ended: how many of them were answered by the end of the iterator, after which the dataset starts another one.
    """

    snapshot: Snapshot = {}
    since: int = 0
    failed: int = 0
    ended: int = 0

    @property
    def states(self) -> State:
        """A new copy of the states of the snapshot."""
        return {name: thaw(state) for name, state in self.snapshot.items()}

    @property
    def places(self) -> bool:
        """Whether the snapshot contains a stream's position. The state of a collate function does not."""
        return not _PLACES.isdisjoint(self.snapshot)

    def state(self) -> State:
        """Return the entry for a loader's state."""
        counts = {"failed": self.failed, "ended": self.ended}
        state: State = {"snapshot": self.states} if self.snapshot else {}
        return {**state, "since": self.since, **{name: count for name, count in counts.items() if count}}

    @classmethod
    def read(cls, state: Any, *, of: str) -> WorkerState:
        """Return the position from an entry made by `state`.

        Raises:
            StateError: the entry is damaged.
        """
        snapshot = state.get("snapshot", {}) if isinstance(state, Mapping) else None
        if not isinstance(snapshot, Mapping):
            raise StateError(f"the state of this {of} is damaged: resume from another one, or start without one")
        counts = (read_int({name: 0, **state}, name, of=of) for name in ("since", "failed", "ended"))
        return cls(_frozen(snapshot), *counts)


class UserStates:
    """The positions of all workers according to the batches that the consumer has received.

    Each iterator has its own object, from `begin`, to which it reports. So an older one changes nothing.

    Args:
        num_workers: number of workers; 0 means inline, which counts as worker 0. A stream's share is the same for 0 and
            1.
        stream: whether batches come from the workers' iterators, so that the position of each worker matters.
        stateful: whether there is anything to record: a stream, or an object with a state.
        kept: whether the next iterator has the same workers, or (inline) the same objects.
        initial: takes the states of objects in the trainer's process, for workers of which nothing is known. None if
            workers have their own copies: only those are asked, and a worker that delivered nothing starts fresh.

    Attributes:
        next: the worker of the next batch, if a stream's workers take turns. A resumed epoch asks all workers, also
            those that had ended; they end again.
        base_seed: the seed of workers that outlive an iterator; None if the seed is the iterator's own.
        over: whether the last iterator has ended, or none has begun and no state was loaded.
        resumes: whether a state was loaded, for the next iterator.
        resumed: the states that the workers of this iterator resume from, picklable. Others start fresh.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        stream: bool,
        stateful: bool = True,
        kept: bool = True,
        initial: Callable[[], Snapshot | None] | None = None,
    ) -> None:
        self.num_workers = num_workers
        self.stream = stream
        self.stateful = stateful
        self.next = 0
        self.base_seed: int | None = None
        self.over = True
        self.resumes = False
        self.resumed: dict[int, WorkerState] = {}
        self._kept = kept
        self._initial = initial
        self._count = max(1, num_workers)
        self._workers: dict[int, WorkerState] = {}

    def _new(self, *, resumes: bool) -> UserStates:
        """Return the states for an iterator that has not ended, of which nothing is known."""
        new = copy.copy(self)
        new.next, new.base_seed, new.over, new.resumes = 0, None, False, resumes
        new.resumed, new._workers = {}, {}
        return new

    # Iteration.

    def begin(self, *, fresh: bool) -> UserStates:
        """Return the states for an iterator that starts now. A running one is left.

        Args:
            fresh: whether its workers are new. Otherwise they are the ones of the last iterator, or (inline) the same
                objects.
        """
        new = self._new(resumes=False)
        if self.resumes:
            new.next, new.resumed, new._workers = self.next, self._workers, dict(self._workers)
        elif not fresh and (self.over or not self.stream):
            new._workers = {} if self._asks else dict(self._workers)
        if self.stream and self._initial is not None and not new._workers:
            # Threads move the objects as soon as they start.
            new._workers = dict.fromkeys(range(self._count), WorkerState(self._initial() or {}))
        return new

    @property
    def _asks(self) -> bool:
        """Whether objects are asked when a state is, between batches: they may contain the trainer's generators."""
        return self._initial is not None and not self.stream

    @property
    def repeated(self) -> int:
        """Number of batches that are made again and dropped because no object has a state; for a warning."""
        return sum(one.since for one in self.resumed.values() if not one.places)

    def begun(self, first: dict[int, Snapshot]) -> None:
        """Record snapshots of workers that have yielded nothing yet, by number, and remove them from the dict."""
        while first:
            worker, snapshot = first.popitem()
            one = self._workers.get(worker)
            # A dataset that stores its own position may reset it as late as in the first next(). After an iterator that
            # has ended, only a snapshot of the iterator itself is exact.
            if one is None or not one.ended or "stream" in snapshot or "iterator" in snapshot:
                self._workers[worker] = WorkerState(snapshot)

    def delivered(self, worker: int, snapshot: Snapshot | None) -> None:
        """Record a delivered batch, or the error in its place.

        Args:
            worker: the worker that made it.
            snapshot: snapshot right after it; None if there is none. Empty after an error of a stream, which makes the
                batch again instead, and fails again.
        """
        if snapshot and not (self.stream and _PLACES.isdisjoint(snapshot)):
            self._workers[worker] = WorkerState(snapshot)
        elif self.stream:
            one, failed = self._workers.get(worker, WorkerState()), snapshot == {}
            newest = snapshot if snapshot and not one.places else one.snapshot
            self._workers[worker] = one._replace(snapshot=newest, since=one.since + 1, failed=one.failed + failed)
        else:
            # If no object has a state, any worker may make any batch of a map-style dataset.
            return
        self.next = (worker + 1) % self._count

    def finish(self) -> None:
        """Record that the consumer has received all batches of the iterator."""
        self.next, self.over = 0, True
        if not self._kept:
            self._workers, self.base_seed = {}, None
        elif self.stream:
            # Without a position, only the start of the next iterator is known.
            for number, one in self._workers.items():
                after = one._replace(since=one.since + 1, ended=one.ended + 1)
                self._workers[number] = after if one.places else WorkerState(one.snapshot)
        elif self._asks:
            self._workers = {}

    # State.

    def state(self) -> State | None:
        """Return deep copies, JSON-serialisable if the user's states are; None if there are no states."""
        if not self.stateful:
            return None
        known = self._workers
        initial = self._initial() if self._initial is not None and len(known) < self._count else None
        workers = [known.get(number, WorkerState(initial or {})) for number in range(self._count)]
        if not self.stream and not any(one.snapshot for one in workers):
            return None
        seed = {} if self.base_seed is None else {"base_seed": self.base_seed}
        entries = {str(number): one.state() for number, one in enumerate(workers)}
        return {"num_workers": self.num_workers, "next": self.next, **seed, "workers": entries}

    def load(self, state: Mapping[str, Any] | None) -> UserStates:
        """Return the states for an iterator that resumes from a state; None resumes from nothing.

        Raises:
            LayoutError: the number of workers differs, and so do their states, or a stream is split among them.
            StateError: the state is damaged.
        """
        new = self._new(resumes=True)
        if state is None:
            return new
        of = "loader's workers"
        if not isinstance(state, Mapping):
            raise StateError(f"the state of this {of} must be a dict, got {type(state).__name__}")
        entries = state.get("workers")
        count = max(1, read_int(state, "num_workers", of=of))
        if not isinstance(entries, Mapping) or len(entries) != count or set(entries) != {str(n) for n in range(count)}:
            raise StateError(f"the state of this {of} is damaged: it needs the workers 0 to {count - 1}")
        if "base_seed" in state:
            new.base_seed = read_int(state, "base_seed", of=of, below=1 << 63)
        following = read_int(state, "next", of=of, below=count)
        workers = [WorkerState.read(entries[str(number)], of=of) for number in range(count)]
        if count != self._count:
            following, workers = 0, self._for_other_number(workers)
        new.next = following
        new._workers = {number: one for number, one in enumerate(workers) if one != WorkerState()}
        return new

    def _for_other_number(self, workers: list[WorkerState]) -> list[WorkerState]:
        """Return the states for another number of workers. That is possible if all workers have the same one."""
        # Generators are left behind, because their seeds contain the worker's number.
        for one in workers:
            one.snapshot.pop("generators", None)
        first, moved = workers[0], self.stream and any(one.since or one.places for one in workers)
        if moved or not all(same_states(one.states, first.states) for one in workers):
            raise LayoutError(
                f"this state is of {len(workers)} workers and the loader has {self._count}: each worker has its own "
                "state, and a stream is split among them. Resume with the same num_workers"
            )
        return [first] * self._count
