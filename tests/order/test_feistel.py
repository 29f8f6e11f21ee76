"""The Feistel network: tables of its rounds give what its arithmetic gives."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from full_run import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.hashing import derive_key
from penstock.order import Permutation
from penstock.order.permutation import ROUNDS, feistel, feistel_by_table, round_tables

keys = st.lists(st.integers(0, 2**32 - 1), min_size=ROUNDS, max_size=ROUNDS)


@settings(deadline=None, max_examples=examples(50, 200))
@given(n=st.integers(2, 300_000), round_keys=keys, seed=st.integers(0, 2**32))
@example(n=2, round_keys=[0] * ROUNDS, seed=0)
@example(n=2**26, round_keys=[2**32 - 1] * ROUNDS, seed=1)
def test_tables_give_what_arithmetic_gives(n: int, round_keys: list[int], seed: int) -> None:
    a = math.isqrt(n - 1) + 1
    network = a, -(-n // a), round_keys
    domain = network[0] * network[1]
    indices = np.random.default_rng(seed).integers(0, domain, 500).astype(np.uint64)
    indices[:2] = 0, domain - 1
    image = feistel_by_table(indices, network[1], round_tables(*network))
    assert image.dtype == np.uint64
    assert np.array_equal(image, feistel(indices, *network))
    assert image.tolist() == [feistel(i, *network) for i in indices.tolist()]
    assert np.array_equal(feistel(image, *network, inverse=True), indices)


@pytest.mark.parametrize("n", [4097, 65_536, 1_281_167, 50_000_000, 2**26, 2**26 + 1])
def test_a_permutation_that_was_asked_for_much_gives_what_a_new_one_gives(n: int) -> None:
    key = derive_key(3, n)
    used = Permutation(n, key)
    for _ in range(12):
        used[np.arange(min(n, 10_000))]
    indices = np.random.default_rng(n).integers(0, n, 3000)
    assert np.array_equal(used[indices], Permutation(n, key)[indices])
    assert used[indices[:20]].tolist() == [used[i] for i in indices[:20].tolist()]
    assert np.array_equal(used.inverse[used[indices]], indices)


@pytest.mark.parametrize(("n", "bytes_kept"), [(2**26, 2_300_000), (2**26 + 1, 20_000), (2**32, 20_000)])
def test_a_permutation_keeps_as_much_memory_as_it_says(n: int, bytes_kept: int) -> None:
    order = Permutation(n, 1)
    order[np.arange(1000)]
    tracemalloc.start()
    for _ in range(60):
        order[np.arange(10_000)]
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < bytes_kept
