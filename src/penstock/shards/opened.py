"""`OpenShards`: a bounded set of open shards of a process, and the samples read from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.order.permutation import Indices
from penstock.shards.grouping import Sample
from penstock.shards.handles import Handle, OpenShard
from penstock.shards.ranged import RangedShard, read_samples
from penstock.storage.file_pool import FilePool

__all__ = ["OpenShards", "pack_rows", "split_rows"]

_SHIFT = 40  # bits of a sample's number within its shard
_DESCRIPTORS = 4  # that an open shard takes: of itself and of its indexes, one for images included


def pack_rows(shards: Indices, samples: Indices) -> Indices:
    """Return one number for each pair of a shard and a sample in it: int64."""
    return (shards << _SHIFT) | samples


def split_rows(rows: Indices) -> tuple[Indices, Indices]:
    """Return the shards and the samples of `pack_rows`."""
    return rows >> _SHIFT, rows & ((1 << _SHIFT) - 1)


class OpenShards:
    """The open shards of a set. Thread-safe.

    Args:
        handles: handles of all shards, opened at first use; the oldest open one is closed first.
    """

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles
        self._elsewhere = not all(handle.is_file for handle in handles)
        self._open: FilePool[OpenShard | RangedShard] = FilePool(_DESCRIPTORS, copies=self._elsewhere)

    def find(self, number: int) -> OpenShard | RangedShard | None:
        """Return a shard if it is open."""
        return self._open.find(number)

    def get(self, number: int) -> OpenShard | RangedShard:
        """Return a shard, opened if needed.

        Raises:
            ShardChangedError: the shard is no longer the one that the handle refers to.
            StorageError: see `penstock.storage.local_path`.
        """
        return self._open.find(number) or self._open.add(number, self._handles[number].open())

    def check(self) -> None:
        """Raise ShardChangedError if an open shard was truncated, modified or touched."""
        for shard in self._open:
            shard.check()

    def read(self, shards: Indices, samples: Indices) -> list[Sample]:
        """Return samples, in this order: the fast way to read a batch.

        Args:
            shards, samples: shard numbers, and sample numbers within them: int64 of shape (n,).

        Raises as `get` does.
        """
        if not self._elsewhere and len(set(shards.tolist())) <= self._open.most:
            return self._read(shards, samples)
        # In sorted order, one request reads neighbours, and the limit of open shards holds.
        ordered, places = np.unique(pack_rows(shards, samples), return_inverse=True)
        shards, samples = split_rows(ordered)
        part = np.cumsum(np.diff(shards, prepend=shards[:1]) != 0) // self._open.most
        cuts = np.flatnonzero(np.diff(part)) + 1
        pairs = zip(np.split(shards, cuts), np.split(samples, cuts), strict=True)
        found = [sample for numbers, theirs in pairs for sample in self._read(numbers, theirs)]
        return [dict(found[place]) for place in places.tolist()]

    def _read(self, shards: Indices, samples: Indices) -> list[Sample]:
        opened = {number: self.get(number) for number in set(shards.tolist())}
        wanted = [(opened[number], k) for number, k in zip(shards.tolist(), samples.tolist(), strict=True)]
        by_ranges = any(isinstance(shard, RangedShard) for shard in opened.values())
        found = list(read_samples(wanted)) if by_ranges else [shard.sample(k) for shard, k in wanted]
        for shard in opened.values():
            shard.check()  # after the reads, so that no changed data is returned
        return found
