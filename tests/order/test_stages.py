"""`StagedMixture`: exact counts, an inverse, and a past that later weights do not change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import OrderError
from penstock.hashing import derive_key
from penstock.order.mixture import MIXTURE_ORDER, BlockMixture
from penstock.order.stages import (
    StagedMixture,
    WeightStage,
    boundary,
    changed,
    check_stages,
    counts_before,
    staged_counts,
)


@st.composite
def stages(draw: Any, sources: int = 3) -> tuple[WeightStage, ...]:
    weights = st.lists(st.integers(0, 5), min_size=sources, max_size=sources).filter(any)
    begins = sorted(draw(st.sets(st.integers(1, 40_000), max_size=3)))
    return tuple(WeightStage(begin, tuple(draw(weights))) for begin in (0, *begins))


def everything(made: StagedMixture) -> tuple[np.ndarray, np.ndarray]:
    return made.locate(np.arange(made.length))


@given(stages(), st.integers(1, 12_000), st.integers(0, 4))
@settings(max_examples=40, deadline=None)
def test_sources_are_gone_through_in_order_and_found_again(
    parts: tuple[WeightStage, ...], length: int, epoch: int
) -> None:
    made = StagedMixture(parts, length, epoch, 7)
    sources, ordinals = everything(made)
    for source in range(3):
        assert (ordinals[sources == source] == np.arange((sources == source).sum())).all()
        assert made.counts(length)[source] == (sources == source).sum()
    for place in {0, length // 3, length - 1}:
        assert made.position(int(sources[place]), int(ordinals[place])) == place
        assert list(made.counts(place)) == [int((sources[:place] == source).sum()) for source in range(3)]
    for segment in made.segments:
        here = sources[segment.origin : segment.origin + segment.length]
        counts = tuple(int((here == source).sum()) for source in range(3))
        assert counts == staged_counts(segment.weights, segment.length)


@given(stages(), st.integers(1, 9_000), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_epochs_before_are_summed_up(parts: tuple[WeightStage, ...], length: int, epoch: int) -> None:
    before = np.zeros(3, dtype=int)
    for number in range(epoch):
        before += StagedMixture(parts, length, number, 0).counts(length)
    assert counts_before(parts, epoch, length) == tuple(before)


@given(st.integers(1, 60_000), st.integers(0, 3), st.data())
@settings(max_examples=40, deadline=None)
def test_new_weights_leave_what_was_before_as_it_is(length: int, epoch: int, data: Any) -> None:
    first = (WeightStage(0, (3, 1, 1)), WeightStage(9_000, (1, 1, 1)))
    at = data.draw(st.integers(epoch * length, (epoch + 1) * length - 1))
    begin = boundary(first, length, at)
    assert at <= begin
    later = changed(first, WeightStage(begin, (1, 0, 5)))
    for number in range(begin // length + 1):
        before, after = (everything(StagedMixture(parts, length, number, 3)) for parts in (first, later))
        same = min(length, begin - number * length)
        assert all((a[:same] == b[:same]).all() for a, b in zip(before, after, strict=True))


def test_a_boundary_is_the_end_of_a_block_where_there_is_one() -> None:
    only = (WeightStage(0, (1, 1)),)
    assert [boundary(only, 100_000, at) for at in (0, 1, 4096, 4097, 90_000, 99_999)] == [
        *(0, 4096, 4096, 8192),
        *(90_112, 100_000),
    ]
    assert boundary(only, 5000, 1) == 5000, "one block, whose end is that of the epoch"
    assert boundary(only, 5000, 5000) == 5000


def test_without_changes_the_order_is_that_of_the_block_mixture() -> None:
    made = StagedMixture((WeightStage(0, (7, 2, 1)),), 10_000, 3, 5)
    same = BlockMixture((7, 2, 1), derive_key(5, 3, MIXTURE_ORDER), length=10_000)
    for mine, theirs in zip(everything(made), same.locate(np.arange(10_000)), strict=True):
        assert (mine == theirs).all()


def test_epochs_far_away() -> None:
    parts = (WeightStage(0, (1, 2)), WeightStage(10**30, (2, 1)))
    assert sum(counts_before(parts, 2**61, 3000)) == 2**61 * 3000


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (WeightStage(1, (1,)),),
        (WeightStage(0, (1,)), WeightStage(0, (2,))),
        (WeightStage(0, (0, 0)),),
        (WeightStage(0, (1, -1)),),
    ],
)
def test_what_is_no_order(parts: tuple[WeightStage, ...]) -> None:
    with pytest.raises(OrderError):
        check_stages(parts)
