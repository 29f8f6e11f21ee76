"""`ClassShuffle` and `ClassBatches`: samples shuffled within classes, such as similar lengths, and cut into batches.

Samples are numbered class after class, and ``starts`` has the start of each class. Each class has its own keyed
permutation, and no sample leaves its class::

    starts     0       4     7        12
    class      0 0 0 0 1 1 1 2 2 2 2 2
    shuffled   2 0 3 1 6 4 5 9 11 7 10 8

A look-up is one Feistel network with the sizes and keys of each index's class (`penstock.order.permutation`), with
cycle walking. So it costs the same for one class and for ten thousand.

A sample's number is its *place* in the class-sorted sequence. The same numbers are *slots* of batches. A batch is a
range of slots, and all batches that begin in a class have the same size. In each epoch, a keyed permutation orders the
batches, and a `ClassShuffle` assigns the samples of each class to its slots (`penstock.plan.class_plan`)::

    classes     | 0         | 1         | 2         |      starts   0 5 10 15
    sizes       | 2         | 3         | 4         |
    fill        |0 0|1 1|2 2 2 ...                         a batch at the end of a class takes from the next
    no fill     |0 0|1 1|2| |3 3 3|4 4| |5 5 5 5|6|        each class ends with its own partial batch

    batch number in the epoch -> batch -> (class, ordinal) -> slots -> places -> samples

Promises: a bijection within each class; each slot in exactly one batch, except in dropped batches; 50 bytes of memory
per class, so finding any batch of any epoch, and the batch of any sample, always costs the same; the same on every
machine, frozen by golden vectors in the tests under `ORDER_VERSION`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.hashing import mix, mix_array
from penstock.order.permutation import ROUNDS, Bijection, Indices, feistel

__all__ = ["ClassBatches", "ClassShuffle", "class_of", "square_roots"]

_BLOCK = 32768  # indices processed at once, so that they stay in the cache


class ClassShuffle(Bijection):
    """A permutation of ``range(starts[0], starts[-1])`` that keeps every class.

    Args:
        starts: the start of each class, then the end of the last: int64 of shape (classes + 1,), not descending.
        key: any integer, taken modulo 2**64.
        numbers: numbers of the classes, of which their keys are made; by default 0, 1, 2, ...

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


class ClassBatches:
    """The cuts of a class-sorted sequence into batches.

    Args:
        starts: the start of each class, then the end of the last: int64 of shape (classes + 1,), not descending.
        sizes: number of samples in a batch that begins in the class, 1 or more: int64 of shape (classes,).
        fill: fill a batch at the end of a class with samples of the next classes, so that only the very last batch can
            be partial. Otherwise each class may end with a partial batch.
        drop_last: leave out partial batches.

    >>> batches = ClassBatches([0, 5, 10], [2, 3], fill=True)
    >>> len(batches), batches.slots(np.arange(5))[1].tolist()
    (5, [2, 2, 2, 3, 1])
    >>> batches.batch_of(np.arange(10)).tolist()
    [0, 0, 1, 1, 2, 2, 3, 3, 3, 4]
    """

    def __init__(
        self, starts: npt.ArrayLike, sizes: npt.ArrayLike, *, fill: bool = False, drop_last: bool = False
    ) -> None:
        self.starts: Indices = np.asarray(starts, dtype=np.int64)
        self.sizes: Indices = np.asarray(sizes, dtype=np.int64)
        begins = self.starts[:-1].copy()
        if fill:
            end = 0
            for number, (stop, size) in enumerate(zip(self.starts[1:].tolist(), self.sizes.tolist(), strict=True)):
                begins[number] = begin = max(int(begins[number]), end)
                end = max(begin, begin + -(-(stop - begin) // size) * size)
        counts = np.maximum(0, -(-(self.starts[1:] - begins) // self.sizes))
        ends = np.full_like(begins, self.starts[-1]) if fill else self.starts[1:]
        if drop_last:
            counts = np.minimum(counts, np.maximum(0, (ends - begins) // self.sizes))
            ends = begins + counts * self.sizes
            if fill:
                ends = np.full_like(ends, ends[counts > 0].max(initial=self.starts[0]))
        self._begins = begins
        """The first slot of the first batch that begins in each class."""
        self._ends = ends
        """The slot after the last batch of each class; with ``fill``, after the last batch of all."""
        self._first = np.concatenate([[0], np.cumsum(counts)])
        """The number of the first batch that begins in each class, then the number of batches."""

    def __len__(self) -> int:
        return int(self._first[-1])

    @property
    def samples(self) -> Indices:
        """Number of samples in the batches that begin in each class: int64 of shape (classes,)."""
        counts = np.diff(self._first)
        return np.where(counts > 0, np.minimum(counts * self.sizes, self._ends - self._begins), 0)

    def slots(self, batches: Indices) -> tuple[Indices, Indices]:
        """Return the slots of batches, one batch after the other, and the number of slots of each batch."""
        classes = class_of(self._first, batches)
        begins = self._begins[classes] + (batches - self._first[classes]) * self.sizes[classes]
        counts = np.minimum(self.sizes[classes], self._ends[classes] - begins)
        before = np.cumsum(counts) - counts
        slots = np.repeat(begins - before, counts)
        slots += np.arange(len(slots))
        return slots, counts

    def batch_of(self, slots: Indices) -> Indices:
        """Return the batch of each slot: int64 of the same shape; -1 if the batch is dropped."""
        classes = class_of(self.starts, slots)
        # A slot before the first batch of its class is in the last batch of an earlier class.
        inside = np.maximum(-1, (slots - self._begins[classes]) // self.sizes[classes])
        return np.where(slots < self._ends[classes], self._first[classes] + inside, -1)


def square_roots(numbers: Indices) -> Indices:
    """Return the integer square roots of numbers up to 2**62, exactly."""
    roots = np.sqrt(numbers).astype(np.int64)
    roots -= roots * roots > numbers
    roots += (roots + 1) * (roots + 1) <= numbers
    return roots


def class_of(starts: Indices, places: Indices) -> Indices:
    """Return the class of each place; never an empty class."""
    return np.searchsorted(starts, places, side="right") - 1
