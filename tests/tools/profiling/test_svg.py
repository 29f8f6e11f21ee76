"""Values on the axes of plots."""

from __future__ import annotations

import pytest

from penstock.svg import short, ticks


@pytest.mark.parametrize("highest", [0.3, 1, 1.1, 2, 3, 4, 5, 7, 9.99, 10, 12, 99, 100, 123_456, 6.2e6, 9.1e12])
def test_ticks_are_few_round_and_high_enough(highest: float) -> None:
    marks = ticks(highest)
    assert 3 <= len(marks) <= 6
    assert marks[-1] >= highest * 0.999999
    assert f"{marks[1]:e}"[0] in "125"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (12, "12"), (999.7, "1 k"), (12_345, "12.3 k"), (999_960, "1 M"), (4.5e9, "4.5 G")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text
