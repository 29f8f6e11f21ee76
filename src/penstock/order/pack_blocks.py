"""`PackBlockOrder`: blocks of packs in random order, and the packs of each block in random order.

    blocks of documents     0 ... 262,143 | 262,144 ... 524,287 | ...       each is packed separately
    packs                   0 1 2 3 4     | 5 6 7               | 8 9       `firsts` = 0, 5, 8, 10
    an epoch                6 7 5 | 8 9 | 3 0 4 1 2

So a job that reads one block of packs reads only one block of documents.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from penstock.hashing import derive_key, mix
from penstock.order.permutation import Bijection, Indices, Permutation

__all__ = ["PACK_BLOCK_ORDER", "PackBlockOrder", "different"]

PACK_BLOCK_ORDER = "pack-blocks-1"
"""Name of the frozen order. States contain it."""


class PackBlockOrder(Bijection):
    """The order of the packs in one epoch, by pack number.

    Args:
        firsts: the first pack of each block, then the number of packs: int64 of shape (blocks + 1,).
        seed, epoch: choose the order together; every pair yields an unrelated order.

    Cost: a `Permutation` look-up for each block of the positions; 32 bytes of memory per block.

    >>> order = PackBlockOrder(np.array([0, 3, 5]), seed=0, epoch=0)
    >>> packs = order[np.arange(5)].tolist()
    >>> sorted(packs) == list(range(5)), {pack < 3 for pack in packs[-2:]} in ({True}, {False})
    (True, True)
    """

    def __init__(self, firsts: Indices, seed: int, epoch: int) -> None:
        self._key = derive_key(seed, epoch, PACK_BLOCK_ORDER)
        self._starts = firsts
        self._order = Permutation(len(firsts) - 1, mix(self._key, 0))
        self._blocks = self._order[np.arange(len(firsts) - 1)]
        self._firsts = firsts[self._blocks]
        self._begins = np.concatenate([[0], np.cumsum(np.diff(firsts)[self._blocks])])
        self.n = int(self._begins[-1])

    def _rows(self, positions: Indices) -> Indices:
        steps = self._begins.searchsorted(positions, "right") - 1
        for step in different(steps):
            here = steps == step
            positions[here] = self._firsts[step] + self._inside(step)[positions[here] - self._begins[step]]
        return positions

    def _find(self, rows: Indices) -> Indices:
        steps = self._order.inverse[self._starts.searchsorted(rows, "right") - 1]
        for step in different(steps):
            here = steps == step
            rows[here] = self._begins[step] + self._inside(step).inverse[rows[here] - self._firsts[step]]
        return rows

    def _inside(self, step: int) -> Permutation:
        """Return the order of the packs of a block."""
        size = int(self._begins[step + 1] - self._begins[step])
        return _permutation(size, mix(self._key, 1, int(self._blocks[step])))


def different(numbers: Indices) -> list[int]:
    """Return the distinct numbers, ascending.

    Not by `numpy.unique`: its first call in a process imports ``numpy.ma``, which takes longer than computing a batch.
    """
    return sorted(set(numbers.tolist()))


@lru_cache(maxsize=8)
def _permutation(n: int, key: int) -> Permutation:
    return Permutation(n, key)
