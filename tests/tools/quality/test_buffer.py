"""The shuffle buffer as an order: the same as one that runs through the file, at any position."""

from __future__ import annotations

import numpy as np
import pytest
from full_run import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import OrderError
from penstock.hashing import derive_key
from penstock.tools.quality import ShuffleBuffer


def run_through(order: ShuffleBuffer) -> list[int]:
    """What a program with a buffer gives out that draws the same places."""
    buffer = list(range(order.size)) if order.n else []
    out = []
    steps = max(0, order.n - order.size)
    for step, place in enumerate(order._place(np.arange(steps)).tolist()):
        out.append(buffer[place])
        buffer[place] = step + order.size
    return out + [buffer[int(order._last[i])] for i in range(order.n - steps)]


@settings(deadline=None, max_examples=examples(25, 100))
@given(n=st.integers(0, 600), size=st.integers(1, 700), key=st.integers(0, 2**64 - 1))
def test_it_is_what_a_buffer_gives_out(n: int, size: int, key: int) -> None:
    order = ShuffleBuffer(n, size, key)
    rows = order[np.arange(n)]
    assert rows.tolist() == run_through(order)
    assert np.array_equal(np.sort(rows), np.arange(n))
    assert np.array_equal(order.inverse[rows], np.arange(n))
    assert len(order) == len(order.inverse) == n


def test_any_position_without_those_before() -> None:
    order = ShuffleBuffer(1_000_000, 500, derive_key(0, 0))
    rows = order[np.arange(1_000_000)]
    some = np.random.default_rng(0).permutation(1_000_000)[:300]
    assert np.array_equal(order[some], rows[some])
    assert [order[int(position)] for position in some[:5]] == rows[some[:5]].tolist()
    assert np.array_equal(rows[order.inverse[some]], some)
    assert order.inverse[int(rows[7])] == 7


def test_rows_leave_after_as_many_steps_as_the_buffer_holds_on_average() -> None:
    order = ShuffleBuffer(10**12, 1000, key=5)
    positions = np.arange(10**11, 10**11 + 20_000)
    late = positions - order[positions]
    assert late.mean() == pytest.approx(0, abs=60)  # a row enters 1,000 steps ahead, and waits for 1,000
    assert late.max() > 4000
    assert late.min() >= -1000


def test_sizes_are_checked() -> None:
    for n, size in ((-1, 5), (5, 0), (5, 2**31)):
        with pytest.raises(OrderError):
            ShuffleBuffer(n, size, 0)
