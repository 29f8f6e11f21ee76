"""`EpochPlan` and `BatchEpochPlan`: one epoch of a plan on one rank, as a function of position.

    plan.bind(cursor)  ->  epoch plan  ->  indices(a, b), positions(a, b)     any part of it, in any order
                                           cursor(count)                      the position after ``count`` samples

A loader that prefetches takes the cursor after the last sample that its *consumer* has received, so no sample is
counted twice or replayed.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from penstock.order import Order, Partition
from penstock.order.permutation import MAX_N, Indices
from penstock.plan.cursor import Cursor, State

__all__ = [
    "Batch",
    "BatchEpochPlan",
    "EpochPlan",
    "ForwardEpoch",
    "PartitionedOrder",
    "RankPartition",
    "RemainingBatches",
    "length_of",
]


_LARGEST_BLOCK = 64
"""Batches in a block."""

Batch = tuple[list[Any], Indices]
"""The sample indices of a batch, and the int64 array of their positions in the epoch."""


class RankPartition(NamedTuple):
    """The partition of an epoch plan among ranks, from which `penstock.Ledger` computes the rows of any step.

    Attributes:
        epoch: the number of the epoch.
        partition: this rank's positions; positions of batches, if the order is one of batches.
        mini_epoch, done, base, skip: the start, see `penstock.plan.share.MiniEpoch`.
        parts: number of mini-epochs in an epoch.
        batch_size: batch size of each rank.
        drop_last: whether the last batch is left out if it is not full.
        excluded: hash of the excluded rows.
    """

    epoch: int
    partition: Partition
    mini_epoch: int = 0
    done: int = 0
    base: int = 0
    skip: int = 0
    parts: int = 1
    batch_size: int = 1
    drop_last: bool = False
    excluded: str | None = None

    @property
    def first(self) -> int:
        """Position of the first sample over all ranks."""
        return self.partition.begin + self.skip * self.partition.world_size

    @property
    def empty(self) -> bool:
        """Whether no samples are left for this rank."""
        return self.skip >= len(self.partition)


class EpochPlan(abc.ABC):
    """The samples of one epoch on one rank, starting at a cursor.

    Attributes:
        seed: seed of the samples' generators; None leaves seeding to the reader of the plan.
        epoch: the number of the epoch.
        per_rank: whether positions count only this rank's samples. Otherwise they count the samples of all ranks, and
            do not depend on the number of ranks.
        one_by_one: whether reading the plan runs the user's code, so that it must not be read ahead further than
            needed.
        place: the position of the dataset, for datasets whose workers need it.
    """

    seed: int | None = None
    epoch: int = 0
    per_rank: bool = False
    one_by_one: bool = False
    place: Any = None

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of samples; raise TypeError if the plan is endless."""

    @abc.abstractmethod
    def indices(self, start: int, stop: int) -> Indices:
        """Return the indices of samples ``start`` to ``stop``: int64 of shape (stop - start,)."""

    @abc.abstractmethod
    def positions(self, start: int, stop: int) -> Indices:
        """Return the positions of samples ``start`` to ``stop`` in the epoch: int64 of shape (stop - start,)."""

    @abc.abstractmethod
    def cursor(self, count: int) -> Cursor:
        """Return the cursor of a consumer that has received the first ``count`` samples."""

    def exhaust(self) -> None:  # noqa: B027 (most have nothing to do)
        """Record that the plan was read to its end. A plan that draws from a generator makes its last draws."""

    def job(self) -> EpochPlan:
        """Return the plan of all ranks together, from the same cursor."""
        return self

    @property
    def rank_partition(self) -> RankPartition | None:
        """The partition of the epoch among the ranks; None if it cannot be computed."""
        return None

    @property
    def rounds(self) -> int | None:
        """How often this plan yields each sample, if equally often; else None."""
        return None


class ForwardEpoch(abc.ABC):
    """The samples of one epoch on one rank that become known while they are read: once, from a cursor on.

    Attributes:
        seed, epoch: as in `EpochPlan`.
        place: the position of the dataset for the samples that `read` yielded last.
    """

    seed: int | None = None
    epoch: int = 0
    place: Any = None

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of samples; raise TypeError while it is unknown."""

    @abc.abstractmethod
    def read(self, size: int) -> Iterator[tuple[Indices, Indices]]:
        """Yield the indices and positions of ``size`` samples at a time, fewer at the end. Waits for data."""

    @abc.abstractmethod
    def cursor(self, count: int) -> Cursor:
        """Return the cursor of a consumer that has received the first ``count`` samples."""


class BatchEpochPlan(abc.ABC):
    """The batches of one epoch on one rank. `seed`, `epoch` and so on are as in `EpochPlan`.

    Attributes:
        first_batch: number of the first batch in this rank's epoch.
    """

    seed: int | None = None
    epoch: int = 0
    per_rank: bool = False
    one_by_one: bool = False
    place: Any = None
    first_batch: int = 0

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of batches; raise TypeError if the plan is endless."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches."""

    @abc.abstractmethod
    def cursor(self, count: int) -> Cursor:
        """Return the cursor of a consumer that has received the first ``count`` batches."""

    @property
    def rank_partition(self) -> RankPartition | None:
        """The partition of the epoch among the ranks; None if it cannot be computed."""
        return None

    def exhaust(self) -> None:  # noqa: B027 (most have nothing to do)
        """Record that the plan was read to its end, or will not be read further."""

    def blocks(self) -> Iterator[tuple[list[list[Any]], Indices]]:
        """Yield blocks of batches of one size, with their positions: int64 of shape (batches, size).

        The first block has one batch, so that it is ready soon. With ``one_by_one`` every block has one batch.
        """
        batches, group, left = iter(self), 1, 1 if self.one_by_one else length_of(self)
        # Some plans draw from a generator at their end, so the end must not be read ahead of time.
        while taken := list(itertools.islice(batches, max(1, min(group, left - 1)))):
            left -= len(taken)
            for _, alike in itertools.groupby(taken, key=lambda batch: len(batch[0])):
                lists, positions = zip(*alike, strict=True)
                yield list(lists), np.stack(positions)
            group = min(_LARGEST_BLOCK, group * 2)


class PartitionedOrder(EpochPlan):
    """An order split among ranks by a partition.

    Args:
        make: returns the order; called at the first index, because torch's order costs O(N).
        partition: this rank's positions.
        identity: entries that a state must match, see `Cursor.plan`.
        seed, epoch, per_rank: see `EpochPlan`.
        rounds: how often the order yields each sample; None if that differs between samples.
        entropy: returns the random draw at the start of the epoch; called for each cursor.
        exhaust: called at the end of the epoch, perhaps more than once.
    """

    def __init__(
        self,
        make: Callable[[], Order],
        partition: Partition,
        identity: State,
        *,
        seed: int | None,
        epoch: int,
        per_rank: bool = False,
        rounds: int | None = 1,
        entropy: Callable[[], State] = dict,
        exhaust: Callable[[], object] | None = None,
    ) -> None:
        self._make = make
        self.partition = partition
        self._identity = identity
        self.seed = seed
        self.epoch = epoch
        self.per_rank = per_rank
        self._rounds = rounds
        self._entropy = entropy
        self._exhaust = exhaust

    @cached_property
    def order(self) -> Order:
        """The order of the whole epoch, of all ranks together."""
        return self._make()

    def __len__(self) -> int:
        return len(self.partition)

    def indices(self, start: int, stop: int) -> Indices:
        """Return sample indices; padding repeats the start of the epoch's order."""
        return self.order[self.partition.samples(start, stop)]

    def positions(self, start: int, stop: int) -> Indices:
        """Return positions in the epoch; positions of n or more are padding."""
        return self.partition.positions(start, stop)

    def cursor(self, count: int) -> Cursor:
        """Return the cursor of the whole job when every rank has received ``count`` samples."""
        consumed = self.partition.consumed_after(count)
        return Cursor(epoch=self.epoch, consumed=consumed, plan=self._identity, entropy=self._entropy())

    @property
    def rank_partition(self) -> RankPartition:
        """The partition of the epoch among the ranks."""
        return RankPartition(self.epoch, self.partition, base=self.partition.consumed)

    @property
    def rounds(self) -> int | None:
        """How often this plan yields each sample, if equally often; else None."""
        everything = self.partition.consumed == 0 and len(self) == self.partition.n
        return self._rounds if everything else None

    def job(self) -> PartitionedOrder:
        """Return the rest of the epoch of all ranks together: every sample once, without padding."""
        partition = Partition(self.partition.n, remainder="uneven", consumed=self.partition.consumed)
        return PartitionedOrder(
            lambda: self.order,
            partition,
            self._identity,
            seed=self.seed,
            epoch=self.epoch,
            per_rank=self.per_rank,
            rounds=self._rounds,
            entropy=self._entropy,
            exhaust=self._exhaust,
        )

    def exhaust(self) -> None:
        """Record that the plan was read to its end."""
        if self._exhaust is not None:
            self._exhaust()


class RemainingBatches(BatchEpochPlan):
    """A batch epoch plan without its first batches. Their indices are drawn and dropped.

    Args:
        whole: the plan with all batches.
        skipped: number of first batches to leave out.
    """

    def __init__(self, whole: BatchEpochPlan, skipped: int) -> None:
        self.whole, self.skipped = whole, skipped
        self.first_batch = whole.first_batch + skipped
        self.seed, self.epoch = whole.seed, whole.epoch
        self.per_rank, self.one_by_one = whole.per_rank, whole.one_by_one

    @property
    def place(self) -> Any:
        """The position of the dataset."""
        return self.whole.place

    @property
    def rank_partition(self) -> RankPartition | None:
        return self.whole.rank_partition

    def __len__(self) -> int:
        return max(0, len(self.whole) - self.skipped)

    def __iter__(self) -> Iterator[Batch]:
        return itertools.islice(self.whole, self.skipped, None)

    def cursor(self, count: int) -> Cursor:
        return self.whole.cursor(count + self.skipped)

    def exhaust(self) -> None:
        self.whole.exhaust()


def length_of(plan: EpochPlan | ForwardEpoch | BatchEpochPlan) -> int:
    """Return the number of samples or batches of an epoch plan, or 2**62 if it is endless or unknown."""
    try:
        return len(plan)
    except TypeError:
        return MAX_N
