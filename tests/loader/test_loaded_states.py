"""A state that was loaded stays loaded until the next pass: through settings assigned since, and in copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from state_support import CountingMap, IteratorStream, PlainStream, StatefulStream

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
