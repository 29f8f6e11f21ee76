"""`NodeShuffle`: the order of an epoch in which each node reads mostly the rows that it read in the last epoch.

Rows have a *home order*: shards (or blocks of rows) permuted by the seed only, the same in all epochs. Each node has an
arc of this closed line, and shuffles it again in each epoch. From epoch to epoch the arcs turn by a fraction of their
length, so that rows slowly move on to the next node::

    home line   s7 s2 s9 s4 | s1 s8 s0 s5 | s3 s6 ...
    epoch 0     [  node 0   ) [  node 1   ) [ ...
    epoch 1       [  node 0   ) [  node 1   ) [ ...        an eighth of an arc further

Positions are split among ranks in strides, and node k has the ranks from ``k * ranks / nodes`` on. So each position
belongs to a node, and maps to the next row of the node's arc.

Invariant: a bijection of ``range(n)`` that depends only on (n, seed, epoch, nodes, ranks, the starts of shards).
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock.errors import OrderError
from penstock.hashing import derive_key, mix
from penstock.order.permutation import Indices, Inverse, Permutation, normalise
from penstock.order.shuffle import DEFAULT_BLOCK_SIZE, DEFAULT_WINDOW, BlockShuffle, Order, groups
from penstock.order.uneven import PermutedBlocks, UnevenBlockShuffle, cut_blocks

__all__ = ["TURN", "NodeShuffle", "Nodes"]

TURN = 8
"""Arcs turn by 1/8 of their length from epoch to epoch."""

_BLOCKS = 64
"""Blocks of an arc in the global shuffle, which has no block size of its own."""


class Nodes(NamedTuple):
    """The nodes and ranks of a job: the same number of ranks on each node, in order."""

    nodes: int
    ranks: int


class _Line(Protocol):
    """Rows in home order."""

    def rows(self, places: Indices) -> Indices: ...
    def places(self, rows: Indices) -> Indices: ...
    def blocks_in(self, begin: int, size: int, key: int) -> Order: ...


class NodeShuffle:
    """The order of an epoch that assigns shards, or blocks of rows, to nodes.

    Args:
        n: number of samples.
        layout: nodes and ranks.
        seed, epoch: choose the order together; the home order depends only on the seed.
        kind: how a node shuffles its arc: ``"block"`` or ``"global"``.
        block_size, window: of the block shuffle, see `penstock.order.make_order`. The global shuffle assigns blocks of
            up to 1,024 rows.
        starts: the first row of each shard, then n. Shards then stay whole; by default, blocks do.

    Raises:
        OrderError: an unknown kind, or nodes with different numbers of ranks.

    ``order[position]`` takes an int or an integer array, and ``order.inverse[row]`` returns the position of a row.
    Cost: as `BlockShuffle`, and O(1) memory. With ``starts``, O(shards) memory and one number per block of
    ``block_size`` rows.

    >>> order = NodeShuffle(1000, Nodes(nodes=2, ranks=4), block_size=10, window=2)
    >>> rows = order[np.arange(1000)]
    >>> sorted(rows.tolist()) == list(range(1000))
    True
    >>> after = NodeShuffle(1000, Nodes(nodes=2, ranks=4), epoch=1, block_size=10, window=2)[np.arange(1000)]
    >>> first = np.arange(1000) % 4 < 2  # the positions of node 0
    >>> len(set(rows[first].tolist()) & set(after[first].tolist()))
    438
    """

    def __init__(
        self,
        n: int,
        layout: Nodes,
        *,
        seed: int = 0,
        epoch: int = 0,
        kind: str = "block",
        block_size: int = DEFAULT_BLOCK_SIZE,
        window: int = DEFAULT_WINDOW,
        starts: Indices | None = None,
    ) -> None:
        nodes, ranks = layout
        if kind not in ("block", "global"):
            raise OrderError(f"nodes shuffle their rows with kind='block' or 'global', got {kind!r}")
        if nodes < 1 or ranks < 1 or ranks % nodes:
            raise OrderError(f"{ranks} ranks on {nodes} nodes: each node must have the same number of ranks")
        self.n, self.layout, self.kind = n, layout, kind
        if kind == "global":
            # An arc needs enough blocks, from all over the file.
            block_size = max(1, min(DEFAULT_BLOCK_SIZE, n // (nodes * _BLOCKS)))
        self.block_size, self.window = block_size, window
        self._here = ranks // nodes
        self._key = derive_key(seed, epoch, "nodes")
        home = derive_key(seed, 0, "home")
        self._line: _Line = (
            _Blocks(n, home, kind, block_size, window)
            if starts is None
            else _Shards(starts, home, kind, block_size, window)
        )
        self._turn = epoch * n // (TURN * nodes) % max(n, 1)
        self._arcs: dict[int, Order] = {}
        places = np.arange(nodes + 1, dtype=np.int64) * self._here
        self._begins = n // ranks * places + np.minimum(n % ranks, places)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        positions = normalise(index, self.n)
        flat = positions.reshape(-1)
        rounds, ranks = np.divmod(flat, self.layout.ranks)
        nodes = ranks // self._here
        places = rounds * self._here + ranks - nodes * self._here
        for node, inside in groups(nodes):
            places[inside] = self._arc(node)[places[inside]] + self._begins[node]
        flat[:] = self._line.rows((places + self._turn) % max(self.n, 1))
        return int(positions) if positions.ndim == 0 else positions

    @cached_property
    def inverse(self) -> Inverse:
        """The inverse bijection, with the same indexing."""
        return Inverse(self.n, self._locate)

    def nodes_of(self, positions: Indices) -> Indices:
        """Return the nodes of positions: int64 of the shape of ``positions``."""
        return np.asarray(positions) % self.layout.ranks // self._here

    def _locate(self, index: Any) -> Any:
        rows = normalise(index, self.n)
        flat = rows.reshape(-1)
        places = (self._line.places(flat) - self._turn) % max(self.n, 1)
        nodes = self._begins.searchsorted(places, "right") - 1
        places -= self._begins[nodes]
        for node, inside in groups(nodes):
            places[inside] = self._arc(node).inverse[places[inside]]  # type: ignore[attr-defined]
        rounds, ranks = np.divmod(places, self._here)
        flat[:] = rounds * self.layout.ranks + nodes * self._here + ranks
        return int(rows) if rows.ndim == 0 else rows

    def _arc(self, node: int) -> Order:
        """Return the order of a node's arc, as places counted from its start."""
        if node not in self._arcs:
            begin, end = self._begins[node : node + 2].tolist()
            begin_on_line = (begin + self._turn) % max(self.n, 1)
            self._arcs[node] = self._line.blocks_in(begin_on_line, end - begin, mix(self._key, node))
        return self._arcs[node]


class _Blocks:
    """The home order of rows whose shards are unknown."""

    def __init__(self, n: int, key: int, kind: str, block_size: int, window: int) -> None:
        self._home = BlockShuffle(n, key, block_size=block_size, window=1)
        self._kind, self._block_size, self._window = kind, block_size, window

    def rows(self, places: Indices) -> Indices:
        self._home.permute_blocks(places)
        return places

    def places(self, rows: Indices) -> Indices:
        places = rows.copy()
        self._home.place_blocks(places)
        return places

    def blocks_in(self, begin: int, size: int, key: int) -> Order:
        if self._kind == "global":
            return Permutation(size, key)
        return BlockShuffle(size, key, block_size=self._block_size, window=self._window)


class _Shards:
    """The home order of rows in shards, which stay whole except at the ends of arcs."""

    def __init__(self, starts: Indices, key: int, kind: str, block_size: int, window: int) -> None:
        self._home = _permuted(np.asarray(starts, np.int64).tobytes(), key)
        self._kind, self._block_size, self._window = kind, block_size, window

    def rows(self, places: Indices) -> Indices:
        return self._home.rows(places)

    def places(self, rows: Indices) -> Indices:
        return self._home.places(rows)

    def blocks_in(self, begin: int, size: int, key: int) -> Order:
        if self._kind == "global":
            return Permutation(size, key)
        begins = self._home.begins
        inside = (begins[:-1] - begin) % max(int(begins[-1]), 1)
        starts = np.append(np.unique(np.append(inside[inside < size], 0)), size)
        return UnevenBlockShuffle(cut_blocks(starts, self._block_size), key, window=self._window)


@lru_cache(maxsize=4)
def _permuted(starts: bytes, key: int) -> PermutedBlocks:
    # Cached: all epochs of a job have the same home order.
    return PermutedBlocks(np.frombuffer(starts, np.int64), key)
