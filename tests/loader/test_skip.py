"""``DataLoader.skip``: batches that are passed over, from every state. ``skip=`` in the constructor names it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from entries_support import closed, opened
from pair_support import Pairs
from state_support import CountingCollate

from penstock import DataLoader, InfiniteSampler, Ledger
from penstock.errors import ConfigError, StateError

N, SIZE = 47, 5  # ten steps an epoch


def make() -> DataLoader[Any]:
    return DataLoader(Pairs(N), SIZE, shuffle="global", seed=1)


def rows(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


@pytest.fixture(scope="module")
def steps() -> list[list[int]]:
    """The rows of every step of an epoch."""
    return rows(make())


def test_the_argument_names_the_method() -> None:
    arguments: dict[str, Any] = {"skip": (3, 5)}
    with pytest.raises(ConfigError, match=r"takes no skip=: call loader\.skip\(n\)"):
        DataLoader(Pairs(N), SIZE, **arguments)


def test_nothing_of_them_is_read() -> None:
    class Noting(Pairs):
        def __getitem__(self, row: int) -> Any:
            read.append(row)
            return super().__getitem__(row)

    read: list[int] = []
    loader = DataLoader(Noting(N), SIZE, shuffle="global", seed=1)
    loader.skip(6)
    assert [row for batch in rows(loader) for row in batch] == read
    assert len(read) == N - 30


def test_what_the_method_passes_over_is_counted() -> None:
    loader = make()
    iterator = iter(loader)
    assert len(rows(next(iterator) for _ in range(3))) == 3
    loader.skip(4)  # steps 3 to 6
    assert Ledger(loader).step == 7
    assert rows(loader) == rows(make())[7:]
    assert Ledger(loader).step == 10


@pytest.mark.parametrize("count", range(7))
def test_the_method_passes_over_batches_that_were_not_delivered(count: int, steps: list[list[int]]) -> None:
    """Batches 0, 2, 4 and 5 were delivered, the last three ahead of others."""
    loader = make()
    next(iter(loader))
    loader.load_state_dict(closed({**opened(loader.state_dict()), "ahead": [1, 3, 4], "world": [0, 1]}))
    with pytest.raises(ConfigError, match="has 6 batches left"):
        loader.skip(7)
    loader.skip(count)
    again = make()
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    left = [1, 3, 6, 7, 8, 9]
    assert rows(again) == rows(loader) == [steps[step] for step in left[count:]]


@pytest.mark.parametrize("how", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_method_does_not_change_later_batches(how: dict[str, Any], shuffle: bool) -> None:
    """Neither their draws, also without a seed, nor the states of users' objects."""

    def plain(batches: Any) -> list[Any]:
        return [(calls, [(row, float(draw)) for row, draw in batch]) for calls, batch in batches]

    expected: list[Any] = []
    for _ in range(2):
        torch.manual_seed(2)
        with DataLoader(Pairs(N), SIZE, shuffle=shuffle, collate_fn=CountingCollate(), **how) as loader:
            iterator = iter(loader)
            if not expected:
                expected = plain(iterator)
                continue
            assert plain(next(iterator) for _ in range(3)) == expected[:3]
            loader.skip(2)
            assert plain(loader) == [(calls - 2, batch) for calls, batch in expected[5:]]


def test_the_method_passes_over_batches_of_an_endless_sampler() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(range(9), 2, sampler=InfiniteSampler(range(9), seed=1))

    expected = [batch.tolist() for batch in itertools.islice(loader(), 9)]
    skipping = loader()
    next(iter(skipping))
    skipping.skip(5)
    assert [batch.tolist() for batch in itertools.islice(skipping, 3)] == expected[6:]


def test_a_damaged_step_is_refused() -> None:
    with pytest.raises(StateError, match="step"):
        make().load_state_dict(closed({**opened(make().state_dict()), "step": -1}))
