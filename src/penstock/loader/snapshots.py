"""Snapshots of the user's own objects, taken where these live: dataset, its iterator, collate function.

An object takes part if it has ``state_dict()`` and ``load_state_dict(state)``, the protocol of torchdata's
StatefulDataLoader. A dataset of ours that gives streams has the `cursor` of its stream instead. A snapshot is frozen
(pickled) where it is taken, so nothing changes it afterwards, tensors included. Cost without a state: 1 us a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from penstock.errors import StateError
from penstock.loader.generators import WorkerGenerators
from penstock.plan.cursor import State
from penstock.plan.stream import ResumableDataset, Stream, is_opened
from penstock.plan.user_states import Frozen, freeze, has_state, same_states, states_of, thaw

__all__ = [
    "Snapshot",
    "SnapshotInterval",
    "cursor_of",
    "reopen",
    "restore",
    "state_before",
    "take_first_snapshot",
    "take_snapshot",
]

T = TypeVar("T")

_AMORTISE = 1 << 16  # bytes of snapshot per batch: a larger one is taken every so many batches


class Snapshot(NamedTuple):
    """The states of one worker's objects.

    Attributes:
        states: by owner: ``stream``, ``dataset``, ``dataset_before``, ``iterator``, ``collate_fn``, ``generators``.
        owners: the names of those that have one.
    """

    states: Frozen
    owners: frozenset[str]

    @classmethod
    def of(cls, states: Mapping[str, Any]) -> Snapshot:
        """Freeze states."""
        return cls(freeze(dict(states)), frozenset(states))

    def without_generators(self) -> Snapshot:
        """Return the same for a worker that draws from its own seed."""
        if "generators" not in self.owners:
            return self
        return Snapshot.of({name: state for name, state in thaw(self.states).items() if name != "generators"})

    @property
    def places(self) -> bool:
        """Whether it says where a stream is: the state of a collate function does not."""
        return not self.owners.isdisjoint(("stream", "dataset", "iterator"))

    @property
    def opens(self) -> bool:
        """Whether it is exact right after ``iter()``. A dataset that keeps its place may move it back as late as by
        the first ``next()``.
        """
        return not self.owners.isdisjoint(("stream", "iterator"))


def take_snapshot(
    dataset: Any,
    iterator: Any,
    collate_fn: Any,
    generators: WorkerGenerators | None = None,
    before: Frozen | None = None,
) -> Snapshot | None:
    """Return the states of a worker's objects right now, frozen; None if nobody has one.

    Args:
        dataset, iterator, collate_fn: of the worker. The iterator is None for map-style datasets, and for an iterable
            one that nobody iterates yet.
        generators: of the worker process; those that were drawn from become part of the snapshot. None in the
            trainer's process, whose generators are its own.
        before: of the dataset, from `state_before`.
    """
    states = _states_of(dataset, iterator, collate_fn)
    if not states:
        return None
    if before is not None and {"dataset", "iterator"} <= states.keys():
        own = states["dataset"]
        if freeze({"dataset": own}) != before:
            states["dataset_before"] = thaw(before)["dataset"]
    drawn = {} if generators is None else generators.drawn()
    return Snapshot.of({**states, "generators": drawn} if drawn else states)


def _states_of(dataset: Any, iterator: Any, collate_fn: Any) -> dict[str, Any]:
    if not isinstance(dataset, ResumableDataset) or not isinstance(iterator, Stream | None):
        return states_of(dataset=dataset, iterator=iterator, collate_fn=collate_fn)
    if iterator is None and is_opened(dataset):  # its epoch is the loader's
        return states_of(collate_fn=collate_fn)
    cursor = dataset.state_dict() if iterator is None else iterator.cursor()
    return {"stream": cursor, **states_of(collate_fn=collate_fn)}


def take_first_snapshot(
    dataset: Any,
    iterator: Any,
    collate_fn: Any,
    generators: WorkerGenerators | None = None,
    before: Frozen | None = None,
) -> Snapshot | None:
    """Return the same of objects that have given nothing yet; None too if one of them has no state before it gives
    something.
    """
    return _unless_missing(lambda: take_snapshot(dataset, iterator, collate_fn, generators, before))


def state_before(dataset: Any) -> Frozen | None:
    """Return the state of an iterable dataset right before ``iter()``; None if it has none.

    ``iter()`` may move a dataset, such as one that counts epochs. Where an iterator has a state, too, its dataset
    goes on from here.
    """
    if isinstance(dataset, ResumableDataset):
        return None
    states = _unless_missing(lambda: states_of(dataset=dataset))
    return freeze(states) if states else None


def _unless_missing(take: Callable[[], T]) -> T | None:
    """Return what is taken of objects that may have no state yet; None if an attribute is missing."""
    try:
        return take()
    except AttributeError:
        # Attributes may be made as late as by the first next(). One that is missing for good is raised after the first
        # batch, which nothing catches.
        return None


class SnapshotInterval:
    """When a snapshot is due: after each batch, but one of more than 64 KiB only after every (its size / 64 KiB)
    batches, so that writing down a buffer of samples does not cost more than the samples.
    """

    def __init__(self) -> None:
        self._wait = 0

    def is_due(self) -> bool:
        """Count one batch, and return whether a snapshot is to be taken after it."""
        if self._wait > 0:
            self._wait -= 1
            return False
        return True

    def taken(self, snapshot: Snapshot | None) -> None:
        """Wait for the next one in proportion to the size of this one."""
        size = len(snapshot.states) if snapshot is not None and isinstance(snapshot.states, bytes) else 0
        self._wait = size // _AMORTISE

    def reset(self) -> None:
        """Have the next one taken at once."""
        self._wait = 0


def restore(snapshot: Snapshot | None, generators: WorkerGenerators | None = None, **items: Any) -> None:
    """Load the states of those objects that are given, in this order, and the generators of a worker process.

    Raises:
        StateError: there is a state, and the object has no ``load_state_dict``.
    """
    states = {} if snapshot is None else thaw(snapshot.states)
    for name, item in items.items():
        _load(states, name, item)
    if generators is not None and snapshot is not None:
        generators.restore(states.get("generators", {}))


def cursor_of(snapshot: Snapshot | None) -> State | None:
    """Return the cursor of a stream of ours, if a snapshot holds one."""
    cursor: State | None = None if snapshot is None else thaw(snapshot.states).get("stream")
    return cursor


def reopen(snapshot: Snapshot | None, dataset: Any, open_iterator: Callable[[], Any]) -> None:
    """Put an iterable dataset and its iterator back to a snapshot.

    Args:
        snapshot: to go on from; None begins anew.
        dataset: the worker's.
        open_iterator: calls ``iter(dataset)``, and returns the iterator.

    Raises:
        StateError: there is a state, and the object has no ``load_state_dict``.

    The iterator is opened once, but where both have a state and ``iter()`` moved the dataset: then it is opened again
    from the state that the dataset had before.
    """
    states = {} if snapshot is None else thaw(snapshot.states)
    _load(states, "stream", dataset)
    _load(states, "dataset", dataset)
    _load(states, "iterator", open_iterator())
    if "dataset_before" not in states or _is_at(dataset, states["dataset"]):
        return
    dataset.load_state_dict(states["dataset_before"])
    _load(states, "iterator", open_iterator())
    if not _is_at(dataset, states["dataset"]):
        # The dataset moves with its items, too.
        _load(states, "dataset", dataset)


def _is_at(dataset: Any, state: Any) -> bool:
    return same_states(dataset.state_dict(), state)


def _load(states: Mapping[str, Any], name: str, item: Any) -> None:
    if name not in states:
        return
    if not has_state(item):
        raise StateError(
            f"there is a state of the {name.replace('_', ' ')}, and {type(item).__name__} has no load_state_dict: "
            "resume with the same objects, or start anew without the state"
        )
    item.load_state_dict(states[name])
