"""Snapshots of user objects, taken where they live: dataset, its iterator, collate function.

An object takes part if it has ``state_dict()`` and ``load_state_dict(state)``, the protocol of torchdata's
StatefulDataLoader. A Penstock dataset that opens streams has its stream's `cursor` instead. A snapshot is frozen
(pickled) immediately, so nothing changes it later, tensors included. Cost without a state: 1 µs per batch.
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
    "cursor_of",
    "reopen",
    "restore",
    "state_before",
    "take_first_snapshot",
    "take_snapshot",
]

T = TypeVar("T")


class Snapshot(NamedTuple):
    """The states of one worker's objects.

    Attributes:
        states: states by owner: ``stream``, ``dataset``, ``dataset_before``, ``iterator``, ``collate_fn``,
            ``generators``.
        owners: names of the owners that have a state.
    """

    states: Frozen
    owners: frozenset[str]

    @classmethod
    def of(cls, states: Mapping[str, Any]) -> Snapshot:
        """Return frozen states."""
        return cls(freeze(dict(states)), frozenset(states))

    def without_generators(self) -> Snapshot:
        """Return a snapshot for a worker that draws from its own seed."""
        if "generators" not in self.owners:
            return self
        return Snapshot.of({name: state for name, state in thaw(self.states).items() if name != "generators"})

    @property
    def places(self) -> bool:
        """Whether it contains a stream's position. The state of a collate function does not."""
        return not self.owners.isdisjoint(("stream", "dataset", "iterator"))

    @property
    def opens(self) -> bool:
        """Whether it is exact right after ``iter()``.

        A dataset that stores its own position may reset it as late as in the first ``next()``.
        """
        return not self.owners.isdisjoint(("stream", "iterator"))


def take_snapshot(
    dataset: Any,
    iterator: Any,
    collate_fn: Any,
    generators: WorkerGenerators | None = None,
    before: Frozen | None = None,
) -> Snapshot | None:
    """Return the current states of a worker's objects, frozen; None if no object has one.

    Args:
        dataset, iterator, collate_fn: the worker's objects. The iterator is None for map-style datasets, and for
            iterable ones before ``iter()``.
        generators: generators of the worker process; those that were used become part of the snapshot. None in the
            trainer's process, whose generators belong to the trainer.
        before: state of the dataset, from `state_before`.
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
    # The loader determines the epoch of such a dataset.
    if iterator is None and is_opened(dataset):
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
    """Return the states of objects that have yielded nothing yet.

    None also if one of them has no state before its first item.
    """
    return _unless_missing(lambda: take_snapshot(dataset, iterator, collate_fn, generators, before))


def state_before(dataset: Any) -> Frozen | None:
    """Return the state of an iterable dataset right before ``iter()``; None if it has none.

    ``iter()`` may change a dataset, such as one that counts epochs. If its iterator has a state too, the dataset
    resumes from here.
    """
    if isinstance(dataset, ResumableDataset):
        return None
    states = _unless_missing(lambda: states_of(dataset=dataset))
    return freeze(states) if states else None


def _unless_missing(take: Callable[[], T]) -> T | None:
    """Return the result of ``take``; None if an attribute of an object does not exist yet."""
    try:
        return take()
    except AttributeError:
        # Attributes may be created as late as in the first next(). One that never exists raises after the first batch,
        # where nothing catches it.
        return None


def restore(snapshot: Snapshot | None, generators: WorkerGenerators | None = None, **items: Any) -> None:
    """Load the states of the given objects, in this order, and the generators of a worker process.

    Raises:
        StateError: an object with a state has no ``load_state_dict``.
    """
    states = {} if snapshot is None else thaw(snapshot.states)
    for name, item in items.items():
        _load(states, name, item)
    if generators is not None and snapshot is not None:
        generators.restore(states.get("generators", {}))


def cursor_of(snapshot: Snapshot | None) -> State | None:
    """Return the cursor of a Penstock stream in a snapshot; None if there is none."""
    cursor: State | None = None if snapshot is None else thaw(snapshot.states).get("stream")
    return cursor


def reopen(snapshot: Snapshot | None, dataset: Any, open_iterator: Callable[[], Any]) -> None:
    """Restore an iterable dataset and its iterator from a snapshot.

    Args:
        snapshot: the snapshot; None to start from the beginning.
        dataset: the worker's dataset.
        open_iterator: calls ``iter(dataset)`` and returns the iterator.

    Raises:
        StateError: an object with a state has no ``load_state_dict``.

    The iterator is opened once. It is opened again, from the dataset's earlier state, if both have a state and
    ``iter()`` changed the dataset.
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
        # The dataset also changes with its items.
        _load(states, "dataset", dataset)


def _is_at(dataset: Any, state: Any) -> bool:
    return same_states(dataset.state_dict(), state)


def _load(states: Mapping[str, Any], name: str, item: Any) -> None:
    if name not in states:
        return
    if not has_state(item):
        raise StateError(
            f"the state contains one of the {name.replace('_', ' ')}, but {type(item).__name__} has no "
            "load_state_dict: resume with the same objects, or start without the state"
        )
    item.load_state_dict(states[name])
