"""Orders by name; block shuffle: a bijection that stays within its blocks."""

from __future__ import annotations

import numpy as np
import pytest
from full_run import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import OrderError
from penstock.order import SHUFFLES, BlockShuffle, make_order

sizes = {"n": st.integers(0, 600), "block_size": st.integers(1, 70), "window": st.integers(1, 12)}


@settings(deadline=None, max_examples=examples(50, 200))
@given(key=st.integers(0, 2**64 - 1), **sizes)
def test_block_is_a_bijection(n: int, block_size: int, window: int, key: int) -> None:
    order = BlockShuffle(n, key, block_size=block_size, window=window)
    image = order[np.arange(n)]
    assert np.array_equal(np.sort(image), np.arange(n))
    assert [order[i] for i in range(key % 9, n, 9)] == image[key % 9 :: 9].tolist()
    assert len(order) == n


@settings(deadline=None, max_examples=examples(50, 200))
@given(key=st.integers(0, 2**64 - 1), **sizes)
def test_a_window_reads_its_own_blocks_and_all_of_them(n: int, block_size: int, window: int, key: int) -> None:
    order = BlockShuffle(n, key, block_size=block_size, window=window)
    blocks = order[np.arange(n)] // block_size
    seen: set[int] = set()
    begin = 0
    while begin < n:
        # a window holds `window` blocks; the one that is short makes its window shorter
        mine: list[int] = []
        end = begin
        for number in dict.fromkeys(blocks[begin : begin + block_size * window].tolist()):
            if len(mine) == window:
                break
            mine.append(number)
        end = begin + sum(min(block_size, n - number * block_size) for number in mine)
        assert set(blocks[begin:end].tolist()) == set(mine)
        assert not seen & set(mine), "no block is in two windows"
        seen |= set(mine)
        begin = end
    assert begin == n
    assert seen == set(range(-(-n // block_size)))


@settings(deadline=None, max_examples=examples(50, 200))
@given(key=st.integers(0, 2**64 - 1), **sizes)
def test_the_inverse_of_block_finds_every_row(n: int, block_size: int, window: int, key: int) -> None:
    order = BlockShuffle(n, key, block_size=block_size, window=window)
    assert np.array_equal(order.inverse[order[np.arange(n)]], np.arange(n))
    some = range(key % 9, n, 9)
    assert [order.inverse[order[i]] for i in some] == list(some)
    assert len(order.inverse) == n


@settings(deadline=None, max_examples=examples(25, 100))
@given(key=st.integers(0, 2**64 - 1), **sizes)
def test_windows_are_where_rows_are_mixed(n: int, block_size: int, window: int, key: int) -> None:
    order = BlockShuffle(n, key, block_size=block_size, window=window)
    blocks = order[np.arange(n)] // block_size
    begin = 0
    while begin < n:
        first, end = order.window_at(begin)
        assert first == begin
        assert all(order.window_at(position) == (begin, end) for position in range(begin, end, 7))
        inside = set(blocks[begin:end].tolist())
        assert len(inside) <= window
        assert not inside & set(blocks[end:].tolist())
        begin = end


def test_the_inverse_far_out() -> None:
    for kind in ("none", "block"):
        order = make_order(kind, 10**12 + 7, seed=3)
        positions = np.array([0, 1, 65_535, 65_536, 10**11 + 3, 10**12 + 6])
        assert np.array_equal(order.inverse[order[positions]], positions)


def test_a_window_as_large_as_the_data_mixes_all() -> None:
    order = BlockShuffle(10_000, 3, block_size=100, window=100)
    image = order[np.arange(10_000)]
    assert np.abs(image - np.arange(10_000)).mean() == pytest.approx(10_000 / 3, rel=0.05)


def test_windows_are_shuffled_differently() -> None:
    order = BlockShuffle(4000, 3, block_size=100, window=1)
    image = order[np.arange(4000)].reshape(40, 100) % 100
    assert len({tuple(row) for row in image.tolist()}) == 40


def test_block_beyond_32_bits() -> None:
    n = 2**40 + 12_345
    order = BlockShuffle(n, 7, block_size=1024, window=64)
    positions = np.concatenate([np.arange(1000), np.arange(n - 1000, n), np.arange(2**39, 2**39 + 1000)])
    image = order[positions]
    assert len(set(image.tolist())) == 3000
    assert ((image >= 0) & (image < n)).all()
    assert [order[int(p)] for p in positions[::250]] == image[::250].tolist()
    assert len(set((image[:1000] // 1024).tolist())) <= 64


@pytest.mark.parametrize("kind", SHUFFLES)
@pytest.mark.parametrize("n", [0, 1, 2, 1025, 70_000])
def test_all_kinds(kind: str, n: int) -> None:
    order = make_order(kind, n, seed=3, epoch=2)
    image = order[np.arange(n)]
    assert image.dtype == np.int64
    assert np.array_equal(np.sort(image), np.arange(n))
    assert np.array_equal(order[np.arange(n).reshape(1, -1)], image.reshape(1, -1))
    if n:
        assert order[0] == image[0]
        assert order[-1] == image[-1]
        assert type(order[0]) is int
    for bad in (n, -n - 1):
        with pytest.raises(IndexError):
            order[bad]


def test_kinds_depend_on_seed_and_epoch() -> None:
    for kind in ("global", "block"):
        orders = [
            tuple(make_order(kind, 500, seed=s, epoch=e, block_size=16)[np.arange(500)].tolist())
            for s in range(3)
            for e in range(3)
        ]
        assert len(set(orders)) == 9
    assert make_order("none", 5, seed=1, epoch=4)[np.arange(5)].tolist() == [0, 1, 2, 3, 4]


def test_errors() -> None:
    with pytest.raises(OrderError, match="unknown shuffle 'local': use one of 'global', 'block', 'none'"):
        make_order("local", 5)
    for sizes in ({"block_size": 0}, {"window": -1}):
        with pytest.raises(OrderError, match="must be positive"):
            BlockShuffle(5, 0, **sizes)
    with pytest.raises(OrderError, match="less than 2"):
        BlockShuffle(5, 0, block_size=10**15, window=10**15)
    assert sorted(BlockShuffle(5, 0, block_size=1 << 40, window=1 << 22)[np.arange(5)]) == [0, 1, 2, 3, 4]
    for kind in ("global", "none"):
        with pytest.raises(OrderError):
            make_order(kind, -1)
    with pytest.raises(OrderError, match="epoch"):
        make_order("global", 5, epoch=-1)


def test_block_of_negative_length() -> None:
    with pytest.raises(OrderError):
        make_order("block", -1)


def test_golden_block_shuffle() -> None:
    """Frozen together with the permutation: see test_permutation."""
    order = make_order("block", 100, seed=1, epoch=2, block_size=8, window=3)
    assert order[np.arange(24)].tolist() == GOLDEN_BLOCK
    far = make_order("block", 10**10, seed=1, epoch=2)
    assert far[np.array([0, 1, 2, 5 * 10**9, 10**10 - 1])].tolist() == GOLDEN_FAR


GOLDEN_BLOCK = [0, 69, 98, 97, 66, 68, 4, 99, 1, 3, 71, 96, 64, 5, 70, 2, 65, 7, 6, 67, 62, 32, 34, 33]
GOLDEN_FAR = [501163485, 9891931944, 6383031138, 4877078510, 3271608723]


@settings(deadline=None, max_examples=examples(50, 200))
@given(key=st.integers(0, 2**64 - 1), data=st.data(), ordered=st.booleans(), **sizes)
def test_block_takes_positions_in_any_order(
    n: int, block_size: int, window: int, key: int, data: st.DataObject, ordered: bool
) -> None:
    order = BlockShuffle(n, key, block_size=block_size, window=window)
    positions = data.draw(st.lists(st.integers(0, n - 1), max_size=60)) if n else []
    positions = sorted(positions) if ordered else positions
    rows = order[np.array(positions, dtype=np.int64)]
    assert rows.tolist() == [order[i] for i in positions]
    assert order.inverse[rows].tolist() == positions
