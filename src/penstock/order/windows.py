"""The order of an epoch over shards whose samples nobody has counted yet: window by window, by arithmetic.

    shards in the epoch's order    | window 0 | window 1      | window 2                      | ...
    dealt to ranks, one by one     | 0 1 2    | 0 1 2 0 1 2   | 0 1 2 0 1 2 0 1 2 0 1 2       |
    samples of a window            what one rank's shards have too many, another gets; each shuffles what it has

The first window has one shard a rank, so that the first batch comes soon; each next one has twice as many, up to a
limit. Positions of the epoch are dealt to ranks in turn, as everywhere: a window of n samples covers n positions, and
how many of them are a rank's follows from where the window begins. Where a rank's shards have more samples than it has
positions, the last ones go to ranks that have fewer, in the order of the ranks: so few shards are read by two ranks.

Invariant: the window's order depends on the counts of *its* shards alone, and on how many samples came before it. So a
state needs two numbers of all that went before.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.errors import OrderError
from penstock.hashing import mix
from penstock.order.permutation import Indices, Permutation

__all__ = ["Stage", "WindowOrder", "window_spans"]


class Stage(NamedTuple):
    """From where on the shards are dealt to so many ranks: the beginning of an epoch, or a resume on other ranks.

    Attributes:
        shard: the first shard, by its place in the epoch's order.
        position: samples of the epoch before it.
        world_size: ranks.
    """

    shard: int
    position: int
    world_size: int


def window_spans(stage: Stage, number: int, shards: int, most: int) -> tuple[int, int]:
    """Return the first and the last shard (exclusive) of a window, by their places in the epoch's order.

    Args:
        stage: whose windows are counted from 0.
        number: of the window.
        shards: how many there are.
        most: shards of one rank in a window, at most.

    Window k has 2**k shards a rank, until that is more than ``most``. Behind the last window spans are empty.

    >>> [window_spans(Stage(0, 0, 2), number, 20, 4) for number in range(5)]
    [(0, 2), (2, 6), (6, 14), (14, 20), (20, 20)]
    """
    full = most.bit_length() - 1  # windows before this one double
    before = (1 << min(number, full)) - 1
    size = min(1 << min(number, full), most)
    if number > full:
        before += (1 << full) + (number - full - 1) * most
        size = most
    begin = stage.shard + before * stage.world_size
    return min(begin, shards), min(begin + size * stage.world_size, shards)


class WindowOrder:
    """The samples of one window: which of them stands at which position.

    Args:
        shards: numbers of the window's shards, in the epoch's order.
        counts: how many samples each of them has.
        begin: the position of the window's first sample, in the epoch.
        first: which rank that position belongs to.
        world_size: ranks of the stage.
        key: of the shuffle; None keeps the samples of a rank in the order of its shards.

    Samples are pairs: the number of a shard, and that of a sample in it. Cost: what a rank reads is computed for that
    rank, O(samples of its part) time and memory.

    >>> order = WindowOrder([7, 3], [3, 1], begin=0, first=0, world_size=2, key=None)
    >>> [list(zip(*map(list, order.of_rank(rank)))) for rank in range(2)]
    [[(7, 0), (7, 1)], [(3, 0), (7, 2)]]
    """

    def __init__(
        self,
        shards: Sequence[int],
        counts: Sequence[int],
        *,
        begin: int,
        first: int,
        world_size: int,
        key: int | None,
    ) -> None:
        if len(shards) != len(counts):
            raise OrderError(f"{len(shards)} shards need as many counts, got {len(counts)}")
        self.shards = np.asarray(shards, dtype=np.int64)
        self.counts = np.asarray(counts, dtype=np.int64)
        self.begin, self.world_size = operator.index(begin), operator.index(world_size)
        self._first, self._key = first % world_size, key
        self._known: dict[int, tuple[Indices, Indices]] = {}
        self.samples = int(self.counts.sum())

    def __len__(self) -> int:
        return self.samples

    @property
    def end(self) -> int:
        """The position behind the window."""
        return self.begin + self.samples

    def quota(self, rank: int) -> int:
        """Return how many positions of the window are a rank's."""
        offset = (rank - self._first) % self.world_size
        return max(0, -(-(self.samples - offset) // self.world_size))

    def of_rank(self, rank: int) -> tuple[Indices, Indices]:
        """Return a rank's samples, in order: numbers of shards and of samples in them, int64 of shape (quota,)."""
        found = self._known.get(rank)
        if found is None:
            found = self._known[rank] = self._find(rank)
        return found

    def _find(self, rank: int) -> tuple[Indices, Indices]:
        quota, own = self.quota(rank), int(self._own[rank])
        parts = [self._part(rank, 0, min(own, quota))]
        if quota > own:
            parts += self._surplus(int(self._missing[:rank].sum()), quota - own)
        shards, samples = (np.concatenate(part) for part in zip(*parts, strict=True))
        if self._key is None or not quota:
            return shards, samples
        places = Permutation(quota, mix(self._key, rank))[np.arange(quota, dtype=np.int64)]
        return shards[places], samples[places]

    def at(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the samples at positions of the epoch that are in this window, of whichever ranks.

        Cost: that of `of_rank` for each rank that the positions belong to; what was computed is kept.
        """
        ranks = (self._first + positions - self.begin) % self.world_size
        turns = (positions - self.begin) // self.world_size
        shards, samples = np.empty_like(positions), np.empty_like(positions)
        for rank in np.unique(ranks).tolist():
            here = ranks == rank
            theirs = self.of_rank(rank)
            shards[here], samples[here] = theirs[0][turns[here]], theirs[1][turns[here]]
        return shards, samples

    @cached_property
    def _own(self) -> Indices:
        """How many samples the shards of each rank have together."""
        ranks = np.arange(len(self.counts)) % self.world_size
        return np.bincount(ranks, weights=self.counts, minlength=self.world_size).astype(np.int64)

    @cached_property
    def _missing(self) -> Indices:
        """How many samples each rank gets of others; of those that have too many, less than nothing."""
        quotas = np.array([self.quota(rank) for rank in range(self.world_size)], dtype=np.int64)
        missing: Indices = np.maximum(quotas - self._own, 0)
        return missing

    @cached_property
    def _spare(self) -> Indices:
        """How many samples each rank has too many."""
        quotas = np.array([self.quota(rank) for rank in range(self.world_size)], dtype=np.int64)
        spare: Indices = np.maximum(self._own - quotas, 0)
        return spare

    def _part(self, rank: int, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return some of the samples of a rank's own shards, in the order of the shards."""
        counts, shards = self.counts[rank :: self.world_size], self.shards[rank :: self.world_size]
        places = np.arange(start, stop, dtype=np.int64)
        if not len(shards):
            return places, places
        starts = np.cumsum(counts) - counts
        at = np.searchsorted(starts, places, "right") - 1
        return shards[at], places - starts[at]

    def _surplus(self, start: int, count: int) -> list[tuple[Indices, Indices]]:
        """Return samples that ranks have too many: of all of them, one rank after the other, ``count`` from a place."""
        ends = np.cumsum(self._spare)
        parts, stop = [], start + count
        for rank in range(int(np.searchsorted(ends, start, "right")), self.world_size):
            begin = int(ends[rank] - self._spare[rank])
            if begin >= stop:
                break
            behind = int(self._own[rank] - self._spare[rank]) - begin
            parts.append(self._part(rank, max(start, begin) + behind, min(stop, int(ends[rank])) + behind))
        return parts
