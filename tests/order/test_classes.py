"""The shuffle within classes, and the batches cut from it: bijections, frozen, and as random as a permutation."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise, permutations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.order.classes import ClassBatches, ClassShuffle, square_roots

SIZES = st.lists(st.integers(0, 40) | st.integers(0, 3), min_size=1, max_size=12)


def starts_of(sizes: list[int], first: int = 0) -> np.ndarray:
    return first + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


# The shuffle.


@settings(deadline=None, max_examples=150)
@given(st.lists(st.one_of(st.integers(0, 1 << 62), st.integers(0, (1 << 31) - 1).map(lambda n: n * n + 2 * n))))
def test_square_roots_are_exact(numbers: list[int]) -> None:
    """Also just below squares, where a root as a float is that of the square."""
    assert square_roots(np.array(numbers, np.int64)).tolist() == [math.isqrt(n) for n in numbers]


@given(SIZES, st.integers(0, 50), st.integers(0, 1 << 64))
def test_each_class_is_permuted_by_itself(sizes: list[int], first: int, key: int) -> None:
    starts = starts_of(sizes, first)
    shuffle, indices = ClassShuffle(starts, key), np.arange(starts[0], starts[-1])
    found = shuffle[indices]
    for begin, end in pairwise(starts.tolist()):
        assert sorted(found[begin - first : end - first].tolist()) == list(range(begin, end))
    assert shuffle.inverse[found].tolist() == indices.tolist()
    for index in indices[:3].tolist():
        assert shuffle[index] == found[index - first]


def test_large_classes_are_permuted_too() -> None:
    starts = starts_of([100_000, 1, (1 << 40) + 5, 70_001])
    shuffle = ClassShuffle(starts, 5)
    some = np.concatenate([np.arange(100_001), starts[2] + np.arange(0, 1 << 40, (1 << 40) // 9_999)])
    found = shuffle[some]
    assert len(np.unique(found)) == len(some)
    assert (found[:100_000] < 100_000).all()
    assert found[100_000] == 100_000
    assert ((found[100_001:] >= starts[2]) & (found[100_001:] < starts[3])).all()
    assert shuffle.inverse[found].tolist() == some.tolist()


def test_every_order_is_as_likely() -> None:
    for n, keys in ((2, 2_000), (3, 6_000), (4, 12_000)):
        # Many classes of one size: each is permuted by a key of its own.
        found = ClassShuffle(np.arange(keys + 1) * n, 7)[np.arange(keys * n)].reshape(keys, n) % n
        counts = Counter(map(tuple, found.tolist()))
        observed = [counts[order] for order in permutations(range(n))]
        assert scipy.stats.chisquare(observed).pvalue > 1e-4, observed


def test_neighbours_part() -> None:
    n = 5_000
    moved = ClassShuffle([0, n, 2 * n], 3)[np.arange(2 * n)].reshape(2, n) % n
    for row in moved:
        steps = np.diff(row) % n
        assert scipy.stats.kstest(steps / n, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(moved[0], moved[1])[0, 1]) < 0.06


def test_the_shuffle_is_frozen() -> None:
    shuffle = ClassShuffle([0, 4, 7, 7, 100, 6_000], 1)
    assert shuffle[np.arange(12)].tolist() == [2, 1, 3, 0, 4, 6, 5, 42, 20, 34, 39, 56]
    assert shuffle[[100, 3_000, 5_999]].tolist() == [2914, 3326, 3388]


def test_what_is_out_of_range() -> None:
    shuffle = ClassShuffle([2, 4, 7], 1)
    for index in (7, 1, np.array([3, 1]), -8):
        with pytest.raises(IndexError, match="out of range"):
            shuffle[index]  # type: ignore[index]


# The batches.


@settings(deadline=None, max_examples=200)
@given(SIZES, st.integers(0, 5), st.booleans(), st.booleans(), st.data())
def test_each_slot_is_in_one_batch(
    sizes: list[int], first: int, fill: bool, drop_last: bool, data: st.DataObject
) -> None:
    starts = starts_of(sizes, first)
    per_batch = data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    batches = ClassBatches(starts, per_batch, fill=fill, drop_last=drop_last)
    slots, counts = batches.slots(np.arange(len(batches)))
    assert len(counts) == len(batches)
    assert (counts >= 1).all()
    classes = np.repeat(np.arange(len(sizes)), sizes)
    at = 0
    dropped = set(range(first, int(starts[-1])))
    for number, count in enumerate(counts.tolist()):
        mine = slots[at : at + count]
        at += count
        dropped -= set(mine.tolist())
        assert mine.tolist() == list(range(mine[0], mine[0] + count))
        begins_in = classes[mine[0] - first]
        assert count <= per_batch[begins_in]
        assert fill or (classes[mine - first] == begins_in).all()
        if drop_last:
            assert count == per_batch[begins_in]
        assert (batches.batch_of(mine) == number).all()
    assert at == len(slots) == len(set(slots.tolist()))
    left = np.array(sorted(dropped), dtype=np.int64)
    assert (batches.batch_of(left) == -1).all()
    if not drop_last:
        assert not dropped
        assert (
            not fill
            or (counts[:-1] == np.array(per_batch)[classes[slots[np.cumsum(counts)[:-1] - counts[:-1]] - first]]).all()
        )
    elif fill:
        assert len(left) < max(per_batch)
    else:
        assert len(left) == sum(size % count for size, count in zip(sizes, per_batch, strict=True))
