"""Iterators over epoch plans: every item once and in order, and a count that is exact between any two of them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.order.permutation import Indices as Array
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import Batches, EpochPlan
from penstock.plan.reader import Draws
from penstock.samplers.base import EpochBatchSampler, EpochSampler

lengths = st.one_of(st.integers(0, 40), st.sampled_from([255, 256, 257, 1279, 1280, 1281, 5376, 21_760, 50_000]))
batch_sizes = st.one_of(st.integers(1, 300), st.sampled_from([1023, 1024, 1025, 32_768, 32_769, 50_000]))


class Plan(EpochPlan):
    """Index i of the plan is ``7 * i``, at position ``i + 3``; it writes down what it was asked for."""

    def __init__(self, length: int | None) -> None:
        self.length = length
        self.asked: list[tuple[int, int]] = []
        self.ends = 0

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("endless")
        return self.length

    def block(self, start: int, stop: int) -> tuple[Array, Array]:
        self.asked.append((start, stop))
        numbers = np.arange(start, stop, dtype=np.int64)
        return numbers * 7, numbers + 3

    def cursor(self, count: int) -> Cursor:
        return Cursor(consumed=count)

    def exhaust(self) -> None:
        self.ends += 1


class Indices(EpochSampler):
    def __init__(self, plan: EpochPlan) -> None:
        super().__init__()
        self.plan = plan

    def bind(self, cursor: Cursor, draws: Draws) -> EpochPlan:
        return self.plan

    def read(self, state: Any) -> Cursor:
        raise NotImplementedError

    @property
    def yielded(self) -> int:
        return int(json.loads(self.state_dict()["penstock"])["consumed"])


class BatchesOf(EpochBatchSampler):
    def __init__(self, plan: EpochPlan, batch_size: int, drop_last: bool) -> None:
        super().__init__()
        self.plan = Batches(plan, batch_size, drop_last)
        self.batch_size = batch_size

    def bind(self, cursor: Cursor, draws: Draws) -> Batches:
        return self.plan

    def read(self, state: Any) -> Cursor:
        raise NotImplementedError

    @property
    def yielded(self) -> int:
        return int(json.loads(self.state_dict()["penstock"])["consumed"]) // self.batch_size


def expected(length: int, batch_size: int, drop_last: bool) -> list[list[int]]:
    indices = range(0, 7 * length, 7)
    cut = [list(indices[begin : begin + batch_size]) for begin in range(0, length, batch_size)]
    return [batch for batch in cut if len(batch) == batch_size or not drop_last]


@settings(deadline=None)
@given(length=lengths)
def test_every_index_once_in_order(length: int) -> None:
    run = Indices(Plan(length))
    indices = list(run)
    assert indices == list(range(0, 7 * length, 7))
    assert all(type(index) is int for index in indices[:3])
    assert run.yielded == length


@settings(deadline=None)
@given(length=lengths, batch_size=batch_sizes, drop_last=st.booleans())
def test_every_batch_once_in_order(length: int, batch_size: int, drop_last: bool) -> None:
    run = BatchesOf(Plan(length), batch_size, drop_last)
    assert list(run) == expected(length, batch_size, drop_last)
    assert run.yielded == len(expected(length, batch_size, drop_last))


@settings(deadline=None)
@given(length=lengths, batch_size=batch_sizes, drop_last=st.booleans())
def test_blocks_are_whole_batches_and_the_first_is_one(length: int, batch_size: int, drop_last: bool) -> None:
    blocks = list(Batches(Plan(length), batch_size, drop_last).blocks())
    assert [batch for rows, _ in blocks for batch in rows.tolist()] == expected(length, batch_size, drop_last)
    for rows, positions in blocks:
        assert rows.dtype == positions.dtype == np.int64
        assert (7 * (positions - 3)).tolist() == rows.tolist()
    assert not blocks or len(blocks[0][0]) == 1


def test_the_count_is_exact_after_every_index() -> None:
    run = Indices(Plan(7000))
    assert run.yielded == 0
    for number, _ in enumerate(run, 1):
        assert run.yielded == number
    assert run.yielded == 7000


@pytest.mark.parametrize("batch_size", [1, 3, 600, 2000])
def test_the_count_is_exact_after_every_batch(batch_size: int) -> None:
    run = BatchesOf(Plan(7000), batch_size, False)
    assert run.yielded == 0
    for number, _ in enumerate(run, 1):
        assert run.yielded == number


def test_no_more_is_computed_than_the_consumer_needs() -> None:
    plan = Plan(None)
    indices = iter(Indices(plan))
    assert plan.asked == []
    next(indices)
    assert plan.asked == [(0, 256)]
    for _ in range(255):
        next(indices)
    assert len(plan.asked) == 1
    next(indices)
    assert plan.asked == [(0, 256), (256, 1280)]


def test_an_endless_plan_is_asked_for_blocks_of_bounded_size() -> None:
    plan = Plan(None)
    assert sum(1 for _ in itertools.islice(Indices(plan), 100_000)) == 100_000
    assert sum(map(len, itertools.islice(BatchesOf(plan, 100, True), 1000))) == 100_000
    assert max(stop - start for start, stop in plan.asked) <= 32_768


def test_the_end_is_reported_once_and_when_it_is_asked_for() -> None:
    plan = Plan(300)
    indices = iter(Indices(plan))
    for _ in range(300):
        next(indices)
    assert plan.ends == 0
    assert [next(indices, None), next(indices, None)] == [None, None]
    assert plan.ends == 1


def ends_at(length: int, drop_last: bool) -> tuple[int, int]:
    """Return the number of the request that reported the end, and how many batches came after it."""
    plan = Plan(length)
    made = iter(BatchesOf(plan, 4, drop_last))
    seen = next(number for number in itertools.count(1) if next(made, None) is None or plan.ends)
    rest = list(made)
    assert plan.ends == 1
    return seen, len(rest)


def test_the_end_of_batches_is_reported_while_a_short_one_is_drawn() -> None:
    assert ends_at(10, drop_last=False) == (3, 0)
    assert ends_at(10, drop_last=True) == (3, 0)
    assert ends_at(8, drop_last=False) == (3, 0)
    assert ends_at(3, drop_last=False) == (1, 0)
    assert ends_at(0, drop_last=False) == (1, 0)


def test_a_plan_is_read_one_by_one_if_it_must_be() -> None:
    plan = Plan(10)
    plan.one_by_one = True
    list(BatchesOf(plan, 3, False))
    assert plan.asked == [(0, 3), (3, 6), (6, 9), (9, 10)]


def test_an_error_of_the_plan_reaches_the_consumer_and_leaves_the_count() -> None:
    class Broken(Plan):
        def block(self, start: int, stop: int) -> tuple[Array, Array]:
            if start:
                raise OSError("the plan is gone")
            return super().block(start, stop)

    run = Indices(Broken(1000))
    with pytest.raises(OSError, match="the plan is gone"):
        list(run)
    assert run.yielded == 256
