"""`ClassShuffle`: a permutation of samples within classes, such as samples of similar length.

Samples are numbered class after class, and ``starts`` has the start of each class. Each class has its own keyed
permutation, and no sample leaves its class::

    starts     0       4     7        12
    class      0 0 0 0 1 1 1 2 2 2 2 2
    shuffled   2 0 3 1 6 4 5 9 11 7 10 8

A look-up is one Feistel network with the sizes and keys of each index's class (`penstock.order.permutation`), with
cycle walking. So it costs the same for one class and for ten thousand.

Promises: a bijection within each class; 50 bytes of memory per class; the same on every machine, frozen by golden
vectors in the tests under `ORDER_VERSION`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.errors import OrderError
from penstock.hashing import mix, mix_array
from penstock.order.permutation import MAX_N, ROUNDS, Bijection, Indices, feistel

__all__ = ["ClassShuffle", "class_of", "square_roots"]

_BLOCK = 32768  # indices processed at once, so that they stay in the cache


class ClassShuffle(Bijection):
    """A permutation of ``range(starts[0], starts[-1])`` that keeps every class.

    Args:
        starts: the start of each class, then the end of the last: int64 of shape (classes + 1,), not descending.
        key: any integer, taken modulo 2**64.
        numbers: numbers of the classes, of which their keys are made; by default 0, 1, 2, ...

    Raises:
        OrderError: starts are negative or descending.

    Cost: 0.2 microseconds per index in large arrays.

    >>> shuffle = ClassShuffle([0, 4, 7], key=1)
    >>> sorted(shuffle[np.arange(4)].tolist()), sorted(shuffle[np.arange(4, 7)].tolist())
    ([0, 1, 2, 3], [4, 5, 6])
    >>> shuffle.inverse[shuffle[np.arange(7)]].tolist()
    [0, 1, 2, 3, 4, 5, 6]
    """

    def __init__(self, starts: npt.ArrayLike, key: int, *, numbers: Indices | None = None) -> None:
        self.starts: Indices = np.asarray(starts, dtype=np.int64)
        sizes = np.diff(self.starts)
        if not len(self.starts) or self.starts[0] < 0 or self.starts[-1] > MAX_N or (sizes < 0).any():
            raise OrderError("starts of classes ascend from 0 or more to 2**62 at most")
        self.n = int(self.starts[-1])
        self._sizes = sizes.view(np.uint64)
        # As in `Permutation`: a * b >= n, with fewer than a values outside [0, n).
        a = square_roots(np.maximum(sizes - 1, 0)) + 1
        self._a, self._b = a.astype(np.uint32), (-(-sizes // a)).astype(np.uint32)
        names = np.arange(len(sizes), dtype=np.uint64) if numbers is None else numbers.astype(np.uint64)
        self._keys = np.stack([mix_array(mix(key, r), names) for r in range(ROUNDS)]).astype(np.uint32)

    def _rows(self, positions: Indices) -> Indices:
        return self._walked(positions, inverse=False)

    def _find(self, rows: Indices) -> Indices:
        return self._walked(rows, inverse=True)

    def _walked(self, indices: Indices, *, inverse: bool) -> Indices:
        """Replace indices by their images, in place."""
        if indices.size and int(indices.min()) < self.starts[0]:
            raise IndexError(f"index {int(indices.min())} is out of range: the first class begins at {self.starts[0]}")
        for begin in range(0, indices.size, _BLOCK):
            flat = indices[begin : begin + _BLOCK]
            classes = class_of(self.starts, flat)
            begins = self.starts[classes]
            flat -= begins
            local, sizes, left = flat.view(np.uint64), self._sizes[classes], np.arange(flat.size)
            while left.size:
                which = classes[left]
                local[left] = feistel(local[left], self._a[which], self._b[which], self._keys[:, which], inverse)
                left = left[local[left] >= sizes[left]]
            flat += begins
        return indices


def square_roots(numbers: Indices) -> Indices:
    """Return the integer square roots of numbers up to 2**62, exactly."""
    roots = np.sqrt(numbers).astype(np.int64)
    roots -= roots * roots > numbers
    roots += (roots + 1) * (roots + 1) <= numbers
    return roots


def class_of(starts: Indices, places: Indices) -> Indices:
    """Return the class of each place; never an empty class."""
    return np.searchsorted(starts, places, side="right") - 1
