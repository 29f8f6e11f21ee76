"""Batches that are dealt to ranks: all ranks together have those of one, and any number of ranks goes on."""

from __future__ import annotations

from typing import Any

import pytest
from entries_support import closed
from hypothesis import given
from hypothesis import strategies as st
from plan_support import bound

import penstock as ps
from penstock.errors import ConfigError
from penstock.integrations.dispatch_batches import DispatchedBatches
from penstock.plan.reader import PlanReader


def batches(n: int, size: int, drop_last: bool = False) -> ps.BatchSampler:
    return ps.BatchSampler(ps.RandomSampler(range(n), shuffle="global", seed=2), size, drop_last)


def walk(sampler: Any) -> tuple[list[list[int]], list[list[int]]]:
    made = list(bound(sampler))
    return [list(indices) for indices, _ in made], [positions.tolist() for _, positions in made]


SIZES = {"n": st.integers(1, 60), "size": st.integers(1, 7), "world": st.integers(1, 5)}


@given(**SIZES, even=st.booleans(), drop_last=st.booleans())
def test_ranks_have_the_batches_of_one_in_turn(n: int, size: int, world: int, even: bool, drop_last: bool) -> None:
    whole, places = walk(batches(n, size, drop_last))
    ranks = [
        DispatchedBatches(batches(n, size, drop_last), rank, world, split=False, even=even) for rank in range(world)
    ]
    lengths = [len(rank) for rank in ranks]
    dealt = [walk(rank) for rank in ranks]
    assert [len(indices) for indices, _ in dealt] == lengths
    order = [index for batch in whole for index in batch]
    position_of = dict(zip(order, (place for batch in places for place in batch), strict=True))
    for indices, positions in dealt:
        assert all(
            position_of[i] == p for a, b in zip(indices, positions, strict=True) for i, p in zip(a, b, strict=True)
        )
    rounds = max(lengths)
    flat = [
        index for number in range(rounds) for indices, _ in dealt for index in (indices[number : number + 1] or [[]])[0]
    ]
    if drop_last:
        assert flat == order[: len(whole) // world * world * size]
    else:
        assert flat[: len(order)] == order
        assert flat[len(order) :] == (order * (world * size))[: len(flat) - len(order)]
        assert not even or len(flat) == rounds * world * size
        assert even or len(flat) == len(order)
    assert not even or len(set(lengths)) == 1


@given(**SIZES)
def test_batches_can_be_split(n: int, size: int, world: int) -> None:
    ranks = [DispatchedBatches(batches(n, size * world), rank, world, split=True, even=True) for rank in range(world)]
    dealt = [walk(rank)[0] for rank in ranks]
    order = [index for batch in walk(batches(n, 1))[0] for index in batch]
    flat = [index for parts in zip(*dealt, strict=True) for part in parts for index in part]
    assert flat[:n] == order
    assert all(len(part) == size for indices in dealt for part in indices)


@given(**SIZES, other=st.integers(1, 5), had=st.integers(0, 20))
def test_any_number_of_ranks_goes_on(n: int, size: int, world: int, other: int, had: int) -> None:
    first = DispatchedBatches(batches(n, size), 0, world, split=False, even=True)
    run = bound(first)
    had = min(had, len(run))
    rest = []
    for rank in range(other):
        second = DispatchedBatches(batches(n, size), rank, other, split=False, even=False)
        second.load_state_dict(closed(run.cursor(had).state()))
        assert second.epoch == first.epoch
        rest += [index for batch in walk(second)[0] for index in batch]
    order = [index for batch in walk(batches(n, size))[0] for index in batch]
    assert sorted(rest) == sorted(order[had * world * size :])


def test_epochs_follow_the_sampler() -> None:
    dealt = DispatchedBatches(batches(20, 2), 0, 2, split=False, even=True)
    reader = PlanReader(dealt)
    first = [indices for indices, _ in reader.start(advance=True)]
    assert reader.current
    reader.finish(advance=True)
    assert (reader.epoch, reader.current) == (1, False)
    second = [indices for indices, _ in reader.start(advance=True)]
    dealt.set_epoch(0)
    assert not reader.current
    assert [indices for indices, _ in reader.start(advance=True)] == first != second
    assert list(dealt) == first


def test_batches_of_unknown_size_are_refused_where_it_matters() -> None:
    inner = batches(20, 2)
    inner.batch_size = 0
    with pytest.raises(ConfigError, match="even_batches=False"):
        DispatchedBatches(inner, 0, 2, split=False, even=True)
