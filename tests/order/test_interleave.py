"""Interleaving: exact counts, an error below one on every prefix, and the same sequence from wherever it is asked."""

from __future__ import annotations

import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import OrderError
from penstock.order import deadlines
from penstock.order.interleave import Interleave

SMALL = st.lists(st.integers(1, 60), min_size=1, max_size=12)
FEW = st.lists(st.integers(1, 3_000_000), min_size=1, max_size=4)
MANY = st.lists(st.integers(1, 10**7), min_size=5, max_size=12)


def worst_error(mix: Interleave, n: int) -> Fraction:
    sources, _ = mix.locate(np.arange(n))
    worst = 0
    for source, weight in enumerate(mix.weights):
        had = np.cumsum(sources == source, dtype=np.int64)
        worst = max(worst, int(np.abs(had * mix.total - np.arange(1, n + 1) * weight).max()))
    return Fraction(worst, mix.total)


@given(SMALL)
def test_error_below_one_and_exact_counts(weights: list[int]) -> None:
    mix = Interleave(weights)
    assert mix.bound == 1
    assert worst_error(mix, 2 * mix.total) < 1
    assert mix.counts(mix.total) == mix.weights
    sources, _ = mix.locate(np.arange(mix.total))
    assert np.bincount(sources, minlength=len(weights)).tolist() == list(mix.weights)


@given(FEW)
@settings(max_examples=30)
def test_error_below_one_for_up_to_four_of_any_weights(weights: list[int]) -> None:
    mix = Interleave(weights)
    assert mix.bound == 1
    assert worst_error(mix, 20_000) < 1


@given(MANY)
@settings(max_examples=30)
def test_error_below_one_for_many_of_odd_weights(weights: list[int]) -> None:
    weights = [weight + sum(weights) // 10_000 for weight in weights]  # blocks are short then
    mix = Interleave(weights)
    assert mix.bound == 1
    assert worst_error(mix, 20_000) < 1


@given(st.lists(st.integers(0, 2000), min_size=5, max_size=12), st.integers(0, 10**6))
@settings(max_examples=30)
def test_blocks_by_deadlines_join(weights: list[int], begin: int) -> None:
    """Anywhere in a period, over the bounds of blocks and its end: counts go up by one a position, never off by one."""
    mix = Interleave([weight * 1000 + 7 * i + 1009 for i, weight in enumerate(weights)])
    mix._tree = None  # by deadlines, also where the tree would do
    for at in (begin % mix.total // mix._size * mix._size, mix.total):
        low = max(0, at - 200)
        sources, ordinals = mix.locate(np.arange(low, at + 200))
        had = list(mix.counts(low))
        for position, source, ordinal in zip(range(low, at + 200), sources.tolist(), ordinals.tolist(), strict=True):
            assert ordinal == had[source]
            had[source] += 1
            for count, weight in zip(had, mix.weights, strict=True):
                assert abs(count * mix.total - (position + 1) * weight) < mix.total


RARE = st.lists(st.sampled_from([1, 2, 9, 302, 4099, 10**5 + 3, 10**7 + 19, 10**9 + 7, 10**10]), min_size=5, max_size=9)


@given(RARE, st.integers(0, 2**40), st.data())
@settings(max_examples=25)
def test_error_below_one_for_sources_of_tiny_shares(weights: list[int], begin: int, data: Any) -> None:
    """At the events of each source, where its error is largest, in some block of some period."""
    mix = Interleave([weight + i for i, weight in enumerate(weights)])
    mix._tree = None  # by deadlines, also where the tree would do
    assert mix.bound == 1
    source = data.draw(st.integers(0, len(weights) - 1))
    ordinal = begin % mix.weights[source]
    at = mix.position(source, ordinal)
    assert [int(found[0]) for found in mix.locate(np.array([at]))] == [source, ordinal]
    low = max(0, at - 2000)
    sources, _ = mix.locate(np.arange(low, at + 2000))
    had = list(mix.counts(low))
    for position, found in enumerate(sources.tolist(), low):
        for count in (had[found], had[found] + 1):
            assert abs(count * mix.total - (position + count - had[found]) * mix.weights[found]) < mix.total
        had[found] += 1
    assert mix.counts(at + 2000) == tuple(had)


@given(st.lists(st.one_of(st.integers(1, 3), st.integers(1, 300)), min_size=2, max_size=14), st.sampled_from([1, 2, 4]))
@settings(max_examples=40)
def test_halved_spans_everywhere(weights: list[int], size: int) -> None:
    """With blocks so small that nearly every count is a bound between them: all prefixes of two periods."""
    mix = Interleave(weights)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_SMALLEST", "_LARGEST"):
            patch.setattr(deadlines, name, 4)
        patch.setattr(deadlines, "_HALVED", size)
        _forget()
        mix._tree, mix._size = None, deadlines.block_size(mix.weights)
        assert worst_error(mix, 2 * mix.total) < 1
        sources, ordinals = mix.locate(np.arange(mix.total))
        for source, weight in enumerate(mix.weights):
            places = np.flatnonzero(sources == source)
            assert ordinals[places].tolist() == list(range(weight))
            assert mix.position(source, weight - 1) == places[-1]
            assert mix.position(source, weight) == places[0] + mix.total
    _forget()


def _forget() -> None:
    deadlines._bound.cache_clear()
    deadlines.make_block.cache_clear()


@given(st.one_of(SMALL, FEW, MANY), st.integers(0, 2**40))
@settings(max_examples=60)
def test_random_access_agrees_with_counting(weights: list[int], begin: int) -> None:
    mix = Interleave(weights)
    sources, ordinals = mix.locate(np.arange(begin, begin + 50))
    for position, source, ordinal in zip(range(begin, begin + 50), sources.tolist(), ordinals.tolist(), strict=True):
        assert mix.counts(position)[source] == ordinal
        assert mix.counts(position + 1)[source] == ordinal + 1
        assert sum(mix.counts(position)) == position
    source, ordinal = int(sources[7]), int(ordinals[7])
    assert mix.position(source, ordinal) == begin + 7


@pytest.mark.parametrize("weights", [[2**49 - 1, 2**48 + 1, 12345], [2**49, 2**49 - 3], [1, 2**50 - 1]])
def test_products_beyond_64_bits(weights: list[int]) -> None:
    mix = Interleave(weights)
    positions = np.concatenate([np.arange(p, p + 300) for p in (0, 2**48 - 150, mix.total - 150, 2**61)])
    sources, ordinals = mix.locate(positions)
    for position, source, ordinal in zip(positions.tolist(), sources.tolist(), ordinals.tolist(), strict=True):
        assert mix.counts(position)[source] == ordinal
        assert mix.counts(position + 1)[source] == ordinal + 1


def test_the_order_is_frozen() -> None:
    """Golden vectors: states name positions, so what stands there may never change."""
    assert "".join(map(str, Interleave([5, 3, 2]).locate(np.arange(20))[0].tolist())) == GOLDEN_TABLE
    assert "".join(map(str, Interleave([7919, 3001, 541, 17]).locate(np.arange(60))[0].tolist())) == GOLDEN_TREE
    five = Interleave([10**6 + 3, 10**5 + 3, 10**4 + 7, 999_983, 77_777])
    assert five.locate(np.arange(10**9, 10**9 + 20))[0].tolist() == GOLDEN_FIVE
    ten = Interleave(
        [3_000_017, 2_100_011, 2_000_003, 1_900_003, 1_000_003, 900_001, 800_011, 700_001, 500_009, 300_007]
    )
    assert "".join(map(str, ten.locate(np.arange(4000, 4100))[0].tolist())) == GOLDEN_BLOCKS

    rare = Interleave([6, 974, 9, 8314687135, 6980998, 707066, 258, 8847398])
    sources, _ = rare.locate(np.arange(5 * 10**9, 5 * 10**9 + 20_000))
    places = np.flatnonzero(sources != 3)[:12]
    assert list(zip(places.tolist(), sources[places].tolist(), strict=True)) == GOLDEN_RARE
    assert rare.counts(16384 * 305177) == GOLDEN_RARE_COUNTS


GOLDEN_RARE = [
    (158, 4),
    (662, 7),
    (1166, 4),
    (1670, 7),
    (2174, 7),
    (2677, 4),
    (3181, 7),
    (3685, 4),
    (4189, 7),
    (4693, 4),
    (5196, 7),
    (5700, 4),
]
GOLDEN_RARE_COUNTS = (4, 585, 5, 4990095391, 4189676, 424349, 154, 5309804)
GOLDEN_BLOCKS = "1802403172503012694301201735021034862103052713042081635021034720130952613040217350281036420110246301"
GOLDEN_TABLE = "01020101020102010102"
GOLDEN_TREE = "010001000120010001000100100010201000100010010001000210010001"
GOLDEN_FIVE = [3, 0, 3, 0, 3, 0, 3, 0, 3, 0, 3, 0, 4, 0, 3, 0, 3, 0, 3, 0]


def test_shapes_pickles_and_errors() -> None:
    mix = Interleave([30, 10])
    assert mix.weights == (3, 1)
    assert pickle.loads(pickle.dumps(mix)).counts(7) == mix.counts(7)
    assert [found.shape for found in mix.locate(np.arange(6).reshape(2, 3))] == [(2, 3), (2, 3)]
    assert [found.shape for found in mix.locate(np.empty(0, np.int64))] == [(0,), (0,)]
    tree = Interleave([30_000, 9_001])
    assert [found.tolist() for found in tree.locate(np.arange(6).reshape(2, 3))] == [
        found.reshape(2, 3).tolist() for found in tree.locate(np.arange(6))
    ]
    for weights in ([], [0, 1], [1, -1], [2**50, 1]):
        with pytest.raises(OrderError):
            Interleave(weights)
    with pytest.raises(OrderError, match="positions"):
        mix.locate(np.array([-1]))
