"""Which size of batches is usual: free slots keep as much memory."""

from __future__ import annotations

import pytest

from penstock.loader.executors.process.ring import usual


@pytest.mark.parametrize("at", range(16))
def test_one_batch_unlike_the_others_is_not_usual(at: int) -> None:
    assert usual([240 if number == at else 4 for number in range(16)]) == 4


def test_what_is_large_often_is_usual() -> None:
    assert usual([4, 4, 9] * 5) == 9
    assert usual([4, 4, 4, 4, 9] * 3) == 4


@pytest.mark.parametrize(("sizes", "expected"), [([7], 7), ([4, 240], 4), ([4, 240, 4], 4)])
def test_of_few_batches(sizes: list[int], expected: int) -> None:
    assert usual(sizes) == expected
