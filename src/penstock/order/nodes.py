"""`NodeShuffle`: the order of an epoch in which each node keeps most of the rows that it had before.

Rows lie on a line in *home order*: shards (or blocks of rows) permuted by the seed alone, the same in all epochs. Each
node has an arc of that line, and shuffles it anew in each epoch. Arcs are turned by a fraction of themselves from epoch
to epoch, so rows move on to the next node in time::

    home line   s7 s2 s9 s4 | s1 s8 s0 s5 | s3 s6 ...
    epoch 0     [  node 0   ) [  node 1   ) [ ...
    epoch 1       [  node 0   ) [  node 1   ) [ ...        an eighth of an arc further

Positions are dealt to ranks in strides, and ranks ``k * ranks / nodes`` and following are on node k. So position p
belongs to a node, and stands for the next row of its arc.

Invariant: a bijection of ``range(n)`` that depends on (n, seed, epoch, nodes, ranks, the starts of shards) alone.
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
"""Arcs are turned by one part of so many from epoch to epoch."""

_BLOCKS = 64  # of an arc, where blocks are chosen here


class Nodes(NamedTuple):
    """How the ranks of a job lie on nodes: equally many on each, in their order."""

    nodes: int
    ranks: int


class _Line(Protocol):
    """Rows in home order."""

    def rows(self, places: Indices) -> Indices: ...
    def places(self, rows: Indices) -> Indices: ...
    def blocks_in(self, begin: int, size: int, key: int) -> Order: ...


class NodeShuffle:
    """The order of an epoch that deals shards, or blocks of rows, to nodes.

    Args:
        n: number of samples.
        layout: nodes and ranks.
        seed, epoch: together they choose the order; the home order is one of the seed alone.
        kind: how a node shuffles its arc: ``"block"`` or ``"global"``.
        block_size, window: of the block shuffle, see `penstock.order.make_order`; the global one has blocks of up to
            1,024 rows.
        starts: the first row of each shard, and n, so that shards stay whole; by default blocks do.

    Raises:
        OrderError: another kind, or ranks that are not equally many on each node.

    ``order[position]`` takes an int or an integer array, ``order.inverse[row]`` says where a row stands. Cost: as of
    `BlockShuffle`, and O(1) memory; with ``starts`` O(shards), and a number for each block of ``block_size`` rows.

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
            raise OrderError(f"nodes shuffle their rows by 'block' or 'global', not by {kind!r}")
        if nodes < 1 or ranks < 1 or ranks % nodes:
            raise OrderError(f"{ranks} ranks on {nodes} nodes: there have to be equally many on each")
        self.n, self.layout, self.kind = n, layout, kind
        if kind == "global":  # so that arcs have enough blocks, wherever they lie in the file
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
        """The inverse bijection, indexed in the same way."""
        return Inverse(self.n, self._locate)

    def nodes_of(self, positions: Indices) -> Indices:
        """Return the nodes that positions belong to: int64 of the shape of ``positions``."""
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
        """Return the order of a node's arc, as places from its beginning on."""
        if node not in self._arcs:
            begin, end = self._begins[node : node + 2].tolist()
            begin_on_line = (begin + self._turn) % max(self.n, 1)
            self._arcs[node] = self._line.blocks_in(begin_on_line, end - begin, mix(self._key, node))
        return self._arcs[node]


class _Blocks:
    """Rows of which nobody knows the shards."""

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
    """Rows in shards, which stay whole but at the ends of arcs."""

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
    # All epochs of a job have the same home order.
    return PermutedBlocks(np.frombuffer(starts, np.int64), key)
