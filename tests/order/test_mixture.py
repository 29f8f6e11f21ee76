"""The order of mixtures: exact counts, bounded prefixes, a bijection, every rank's share, and weights that change."""

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
from penstock.order.mixture import (
    MIXTURE_ORDER,
    BlockMixture,
    StagedMixture,
    WeightStage,
    boundary,
    counts_before,
    exact_counts,
)
from penstock.order.permutation import MAX_N

WEIGHTS = st.lists(st.one_of(st.integers(1, 60), st.integers(1, 10**7)), min_size=1, max_size=9)
KEYS = st.integers(0, 2**64 - 1)
SKEWED = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)).map(lambda pair: pair[0] * 10 ** pair[1]), min_size=1)
HUGE = [[2**49 - 1, 2**48 + 1, 12345], [2**49, 2**49 - 3], [1, 2**50 - 1], [3, 5, 2**50 - 8]]


# The permutation of a block.


@given(KEYS, st.integers(0, 2**40), st.integers(1, 4095))
@settings(max_examples=examples(15, 60))
def test_runs_of_a_block_are_spread_evenly(key: int, number: int, some: int) -> None:
    """Of c samples in a block, each aligned run of 2**i places has its part, rounded."""
    sources, _ = BlockMixture([some, 4096 - some], key).locate(number * 4096 + np.arange(4096))
    assert (sources == 0).sum() == some
    for run in (2**i for i in range(13)):
        counts = (sources == 0).reshape(-1, run).sum(axis=1)
        assert (abs(counts - run * some / 4096) < 1).all()


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
            assert [one.tolist() for one in mix.locate(np.array([position]))] == [[source], [ordinal]]
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


@given(SKEWED, st.integers(0, 2**60))
@settings(max_examples=examples(40, 200))
@example([7, 2, 1], 2**60)
@example([13 * 10**6, 8, 5, 3, 2, 1, 1], 12345)
def test_counts_are_exact_at_the_end_of_each_block(weights: list[int], number: int) -> None:
    mix = BlockMixture(weights)
    size = mix.block_size
    number %= 2**61 // size
    before = mix.counts(number * size)
    for position in range((number + 1) * size, (number + 4) * size, size):
        counts = mix.counts(position)
        assert counts == exact_counts(weights, position)
        assert sum(counts) == position
        shares = [Fraction(weight, sum(weights)) * position for weight in weights]
        assert all(abs(count - share) < 1 for count, share in zip(counts, shares, strict=True))
        assert all(low <= high for low, high in zip(before, counts, strict=True)), "no sample is taken back"
        before = counts


def test_a_source_of_one_in_a_billion_comes_at_its_rate() -> None:
    mix = BlockMixture([10**9 - 3, 1, 2], 5)
    places = [mix.position(1, ordinal) for ordinal in range(20)]
    assert all(abs(place - (ordinal + 0.5) * 10**9) < 2 * mix.block_size for ordinal, place in enumerate(places))
    assert mix.locate(np.array(places))[0].tolist() == [1] * 20
    assert mix.locate(np.array(places))[1].tolist() == list(range(20))


@given(st.integers(0, 2**32), st.integers(0, 9), st.integers(0, 2**40))
@settings(max_examples=examples(6, 30), deadline=None)
def test_a_thousand_sources(seed: int, spread: int, begin: int) -> None:
    """Random access is sequential access, each source is read in order, and the inverse finds each sample."""
    rng = np.random.default_rng(seed)
    weights = np.floor(10 ** (rng.random(1000) * spread)).astype(int).tolist()
    mix = BlockMixture(weights, seed)
    positions = np.arange(begin, begin + 10_000)
    sources, ordinals = mix.locate(positions)
    mixed = rng.permutation(10_000)
    for found, whole in zip(mix.locate(positions[mixed]), (sources, ordinals), strict=True):
        assert np.array_equal(found, whole[mixed])
    had, after = mix.counts(begin), mix.counts(begin + 10_000)
    assert (np.bincount(sources, minlength=1000) == np.subtract(after, had)).all()
    for source in np.unique(sources).tolist():
        mine = ordinals[sources == source]
        assert np.array_equal(mine, had[source] + np.arange(len(mine)))
    for place in rng.integers(0, 10_000, 20).tolist():
        assert mix.position(int(sources[place]), int(ordinals[place])) == begin + place


@given(SKEWED, KEYS, st.integers(1, 20_000))
@settings(max_examples=examples(15, 60))
def test_a_source_that_is_added_without_weight_changes_nothing(weights: list[int], key: int, length: int) -> None:
    """So a source may be added during a run: earlier stages give it the weight 0."""
    before, after = (BlockMixture([*weights, *more], key, length=length) for more in ([], [0]))
    for mine, theirs in zip(before.locate(np.arange(length)), after.locate(np.arange(length)), strict=True):
        assert np.array_equal(mine, theirs)
    with pytest.raises(OrderError, match="has 0 samples"):
        after.position(len(weights), 0)


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
    assert mix.locate(np.array([2**61] * 9))[1].tolist() == mix.locate(np.array([2**61]))[1].tolist() * 9


@pytest.mark.parametrize("weights", [[7, 2, 1], [1, 1], [10**6, 1, 3000], *HUGE], ids=str)
def test_scattered_positions_of_many_blocks(weights: list[int]) -> None:
    mix = BlockMixture(weights, 3)
    positions = np.random.default_rng(0).integers(0, 2**61, 9000)
    sources, ordinals = mix.locate(positions)
    for at in range(0, 9000, 37):
        assert mix.position(int(sources[at]), int(ordinals[at])) == positions[at]


def test_prefixes_do_not_depend_on_the_length() -> None:
    """Epochs of other lengths agree up to the last block of the shorter one."""
    whole = BlockMixture([3, 1], 9).locate(np.arange(30_000))
    for length in (20_000, 20_481, 24_575, 24_576):
        same = (length // 4096 - 1) * 4096
        found = BlockMixture([3, 1], 9, length=length).locate(np.arange(same))
        assert np.array_equal(found, [each[:same] for each in whole])


def test_a_block_has_a_sample_of_each_source() -> None:
    sizes = {(1, 1): 2, (4095, 1): 2, (4096, 1): 3, (1, 0, 4096): 3, (2**50 - 1, 1): 9}
    assert {weights: BlockMixture(weights).block_size for weights in sizes} == {
        weights: 64**digits for weights, digits in sizes.items()
    }


def test_the_bound_is_a_few_samples() -> None:
    assert BlockMixture([1, 1]).bound == 8
    assert BlockMixture([7, 2, 1]).bound == 8
    assert BlockMixture([10**6, 1]).bound == 14
    assert BlockMixture([999, 1], length=10**9).bound == 15


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
    """Golden vectors of "mixture-blocks-2": states name positions, so what stands there may never change."""
    assert {name: string(mix, begin, 60) for name, (mix, begin) in FROZEN.items()} == GOLDEN
    rare = BlockMixture([6, 974, 9, 8314687135, 6980998, 707066, 258, 8847398], derive_key(5, 1), length=2**50 + 77)
    assert rare.counts(2**49 + 12_345) == GOLDEN_COUNTS
    assert [rare.position(source, 3) for source in range(8)] == GOLDEN_POSITIONS
    many = BlockMixture(range(1, 1001), derive_key(4, 2))
    assert many.locate(10**12 + np.arange(12))[0].tolist() == GOLDEN_OF_1000


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
GOLDEN_OF_1000 = [608, 932, 787, 346, 997, 703, 494, 863, 427, 826, 657, 965]


def test_shapes_pickles_and_errors() -> None:
    mix = BlockMixture([30, 10], 3, length=100)
    assert mix.weights == (3, 1)
    again = pickle.loads(pickle.dumps(mix))
    assert repr(again) == repr(mix)
    assert np.array_equal(again.locate(np.arange(100)), mix.locate(np.arange(100)))
    assert [found.shape for found in mix.locate(np.arange(6).reshape(2, 3))] == [(2, 3), (2, 3)]
    assert [found.shape for found in mix.locate(np.arange(60).reshape(5, 12))] == [(5, 12), (5, 12)]
    assert [found.shape for found in mix.locate(np.empty(0, np.int64))] == [(0,), (0,)]
    for weights in ([], [0, 0], [1, -1], [2**50, 1]):
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


# Weights that change.


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
    for origin, end, _, mixture in made.segments:
        # Positions of one segment alone take a path of their own.
        found = made.locate(np.arange(origin, end)[::-1])
        assert (found[0] == sources[origin:end][::-1]).all()
        assert (found[1] == ordinals[origin:end][::-1]).all()
        counts = tuple(int((sources[origin:end] == source).sum()) for source in range(3))
        assert counts == exact_counts(mixture.weights, end - origin)


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
    later = tuple(sorted({part.begin: part for part in (*first, WeightStage(begin, (1, 0, 5)))}.values()))
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
