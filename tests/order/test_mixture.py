"""The order of mixtures: exact counts, bounded prefixes, a bijection, and every rank's share by the weights."""

from __future__ import annotations

import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from full_run import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import OrderError
from penstock.hashing import derive_key
from penstock.order.digits import DigitShuffle, find_in, rank, ranks, slot_of, slots_of
from penstock.order.mixture import BlockMixture, exact_counts
from penstock.order.permutation import MAX_N

WEIGHTS = st.lists(st.one_of(st.integers(1, 60), st.integers(1, 10**7)), min_size=1, max_size=9)
KEYS = st.integers(0, 2**64 - 1)
HUGE = [[2**49 - 1, 2**48 + 1, 12345], [2**49, 2**49 - 3], [1, 2**50 - 1], [3, 5, 2**50 - 8]]


# The permutation of a block.


@given(KEYS, st.integers(0, 2**40), st.integers(1, 2))
@settings(max_examples=examples(10, 20))
def test_places_have_each_slot_once_and_runs_are_spread_evenly(key: int, number: int, digits: int) -> None:
    size = 64**digits
    begin = number * 64**2
    path = DigitShuffle(key, 2).path(np.arange(size, dtype=np.uint64), np.uint64(begin), digits)
    slots = slots_of([step.view(np.int64) for step in path])
    assert sorted(slots.tolist()) == list(range(size))
    for run in (2**i for i in range(6 * digits)):
        parts = np.sort(slots.reshape(-1, run) // (size // run), axis=1)
        assert (parts == np.arange(run)).all()


@given(KEYS, st.integers(1, 4), st.data())
@settings(max_examples=examples(15, 60))
def test_ranks_are_what_counting_gives(key: int, digits: int, data: Any) -> None:
    shuffle, begin = DigitShuffle(key, 4), data.draw(st.integers(0, 2**20)) * 64**4
    stop = data.draw(st.integers(0, min(64**digits - 1, 1500)))
    bound = data.draw(st.integers(0, 64**digits))
    slots = [slot_of(shuffle.path(place, begin, digits)) for place in range(stop)]
    found = [place for place, slot in enumerate(slots) if slot < bound]
    assert rank(shuffle.path(stop, begin, digits), bound) == len(found)
    for before, place in list(enumerate(found))[:: max(1, len(found) // 20)]:
        assert find_in(shuffle, before, (0, bound), begin, digits) == place
        path = shuffle.path(np.array([place], np.uint64), np.uint64(begin), digits)
        assert ranks([step.view(np.int64) for step in path], np.array([bound])).tolist() == [before]


# Counts.


def checked(mix: BlockMixture, begin: int, count: int) -> None:
    """Compare a stretch of positions with counting, one by one."""
    sources, ordinals = mix.locate(np.arange(begin, begin + count))
    had = list(mix.counts(begin))
    assert sum(had) == begin
    for position, source, ordinal in zip(range(begin, begin + count), sources.tolist(), ordinals.tolist(), strict=True):
        assert ordinal == had[source]
        had[source] += 1
        for number, weight in enumerate(mix.weights):
            assert abs(had[number] * mix.total - (position + 1) * weight) < mix.bound * mix.total
        if position % 7 == 0:
            assert mix.locate_one(position) == (source, ordinal)
            assert mix.position(source, ordinal) == position
    assert mix.counts(begin + count) == tuple(had)


@given(WEIGHTS, KEYS, st.integers(1, 2000))
@settings(max_examples=examples(15, 60))
def test_a_short_epoch(weights: list[int], key: int, length: int) -> None:
    mix = BlockMixture(weights, key, length=length)
    checked(mix, 0, length)
    assert mix.counts(length) == exact_counts(weights, length)


@given(WEIGHTS, KEYS, st.integers(0, 2**40), st.data())
@settings(max_examples=examples(15, 60))
def test_around_the_bounds_of_blocks_and_the_end(weights: list[int], key: int, more: int, data: Any) -> None:
    length = data.draw(st.none() | st.integers(1, 5).map(lambda blocks: blocks * 64**3 + more % 64**3))
    mix = BlockMixture(weights, key, length=length)
    size = mix.block_size
    for bound in (size, 2 * size, more // size * size, length or 0):
        low = max(0, min(bound - 100, MAX_N if length is None else length))
        high = bound + 100 if length is None else min(bound + 100, length)
        checked(mix, low, max(0, high - low))


@given(WEIGHTS, KEYS, st.integers(0, 2**60))
@settings(max_examples=examples(15, 60))
@example([7, 2, 1], 0, 2**60)
def test_counts_are_exact_at_the_end_of_each_block(weights: list[int], key: int, number: int) -> None:
    mix = BlockMixture(weights, key)
    position = number % (2**61 // mix.block_size) * mix.block_size
    shares = [Fraction(weight, sum(weights)) * position for weight in weights]
    assert mix.counts(position) == exact_counts(weights, position)
    assert all(abs(count - share) <= 1 for count, share in zip(mix.counts(position), shares, strict=True))
    assert sum(mix.counts(position)) == position


@given(st.lists(st.integers(1, 10**5), min_size=1, max_size=9), KEYS, st.integers(1, 9))
@settings(max_examples=examples(15, 60))
def test_weights_that_are_counts_are_exact_at_the_end(weights: list[int], key: int, times: int) -> None:
    mix = BlockMixture(weights, key, length=sum(weights) * times)
    assert mix.counts(sum(weights) * times) == tuple(weight * times for weight in weights)
    sources, _ = mix.locate(np.arange(sum(weights) * times))
    assert np.bincount(sources, minlength=len(weights)).tolist() == [weight * times for weight in weights]


@pytest.mark.parametrize("weights", [[32, 36, 32], [34, 34, 43], [33, 28, 50], [25, 34, 37]], ids=str)
def test_an_epoch_may_end_where_a_source_has_fewer_than_at_a_block_before(weights: list[int]) -> None:
    """Rounding takes a sample back at the next position, so what is left there could not be a block by itself."""
    size = BlockMixture(weights).block_size
    before = BlockMixture(weights).counts(2 * size)
    assert exact_counts(weights, 2 * size + 1)[1] == before[1] - 1
    for length in (2 * size + 1, 2 * size + 2, 2 * size + 50):
        checked(BlockMixture(weights, 7, length=length), size, length - size)


@pytest.mark.parametrize("weights", HUGE, ids=str)
@pytest.mark.parametrize("length", [None, 2**61 + 2**56 + 12_345], ids=str)
def test_huge_positions_are_exact(weights: list[int], length: int | None) -> None:
    mix = BlockMixture(weights, 5, length=length)
    size = mix.block_size
    assert size <= 2**54
    for begin in (0, 2**48, size - 100, 2**61 - 100, 2**61 + 2**56 + 12_345 - 200, 2**61 // size * size - 100):
        checked(mix, begin, 200)
    assert mix.locate(np.array([2**61] * 9))[1].tolist() == [mix.locate_one(2**61)[1]] * 9


@pytest.mark.parametrize("weights", [[7, 2, 1], [1, 1], [10**6, 1, 3000], *HUGE], ids=str)
def test_scattered_positions_of_many_blocks(weights: list[int]) -> None:
    mix = BlockMixture(weights, 3)
    positions = np.random.default_rng(0).integers(0, 2**61, 9000)
    sources, ordinals = mix.locate(positions)
    for at in range(0, 9000, 37):
        assert mix.locate_one(int(positions[at])) == (sources[at], ordinals[at])


def test_prefixes_do_not_depend_on_the_length() -> None:
    """Epochs of other lengths agree up to the last block of the shorter one."""
    whole = BlockMixture([3, 1], 9).locate(np.arange(30_000))
    for length in (20_000, 20_481, 24_575, 24_576):
        same = (length // 4096 - 1) * 4096
        found = BlockMixture([3, 1], 9, length=length).locate(np.arange(same))
        assert np.array_equal(found, [each[:same] for each in whole])


def test_sizes_of_blocks() -> None:
    sizes = {(1, 1): 2, (3, 1): 2, (4, 1): 3, (999, 4): 3, (999, 1): 4, (2**50 - 1, 1): 9}
    for weights, digits in sizes.items():
        mix = BlockMixture(weights)
        assert mix.block_size == 64**digits
        assert digits == 9 or min(weights) * mix.block_size >= 1000 * sum(weights)


def test_the_bound_is_a_few_samples() -> None:
    assert BlockMixture([1, 1]).bound == 8
    assert BlockMixture([7, 2, 1]).bound == 11
    assert BlockMixture([999, 1], length=10**9).bound == 27


# Ranks and batches.

SHARES = {"halves": [1, 1], "three": [7, 2, 1], "quarters": [2, 1, 1], "rare": [600, 300, 90, 9, 1]}


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("name", SHARES)
def test_every_rank_has_every_source_by_its_weight(name: str, ranks: int) -> None:
    """Within four deviations of independent draws; the keys are fixed, so that no run fails by chance."""
    weights = SHARES[name]
    shares = np.array(weights) / sum(weights)
    for epoch, start in ((0, 0), (1, 777_777)):
        mix = BlockMixture(weights, derive_key(1, epoch))
        for rank_ in range(min(ranks, 8)):
            sources, _ = mix.locate((start + np.arange(10_000)) * ranks + rank_)
            counts = np.bincount(sources, minlength=len(weights))
            assert (abs(counts - 10_000 * shares) < 4 * np.sqrt(10_000 * shares * (1 - shares))).all(), rank_


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("name", SHARES)
def test_batches_of_a_rank_vary_as_draws_do(name: str, ranks: int) -> None:
    """No batch of 100 is far off, and what one has tells nothing of the next one."""
    weights = SHARES[name]
    mix = BlockMixture(weights, derive_key(2))
    for rank_ in (0, ranks - 1):
        sources, _ = mix.locate(np.arange(40_000) * ranks + rank_)
        for source, weight in enumerate(weights):
            share = weight / sum(weights)
            counts = (sources == source).reshape(-1, 100).sum(axis=1)
            assert abs(counts - 100 * share).max() < 5 * np.sqrt(100 * share * (1 - share)) + 3
            assert counts.var() < 1.3 * 100 * share * (1 - share)
            if share > 0.05:
                assert np.corrcoef(counts[1:], counts[:-1])[0, 1] < 0.2


@pytest.mark.parametrize("name", SHARES)
def test_global_batches_are_off_by_a_few_samples(name: str) -> None:
    """The next 1,024 positions from anywhere: off by less than twice the bound, by arithmetic, and by far less here."""
    weights = SHARES[name]
    shares = np.array(weights) / sum(weights)
    sources, _ = BlockMixture(weights, derive_key(3)).locate(np.arange(2**19))
    for source, share in enumerate(shares):
        counts = (sources == source).reshape(-1, 1024).sum(axis=1)
        assert abs(counts - 1024 * share).max() < 2.5


@pytest.mark.parametrize("stride", [4096, 8192, 3 * 4096, 64**3])
def test_strides_of_whole_blocks_do_not_alias(stride: int) -> None:
    for weights in SHARES.values():
        shares = np.array(weights) / sum(weights)
        sources, _ = BlockMixture(weights, derive_key(4)).locate(np.arange(10_000) * stride + 17)
        counts = np.bincount(sources, minlength=len(weights))
        assert (abs(counts - 10_000 * shares) < 4 * np.sqrt(10_000 * shares * (1 - shares))).all()


def test_keys_give_unrelated_orders() -> None:
    one, other = (BlockMixture([1, 1], key).locate(np.arange(4096))[0] for key in (0, 1))
    assert 0.4 < (one == other).mean() < 0.6
    blocks = BlockMixture([1, 1], 0).locate(np.arange(8192))[0].reshape(2, 4096)
    assert 0.4 < (blocks[0] == blocks[1]).mean() < 0.6


# Frozen.


def string(mix: BlockMixture, begin: int, count: int) -> str:
    return "".join(map(str, mix.locate(np.arange(begin, begin + count))[0].tolist()))


def test_the_order_is_frozen() -> None:
    """Golden vectors of "mixture-blocks-1": states name positions, so what stands there may never change."""
    assert {name: string(mix, begin, 60) for name, (mix, begin) in FROZEN.items()} == GOLDEN
    rare = BlockMixture([6, 974, 9, 8314687135, 6980998, 707066, 258, 8847398], derive_key(5, 1), length=2**50 + 77)
    assert rare.counts(2**49 + 12_345) == GOLDEN_COUNTS
    assert [rare.position(source, 3) for source in range(8)] == GOLDEN_POSITIONS


FROZEN = {
    "two": (BlockMixture([1, 1], 0), 0),
    "three": (BlockMixture([7, 2, 1], derive_key(0, 0)), 0),
    "three, far": (BlockMixture([7, 2, 1], derive_key(0, 3)), 2**61),
    "an epoch of 60": (BlockMixture([5, 3, 2], derive_key(1, 0), length=60), 0),
    "an epoch's end": (BlockMixture([7919, 3001, 541, 17], derive_key(2, 7), length=10**6), 10**6 - 60),
    "many": (BlockMixture([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], derive_key(3, 0)), 10**9),
}
GOLDEN = {
    "two": "101001011001011010011010010110100101010110011001011010100101",
    "three": "001000010001200000100002010010020102100000200100001001000001",
    "three, far": "100010200100020000020100010200100201010010000200010010000001",
    "an epoch of 60": "012010201001021002101001200102010210010210010201020102102001",
    "an epoch's end": "010010000100001010000101100010000201100001000001001000010120",
    "many": "968427951758963873954860964827589684592773960784587183963795",
}
GOLDEN_COUNTS = (405427, 65814250, 608140, 561832549828160, 471713708885, 47777226880, 17433344, 597828408571)
GOLDEN_POSITIONS = [5892639215, 27884819, 3306043981, 3, 3851, 42888, 117368742, 3211]


def test_shapes_pickles_and_errors() -> None:
    mix = BlockMixture([30, 10], 3, length=100)
    assert mix.weights == (3, 1)
    again = pickle.loads(pickle.dumps(mix))
    assert repr(again) == repr(mix)
    assert np.array_equal(again.locate(np.arange(100)), mix.locate(np.arange(100)))
    assert [found.shape for found in mix.locate(np.arange(6).reshape(2, 3))] == [(2, 3), (2, 3)]
    assert [found.shape for found in mix.locate(np.arange(60).reshape(5, 12))] == [(5, 12), (5, 12)]
    assert [found.shape for found in mix.locate(np.empty(0, np.int64))] == [(0,), (0,)]
    for weights in ([], [0, 1], [1, -1], [2**50, 1]):
        with pytest.raises(OrderError):
            BlockMixture(weights)
    for length in (-1, 2**62 + 1):
        with pytest.raises(OrderError, match="2\\*\\*62"):
            BlockMixture([1], length=length)
    for positions in ([-1], [100]):
        with pytest.raises(OrderError, match="positions"):
            mix.locate(np.array(positions))
    with pytest.raises(OrderError, match="positions"):
        mix.counts(101)
    for ordinal in (-1, 75):
        with pytest.raises(OrderError, match="75 samples"):
            mix.position(0, ordinal)
