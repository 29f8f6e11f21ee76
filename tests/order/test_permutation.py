"""The keyed permutation: a bijection for every n, random by the tests below, and frozen."""

from __future__ import annotations

import itertools
import math
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
import scipy  # its parts are imported when they are named
from full_run import examples, full_only
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interpreter_support import FULL

from penstock.errors import OrderError
from penstock.hashing import derive_key, mix, mix_array, splitmix64
from penstock.order import ORDER_VERSION, Permutation, make_order
from penstock.order import permutation as permutation_module
from penstock.order.permutation import MAX_N, TABLE_LIMIT, normalise

# All keys here are fixed, so no test can fail by chance; p-values say how extraordinary a sound permutation would be.

_EDGES = sorted({1, 2, 3, *(2**k + d for k in range(1, 18) for d in (-1, 0, 1)), TABLE_LIMIT - 1, TABLE_LIMIT + 1})


@pytest.mark.parametrize("n", _EDGES)
def test_bijection_and_inverse_at_the_edges(n: int) -> None:
    p = Permutation(n, key=n)
    image = p[np.arange(n)]
    assert image.dtype == np.int64
    assert np.array_equal(np.sort(image), np.arange(n))
    assert np.array_equal(p.inverse[image], np.arange(n))
    assert len(p) == len(p.inverse) == n


@settings(deadline=None, max_examples=examples(15, 60))
@given(n=st.integers(1, 200_000), key=st.integers(0, 2**64 - 1))
def test_bijection_and_inverse(n: int, key: int) -> None:
    p = Permutation(n, key)
    image = p[np.arange(n)]
    assert np.array_equal(np.bincount(image, minlength=n), np.ones(n))
    assert np.array_equal(p.inverse[image], np.arange(n))


@settings(deadline=None, max_examples=examples(37, 150))
@given(n=st.integers(2**32 - 2, MAX_N), key=st.integers(0, 2**64 - 1), data=st.data())
@example(n=2**32, key=0, data=None)
@example(n=2**32 + 1, key=1, data=None)
@example(n=MAX_N, key=2, data=None)
@example(n=MAX_N - 1, key=3, data=None)
def test_huge_domains(n: int, key: int, data: Any) -> None:
    index = np.array([0, 1, n // 2, n - 2, n - 1], dtype=np.int64)
    if data is not None:
        index = np.append(index, np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), dtype=np.int64))
    p = Permutation(n, key)
    image = p[index]
    assert ((image >= 0) & (image < n)).all()
    assert np.array_equal(p.inverse[image], index)
    assert np.array_equal(p[p.inverse[index]], index)
    assert len(set(image.tolist())) == len(set(index.tolist()))
    assert [p[int(i)] for i in index] == image.tolist(), "scalar and vector agree"
    assert [p.inverse[int(i)] for i in image] == index.tolist()


@settings(deadline=None, max_examples=examples(20, 80))
@given(n=st.integers(1, 20_000), key=st.integers(0, 2**64 - 1), data=st.data())
def test_scalar_is_vector(n: int, key: int, data: Any) -> None:
    p = Permutation(n, key)
    index = data.draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=20))
    vector = p[np.array(index)]
    assert [p[i] for i in index] == vector.tolist()
    assert all(type(p[i]) is int for i in index[:3])
    assert p[np.array(index).reshape(1, -1)].shape == (1, len(index))
    assert np.array_equal(p[index], vector)


def test_shapes_types_and_errors() -> None:
    p = Permutation(5000, 1)
    assert p[np.empty(0, dtype=np.int64)].shape == (0,)
    assert p[np.array([3], dtype=np.uint8)].tolist() == [p[3]]
    assert p[-1] == p[4999]
    for bad in (5000, -5001):
        with pytest.raises(IndexError, match="out of range for 5000"):
            p[bad]
        with pytest.raises(IndexError, match="out of range for 5000"):
            p[np.array([0, bad])]
        with pytest.raises(IndexError):
            p.inverse[bad]
    with pytest.raises(TypeError, match="integers"):
        p[np.array([0.5])]
    for n in (-1, MAX_N + 1):
        with pytest.raises(OrderError, match=r"2\*\*62"):
            Permutation(n, 0)
    empty = Permutation(0, 0)
    assert len(empty) == 0
    assert empty[np.empty(0, dtype=int)].size == 0
    with pytest.raises(IndexError):
        empty[0]


@pytest.mark.parametrize("n", [10, MAX_N])
@pytest.mark.parametrize("bad", [2**63, 2**64 - 10, 2**64 - 1])
def test_numbers_that_int64_takes_for_negative_ones_are_out_of_range(n: int, bad: int) -> None:
    for index in (bad, np.uint64(bad), np.array([0, bad, 1], np.uint64)):
        with pytest.raises(IndexError, match=f"index {bad} is out of range for {n} elements"):
            normalise(index, n)
    with pytest.raises(IndexError, match="out of range"):
        Permutation(n, 0)[np.array([bad], np.uint64)]
    assert normalise(np.array([0, n - 1], np.uint64), n).tolist() == [0, n - 1]


def test_the_argument_is_not_changed() -> None:
    index = np.arange(100_000)
    Permutation(100_000, 1)[index]
    assert np.array_equal(index, np.arange(100_000))


def test_pickles_as_two_numbers() -> None:
    p = Permutation(10**9, 12345)
    data = pickle.dumps(p)
    assert len(data) < 150
    assert pickle.loads(data)[77] == p[77]


def test_memory_does_not_depend_on_n() -> None:
    index = np.arange(1000)
    tracemalloc.start()
    Permutation(MAX_N, 3)[index]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300_000


# Randomness.


@pytest.mark.parametrize("n", [4, 5] if FULL else [4])
def test_all_permutations_are_equally_frequent(n: int) -> None:
    keys = 24_000 if n == 4 else 36_000
    seen = [tuple(Permutation(n, derive_key(5, k))[np.arange(n)].tolist()) for k in range(keys)]
    numbers = {each: i for i, each in enumerate(itertools.permutations(range(n)))}
    table = np.bincount([numbers[each] for each in seen], minlength=math.factorial(n))
    assert 0.001 < scipy.stats.chisquare(table).pvalue < 0.999


@full_only("thousands of permutations")
@pytest.mark.parametrize("n", [8, 16])
def test_parity_is_even_half_the_time(n: int) -> None:
    keys, even = 8000, 0
    for k in range(keys):
        order = Permutation(n, derive_key(6, k))[np.arange(n)]
        inversions = int((order[:, None] > order[None, :])[np.triu_indices(n, 1)].sum())
        even += inversions % 2 == 0
    assert scipy.stats.binomtest(even, keys).pvalue > 0.001


@full_only("thousands of permutations for each", but=["7-7000", "2-4000"])
@pytest.mark.parametrize(("n", "keys"), [(2, 4000), (3, 6000), (7, 7000), (16, 8000), (31, 8000)])
def test_every_position_gets_every_element_small(n: int, keys: int) -> None:
    images = np.array([Permutation(n, derive_key(7, k))[np.arange(n)] for k in range(keys)])
    table = np.array([np.bincount(images[:, i], minlength=n) for i in range(n)])
    expected = keys / n
    statistic = ((table - expected) ** 2 / expected).sum()
    assert 0.001 < scipy.stats.chi2.sf(statistic, (n - 1) ** 2) < 0.999


@full_only("thousands of permutations for each", but=["4099"])
@pytest.mark.parametrize("n", [4099, 65_536, 1_000_003, 2**32 + 15, 10**15] if FULL else [4099, 2**32 + 15])
def test_every_position_gets_every_part_large(n: int) -> None:
    """The Feistel range: the image of an index over many keys is spread evenly over 64 parts."""
    keys, index = 6400, np.array([0, 1, 2, n // 3, n // 2, n - 2, n - 1])
    images = np.array([Permutation(n, derive_key(8, k))[index] for k in range(keys)])
    parts = (images.astype(object) * 64 // n).astype(int)
    for column in range(len(index)):
        assert scipy.stats.chisquare(np.bincount(parts[:, column], minlength=64)).pvalue > 0.0005
    # two neighbours together: 8 x 8 parts
    together = parts[:, 0] // 8 * 8 + parts[:, 1] // 8
    assert scipy.stats.chisquare(np.bincount(together, minlength=64)).pvalue > 0.0005


@pytest.mark.parametrize("n", [4097, 5000, 8191, 8192, 10_000, 65_537])
@pytest.mark.parametrize("step", [1, 2, 64])
def test_neighbours_have_no_common_difference(n: int, step: int) -> None:
    """The commonest XOR and the commonest difference of neighbouring images, beside NumPy's own permutations."""

    def commonest(order: np.ndarray) -> tuple[int, int, int]:
        a, b = order[:-step], order[step:]
        return (
            int(np.bincount(a ^ b).max()),
            int(np.bincount((b - a) % n).max()),
            int(np.bincount(np.abs(b - a)).max()),
        )

    rng = np.random.default_rng(1)
    random = np.array([commonest(rng.permutation(n)) for _ in range(60)])
    ours = np.array([commonest(Permutation(n, derive_key(9, k))[np.arange(n)]) for k in range(30)])
    assert (ours.max(axis=0) <= random.max(axis=0) + 2).all()
    assert (np.median(ours, axis=0) <= np.quantile(random, 0.75, axis=0)).all()


@pytest.mark.parametrize("n", [5000, 100_000])
def test_cycles_rises_and_fixed_points_are_those_of_a_random_permutation(n: int) -> None:
    keys = 60
    orders = [Permutation(n, derive_key(10, k))[np.arange(n)] for k in range(keys)]
    fixed = sum(int((order == np.arange(n)).sum()) for order in orders)
    assert 0.001 < scipy.stats.poisson.cdf(fixed, keys) < 0.999
    rises = np.array([(np.diff(order) > 0).sum() for order in orders])
    # rises of a random permutation: mean (n - 1) / 2, variance (n + 1) / 12
    z = (rises - (n - 1) / 2) / math.sqrt((n + 1) / 12)
    assert scipy.stats.kstest(z, "norm").pvalue > 0.001
    displacement = np.mean([np.abs(order - np.arange(n)).mean() for order in orders])
    assert displacement == pytest.approx(n / 3, rel=0.01)


@pytest.mark.parametrize("n", [1000, 5000, 1 << 20, 10**12])
def test_one_bit_of_the_key_changes_everything(n: int) -> None:
    index = np.arange(256) * (n // 256)
    plain = Permutation(n, derive_key(11, 0))
    base = plain[index]
    for bit in range(64):
        other = Permutation(n, derive_key(11, 0) ^ (1 << bit))[index]
        assert (other == base).sum() <= 6  # expected: 256 / n, at most a quarter
        moved = np.abs(other - base).mean() / n
        assert 0.25 < moved < 0.42  # a third, for two unrelated permutations


def test_one_step_of_the_index_moves_half_of_the_bits() -> None:
    n = 1 << 32
    index = np.arange(20_000, dtype=np.int64) * 12_345
    p = Permutation(n, 5)
    for bit in range(32):
        changed = (p[index] ^ p[index ^ (1 << bit)]).astype(np.uint64)
        share = np.bitwise_count(changed).mean() if hasattr(np, "bitwise_count") else _bits(changed)
        assert abs(share - 16) < 0.2


def _bits(values: np.ndarray) -> float:
    return float(np.unpackbits(values.view(np.uint8)).sum() / len(values))


# Keys.


def test_seed_and_epoch_are_not_added() -> None:
    n = 1000
    orders = {}
    for seed, epoch in itertools.product(range(5), range(5)):
        orders[seed, epoch] = tuple(make_order("global", n, seed=seed, epoch=epoch)[np.arange(n)].tolist())
    assert len(set(orders.values())) == 25
    for one, other in itertools.combinations(orders.values(), 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 10  # one on average


def test_keys() -> None:
    assert derive_key(1, 0) != derive_key(0, 1)
    assert derive_key(0, 0, "order") != derive_key(0, 0, "block")
    assert derive_key(-1) == derive_key(2**64 - 1), "torch takes negative seeds modulo 2**64"
    assert len({derive_key(s, e) for s in range(100) for e in range(100)}) == 10_000
    for bad in (2**64, -(2**63) - 1):
        with pytest.raises(OrderError, match="64-bit"):
            derive_key(bad)
    with pytest.raises(OrderError, match="epoch"):
        derive_key(0, -1)
    words = np.arange(50, dtype=np.uint64)
    assert mix_array(99, words).tolist() == [splitmix64(99 ^ w) for w in range(50)]
    assert mix(1, 2) != mix(2, 1)


# Frozen.


def test_golden_vectors() -> None:
    """A change here breaks every saved state: it needs another ORDER_VERSION."""
    assert ORDER_VERSION == 1
    assert hex(derive_key(0, 0)) == "0x3a6a9c6c7cc47df"
    assert hex(derive_key(-5, 7, "sample")) == GOLDEN_KEY
    for (n, key), expected in GOLDEN.items():
        p = Permutation(n, key)
        index = np.unique(np.linspace(0, n - 1, 8).astype(np.int64)) if n < 2**50 else np.arange(8)
        assert p[index].tolist() == expected, (n, key)


GOLDEN_KEY = "0x9fbed31e5f061ef1"
GOLDEN = {
    (1, 3): [0],
    (2, 0): [0, 1],
    (10, 7): [0, 4, 2, 8, 7, 9, 1, 3],
    (1000, 1): [379, 4, 648, 547, 888, 756, 275, 723],
    (4096, 1): [2595, 1893, 3119, 3399, 2153, 493, 522, 2896],
    (4097, 1): [32, 2673, 3466, 1320, 2162, 1770, 3647, 3683],
    (50000, 2): [240, 10854, 13566, 30512, 24967, 1287, 31099, 18797],
    (50000000, 3): [38044671, 36828213, 22907387, 2097609, 21337479, 12638303, 4999102, 31507805],
    (4294967295, 4): [1308640205, 1765216390, 62310717, 4256134361, 1529210069, 2989210754, 941158931, 4163310649],
    (4294967297, 5): [1868056370, 3824335708, 441779822, 3346008194, 2992735344, 3185594880, 1388906357, 1173795589],
    (1000000000000, 6): [
        7883304716,
        288596945803,
        877473783723,
        88681363937,
        191221363806,
        524754927583,
        977173965381,
        147662147468,
    ],
    (4611686018427387904, 7): [
        2267762966920791579,
        3897685368955651152,
        686736125615578026,
        1985901288195777518,
        1795878862336646816,
        4460643713751235984,
        3428571664809692520,
        3378254009821821129,
    ],
}


def test_tables_of_a_thousand_orders_are_kept() -> None:
    """Making one costs as much as thousands of look-ups, and a mixture of small sources asks all of them by turns."""
    permutation_module._tables.cache_clear()
    orders = [Permutation(20, key) for key in range(1000)]
    assert [order[3] for order in orders] == [order[3] for order in orders]
    assert permutation_module._tables.cache_info().misses == len(orders)
