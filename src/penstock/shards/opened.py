"""`OpenShards`: a bounded set of open shards of a process, and the samples read from them."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Protocol

import numpy as np

from penstock.order.permutation import Indices
from penstock.shards.grouping import Sample
from penstock.shards.handles import OpenShard
from penstock.shards.ranged import RangedShard, read_samples

__all__ = ["OpenShards", "pack_rows", "split_rows"]

_SHIFT = 40  # bits of a sample's number within its shard
_FEWEST, _MOST = 64, 4096  # open shards; each takes two descriptors, four with an index of entries


def pack_rows(shards: Indices, samples: Indices) -> Indices:
    """Return one number for each pair of a shard and a sample in it: int64."""
    return (shards << _SHIFT) | samples


def split_rows(rows: Indices) -> tuple[Indices, Indices]:
    """Return the shards and the samples of `pack_rows`."""
    return rows >> _SHIFT, rows & ((1 << _SHIFT) - 1)


class _Handle(Protocol):
    is_file: bool

    def open(self) -> OpenShard | RangedShard: ...


class OpenShards:
    """The open shards of a set. Thread-safe.

    Args:
        handles: handles of all shards, opened at first use; the oldest open one is closed first.
    """

    def __init__(self, handles: Sequence[_Handle]) -> None:
        self._handles = handles
        self._open: dict[int, OpenShard | RangedShard] = {}
        self._limit = _open_limit()
        self._lock = Lock()
        self._elsewhere = not all(handle.is_file for handle in handles)

    def find(self, number: int) -> OpenShard | RangedShard | None:
        """Return a shard if it is open."""
        return self._open.get(number)

    def get(self, number: int) -> OpenShard | RangedShard:
        """Return a shard, opened if needed.

        Raises:
            ShardChangedError: the shard is no longer the one that the handle refers to.
            StorageError: see `penstock.storage.local_path`.
        """
        found = self._open.get(number)
        if found is not None:
            return found
        opened = self._handles[number].open()
        with self._lock:
            if not self._handles[number].is_file:
                self._drop_removed()
            while len(self._open) >= self._limit:
                self._open.pop(next(iter(self._open)))
            self._open[number] = opened
        return opened

    def _drop_removed(self) -> None:
        """Close copies that the cache has evicted: their bytes would stay on the disk."""
        for number, shard in list(self._open.items()):
            if isinstance(shard, OpenShard) and shard.file.is_removed:
                self._open.pop(number, None)

    def check(self) -> None:
        """Raise ShardChangedError if an open shard was truncated, modified or touched."""
        for shard in list(self._open.values()):
            shard.check()

    def read(self, shards: Indices, samples: Indices) -> list[Sample]:
        """Return samples, in this order: the fast way to read a batch.

        Args:
            shards, samples: shard numbers, and sample numbers within them: int64 of shape (n,).

        Raises as `get` does.
        """
        if not self._elsewhere and len(set(shards.tolist())) <= self._limit:
            return self._read(shards, samples)
        # In sorted order, one request reads neighbours, and the limit of open shards holds.
        ordered, places = np.unique(pack_rows(shards, samples), return_inverse=True)
        shards, samples = split_rows(ordered)
        part = np.cumsum(np.diff(shards, prepend=shards[:1]) != 0) // self._limit
        cuts = np.flatnonzero(np.diff(part)) + 1
        pairs = zip(np.split(shards, cuts), np.split(samples, cuts), strict=True)
        found = [sample for numbers, theirs in pairs for sample in self._read(numbers, theirs)]
        return [dict(found[place]) for place in places.tolist()]

    def _read(self, shards: Indices, samples: Indices) -> list[Sample]:
        opened = {number: self.get(number) for number in set(shards.tolist())}
        wanted = [(opened[number], k) for number, k in zip(shards.tolist(), samples.tolist(), strict=True)]
        found = list(read_samples(wanted)) if self._elsewhere else [shard.sample(k) for shard, k in wanted]
        for shard in opened.values():
            shard.check()  # after the reads, so that no changed data is returned
        return found


def _open_limit() -> int:
    """Return how many shards may be open: they use a quarter to half of the process's descriptors."""
    try:
        import resource
    except ImportError:  # Windows
        return _FEWEST
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else min(max(soft // 8, _FEWEST), _MOST)
