"""The order that deals parts of the rows to nodes: a bijection in which each rank has the same rows in every epoch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from full_run import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.order import NodeShuffle
from penstock.order.nodes import VIRTUAL_NODES

LEAST = 64 * VIRTUAL_NODES
"""Fewer rows are one part."""


@settings(deadline=None, max_examples=examples(30, 200))
@given(
    n=st.integers(0, 100) | st.integers(LEAST - 2, LEAST + 1_000),
    block_size=st.none() | st.integers(1, 140),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 100),
)
def test_it_is_a_bijection(n: int, block_size: int | None, seed: int, epoch: int) -> None:
    order = NodeShuffle(n, seed=seed, epoch=epoch, block_size=block_size)
    rows = order[np.arange(n)]
    assert np.array_equal(np.sort(rows), np.arange(n))
    assert np.array_equal(order.inverse[rows], np.arange(n))
    assert [order[i] for i in range(seed % 997, n, 997)] == rows[seed % 997 :: 997].tolist()
    assert [order.inverse[int(row)] for row in rows[::1009]] == list(range(0, n, 1009))
    assert len(order) == len(order.inverse) == n


@pytest.mark.parametrize("block_size", [None, 10])
@pytest.mark.parametrize("ranks", [2, 3, 8, 24, 64, 192])
def test_a_rank_has_the_same_rows_in_every_epoch(block_size: int | None, ranks: int) -> None:
    n = 20_011
    epochs = [NodeShuffle(n, epoch=e, block_size=block_size)[np.arange(n)] for e in range(3)]
    for before, after in itertools.pairwise(epochs):
        assert not np.array_equal(before, after)
        for rank in range(0, ranks, 5):
            assert set(before[rank::ranks].tolist()) == set(after[rank::ranks].tolist())


@pytest.mark.parametrize("block_size", [None, 20])
def test_rows_meet_others_in_every_epoch(block_size: int | None) -> None:
    """Parts are shuffled independently."""
    n = VIRTUAL_NODES * 100
    first, after = (NodeShuffle(n, epoch=e, block_size=block_size) for e in range(2))
    rounds = after.inverse[first[np.arange(VIRTUAL_NODES)]] // VIRTUAL_NODES
    assert len(np.unique(rounds)) > 70


def test_shards_stay_whole() -> None:
    shards = VIRTUAL_NODES * 3 + 30
    order = NodeShuffle(shards * 100, block_size=100)
    numbers = order[np.arange(shards * 100)] // 100
    ranks = np.arange(shards * 100) % 8
    pairs = set(zip(numbers.tolist(), ranks.tolist(), strict=True))
    # Whole shards are dealt evenly. All parts share the last ones.
    assert sum(number < VIRTUAL_NODES * 3 for number, _ in pairs) == VIRTUAL_NODES * 3
    for rank in range(8):
        mine = numbers[ranks == rank]
        for shard in range(0, VIRTUAL_NODES * 3, 29):
            places = np.flatnonzero(mine == shard)
            # A part reads one block after the other.
            assert len(places) in (0, 100)
            assert not len(places) or places[-1] - places[0] < 24 * 100


def test_parts_are_of_the_seed() -> None:
    n = 20_000
    first, other = (set(NodeShuffle(n, seed=s, block_size=10)[np.arange(0, n, 2)].tolist()) for s in (0, 1))
    assert 0.3 < len(first & other) / len(first) < 0.7


def test_many_rows() -> None:
    n = 10**12 + 7
    order = NodeShuffle(n, seed=3, epoch=9, block_size=1024)
    positions = np.array([0, 1, 39, 40, 65_536, 10**11 + 3, n - 1])
    assert np.array_equal(order.inverse[order[positions]], positions)


def test_golden() -> None:
    """Frozen under `ORDER_VERSION`."""
    for block_size, n, rows in GOLDEN:
        order = NodeShuffle(n, seed=5, epoch=3, block_size=block_size)
        assert order[np.arange(0, n, n // 7)].tolist() == rows


def test_positions_outside_the_epoch() -> None:
    with pytest.raises(IndexError):
        NodeShuffle(10)[10]


GOLDEN: list[tuple[int | None, int, list[int]]] = [
    (8, 40, [15, 17, 12, 6, 28, 18, 11, 1]),
    (8, 20011, [7561, 8772, 11400, 1825, 14607, 4718, 3665, 18147]),
    (None, 40, [15, 17, 12, 6, 28, 18, 11, 1]),
    (None, 20011, [7528, 8750, 11364, 1859, 14630, 4731, 3709, 18101]),
]
