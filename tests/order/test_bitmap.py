"""`Bitmap`: select and rank against NumPy's own, dense, sparse and lumpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.order.bitmap as module
from penstock.order.bitmap import BLOCK, Bitmap


def made(mask: np.ndarray) -> Bitmap:
    bits, before = Bitmap.arrays(mask)
    return Bitmap(bits, before, Bitmap.hints_of(before))


def check(mask: np.ndarray) -> None:
    bitmap, rows = made(mask), np.flatnonzero(mask)
    assert len(bitmap) == len(rows)
    assert (bitmap.select(np.arange(len(rows))) == rows).all()
    assert [bitmap.select_one(ordinal) for ordinal in range(0, len(rows), 37)] == rows[::37].tolist()
    assert (bitmap.rank(rows) == np.arange(len(rows))).all()
    assert (bitmap.rank(np.flatnonzero(~mask)) == -1).all()


@given(st.data())
@settings(max_examples=50)
def test_select_and_rank_are_inverse(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5 * BLOCK))
    share = data.draw(st.sampled_from([0.0, 0.01, 0.3, 0.5, 0.99, 1.0]))
    check(np.random.default_rng(data.draw(st.integers(0, 99))).random(size) < share)


@pytest.mark.parametrize("lumps", [[(0, 700)], [(100_000, 100_003), (3, 900)], [(511, 512), (60_000, 61_000)]])
def test_kept_rows_far_apart(lumps: list[tuple[int, int]]) -> None:
    mask = np.zeros(101_000, np.bool_)
    for begin, end in lumps:
        mask[begin:end] = True
    check(mask)


def test_pieces_are_put_together() -> None:
    mask = np.random.default_rng(0).random(4 * BLOCK + 77) < 0.4
    bits, before = Bitmap.arrays(mask)
    first, second = mask[: 2 * BLOCK], mask[2 * BLOCK :]
    head, counts = Bitmap.arrays(first)
    tail, rest = Bitmap.arrays(second, int(counts[-1]))
    assert (np.concatenate([head, tail]) == bits).all()
    assert (np.concatenate([counts, rest[1:]]) == before).all()


def test_bits_are_counted_without_numpy_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module.np, "bitwise_count", raising=False)
    check(np.random.default_rng(1).random(3000) < 0.5)
