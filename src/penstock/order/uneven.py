"""Block shuffles with blocks of any sizes. (`BlockShuffle` has blocks of one size.)"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from penstock.hashing import mix
from penstock.order.permutation import Indices, Inverse, Permutation, normalise
from penstock.order.shuffle import groups, window_order

__all__ = ["PermutedBlocks", "UnevenBlockShuffle", "cut_blocks"]


class PermutedBlocks:
    """Permuted blocks, with the samples of each block in their own order.

    Args:
        starts: the first row of each block, then the number of rows: ascending, int64 of shape (blocks + 1,).
        key: 64-bit key, see `penstock.order.derive_key`.

    Cost: O(blocks) memory, two binary searches per look-up.

    >>> blocks = PermutedBlocks(np.array([0, 3, 4, 6]), key=4)
    >>> blocks.rows(np.arange(6)).tolist()
    [4, 5, 0, 1, 2, 3]
    """

    def __init__(self, starts: Indices, key: int) -> None:
        self._starts = np.asarray(starts, np.int64)
        sizes = np.diff(self._starts)
        blocks = Permutation(len(sizes), key)
        self._blocks = blocks[np.arange(len(sizes))]
        self._slots = blocks.inverse[np.arange(len(sizes))]
        self.begins: Indices = np.concatenate([[0], np.cumsum(sizes[self._blocks])]).astype(np.int64)
        """The start of each permuted block, then the number of rows."""

    def rows(self, places: Indices) -> Indices:
        """Return the rows at places of the permuted blocks: int64 of the shape of ``places``."""
        slots = self.begins.searchsorted(places, "right") - 1
        return places - self.begins[slots] + self._starts[self._blocks[slots]]

    def places(self, rows: Indices) -> Indices:
        """Return the places of rows: the inverse of `rows`."""
        blocks = self._starts.searchsorted(rows, "right") - 1
        return rows - self._starts[blocks] + self.begins[self._slots[blocks]]


class UnevenBlockShuffle:
    """A block shuffle with blocks of any sizes: permutes blocks, then samples within windows of blocks.

    Args:
        starts: see `PermutedBlocks`.
        key: 64-bit key, see `penstock.order.derive_key`.
        window: number of blocks that are mixed.

    ``order[position]`` and ``order.inverse[row]`` take ints and integer arrays. Cost: O(blocks) memory, one
    `Permutation` for each window in a look-up.

    >>> order = UnevenBlockShuffle(np.array([0, 30, 40, 100]), key=1, window=2)
    >>> sorted(order[np.arange(100)].tolist()) == list(range(100))
    True
    """

    def __init__(self, starts: Indices, key: int, *, window: int) -> None:
        self._key = key
        self._blocks = PermutedBlocks(starts, mix(key, 0))
        self._n = int(self._blocks.begins[-1])
        self._bounds = np.append(self._blocks.begins[:-1:window], self._n)

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: Any) -> Any:
        places = normalise(index, self._n)
        flat = places.reshape(-1)
        for inside, begin, order in self._windows(flat):
            flat[inside] = begin + order[flat[inside] - begin]
        flat[:] = self._blocks.rows(flat)
        return int(places) if places.ndim == 0 else places

    @cached_property
    def inverse(self) -> Inverse:
        """The inverse bijection, with the same indexing."""
        return Inverse(self._n, self._locate)

    def _locate(self, index: Any) -> Any:
        rows = normalise(index, self._n)
        flat = rows.reshape(-1)
        flat[:] = self._blocks.places(flat)
        for inside, begin, order in self._windows(flat):
            flat[inside] = begin + order.inverse[flat[inside] - begin]
        return int(rows) if rows.ndim == 0 else rows

    def _windows(self, places: Indices) -> list[tuple[Any, int, Permutation]]:
        """Return, for each window of the places, the places inside, its start, and its permutation."""
        numbers = self._bounds.searchsorted(places, "right") - 1
        found = []
        for number, inside in groups(numbers):
            begin, end = self._bounds[number : number + 2].tolist()
            found.append((inside, begin, window_order(end - begin, mix(self._key, 1, number))))
        return found


def cut_blocks(starts: Indices, block_size: int) -> Indices:
    """Return the starts of blocks of about ``block_size`` rows, which begin at the starts of shards where possible.

    Args:
        starts: the first row of each shard, then the number of rows.
        block_size: a block has less than twice as many rows. No shard with at most this many rows is cut.

    >>> cut_blocks(np.array([0, 60, 120, 180, 240]), 100).tolist(), cut_blocks(np.array([0, 250]), 100).tolist()
    ([0, 60, 180, 240], [0, 100, 200, 250])
    """
    end = int(starts[-1])
    even = np.arange(0, end, block_size, dtype=np.int64)
    near = starts[starts.searchsorted(even, "right") - 1]
    return np.append(np.unique(np.where(even - near < block_size, near, even)), end)
