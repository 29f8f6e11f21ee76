"""How large batches are: what is usual, and what has to be reckoned with for a while."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loader.sizes import RecentSizes


def of(*sizes: int) -> RecentSizes:
    recent = RecentSizes()
    for nbytes in sizes:
        recent.add(nbytes)
    return recent


def test_nothing_is_known_at_first() -> None:
    assert (RecentSizes().usual, RecentSizes().largest) == (0, 0)


@pytest.mark.parametrize("at", [0, 5, 40])
def test_one_batch_unlike_the_others_is_forgotten(at: int) -> None:
    recent = RecentSizes()
    for number in range(60):
        recent.add(240 if number == at else 4)
        assert recent.largest == (240 if at <= number < at + 8 else 4)
        assert recent.usual == (240 if number == at == 0 else 4)


def test_what_is_large_often_is_usual() -> None:
    assert of(*[4, 4, 9] * 20).usual == 9
    assert of(*[4, 4, 4, 4, 9] * 20).usual == 4
    assert of(*[9] * 20, *[4] * 16).usual == 4
    assert of(*[4] * 20, *[9] * 8).usual == 9


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60))
def test_the_largest_is_that_of_the_last_eight(sizes: list[int]) -> None:
    recent = of(*sizes)
    assert recent.largest == max(sizes[-8:])
    assert min(sizes[-20:]) <= recent.usual <= max(sizes[-20:])
