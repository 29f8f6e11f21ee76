"""States of users' objects: what is refused, and what cannot be copied, sent or shared."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from entries_support import closed, opened
from state_support import CountingMap, DrawingStatefulStream, Items, PlainStream, StatefulStream, as_they_are

import penstock as ps
from penstock.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def over(dataset: Any, **how: Any) -> ps.DataLoader[Any]:
    return ps.DataLoader(dataset, 2, collate_fn=as_they_are, **how)


def state_after(loader: ps.DataLoader[Any], batches: int) -> Any:
    """Return the state after some batches, as it comes back from a file."""
    iterator = iter(loader)
    list(itertools.islice(iterator, batches))
    return json.loads(json.dumps(loader.state_dict()))


class LambdaStream(PlainStream):
    """A stream whose state cannot be pickled."""

    def state_dict(self) -> Any:
        return {"next": lambda: 1}

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_cannot_be_pickled_is_an_error(workers: int) -> None:
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match="pickle"):
        list(ps.DataLoader(LambdaStream(4), num_workers=workers))


def test_copies_of_a_data_set_with_different_states_need_as_many_workers() -> None:
    state = state_after(over(CountingMap(9), num_workers=2), 1)
    with pytest.raises(AssertionError):
        over(CountingMap(9), num_workers=3).load_state_dict(state)
    with pytest.raises(StateError, match="of 2 workers and the loader has 1"):
        over(CountingMap(9)).load_state_dict(state)


@pytest.mark.parametrize(
    "damage",
    [
        {"workers": {}},
        {"workers": {"0": {"since": 0}, "2": {"since": 0}}},
        {"workers": {"0": {"since": -1}, "1": {"since": 0}}},
        {"workers": {"0": {"since": True}, "1": {"since": 0}}},
        {"workers": {"0": {"since": [0]}, "1": {"since": 0}}},
        {"workers": {"0": {"since": 0, "ended": "1"}, "1": {"since": 0}}},
        {"workers": {"0": 3, "1": {"since": 0}}},
        {"workers": {"0": {"since": 0, "snapshot": 3}, "1": {"since": 0}}},
        {"num_workers": "2"},
        {"num_workers": -2},
        {"next": 2},
        {"next": None},
    ],
)
def test_damaged_states_are_refused(damage: Any) -> None:
    state = state_after(over(StatefulStream(9), num_workers=2), 3)
    entries = opened(state)
    loader = over(StatefulStream(9), num_workers=2)
    before = loader.state_dict()
    with pytest.raises(StateError):
        loader.load_state_dict(closed({**entries, "workers": {**entries["workers"], **damage}}))
    assert loader.state_dict() == before
    loader.load_state_dict(state)


def test_a_state_needs_an_object_that_loads_it() -> None:
    loader = over(PlainStream(9))
    workers = opened(state_after(over(StatefulStream(9)), 2))["workers"]
    loader.load_state_dict(closed({**opened(loader.state_dict()), "workers": workers}))
    with pytest.raises(StateError, match="PlainStream has no load_state_dict"):
        iter(loader)


@pytest.mark.parametrize(
    "damage",
    [{"python": [3, None, "AAAA"]}, {"numpy": [1]}, {"torch": ["%"]}, {"torch": ["eJwDAAAAAAE="]}, {"python": None}],
    ids=str,
)
def test_damaged_generators_are_refused(damage: Any) -> None:
    entries = opened(state_after(over(DrawingStatefulStream(9), num_workers=1), 2))
    generators = entries["workers"]["workers"]["0"]["snapshot"]["generators"]
    assert generators.keys() == {"python", "numpy", "torch"}
    generators.update(damage)
    loader = over(DrawingStatefulStream(9), num_workers=1)
    loader.load_state_dict(closed(entries))
    with pytest.raises(StateError, match="the state of a generator"):
        next(iter(loader))


class CountsIterators(PlainStream):
    """Its order depends on how often it was iterated; the iterator has a state, too."""

    epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        items = Items(range(self.n))
        items.items = np.random.default_rng(self.epochs).permutation(self.n).tolist()
        return items

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iter_that_changes_the_data_sets_state_is_refused(workers: int) -> None:
    state = state_after(over(CountsIterators(9), num_workers=workers), 2)
    loader = over(CountsIterators(9), num_workers=workers)
    loader.load_state_dict(state)
    with pytest.raises(StateError, match=r"iter\(\) changes the state of CountsIterators"):
        next(iter(loader))


class Passes(StatefulStream):
    """Counts iterators as they begin."""

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        return super().__iter__()


def test_a_state_has_no_beginning_of_an_earlier_epoch() -> None:
    """Persistent workers report where they began epochs that were left at once, too."""
    with ps.DataLoader(Passes(24), 2, num_workers=2, persistent_workers=True) as loader:
        for _ in range(5):
            left = iter(loader)
            del left
        next(iter(loader))
        workers = opened(loader.state_dict())["workers"]["workers"]
        assert [workers[name]["snapshot"]["dataset"]["epochs"] for name in ("0", "1")] == [6, 6]


def test_epochs_of_one_incomplete_batch_go_on() -> None:
    """No snapshot is taken at the end of an iterator, so each state begins epochs earlier."""
    loader: ps.DataLoader[Any] = ps.DataLoader(StatefulStream(3), 5, collate_fn=as_they_are)
    seen, states = [], []
    for _ in range(4):
        for batch in loader:
            seen.append(batch)
            states.append((len(seen), True, json.dumps(loader.state_dict())))
        states.append((len(seen), False, json.dumps(loader.state_dict())))
    for count, inside, state in states:
        again: ps.DataLoader[Any] = ps.DataLoader(StatefulStream(3), 5, collate_fn=as_they_are)
        again.load_state_dict(json.loads(state))
        assert [batch for _ in range(4 - count + inside) for batch in again] == seen[count:]


def test_generators_take_a_few_kilobytes() -> None:
    entries = opened(state_after(over(DrawingStatefulStream(9), num_workers=1), 2))
    generators = entries["workers"]["workers"]["0"]["snapshot"]["generators"]
    assert len(generators) == 3
    assert all(len(json.dumps(one)) < 4_500 for one in generators.values())
