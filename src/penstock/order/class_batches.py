"""`ClassBatches`: batches of samples of one class or of neighbouring classes, in random order, computed.

Samples are numbered by class: their *place* in the class-sorted sequence. The same numbers are *slots* of batches. A
batch is a range of slots, and all batches that begin in a class have the same size. In each epoch, a keyed permutation
orders the batches, and a `ClassShuffle` assigns the samples of each class to its slots (`penstock.plan.class_plan`)::

    classes     | 0         | 1         | 2         |      starts   0 5 10 15
    sizes       | 2         | 3         | 4         |
    fill        |0 0|1 1|2 2 2 ...                         a batch at the end of a class takes from the next
    no fill     |0 0|1 1|2| |3 3 3|4 4| |5 5 5 5|6|        each class ends with its own partial batch

    batch number in the epoch -> batch -> (class, ordinal) -> slots -> places -> samples

Invariant: each slot is in exactly one batch, except in dropped batches. Tables have one entry per class. So finding any
batch of any epoch, and the batch of any sample, always costs the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.errors import OrderError
from penstock.order.classes import class_of
from penstock.order.permutation import Indices

__all__ = ["ClassBatches"]


class ClassBatches:
    """The cuts of a class-sorted sequence into batches.

    Args:
        starts: the start of each class, then the end of the last: int64 of shape (classes + 1,), not descending.
        sizes: number of samples in a batch that begins in the class, 1 or more: int64 of shape (classes,).
        fill: fill a batch at the end of a class with samples of the next classes, so that only the very last batch can
            be partial. Otherwise each class may end with a partial batch.
        drop_last: leave out partial batches.

    Raises:
        OrderError: a size is below 1, or there is not one size per class.

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
        if len(self.sizes) != len(self.starts) - 1 or (self.sizes < 1).any():
            raise OrderError("batches of classes need one size of 1 or more per class")
        begins, counts = _cut(self.starts.tolist(), self.sizes.tolist(), fill)
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

    def fitting(self, places: Indices, counts: Indices) -> npt.NDArray[np.bool_]:
        """Return which samples fit into their batches: the first ones, up to the smallest size of the batch's classes.

        Args:
            places: of the samples, one batch after the other.
            counts: number of samples of each batch, 1 or more: int64 of shape (batches,).
        """
        begins = np.cumsum(counts) - counts
        most = np.minimum.reduceat(self.sizes[class_of(self.starts, places)], begins)
        return np.arange(len(places)) - np.repeat(begins, counts) < np.repeat(most, counts)


def _cut(starts: list[int], sizes: list[int], fill: bool) -> tuple[Indices, Indices]:
    """Return, for each class, the first slot of the first batch that begins there, and the number of such batches."""
    begins, counts, end = [], [], starts[0]
    for start, stop, size in zip(starts, starts[1:], sizes, strict=False):
        begin = max(start, end) if fill else start
        count = max(0, -(-(stop - begin) // size))
        end = begin + count * size
        begins.append(begin)
        counts.append(count)
    return np.array(begins, dtype=np.int64), np.array(counts, dtype=np.int64)
