"""A state that was loaded stays loaded until the next pass: through settings assigned since, and in copies."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from entries_support import closed, opened
from state_support import CountingCollate, CountingMap, IteratorStream, PlainStream, StatefulStream

import penstock as ps
from penstock.errors import StateError

SOURCES = [CountingMap, StatefulStream, IteratorStream, PlainStream]

pytestmark = pytest.mark.filterwarnings("ignore:PlainStream has no state_dict", "ignore:.*does not declare itself pure")


def load(source: Callable[[int], Any]) -> tuple[ps.DataLoader[Any], list[Any]]:
    """Return a loader that goes on behind two batches, and the batches to come."""
    first = make(source)
    batches = iter(first)
    next(batches)
    next(batches)
    state = first.state_dict()
    resumed = make(source)
    resumed.load_state_dict(state)
    return resumed, list(batches)


def make(source: Callable[[int], Any]) -> ps.DataLoader[Any]:
    return ps.DataLoader(source(14), 4, collate_fn=list)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_workers_assigned_after_a_state_go_on_from_it(source: Callable[[int], Any], executor: str) -> None:
    loader, expected = load(source)
    loader.num_workers, loader.executor = 1, executor
    assert list(loader) == expected


def test_workers_assigned_after_a_state_that_it_does_not_fit_are_refused() -> None:
    loader, expected = load(IteratorStream)
    loader.num_workers, loader.executor = 2, "thread"
    for _ in range(2):
        with pytest.raises(StateError, match="Resume with the same num_workers"):
            iter(loader)
    loader.num_workers = 1
    assert list(loader) == expected


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))],
    ids=["copy", "deep", "pickle"],
)
def test_copies_of_a_loader_go_on_from_its_state(source: Callable[[int], Any], duplicate: Callable[[Any], Any]) -> None:
    loader, expected = load(source)
    state = loader.state_dict()
    copied = duplicate(loader)
    assert copied.state_dict() == state
    assert list(copied) == expected
    assert loader.state_dict() == state


def test_growth_keeps_users_states_and_batches_delivered_ahead(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"

    def make(rows: int) -> ps.DataLoader[Any]:
        path.write_text("".join(f"{row:03}.jpg {row}\n" for row in range(rows)))
        data = ps.RankDataset(path, rank=0, world_size=1, seed=1, load=lambda record: record.label)
        return ps.DataLoader(data, 2, collate_fn=CountingCollate())

    first = make(20)
    list(itertools.islice(first, 3))
    state = closed({**opened(first.state_dict()), "ahead": [2, 3], "world": [0, 1], "batch_size": 2})
    same = make(20)
    same.load_state_dict(state)
    expected = list(same)
    for rows in (25, 30):
        grown = make(rows)
        with pytest.raises(StateError, match="fingerprint"):
            grown.load_state_dict(state)
        grown.load_state_dict(state, allow_growth=True)
        assert opened(grown.state_dict()) == opened(state)
    assert list(grown) == expected
    assert [calls for calls, _ in expected] == [4, 5, 6, 7, 8]
    assert [calls for calls, _ in grown] == list(range(9, 24))


def test_batches_delivered_ahead_are_of_the_states_batch_size() -> None:
    loader = ps.DataLoader(range(20), 2)
    list(itertools.islice(loader, 3))
    state = closed({**opened(loader.state_dict()), "ahead": [2, 3], "world": [0, 1], "batch_size": 2})
    loader.load_state_dict(state)
    assert opened(loader.state_dict()) == opened(state)
    with pytest.raises(StateError, match="batch_size is 2 in the state and 4 here"):
        ps.DataLoader(range(20), 4).load_state_dict(state)
