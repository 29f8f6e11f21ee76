"""Snapshots of the user's own objects, as torchdata's StatefulDataLoader takes them: data set, its iterator, and here
the collate function and samplers too.

An object takes part if it has ``state_dict()`` and ``load_state_dict(state)``. A data set is put back before
``iter(dataset)``, its iterator after it, and an object that is both, after it. Who has no state is put back by making
again, and dropping, what has been had.

A snapshot is frozen (pickled) where it is taken, so nothing changes it afterwards, tensors included. Cost without a
state: 1 us a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.errors import StateError
from penstock.loader.generators import generator_states, set_generators
from penstock.plan.user_states import Frozen, freeze, has_state, states_of, thaw

__all__ = [
    "Frozen",
    "Resume",
    "Snapshots",
    "capture",
    "freeze",
    "has_state",
    "reopen",
    "reopen_states",
    "replay",
    "restore",
    "restore_states",
    "states_of",
    "thaw",
]


class Resume(NamedTuple):
    """What a worker is told to go on from: a snapshot, and how many batches the consumer has had since, by pass."""

    snapshot: Frozen | None
    since: list[int]


_AMORTISE = 1 << 16  # bytes of snapshot per batch: a larger one is taken every so many batches


def capture(dataset: Any, iterator: Any, collate_fn: Any, *, generators: bool = False) -> Frozen | None:
    """The states of a worker's objects right now, frozen; None if nobody has one (1 us).

    Args:
        dataset, iterator, collate_fn: of the worker. The iterator is None for map-style data sets, and for an iterable
            one that nobody iterates yet.
        generators: add Python's, NumPy's and torch's global generators (13 kB, 0.1 ms), for a worker process of an
            iterable data set without a seed. Not in the trainer's process, whose generators are its own.

    A collate function alone does not say where a stream is: there its batches are made again from the beginning of the
    pass, and that puts it back too.
    """
    states = states_of(dataset=dataset, iterator=iterator, collate_fn=collate_fn)
    if not states or (iterator is not None and states.keys() == {"collate_fn"}):
        return None
    return freeze({**states, "generators": generator_states()} if generators else states)


class Snapshots:
    """When a worker takes them: after each batch, but one of more than 64 KiB only after every (its size / 64 KiB)
    batches, so that writing a buffer of samples down does not cost more than the samples.

    Args:
        generators: as in `capture`.
        every: take one every so many batches instead. Map-style data sets need 1, since from a count their batches
            cannot be made again.
    """

    def __init__(self, *, generators: bool = False, every: int | None = None) -> None:
        self._generators = generators
        self._every = every
        self._wait = 0

    def take(self, dataset: Any, iterator: Any, collate_fn: Any, *, ended: bool = False) -> Frozen | None:
        """The snapshot after a batch, or None if nobody has a state or none is due.

        Args:
            dataset, iterator, collate_fn: as in `capture`.
            ended: the iterator met its end in this batch (a short one).
        """
        return self.when_due(lambda: capture(dataset, iterator, collate_fn, generators=self._generators), ended=ended)

    def when_due(self, snapshot: Callable[[], Frozen | None], *, ended: bool = False) -> Frozen | None:
        """The same of what ``snapshot`` takes."""
        if ended:
            self._wait = 0
            return None
        if self._wait > 0:
            self._wait -= 1
            return None
        frozen = snapshot()
        if self._every is not None:
            self._wait = self._every - 1
        elif isinstance(frozen, bytes):
            self._wait = len(frozen) // _AMORTISE
        return frozen


def restore_states(snapshot: Frozen | Resume | None, **items: Any) -> None:
    """Put back those objects that are not None, in the order given, and generators if there are any in the snapshot.

    Raises:
        StateError: there is a state, and the object has no ``load_state_dict``.
    """
    if isinstance(snapshot, Resume):
        snapshot = snapshot.snapshot
    states = {} if snapshot is None else thaw(snapshot)
    for name, item in items.items():
        if item is None or name not in states:
            continue
        if not has_state(item):
            raise StateError(
                f"there is a state of the {name.replace('_', ' ')}, and {type(item).__name__} has no load_state_dict: "
                "resume with the same objects, or start anew without the state"
            )
        item.load_state_dict(states[name])
    set_generators(states.get("generators", {}))


def restore(snapshot: Frozen | Resume | None, dataset: Any, iterator: Any, collate_fn: Any) -> None:
    """Put back the objects of a worker that are not None: what `capture` or `WorkerStates.resume` gave."""
    restore_states(snapshot, collate_fn=collate_fn, dataset=dataset, iterator=iterator)


def reopen(resume: Resume, dataset: Any, collate_fn: Any, begin: Callable[[int], Any], make: Callable[[], Any]) -> None:
    """Put back the objects of a worker that iterates a data set, and go on to where the consumer was.

    Args:
        resume: from `WorkerStates.resume`.
        dataset, collate_fn: of the worker.
        begin: ``begin(n)`` begins a pass: the worker then holds ``iter(dataset)``, which is returned. n is 0 for the
            pass that is resumed, 1 for the one before it (the data set's epoch is as much smaller).
        make: makes the next batch of the pass, which is dropped.
    """
    reopen_states(resume, begin, make, collate_fn=collate_fn, dataset=dataset)


def reopen_states(resume: Resume, begin: Callable[[int], Any], make: Callable[[], Any], **items: Any) -> None:
    """`reopen` with objects of other names, put back before the pass begins."""
    restore_states(resume, **items)
    restore_states(resume, iterator=begin(max(0, len(resume.since) - 1)))
    replay(resume.since, begin, make)


def replay(since: list[int], begin: Callable[[int], Any], make: Callable[[], Any]) -> None:
    """From a snapshot, in a pass that has begun, to where the consumer was: what it has had is made again.

    Of each pass that is over one batch more is asked for than was had: that is its end, and with generators the code
    behind ``yield`` has run then.
    """
    for number, had in enumerate(since[:-1]):
        _drop(had + 1, make)
        begin(len(since) - 2 - number)
    _drop(since[-1] if since else 0, make)


def _drop(count: int, make: Callable[[], Any]) -> None:
    for _ in range(count):
        try:
            make()
        except StopIteration:
            return
        except Exception:  # the consumer has had that error in the place of this batch
            continue
