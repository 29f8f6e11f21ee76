"""`EpochPlan` and `BatchEpochPlan`: one epoch of a plan on one rank, as a function of position.

    plan.bind(cursor)  ->  epoch plan  ->  indices(a, b), positions(a, b)     any part of it, in any order
                                           cursor(count)                      where one is who has had so many

Whoever prefetches asks for the cursor at the sample that its *consumer* has reached, so nothing is counted twice and
nothing is replayed.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from penstock.errors import LengthUnknownError
from penstock.order import Order, Partition
from penstock.order.permutation import MAX_N, Indices
from penstock.plan.cursor import Cursor, State

__all__ = [
    "TO_BE_COUNTED",
    "Batch",
    "BatchEpochPlan",
    "BatchesLeft",
    "CountedIterable",
    "Dealt",
    "EpochPlan",
    "PartitionedOrder",
    "length_of",
    "unknown_length",
]

TO_BE_COUNTED = (
    "put indexes beside tar shards (penstock shards index); or open ShardDataset(ShardSet(...)), of JSON "
    "lines TableDataset(JsonFiles(...)), which read all of them before they begin"
)
"""What to do for shards to be counted."""

T_co = TypeVar("T_co", covariant=True)

_LARGEST_BLOCK = 64  # batches

Batch = tuple[list[Any], Indices]
"""The sample indices of a batch, and the int64 array of their positions in the epoch."""


class CountedIterable(Protocol[T_co]):
    """Something to iterate once, which knows how many items it has handed out."""

    @property
    def had(self) -> int:
        """How many items it has handed out."""
        ...

    def __iter__(self) -> Iterator[T_co]: ...


class Dealt(NamedTuple):
    """How a bound plan is dealt.

    Attributes:
        epoch: the number of the epoch.
        partition: this rank's positions; of batches, where the order is one of batches.
        mini_epoch, done, base, skip: where it begins, see `penstock.plan.share.MiniEpoch`.
        parts: mini-epochs of an epoch.
        batch_size: of a rank.
        drop_last: whether a last batch that is not full is left out.
        excluded: hash of the rows that are left out.
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
        """Position of the first sample, over all ranks."""
        return self.partition.begin + self.skip * self.partition.world_size

    @property
    def empty(self) -> bool:
        """Whether this rank has nothing left."""
        return self.skip >= len(self.partition)


class EpochPlan(abc.ABC):
    """The samples of one epoch on one rank, from wherever its cursor stood.

    Attributes:
        seed: of the samples' generators; None leaves them to who reads the plan.
        epoch: the number of the epoch.
        per_rank: whether positions are those of this rank alone. Otherwise they are ordinals in the whole job's epoch,
            and a sample has the same one on any number of ranks.
        one_by_one: whether reading the plan runs code of the user's, so that it is read no further ahead than needed.
        grows: whether the end shows only while the plan is read, see `reach`.
        place: where the data set stands, for data sets that workers have to tell.
    """

    seed: int | None = None
    epoch: int = 0
    per_rank: bool = False
    one_by_one: bool = False
    grows: bool = False
    place: Any = None

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return how many samples there are; TypeError where the plan has no end, or nobody knows it yet."""

    def reach(self, count: int) -> int:
        """Return how many samples are known: ``count`` at least, or all there are. Waits where that takes reading."""
        return length_of(self)

    @abc.abstractmethod
    def indices(self, start: int, stop: int) -> Indices:
        """Return the indices of the samples ``start`` to ``stop``: int64 of shape (stop - start,)."""

    @abc.abstractmethod
    def positions(self, start: int, stop: int) -> Indices:
        """Return their positions in the epoch: int64 of shape (stop - start,)."""

    @abc.abstractmethod
    def cursor(self, count: int) -> Cursor:
        """Return where a consumer is that has had the first ``count`` samples."""

    def exhaust(self) -> None:  # noqa: B027 (most have nothing to do)
        """Take note that the plan was read to its end: what draws from a generator moves that on to the end."""

    def delivered(self, count: int) -> None:  # noqa: B027 (most have nothing to do)
        """Take note that the consumer has had the first ``count`` samples."""

    def job(self) -> EpochPlan:
        """Return the plan of all ranks together, from the same cursor."""
        return self

    @property
    def dealt(self) -> Dealt | None:
        """How the job's ranks share the epoch; None where that is no arithmetic."""
        return None

    @property
    def rounds(self) -> int | None:
        """How often this plan has every sample, if all of them equally often; else None."""
        return None


class BatchEpochPlan(abc.ABC):
    """The batches of one epoch on one rank; `seed`, `epoch` and so on as in `EpochPlan`.

    Attributes:
        first_batch: number of the first batch in the epoch, on this rank.
    """

    seed: int | None = None
    epoch: int = 0
    per_rank: bool = False
    one_by_one: bool = False
    place: Any = None
    first_batch: int = 0

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return how many batches there are; TypeError where the plan has no end."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches."""

    @abc.abstractmethod
    def cursor(self, count: int) -> Cursor:
        """Return where a consumer is that has had the first ``count`` batches."""

    @property
    def dealt(self) -> Dealt | None:
        """How the job's ranks share the epoch; None where that is no arithmetic."""
        return None

    def exhaust(self) -> None:  # noqa: B027 (most have nothing to do)
        """Take note that the plan was read to its end, or will be read no further."""

    def delivered(self, count: int) -> None:  # noqa: B027 (most have nothing to do)
        """Take note that the consumer has had the first ``count`` batches."""

    def blocks(self) -> Iterator[tuple[list[list[Any]], Indices]]:
        """Yield the batches, several of one size at a time, and their positions: int64 of shape (batches, size).

        The first block is one batch, which comes at once. Where the plan is read one by one, all are.
        """
        batches, group, left = iter(self), 1, 1 if self.one_by_one else length_of(self)
        # What draws from a generator does so at its end, which is not to be reached before it is asked for.
        while taken := list(itertools.islice(batches, max(1, min(group, left - 1)))):
            left -= len(taken)
            for _, alike in itertools.groupby(taken, key=lambda batch: len(batch[0])):
                lists, positions = zip(*alike, strict=True)
                yield list(lists), np.stack(positions)
            group = min(_LARGEST_BLOCK, group * 2)

    def lists(self) -> CountedIterable[list[Any]]:
        """Return the batches without positions, for those who iterate a sampler by themselves."""
        return _Lists(self)


class _Lists:
    """The batches of an epoch plan without positions."""

    def __init__(self, run: BatchEpochPlan) -> None:
        self._run = run
        self.had = 0

    def __iter__(self) -> Iterator[list[Any]]:
        for indices, _ in self._run:
            self.had += 1
            yield indices


class PartitionedOrder(EpochPlan):
    """An order, dealt by a partition.

    Args:
        make: makes the order, when the first index is asked for (torch's costs O(N)).
        partition: this rank's positions.
        identity: what a cursor belongs to, see `Cursor.plan`.
        seed, epoch, per_rank: see `EpochPlan`.
        rounds: how often the order runs through all samples, each equally often; None where it does not.
        entropy: what was drawn at the beginning of the epoch; asked when a cursor is.
        exhaust: called at the end of the epoch; may be called again.
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
        """The order of the whole epoch, all ranks together."""
        return self._make()

    def __len__(self) -> int:
        return len(self.partition)

    def indices(self, start: int, stop: int) -> Indices:
        """Return sample indices; padding repeats the start of the epoch's order."""
        return self.order[self.partition.samples(start, stop)]

    def positions(self, start: int, stop: int) -> Indices:
        """Return positions in the epoch; those of n and more are padding."""
        return self.partition.positions(start, stop)

    def cursor(self, count: int) -> Cursor:
        """Return what the whole job has consumed once every rank has had ``count`` samples."""
        consumed = self.partition.consumed_after(count)
        return Cursor(epoch=self.epoch, consumed=consumed, plan=self._identity, entropy=self._entropy())

    @property
    def dealt(self) -> Dealt:
        """How the job's ranks share the epoch."""
        return Dealt(self.epoch, self.partition, base=self.partition.consumed)

    @property
    def rounds(self) -> int | None:
        """How often this plan has every sample, if all of them equally often; else None."""
        everything = self.partition.consumed == 0 and len(self) == self.partition.n
        return self._rounds if everything else None

    def job(self) -> PartitionedOrder:
        """Return what is left of the epoch for all ranks together: every sample once, no padding."""
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
        """Take note that the plan was read to its end."""
        if self._exhaust is not None:
            self._exhaust()


class BatchesLeft(BatchEpochPlan):
    """An epoch plan of batches without some of them, whose indices are drawn and left out.

    Args:
        whole: all of them.
        passed: ranges of numbers of batches, in order, none of them empty, with gaps between them.

    Attributes:
        whole: the plan without gaps.

    Where a consumer is who has had ``count`` batches is behind the range that follows on them, if one does.
    """

    def __init__(self, whole: BatchEpochPlan, passed: Sequence[tuple[int, int]]) -> None:
        self.whole = whole
        self._passed = passed
        self.first_batch = whole.first_batch + self.at(0)
        self.seed, self.epoch = whole.seed, whole.epoch
        self.per_rank, self.one_by_one = whole.per_rank, whole.one_by_one

    @property
    def place(self) -> Any:
        """Where the data set stands."""
        return self.whole.place

    @property
    def dealt(self) -> Dealt | None:
        return self.whole.dealt

    def __len__(self) -> int:
        length = len(self.whole)
        return length - sum(min(end, length) - min(begin, length) for begin, end in self._passed)

    def __iter__(self) -> Iterator[Batch]:
        batches, at = iter(self.whole), 0
        for begin, end in self._passed:
            yield from itertools.islice(batches, begin - at)
            for _ in itertools.islice(batches, end - begin):
                pass
            at = end
        yield from batches

    def at(self, count: int) -> int:
        """Return the number in the whole plan of the batch that comes behind ``count`` of these."""
        for begin, end in self._passed:
            if begin > count:
                break
            count += end - begin
        return count

    def number(self, at: int) -> int | None:
        """Return the number here of a batch of the whole plan; None if it is passed over."""
        before = 0
        for begin, end in self._passed:
            if begin <= at < end:
                return None
            before += end - begin if end <= at else 0
        return at - before

    def cursor(self, count: int) -> Cursor:
        return self.whole.cursor(self.at(count))

    def exhaust(self) -> None:
        self.whole.exhaust()

    def delivered(self, count: int) -> None:
        self.whole.delivered(self.at(count))


def length_of(plan: EpochPlan | BatchEpochPlan) -> int:
    """Return how many samples or batches an epoch plan has, or 2**62 where it has no end or nobody knows."""
    try:
        return len(plan)
    except TypeError:
        return MAX_N


def unknown_length() -> LengthUnknownError:
    """Return the error of whoever needs the number of samples, or numbers them."""
    return LengthUnknownError(
        "how many samples these shards have is not known before all of them were read once, since they have no indexes "
        f"in the store: go through a DataLoader; or {TO_BE_COUNTED}"
    )
