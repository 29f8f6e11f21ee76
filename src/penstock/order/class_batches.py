"""`ClassBatches`: batches of samples of one class or of neighbouring ones, in random order, by arithmetic.

The samples stand in a row of *slots*, class after class. Batches are runs of slots; all that begin in a class are
equally long. A keyed permutation gives the batches their order, and a `ClassShuffle` deals the samples of each class
to its slots::

    classes     | 0         | 1         | 2         |      starts   0 5 10 15
    sizes       | 2         | 3         | 4         |
    filled      |0 0|1 1|2 2 2 ...                         a batch at the end of a class takes from the next
    not filled  |0 0|1 1|2| |3 3 3|4 4| |5 5 5 5|6|        each class ends with a batch of its own

    batch number in the epoch -> batch -> (class, ordinal) -> slots -> places in the row -> samples

Invariant: each slot is in exactly one batch, but for those of batches that are dropped. What is a table has one entry a
class, so any batch of any epoch costs the same, and so does the batch of any sample.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import OrderError
from penstock.hashing import derive_key, mix
from penstock.order.classes import ClassShuffle, class_of
from penstock.order.permutation import Indices, Permutation

__all__ = ["BatchSlots", "ClassBatches", "EpochBatches"]


class BatchSlots(NamedTuple):
    """The slots of some batches, one batch after the other.

    Attributes:
        slots: int64 of shape (samples,).
        counts: how many each batch has: int64 of shape (batches,).
    """

    slots: Indices
    counts: Indices


class ClassBatches:
    """Where the batches of classes are cut.

    Args:
        starts: where each class begins, and the end of the last: int64 of shape (classes + 1,), not descending.
        sizes: samples in a batch that begins in the class, 1 or more: int64 of shape (classes,).
        fill: a batch at the end of a class is filled up with samples of the next ones, so that only the last batch of
            all can be partial. Otherwise each class may end with a partial batch.
        drop_last: leave out batches that are partial.

    Raises:
        OrderError: a size below 1, or not one for each class.

    >>> batches = ClassBatches([0, 5, 10], [2, 3], fill=True)
    >>> len(batches), batches.slots(np.arange(5)).counts.tolist()
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
            raise OrderError("batches of classes need a size of 1 or more for each class")
        begins, counts = _cut(self.starts.tolist(), self.sizes.tolist(), fill)
        ends = begins + counts * self.sizes
        if fill:
            n = int(self.starts[-1])
            if drop_last and len(counts) and (whole := int(ends.max(initial=0))) > n:
                last = int(np.flatnonzero(ends == whole)[0])
                counts[last] -= 1
                ends[last] -= self.sizes[last]
            ends[:] = min(n, int(ends[counts > 0].max(initial=self.starts[0])))
        elif drop_last:
            counts = (ends - (ends > self.starts[1:]) * self.sizes - begins) // self.sizes
            ends = begins + counts * self.sizes
        else:
            ends = self.starts[1:]
        self._begins = begins
        """The first slot of the first batch that begins in each class."""
        self._ends = ends
        """The slot behind the last batch of each class; of all of them where batches are filled up."""
        self._first = np.concatenate([[0], np.cumsum(counts)])
        """The number of the first batch that begins in each class, and the number of all."""

    def __len__(self) -> int:
        return int(self._first[-1])

    @property
    def samples(self) -> Indices:
        """How many samples the batches that begin in each class have: int64 of shape (classes,)."""
        counts = np.diff(self._first)
        return np.where(counts > 0, np.minimum(counts * self.sizes, self._ends - self._begins), 0)

    def bounds(self, batches: Indices) -> tuple[Indices, Indices]:
        """Return the first slot of each batch, and the one behind its last."""
        classes = class_of(self._first, batches)
        begins = self._begins[classes] + (batches - self._first[classes]) * self.sizes[classes]
        return begins, np.minimum(begins + self.sizes[classes], self._ends[classes])

    def slots(self, batches: Indices) -> BatchSlots:
        """Return the slots of batches, one batch after the other."""
        begins, ends = self.bounds(batches)
        counts = ends - begins
        before = np.cumsum(counts) - counts
        slots = np.repeat(begins - before, counts)
        slots += np.arange(len(slots))
        return BatchSlots(slots, counts)

    def batch_of(self, slots: Indices) -> Indices:
        """Return the batch of each slot: int64 of their shape; -1 for those of batches that are dropped."""
        classes = class_of(self.starts, slots)
        # A slot before the first batch of its class is in the last batch that began before.
        inside = np.maximum(-1, (slots - self._begins[classes]) // self.sizes[classes])
        return np.where(slots < self._ends[classes], self._first[classes] + inside, -1)

    def fitting(self, places: Indices, counts: Indices) -> npt.NDArray[np.bool_]:
        """Return which samples of batches fit: as many, from the first on, as a batch of its largest class may have.

        Args:
            places: of samples in the row of classes, one batch after the other.
            counts: how many each batch has, 1 or more: int64 of shape (batches,).
        """
        begins = np.cumsum(counts) - counts
        most = np.minimum.reduceat(self.sizes[class_of(self.starts, places)], begins)
        return np.arange(len(places)) - np.repeat(begins, counts) < np.repeat(most, counts)


def _cut(starts: list[int], sizes: list[int], fill: bool) -> tuple[Indices, Indices]:
    """Return the first slot of the first batch that begins in each class, and how many begin there."""
    begins, counts, end = [], [], starts[0]
    for start, stop, size in zip(starts, starts[1:], sizes, strict=False):
        begin = max(start, end) if fill else start
        count = max(0, -(-(stop - begin) // size))
        end = begin + count * size
        begins.append(begin)
        counts.append(count)
    return np.array(begins, dtype=np.int64), np.array(counts, dtype=np.int64)


class EpochBatches:
    """The batches of one epoch in their order, as places of samples in the row of classes.

    Args:
        batches: where they are cut.
        seed, epoch: together they choose the order; every pair gives an unrelated one.
    """

    def __init__(self, batches: ClassBatches, seed: int, epoch: int) -> None:
        self.batches = batches
        key = derive_key(seed, epoch, "class batches")
        self._order = Permutation(len(batches), mix(key, 0))
        self._shuffle = ClassShuffle(batches.starts, mix(key, 1))

    def __len__(self) -> int:
        return len(self.batches)

    def slots(self, numbers: Indices) -> BatchSlots:
        """Return the slots of the batches with these numbers in the epoch."""
        return self.batches.slots(self._order[numbers])

    def places(self, slots: Indices) -> Indices:
        """Return where the samples of slots stand in the row of classes: int64 of their shape."""
        return self._shuffle[slots]

    def slots_of(self, places: Indices) -> Indices:
        """Undo `places`."""
        return self._shuffle.inverse[places]

    def numbers(self, slots: Indices) -> Indices:
        """Return the number in the epoch of the batch that each slot is in; -1 for those that are dropped."""
        batches = self.batches.batch_of(slots)
        kept = batches >= 0
        batches[kept] = self._order.inverse[batches[kept]]
        return batches
