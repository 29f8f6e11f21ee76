"""Iterators over epoch plans: every item once and in order, and a count that is exact between any two of them."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.order import Permutation
from penstock.order.permutation import Indices
from penstock.plan.iteration import BatchIterator, IndexIterator, batch_blocks, batches

lengths = st.one_of(st.integers(0, 40), st.sampled_from([255, 256, 257, 1279, 1280, 1281, 5376, 21_760, 50_000]))
batch_sizes = st.one_of(st.integers(1, 300), st.sampled_from([1023, 1024, 1025, 32_768, 32_769, 50_000]))


class Plan:
    """Index i of the plan is ``7 * i``, at position ``i + 3``; it writes down what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def indices(self, start: int, stop: int) -> Indices:
        self.asked.append((start, stop))
        return np.arange(start, stop, dtype=np.int64) * 7

    def positions(self, start: int, stop: int) -> Indices:
        return np.arange(start, stop, dtype=np.int64) + 3


def expected(length: int, batch_size: int, drop_last: bool) -> list[list[int]]:
    indices = range(0, 7 * length, 7)
    cut = [list(indices[begin : begin + batch_size]) for begin in range(0, length, batch_size)]
    return [batch for batch in cut if len(batch) == batch_size or not drop_last]


@settings(deadline=None)
@given(length=lengths)
def test_every_index_once_in_order(length: int) -> None:
    run = IndexIterator(Plan().indices, length)
    indices = list(run)
    assert indices == list(range(0, 7 * length, 7))
    assert all(type(index) is int for index in indices[:3])
    assert run.yielded == length


@settings(deadline=None)
@given(length=lengths, batch_size=batch_sizes, drop_last=st.booleans())
def test_every_batch_once_in_order(length: int, batch_size: int, drop_last: bool) -> None:
    run = BatchIterator(Plan().indices, length, batch_size=batch_size, drop_last=drop_last)
    assert list(run) == expected(length, batch_size, drop_last)
    assert run.yielded == len(expected(length, batch_size, drop_last))


@settings(deadline=None)
@given(length=lengths, batch_size=batch_sizes, drop_last=st.booleans())
def test_batches_come_with_their_positions(length: int, batch_size: int, drop_last: bool) -> None:
    plan = Plan()
    pairs = list(batches(plan.indices, plan.positions, length, batch_size=batch_size, drop_last=drop_last))
    assert [indices for indices, _ in pairs] == expected(length, batch_size, drop_last)
    for indices, positions in pairs:
        assert positions.dtype == np.int64
        assert [7 * (position - 3) for position in positions.tolist()] == indices


@settings(deadline=None)
@given(length=lengths, batch_size=batch_sizes, drop_last=st.booleans())
def test_blocks_are_whole_batches_and_the_first_is_one(length: int, batch_size: int, drop_last: bool) -> None:
    plan = Plan()
    blocks = list(batch_blocks(plan.indices, plan.positions, length, batch_size=batch_size, drop_last=drop_last))
    assert [batch for lists, _ in blocks for batch in lists] == expected(length, batch_size, drop_last)
    for lists, positions in blocks:
        assert positions.shape == (len(lists), len(lists[0]))
    assert not blocks or len(blocks[0][0]) == 1


def test_the_count_is_exact_after_every_index() -> None:
    run = IndexIterator(Plan().indices, 7000)
    assert run.yielded == 0
    for number, _ in enumerate(run, 1):
        assert run.yielded == number
    assert run.yielded == 7000


@pytest.mark.parametrize("batch_size", [1, 3, 600, 2000])
def test_the_count_is_exact_after_every_batch(batch_size: int) -> None:
    run = BatchIterator(Plan().indices, 7000, batch_size=batch_size, drop_last=False)
    assert run.yielded == 0
    for number, _ in enumerate(run, 1):
        assert run.yielded == number


def test_the_count_is_that_of_all_consumers_together() -> None:
    run = IndexIterator(Plan().indices, 10_000)
    assert list(itertools.islice(run, 300)) == list(range(0, 2100, 7))
    assert next(iter(run)) == 2100
    for index in run:
        if index == 7 * 4000:
            break
    assert run.yielded == 4001
    assert sum(1 for _ in run) == 10_000 - 4001
    assert next(iter(run), None) is None
    assert run.yielded == 10_000


def test_no_more_is_computed_than_the_consumer_needs() -> None:
    plan = Plan()
    run = IndexIterator(plan.indices, None)
    indices = iter(run)
    assert plan.asked == []
    next(indices)
    assert plan.asked == [(0, 256)]
    for _ in range(255):
        next(indices)
    assert len(plan.asked) == 1
    next(indices)
    assert plan.asked == [(0, 256), (256, 1280)]


def test_an_endless_plan_is_asked_for_blocks_of_bounded_size() -> None:
    plan = Plan()
    assert sum(1 for _ in itertools.islice(IndexIterator(plan.indices, None), 100_000)) == 100_000
    run = BatchIterator(plan.indices, None, batch_size=100, drop_last=True)
    assert sum(map(len, itertools.islice(run, 1000))) == 100_000
    assert max(stop - start for start, stop in plan.asked) <= 32_768


def test_the_end_is_reported_once_and_when_it_is_asked_for() -> None:
    ends: list[int] = []
    run = IndexIterator(Plan().indices, 300, at_end=lambda: ends.append(run.yielded))
    indices = iter(run)
    for _ in range(300):
        next(indices)
    assert ends == []
    assert [next(indices, None), next(indices, None)] == [None, None]
    assert ends == [300]


class _Options(TypedDict):
    batch_size: int
    drop_last: bool
    at_end: Callable[[], object]


def ends_at(kind: str, length: int, drop_last: bool) -> tuple[int, int]:
    """Return the number of the request that reported the end, and how many batches came after it."""
    ended: list[bool] = []
    plan, options = Plan(), _Options(batch_size=4, drop_last=drop_last, at_end=lambda: ended.append(True))
    made: Iterator[Any]
    if kind == "batch iterator":
        made = iter(BatchIterator(plan.indices, length, **options))
    else:
        made = batches(plan.indices, plan.positions, length, **options)
    seen = next(number for number in itertools.count(1) if next(made, None) is None or ended)
    rest = list(made)
    assert ended == [True]
    return seen, len(rest)


@pytest.mark.parametrize("kind", ["batch iterator", "batches"])
def test_the_end_of_batches_is_reported_while_a_short_one_is_drawn(kind: str) -> None:
    assert ends_at(kind, 10, drop_last=False) == (3, 0)
    assert ends_at(kind, 10, drop_last=True) == (3, 0)
    assert ends_at(kind, 8, drop_last=False) == (3, 0)
    assert ends_at(kind, 3, drop_last=False) == (1, 0)
    assert ends_at(kind, 0, drop_last=False) == (1, 0)


def test_an_error_of_the_plan_reaches_the_consumer_and_leaves_the_count() -> None:
    def broken(start: int, stop: int) -> Indices:
        if start:
            raise OSError("the plan is gone")
        return np.arange(start, stop, dtype=np.int64)

    run = IndexIterator(broken, 1000)
    with pytest.raises(OSError, match="the plan is gone"):
        list(run)
    assert run.yielded == 256


def test_a_plan_goes_with_its_last_iterator() -> None:
    gc.disable()
    try:
        plan = Plan()
        gone = weakref.ref(plan)
        run = IndexIterator(plan.indices, 1000)
        next(iter(run))
        del plan, run
        assert gone() is None
    finally:
        gc.enable()


def test_a_permutation_goes_through_as_it_is() -> None:
    order = Permutation(30_000, 5)
    run = IndexIterator(lambda start, stop: order[np.arange(start, stop)], 30_000)
    assert list(run) == order[np.arange(30_000)].tolist()
