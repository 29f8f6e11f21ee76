"""`ClassBatchPlan`: one epoch of batches by class (groups or lengths), as a function of position.

    number in the epoch -> batch -> slots -> places in the class index -> rows        `batches`
    row -> place -> slot -> batch -> number in the epoch                              `numbers_of`

Nothing is replayed: starting in the middle of an epoch costs no more than starting at its beginning. The position of a
sample is its slot, which does not depend on the number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.hashing import derive_key, mix
from penstock.order import Partition
from penstock.order.classes import ClassBatches, ClassShuffle, class_of
from penstock.order.partition import Layout
from penstock.order.permutation import Indices, Permutation
from penstock.plan.cursor import Cursor, State
from penstock.plan.epoch import Batch, BatchEpochPlan
from penstock.plan.exclusion import ExcludedRows
from penstock.storage.class_index import ClassIndex

__all__ = ["ClassBatchPlan"]

_LARGEST_BLOCK = 64
"""Batches computed at once."""


@dataclass(eq=False, kw_only=True)
class ClassBatchPlan(BatchEpochPlan):
    """The batches of one epoch on one rank.

    Args:
        batches: the cuts of the class-sorted sequence into batches.
        samples: the samples by class: maps places of that sequence to samples.
        partition: the numbers of this rank's batches.
        identity: entries that a state must match, see `Cursor.plan`.
        seed: seed of the order (None is 0), and of the samples' generators.
        epoch: the number of the epoch. Every pair of seed and epoch yields an unrelated order.
        excluded: places of the excluded samples, and their replacements.
        sampler: the cursor of the inner plan, if there is one.
    """

    batches: ClassBatches
    samples: ClassIndex
    partition: Partition
    identity: State
    seed: int | None
    epoch: int
    excluded: ExcludedRows
    sampler: Cursor | None = None

    def __post_init__(self) -> None:
        key = derive_key(self.seed or 0, self.epoch, "class batches")
        self._order = Permutation(len(self.batches), mix(key, 0))
        self._shuffle = ClassShuffle(self.batches.starts, mix(key, 1))

    def __len__(self) -> int:
        return len(self.partition)

    def __iter__(self) -> Iterator[Batch]:
        begin, size = 0, 1  # a block of one batch is ready soonest
        while begin < len(self):
            yield from self.numbered(self.partition.positions(begin, begin + size))
            begin, size = begin + size, min(_LARGEST_BLOCK, size * 2)

    def numbered(self, numbers: Indices) -> list[Batch]:
        """Return batches by their numbers in the epoch. Numbers after the last repeat the first batches."""
        rows, positions, counts = self.samples_of(numbers)
        cuts = np.cumsum(counts).tolist()
        indices = rows.tolist()
        return [(indices[a:b], positions[a:b]) for a, b in itertools.pairwise([0, *cuts])]

    def samples_of(self, numbers: Indices) -> tuple[Indices, Indices, Indices]:
        """Return the rows and positions of the samples in batches, batch after batch, and the sizes of the batches."""
        laps, numbers = np.divmod(numbers, max(1, self.partition.n))
        slots, counts = self.batches.slots(self._order[numbers])
        places = self._shuffle[slots]
        if self.excluded.mark and len(slots):
            places = self.excluded.replace(places, self.seed or 0, self.epoch)
            # If no sample of that length is left, longer ones replace it, and only the first of them fit.
            begins = np.cumsum(counts) - counts
            sizes = self.batches.sizes[class_of(self.batches.starts, places)]
            most = np.minimum(counts, np.minimum.reduceat(sizes, begins))
            fitting = np.arange(len(places)) - np.repeat(begins, counts) < np.repeat(most, counts)
            slots, places, counts = slots[fitting], places[fitting], most
        # Repeated batches have other positions, so their samples get other random numbers.
        positions = slots + np.repeat(laps * len(self.samples), counts)
        return self.samples.rows(places), positions, counts

    def numbers_of(self, row: int) -> list[int]:
        """Return the epoch's numbers of all batches that contain a sample, including as a replacement."""
        if not 0 <= row < len(self.samples):
            return []
        places = self.samples.places(np.array([row]))
        if self.excluded.mark:
            found = self.excluded.places_of(int(places[0]), self.seed or 0, self.epoch)
            places = np.array(found, np.int64)
        # Samples that are in no batch of any epoch have places before the first class of the plan.
        places = places[places >= self.batches.starts[0]]
        batches = self.batches.batch_of(self._shuffle.inverse[places])
        numbers: list[int] = np.unique(self._order.inverse[batches[batches >= 0]]).tolist()
        if self.excluded.mark:
            return [number for number in numbers for _ in range(self.numbered(np.array([number]))[0][0].count(row))]
        return numbers

    @property
    def layout(self) -> Layout:
        """How the batches are distributed to ranks."""
        return Layout.of(self.epoch, self.partition, self.excluded.mark[1] if self.excluded.mark else None)

    def cursor(self, count: int) -> Cursor:
        consumed = self.partition.consumed_after(count)
        mark = self.excluded.mark
        plan = {**self.identity, "excluded": list(mark)} if mark else self.identity
        return Cursor(epoch=self.epoch, consumed=consumed, unit="batch", plan=plan, sampler=self.sampler)
