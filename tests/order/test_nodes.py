"""The order that deals shards to nodes: a bijection, of which each node keeps most from epoch to epoch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from full_run import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import OrderError
from penstock.order import NodeShuffle, Partition
from penstock.order.nodes import TURN, Nodes
from penstock.order.uneven import UnevenBlockShuffle, cut_blocks

starts_of = st.lists(st.integers(0, 50), max_size=20).map(lambda sizes: np.cumsum([0, *sizes]))
layouts = st.tuples(st.integers(1, 6), st.integers(1, 4)).map(lambda both: Nodes(both[0], both[0] * both[1]))


@settings(deadline=None, max_examples=examples(80, 400))
@given(
    starts=starts_of,
    has_shards=st.booleans(),
    layout=layouts,
    kind=st.sampled_from(["block", "global"]),
    block_size=st.integers(1, 70),
    window=st.integers(1, 6),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 100),
)
def test_it_is_a_bijection(
    starts: Any, has_shards: bool, layout: Nodes, kind: str, block_size: int, window: int, seed: int, epoch: int
) -> None:
    n = int(starts[-1])
    sizes = {"block_size": block_size, "window": window, "starts": starts if has_shards else None}
    order = NodeShuffle(n, layout, seed=seed, epoch=epoch, kind=kind, **sizes)
    rows = order[np.arange(n)]
    assert np.array_equal(np.sort(rows), np.arange(n))
    assert np.array_equal(order.inverse[rows], np.arange(n))
    assert [order[i] for i in range(seed % 9, n, 9)] == rows[seed % 9 :: 9].tolist()
    assert [order.inverse[int(row)] for row in rows[::7]] == list(range(0, n, 7))
    assert len(order) == len(order.inverse) == n


@pytest.mark.parametrize("by_shards", [False, True])
def test_a_node_keeps_seven_eighths(by_shards: bool) -> None:
    n, layout = 64_000, Nodes(4, 8)
    starts = np.arange(0, n + 1, 100) if by_shards else None
    orders = [NodeShuffle(n, layout, epoch=e, block_size=100, window=4, starts=starts) for e in range(40)]
    rows = [order[np.arange(n)] for order in orders]
    of_node = [[set(some[orders[0].nodes_of(np.arange(n)) == node].tolist()) for node in range(4)] for some in rows]
    for before, after in itertools.pairwise(of_node):
        for a, b in zip(before, after, strict=True):
            assert len(a & b) == n // 4 * (TURN - 1) // TURN
    # Arcs come round, so every node has every row in time.
    assert set().union(*(nodes[0] for nodes in of_node)) == set(range(n))
    # Ranks have the rows of their nodes.
    for rank in range(8):
        mine = rows[0][Partition(n, 8, rank).positions()]
        assert set(mine.tolist()) <= of_node[0][rank // 2]


def test_shards_stay_whole_but_at_the_ends_of_arcs() -> None:
    sizes = np.random.default_rng(3).integers(60, 140, 400)
    starts = np.cumsum([0, *sizes])
    n, layout = int(starts[-1]), Nodes(4, 4)
    for epoch in range(3):
        order = NodeShuffle(n, layout, epoch=epoch, block_size=140, window=1, starts=starts)
        positions = np.arange(n)
        shards = starts.searchsorted(order[positions], "right") - 1
        nodes = order.nodes_of(positions)
        pairs = len(set(zip(shards.tolist(), nodes.tolist(), strict=True)))
        assert len(sizes) <= pairs <= len(sizes) + 4
        for node in range(4):
            mine = shards[nodes == node]
            runs = 1 + np.count_nonzero(np.diff(mine))
            # Blocks are whole shards: a shard, once it was left, does not come again.
            in_blocks = len(np.unique(mine))
            assert runs >= in_blocks
            windows = [np.flatnonzero(mine == shard) for shard in np.unique(mine)]
            assert max(places[-1] - places[0] for places in windows) < 2 * 140


def test_home_order_is_of_the_seed_alone() -> None:
    n, layout = 8_000, Nodes(2, 2)
    first, other = (set(NodeShuffle(n, layout, seed=s, block_size=10)[np.arange(0, n, 2)].tolist()) for s in (0, 1))
    assert 0.4 < len(first & other) / len(first) < 0.6


def test_far_out() -> None:
    n = 10**12 + 7
    order = NodeShuffle(n, Nodes(5, 40), seed=3, epoch=9)
    positions = np.array([0, 1, 39, 40, 65_536, 10**11 + 3, n - 1])
    assert np.array_equal(order.inverse[order[positions]], positions)


def test_golden() -> None:
    """Frozen under `ORDER_VERSION`."""
    order = NodeShuffle(40, Nodes(2, 4), seed=5, epoch=3, block_size=4, window=2)
    assert order[np.arange(40)].tolist() == GOLDEN_BLOCKS
    starts = np.array([0, 7, 9, 20, 33, 40])
    order = NodeShuffle(40, Nodes(2, 4), seed=5, epoch=3, block_size=8, window=2, starts=starts)
    assert order[np.arange(40)].tolist() == GOLDEN_SHARDS
    order = NodeShuffle(40, Nodes(2, 4), seed=5, epoch=3, kind="global", starts=starts)
    assert order[np.arange(40)].tolist() == GOLDEN_GLOBAL


def test_errors() -> None:
    with pytest.raises(OrderError, match="got 'none'"):
        NodeShuffle(10, Nodes(1, 1), kind="none")
    for layout in (Nodes(2, 3), Nodes(0, 1), Nodes(1, 0)):
        with pytest.raises(OrderError, match="same number of ranks"):
            NodeShuffle(10, layout)
    with pytest.raises(IndexError):
        NodeShuffle(10, Nodes(1, 1))[10]


@settings(deadline=None, max_examples=examples(80, 400))
@given(starts=starts_of, block_size=st.integers(1, 70), window=st.integers(1, 6), key=st.integers(0, 2**64 - 1))
def test_uneven_blocks(starts: Any, block_size: int, window: int, key: int) -> None:
    n = int(starts[-1])
    cuts = cut_blocks(starts, block_size)
    sizes = np.diff(cuts)
    assert (cuts[0], cuts[-1]) == (0, n) or n == 0
    assert (sizes > 0).all()
    assert sizes.max(initial=0) < 2 * block_size
    for begin, end in itertools.pairwise(starts):
        if end - begin <= block_size:
            assert not ((cuts > begin) & (cuts < end)).any()
    order = UnevenBlockShuffle(cuts, key, window=window)
    rows = order[np.arange(n)]
    assert np.array_equal(np.sort(rows), np.arange(n))
    assert np.array_equal(order.inverse[rows], np.arange(n))
    blocks = cuts.searchsorted(rows, "right") - 1
    for block in np.unique(blocks):
        places = np.flatnonzero(blocks == block)
        assert places[-1] - places[0] < window * max(sizes.max(), 1)


GOLDEN_BLOCKS = [
    18,
    8,
    7,
    20,
    10,
    16,
    34,
    35,
    17,
    9,
    32,
    21,
    3,
    27,
    33,
    22,
    0,
    13,
    29,
    38,
    1,
    11,
    28,
    39,
    15,
    2,
    37,
    30,
    12,
    14,
    36,
    23,
    24,
    25,
    6,
    5,
    26,
    31,
    19,
    4,
]
GOLDEN_SHARDS = [
    26,
    25,
    34,
    35,
    27,
    23,
    38,
    37,
    28,
    12,
    3,
    2,
    11,
    9,
    4,
    39,
    32,
    31,
    8,
    7,
    20,
    21,
    33,
    0,
    24,
    10,
    1,
    36,
    30,
    22,
    16,
    17,
    29,
    13,
    19,
    14,
    6,
    5,
    15,
    18,
]
GOLDEN_GLOBAL = [
    28,
    11,
    4,
    0,
    22,
    6,
    33,
    14,
    12,
    31,
    34,
    35,
    25,
    21,
    8,
    2,
    13,
    27,
    1,
    18,
    24,
    10,
    39,
    7,
    23,
    26,
    37,
    38,
    29,
    30,
    3,
    19,
    9,
    5,
    16,
    17,
    20,
    32,
    15,
    36,
]
