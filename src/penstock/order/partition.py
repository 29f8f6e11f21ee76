"""Partition: the positions of an epoch that belong to a rank (sharding of the data among ranks), computed. Layout: the
partitions of all ranks from a step on.

An epoch of n samples has the positions ``0 .. n-1``. The order maps them to samples. The whole job has consumed the
first ``consumed`` positions. The rest is cut into ``mini_epochs`` ranges (sub-epochs), and each range is split among
the ranks::

    positions   0 ........ consumed | mini-epoch 0        | mini-epoch 1        | ... n (+ padding)
    ranks                           | 0 1 2 0 1 2 0 1 2   | 0 1 2 0 1 2 0 1 2   |

Each rank has ``share = ceil((n - consumed) / (world_size * mini_epochs))`` positions in each mini-epoch, so all shares
are equally long. Missing positions at the very end of the epoch are padded: they repeat the epoch from its start.

Invariant: the union over ranks and mini-epochs is every position from ``consumed`` to n exactly once, plus the declared
padding. The positions that a job has consumed are always a prefix of the epoch, so any other number of ranks can resume
after it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from penstock.errors import PartitionError
from penstock.order.permutation import MAX_N, Indices, normalise
from penstock.wording import counted

__all__ = ["REMAINDERS", "Layout", "Partition"]

REMAINDERS = ("pad", "drop", "uneven")


class Partition:
    """The positions of one rank in one mini-epoch, as a computed sequence.

    Args:
        n: number of samples in the epoch, 0 or more; world_size and mini_epochs may be larger.
        world_size, rank: the number of ranks of the job, and this rank.
        mini_epochs, mini_epoch: the number of mini-epochs (sub-epochs) in the rest of the epoch, and this one.
        remainder: ``"pad"``: all shares are equal, and the last positions repeat the first of the epoch. ``"drop"``:
            all shares are equal, and the last samples are left out. ``"uneven"``: every sample exactly once, for exact
            evaluation; shares differ by one, and the last mini-epochs may be short.
        consumed: number of first positions of the epoch that the whole job, of any size, has already consumed.

    Raises:
        PartitionError: a rank or mini-epoch is outside its range, a size is negative, or the remainder is unknown.

    ``p[i]`` is the position of the rank's i-th sample; an integer array returns an array. Positions of n or more are
    padding and mean ``position % n``, see `repeated`. Cost: O(1) memory, a few operations per index.

    >>> [Partition(10, 4, r)[np.arange(3)].tolist() for r in range(4)]
    [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    >>> Partition(10, 4, 0).repeated.tolist()  # positions 10 and 11 repeat 0 and 1
    [0, 1]
    """

    def __init__(
        self,
        n: int,
        world_size: int = 1,
        rank: int = 0,
        *,
        mini_epochs: int = 1,
        mini_epoch: int = 0,
        remainder: str = "pad",
        consumed: int = 0,
    ) -> None:
        if not 0 <= n <= MAX_N:
            raise PartitionError(f"a partition needs 0 <= n <= 2**62, got {n}")
        if world_size < 1 or mini_epochs < 1:
            raise PartitionError(f"world_size and mini_epochs must be positive, got {world_size} and {mini_epochs}")
        if not 0 <= rank < world_size:
            raise PartitionError(
                f"rank {rank} is outside the world of {world_size}: ranks go from 0 to {world_size - 1}"
            )
        if not 0 <= mini_epoch < mini_epochs:
            raise PartitionError(
                f"mini_epoch {mini_epoch} is outside the epoch's {mini_epochs}: "
                f"mini-epochs go from 0 to {mini_epochs - 1}"
            )
        if remainder not in REMAINDERS:
            raise PartitionError(f"unknown remainder {remainder!r}: use one of {', '.join(map(repr, REMAINDERS))}")
        if consumed < 0:
            raise PartitionError(f"consumed must be 0 or more, got {consumed}")
        self.n = operator.index(n)
        self.world_size = operator.index(world_size)
        self.rank = operator.index(rank)
        self.mini_epochs = operator.index(mini_epochs)
        self.mini_epoch = operator.index(mini_epoch)
        self.remainder = remainder
        self.consumed = min(operator.index(consumed), self.n)
        rest = self.n - self.consumed
        shares = self.world_size * self.mini_epochs
        share = rest // shares if remainder == "drop" else -(-rest // shares)
        self._end = self.n if remainder == "uneven" else self.consumed + share * shares
        self.begin = min(self.consumed + self.mini_epoch * share * self.world_size, self._end)
        """First position of this mini-epoch, over all ranks."""
        self.end = min(self.begin + share * self.world_size, self._end)
        """First position after this mini-epoch."""
        self._first = self.begin + self.rank
        self.length = max(0, -(-(self.end - self._first) // self.world_size))
        """Number of positions of this rank."""

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return (
            f"Partition(n={self.n}, world_size={self.world_size}, rank={self.rank}, mini_epochs={self.mini_epochs}, "
            f"mini_epoch={self.mini_epoch}, remainder={self.remainder!r}, consumed={self.consumed})"
        )

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: npt.NDArray[Any] | Sequence[int]) -> Indices: ...
    def __getitem__(self, index: Any) -> Any:
        # The common case first: checking for SupportsIndex takes longer than the rest.
        if type(index) is int or (isinstance(index, SupportsIndex) and not isinstance(index, np.ndarray)):
            i = operator.index(index)
            if not -self.length <= i < self.length:
                raise IndexError(
                    f"index {i} is out of range for the {counted(self.length, 'sample')} of rank {self.rank}"
                )
            return self._first + (i % self.length) * self.world_size
        return normalise(index, self.length) * self.world_size + self._first

    def positions(self, start: int = 0, stop: int | None = None) -> Indices:
        """Return the positions of the rank's samples ``start`` to ``stop``, clipped to its share: int64 (count,)."""
        stop = self.length if stop is None else min(stop, self.length)
        begin, end = (self._first + i * self.world_size for i in (min(start, stop), stop))
        return np.arange(begin, end, self.world_size, dtype=np.int64)

    def consumed_after(self, count: int) -> int:
        """Return the number of positions the job has consumed when *every* rank has consumed ``count`` samples here."""
        return min(self.begin + count * self.world_size, self.end, self.n)

    @property
    def padded(self) -> int:
        """Number of padding positions in the whole epoch, over all ranks and mini-epochs."""
        return max(0, self._end - self.n)

    @property
    def dropped(self) -> int:
        """Number of samples of the epoch that are assigned to no rank."""
        return max(0, self.n - self._end)

    @property
    def repeated(self) -> Indices:
        """The positions that padding repeats, in order: int64 of shape (padded,)."""
        return np.arange(self.n, self.n + self.padded, dtype=np.int64) % max(self.n, 1)


class Layout(NamedTuple):
    """How a job's batches are distributed to ranks, from a place in an epoch on. `penstock.Ledger` computes the rows of
    any step from it.

    Attributes:
        step: number of the first batch, counted from the start of the job; 0 in an epoch plan, which does not know it.
        epoch, mini_epoch, done, base, skip: the place where it begins, see `penstock.plan.share.MiniEpoch`.
        ranks: number of ranks.
        batch_size: batch size of each rank.
        samples: samples per epoch; batches, if the order is one of batches.
        ends: handling of the end of an epoch: index of the remainder rule, plus 3 if a last short batch is dropped.
        excluded: hash of the excluded rows.
        parts: mini-epochs per epoch.
        rank: this rank. States contain neither ``parts`` nor ``rank``.
    """

    step: int
    epoch: int
    mini_epoch: int
    done: int
    base: int
    skip: int
    ranks: int
    batch_size: int
    samples: int
    ends: int
    excluded: str | None = None
    parts: int = 1
    rank: int = 0

    @classmethod
    def of(cls, epoch: int, partition: Partition, excluded: str | None = None) -> Layout:
        """Return the layout of an epoch without mini-epochs, from its partition."""
        ends = REMAINDERS.index(partition.remainder)
        place = 0, epoch, 0, 0, partition.consumed, 0
        return cls(*place, partition.world_size, 1, partition.n, ends, excluded, rank=partition.rank)

    @property
    def rule(self) -> tuple[Any, ...]:
        """The fields that depend on neither the place nor the rank."""
        return self[6:-1]

    @property
    def drop_last(self) -> bool:
        """Whether a last short batch is dropped."""
        return self.ends >= len(REMAINDERS)

    @property
    def first(self) -> int:
        """First position, over all ranks."""
        return self.partition().begin + self.skip * self.ranks

    @property
    def empty(self) -> bool:
        """Whether no samples are left for this rank in the mini-epoch."""
        return self.skip >= len(self.partition(self.rank))

    def partition(self, rank: int = 0) -> Partition:
        """Return a rank's positions in the whole mini-epoch."""
        number = self.mini_epoch - self.done
        # A mini-epoch that was finished before the epoch was split again has no samples left.
        return Partition(
            self.samples,
            self.ranks,
            rank,
            mini_epochs=max(1, self.parts - self.done),
            mini_epoch=max(0, number),
            remainder=REMAINDERS[self.ends % len(REMAINDERS)],
            consumed=self.base if number >= 0 else self.samples,
        )
