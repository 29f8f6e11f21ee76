"""`EpochPlan` and `BatchEpochPlan`: one epoch of a plan on one rank, as a function of position.

    plan.bind(cursor)  ->  epoch plan  ->  block(a, b)      indices and positions of any part of it, in any order
                                           cursor(count)    the position after ``count`` samples
                               |
                               Batches(epoch plan, size, drop_last)  ->  blocks()    indices, positions of batches

A loader that prefetches takes the cursor after the last sample that its *consumer* has received, so no sample is
counted twice or replayed.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from penstock.order import Partition
from penstock.order.partition import REMAINDERS, Layout
from penstock.order.permutation import MAX_N, Indices
from penstock.plan.cursor import Cursor, State

__all__ = [
    "Batch",
    "BatchEpochPlan",
    "Batches",
    "Block",
    "EpochOrder",
    "EpochPlan",
    "ForwardEpoch",
    "OneEpoch",
    "PartitionedOrder",
    "length_of",
]


_LARGEST_BLOCK = 64
"""Batches in a block."""
_LARGEST_SAMPLE_BLOCK = 8192
"""Samples in a block of batches: enough to hide NumPy's cost per call."""
_LARGEST_ARRAY = 32768
"""Samples whose indices are computed at once."""
_MOST_BATCHES = 256
"""More lists at a time would trigger Python's garbage collector repeatedly."""

Batch = tuple[list[Any], Indices]
"""The sample indices of a batch, and the int64 array of their positions in the epoch."""

Block = tuple[list[list[Any]] | Indices, Indices]
"""The sample indices of several batches of one size, as lists or as an int64 array of shape (batches, size), and the
array of their positions."""


class EpochOrder(Protocol):
    """The samples of an epoch: an `Order`, an array, or draws with repetition."""

    def __getitem__(self, positions: Indices, /) -> Indices:
        """Return the samples at some positions, int64 of shape (n,)."""


class OneEpoch(abc.ABC):
    """One epoch on one rank, starting at a cursor.

    Attributes:
        seed: seed of the samples' generators; None leaves seeding to the reader of the plan.
        epoch: the number of the epoch.
        per_rank: whether positions count only this rank's samples. Otherwise they count the samples of all ranks, and
            do not depend on the number of ranks.
        one_by_one: whether reading the plan runs the user's code, so that it must not be read ahead further than
            needed.
        place: the position of the dataset, for datasets whose workers need it; of what was read last.
    """

    seed: int | None = None
    epoch: int = 0
    per_rank: bool = False
    one_by_one: bool = False
    place: Any = None

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of samples or batches; raise TypeError if the plan is endless, or while it is unknown."""

    @abc.abstractmethod
    def cursor(self, count: int) -> Cursor:
        """Return the cursor of a consumer that has received the first ``count`` samples or batches."""

    @property
    def start(self) -> Cursor:
        """The start of the epoch."""
        return Cursor(epoch=self.epoch)

    def after(self, count: int) -> Cursor:
        """Return the start of the next epoch of a consumer that has received the first ``count`` batches."""
        return Cursor(epoch=self.epoch + 1)

    def exhaust(self) -> None:  # noqa: B027 (most have nothing to do)
        """Record that the plan was read to its end, or will not be read further. A plan that draws from a generator
        makes its last draws.
        """

    @property
    def layout(self) -> Layout | None:
        """How this epoch is distributed to ranks; None if that cannot be computed."""
        return None


class EpochPlan(OneEpoch):
    """The samples of one epoch on one rank, starting at a cursor."""

    @abc.abstractmethod
    def block(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return the indices of samples ``start`` to ``stop``, and their positions in the epoch: int64 arrays of shape
        (stop - start,).
        """


class ForwardEpoch(OneEpoch):
    """The samples of one epoch on one rank that become known while they are read: once, from a cursor on."""

    one_by_one = True

    @abc.abstractmethod
    def read(self, size: int) -> Iterator[tuple[Indices, Indices]]:
        """Yield the indices and positions of ``size`` samples at a time, fewer at the end. Waits for data."""


class BatchEpochPlan(OneEpoch):
    """The batches of one epoch on one rank, starting at a cursor.

    Attributes:
        length_varies: whether other epochs may have another number of batches.
    """

    length_varies: bool = False

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches."""

    def blocks(self) -> Iterator[Block]:
        """Yield blocks of batches of one size.

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


class Batches(BatchEpochPlan):
    """The batches of an epoch plan of samples.

    Args:
        samples: the epoch plan.
        batch_size: number of samples in a batch.
        drop_last: whether to leave out the last batch if it is not full.
    """

    def __init__(self, samples: EpochPlan | ForwardEpoch, batch_size: int, drop_last: bool) -> None:
        self._samples = samples
        self._batch_size = batch_size
        self._drop_last = drop_last
        self.seed, self.epoch = samples.seed, samples.epoch
        self.per_rank, self.one_by_one = samples.per_rank, samples.one_by_one

    def __len__(self) -> int:
        samples = len(self._samples)
        return samples // self._batch_size if self._drop_last else -(-samples // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for indices, positions in self.blocks():
            yield from zip(indices.tolist(), positions, strict=True)

    def blocks(self) -> Iterator[tuple[Indices, Indices]]:
        """Yield blocks of batches, as arrays.

        Computing the keys of samples from the positions is cheapest for a whole block. A last batch that is not full is
        a separate block.
        """
        run, width = self._samples, self._batch_size
        if isinstance(run, ForwardEpoch):
            for indices, positions in run.read(width):
                if len(indices) == width or not self._drop_last:
                    self.place = run.place
                    yield indices[None], positions[None]
            return
        samples = length_of(run)
        full = samples - samples % width
        begin, size = 0, width
        largest = width if run.one_by_one else width * max(1, _LARGEST_ARRAY // width)
        step = max(1, min(_LARGEST_SAMPLE_BLOCK // width, _MOST_BATCHES))
        while begin < full:
            stop = min(begin + size, full)
            indices, positions = (part.reshape(-1, width) for part in run.block(begin, stop))
            for first in range(0, len(indices), step):
                self.place = run.place
                yield indices[first : first + step], positions[first : first + step]
            begin, size = stop, min(size * 4, largest)
        # Like torch's sampler, which reaches the end of its indices while it fills the last batch.
        run.exhaust()
        if full < samples and not self._drop_last:
            indices, positions = run.block(full, samples)
            self.place = run.place
            yield indices[None], positions[None]

    @property
    def layout(self) -> Layout | None:
        layout = self._samples.layout
        if layout is None:
            return None
        ends = layout.ends + len(REMAINDERS) * self._drop_last
        return layout._replace(batch_size=self._batch_size, ends=ends)

    def cursor(self, count: int) -> Cursor:
        return self._samples.cursor(count * self._batch_size)

    @property
    def start(self) -> Cursor:
        return self._samples.start

    def after(self, count: int) -> Cursor:
        return self._samples.after(count)

    def exhaust(self) -> None:
        self._samples.exhaust()


@dataclass(eq=False, repr=False)
class PartitionedOrder(EpochPlan):
    """An order split among ranks by a partition.

    Attributes:
        make: returns the order; called at the first index, because torch's order costs O(N).
        partition: this rank's positions.
        identity: returns the entries that a state must match, see `Cursor.plan`; called for the first cursor, because
            an epoch needs no fingerprint of the data.
        seed, epoch, per_rank: see `EpochPlan`.
        rounds: how often the order yields each sample; None if that differs between samples.
        entropy: returns the random draw at the start of the epoch; called for each cursor.
        at_end: called at the end of the epoch, perhaps more than once.
    """

    make: Callable[[], EpochOrder]
    partition: Partition
    identity: Callable[[], State]
    _: KW_ONLY
    seed: int | None
    epoch: int
    per_rank: bool = False
    rounds: int | None = 1
    entropy: Callable[[], State] = dict
    at_end: Callable[[], object] | None = None

    @cached_property
    def order(self) -> EpochOrder:
        """The order of the whole epoch, of all ranks together."""
        return self.make()

    @cached_property
    def _identity(self) -> State:
        return self.identity()

    def __len__(self) -> int:
        return self.partition.length

    def block(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return indices and positions. Positions of n or more are padding, which repeats the start of the order."""
        n, positions = self.partition.n, self.partition.positions(start, stop)
        # Positions ascend, so the last one shows whether the division, the largest cost here, is needed.
        padded = positions.size and positions[-1] >= n
        return self.order[positions % n if padded else positions], positions

    def cursor(self, count: int) -> Cursor:
        """Return the cursor of the whole job when every rank has received ``count`` samples."""
        consumed = self.partition.consumed_after(count)
        return Cursor(epoch=self.epoch, consumed=consumed, plan=self._identity, entropy=self.entropy())

    @property
    def layout(self) -> Layout:
        """How this epoch is distributed to ranks."""
        return Layout.of(self.epoch, self.partition)

    def exhaust(self) -> None:
        """Record that the plan was read to its end."""
        if self.at_end is not None:
            self.at_end()


def length_of(plan: EpochPlan | ForwardEpoch | BatchEpochPlan) -> int:
    """Return the number of samples or batches of an epoch plan, or 2**62 if it is endless or unknown."""
    try:
        return len(plan)
    except TypeError:
        return MAX_N
