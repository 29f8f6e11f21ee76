"""The order of an epoch over shards whose numbers of samples are not known yet, window by window.

    shards in the epoch's order    | window 0 | window 1      | window 2                      | ...
    rank of each shard             | 0 1 2    | 0 1 2 0 1 2   | 0 1 2 0 1 2 0 1 2 0 1 2       |
    samples of a window            ranks with too many samples pass some to others; then each rank shuffles its samples

The first window has one shard per rank, so that the first batch is ready soon. Each next window has twice as many, up
to a limit. Positions of the epoch are split among ranks in strides: a window of n samples has n positions, and the
first position of the window determines how many of them each rank gets. If a rank's shards have more samples than the
rank has positions, the last ones go to ranks with fewer, in the order of the ranks. So few shards are read by two
ranks.

Invariant: the order of a window depends only on the counts of *its* shards, and on the number of samples before it. So
a state needs only two numbers about the past.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.errors import OrderError
from penstock.hashing import mix
from penstock.order.permutation import Indices, Permutation

__all__ = ["WindowOrder", "window_span"]


def window_span(number: int, shards: int, most: int, world_size: int) -> tuple[int, int]:
    """Return the first and the last shard (exclusive) of a window, by their places in the epoch's order.

    Args:
        number: number of the window.
        shards: number of shards of the epoch.
        most: the largest number of shards per rank in a window.
        world_size: number of ranks.

    Window k has 2**k shards per rank, until that is more than ``most``. Spans after the last window are empty.

    >>> [window_span(number, 20, 4, world_size=2) for number in range(5)]
    [(0, 2), (2, 6), (6, 14), (14, 20), (20, 20)]
    """
    doubled = min(number, most.bit_length())
    before = (1 << doubled) - 1 + (number - doubled) * most
    size = min(1 << doubled, most)
    begin = before * world_size
    return min(begin, shards), min(begin + size * world_size, shards)


class WindowOrder:
    """The order of the samples in one window.

    Args:
        shards: numbers of the window's shards, in the epoch's order.
        counts: number of samples of each shard.
        begin: the position of the window's first sample in the epoch.
        world_size: number of ranks.
        key: key of the shuffle; None keeps the samples of a rank in the order of its shards.

    A sample is a pair: the number of a shard, and the number of the sample in it.

    >>> order = WindowOrder([7, 3], [3, 1], begin=0, world_size=2, key=None)
    >>> [list(zip(*map(list, order.of_rank(rank)))) for rank in range(2)]
    [[(7, 0), (7, 1)], [(3, 0), (7, 2)]]
    """

    def __init__(
        self, shards: Sequence[int], counts: Sequence[int], *, begin: int, world_size: int, key: int | None
    ) -> None:
        if len(shards) != len(counts):
            raise OrderError(f"{len(shards)} shards need one count each, got {len(counts)} counts")
        self.shards = np.asarray(shards, dtype=np.int64)
        self.counts = np.asarray(counts, dtype=np.int64)
        self.begin, self.world_size, self._key = begin, world_size, key
        self.samples = int(self.counts.sum())
        """Number of samples, and of positions."""
        ranks = np.arange(world_size)
        quotas = np.maximum(0, -(-(self.samples - (ranks - begin) % world_size) // world_size))
        own = np.bincount(np.arange(len(counts)) % world_size, self.counts, world_size).astype(np.int64)
        # For each rank: its positions, the samples in its shards, those that it gets from others, and passes to others.
        self._quotas, self._own = quotas, own
        self._missing, self._spare = np.maximum(quotas - own, 0), np.maximum(own - quotas, 0)

    def __len__(self) -> int:
        return self.samples

    def of_rank(self, rank: int) -> tuple[Indices, Indices]:
        """Return the samples of a rank in order: numbers of shards and of samples in them, int64 of shape (n,).

        Cost: O(samples of the rank) time and memory.
        """
        quota, own = int(self._quotas[rank]), int(self._own[rank])
        parts = [self._part(rank, 0, min(own, quota))]
        if quota > own:
            parts += self._surplus(int(self._missing[:rank].sum()), quota - own)
        shards, samples = (np.concatenate(part) for part in zip(*parts, strict=True))
        if self._key is None or not quota:
            return shards, samples
        places = Permutation(quota, mix(self._key, rank))[np.arange(quota, dtype=np.int64)]
        return shards[places], samples[places]

    def _part(self, rank: int, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return samples ``start`` to ``stop`` of a rank's own shards, in the order of the shards."""
        counts, shards = self.counts[rank :: self.world_size], self.shards[rank :: self.world_size]
        places = np.arange(start, stop, dtype=np.int64)
        if not len(shards):
            return places, places
        starts = np.cumsum(counts) - counts
        at = np.searchsorted(starts, places, "right") - 1
        return shards[at], places - starts[at]

    def _surplus(self, start: int, count: int) -> list[tuple[Indices, Indices]]:
        """Return ``count`` of the samples that ranks pass to others, counted from ``start`` over all ranks in order."""
        ends = np.cumsum(self._spare)
        parts, stop = [], start + count
        for rank in range(int(np.searchsorted(ends, start, "right")), self.world_size):
            begin = int(ends[rank] - self._spare[rank])
            if begin >= stop:
                break
            behind = int(self._own[rank] - self._spare[rank]) - begin
            parts.append(self._part(rank, max(start, begin) + behind, min(stop, int(ends[rank])) + behind))
        return parts
