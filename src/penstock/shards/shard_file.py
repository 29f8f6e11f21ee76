"""`ShardFile`: a file of samples before it is opened, in a store or local, whose samples may not be counted yet.

shard.facts                       None, until this process has counted the shard or received the facts of another
shard.count()                     its facts: by an index if there is one, else from a copy, which is then indexed
pack_rows(shards, samples)        one number for a sample that has no row in the whole set yet
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import astuple
from threading import Lock
from typing import Any, NamedTuple

import xxhash

from penstock.order.permutation import Indices
from penstock.storage import File, RemoteSource, Storage
from penstock.storage.transfer import Cancel, Stat

__all__ = ["INDEXING", "Facts", "ShardFile", "StoredShard", "pack_rows", "split_rows"]

INDEXING = Lock()
"""Files are indexed one at a time: threads would only contend for the GIL."""

_SHIFT = 40  # bits of a sample's number within its shard


class Facts(NamedTuple):
    """Facts of a shard that was counted: enough for ranks and workers that have not read it.

    Attributes:
        version: the version of the object; None for a local file.
        samples: the number of samples.
        content: a text that identifies the content: xxh3_128 as hex; for JSON lines, the fingerprint of the version.
    """

    version: Stat | None
    samples: int
    content: str

    @property
    def identity(self) -> str:
        """8 hex digits by which states name the content."""
        return xxhash.xxh3_64_hexdigest(self.content.encode("utf-8", "surrogateescape"))[:8]

    def to_json(self) -> list[Any]:
        """Return the facts as JSON types."""
        return [None if self.version is None else astuple(self.version), self.samples, self.content]

    @classmethod
    def of_json(cls, facts: Sequence[Any]) -> Facts:
        """Return the facts of a `to_json` result."""
        version, samples, content = facts
        return cls(None if version is None else Stat(*version), samples, content)


class StoredShard(NamedTuple):
    """A shard in a store that is copied when its data is needed, for prefetching: its number in the set and its object.

    ``indexes``: the objects that must be cached before ranges can be read; None if ranges cannot be read.
    """

    number: int
    source: RemoteSource
    indexes: Sequence[RemoteSource] | None = None


class ShardFile(abc.ABC):
    """A file of samples, in a store fixed to one version once that is known. Picklable.

    Args:
        url: its URL.
        storage: access options.
        stat: its version, if known; else the store is asked.

    Attributes: ``facts`` is None until this process has counted the file, or received the facts from another one.
    """

    facts: Facts | None = None

    def __init__(self, url: str, storage: Storage | None = None, stat: Stat | None = None) -> None:
        self.url, self.storage, self._stat = url, storage or Storage(), stat
        self._source: RemoteSource | None = None

    @property
    def source(self) -> RemoteSource:
        """The counted version of the object, or else the current one, which may cost a request.

        Raises:
            StorageError: its version is unknown and it does not exist.
        """
        stat = self._stat if self.facts is None else self.facts.version
        if self._source is None or stat not in (None, self._source.stat):
            self._source = RemoteSource(self.url, self.storage, stat)
        return self._source

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.source.size

    @abc.abstractmethod
    def find(self) -> Facts | None:
        """Return the facts if this machine has an index; costs at most one request."""

    @abc.abstractmethod
    def index_copy(self, copy: File, progress: Callable[[int], object]) -> Facts:
        """Index a copy, and return the facts."""

    def count(self, cancel: Cancel | None = None) -> Facts:
        """Return the facts, by an index without the data if there is one. Raises as `obtain`."""
        return self.obtain(cancel=cancel)

    def obtain(
        self,
        *,
        only_later: bool = False,
        cancel: Cancel | None = None,
        progress: Callable[[int], object] = lambda _: None,
    ) -> Facts:
        """Copy and index the file unless it is counted, or this machine has its index; return the facts.

        Args:
            only_later, cancel: see `fetch`.
            progress: called with the bytes just indexed.

        Raises:
            StorageError: it is unavailable.
            PenstockError: (of its format) it is damaged.
            NotCachedError: see `fetch`.
        """
        self.facts = self.facts or self.find()
        if self.facts is None:
            self.facts = self.index_copy(self.fetch(cancel, only_later=only_later), progress)
        else:
            progress(self.size)
        return self.facts

    def fetch(self, cancel: Cancel | None = None, *, only_later: bool = True) -> File:
        """Return an open copy, fetched if it is missing.

        Args:
            cancel: ends the download, which a later call resumes.
            only_later: see `penstock.storage.Cache.open`.

        Raises:
            NotCachedError: with ``only_later``, the cached objects are needed sooner.
        """
        return self.storage.the_cache().open(self.source.until(cancel), only_later=only_later, progress=False)


def pack_rows(shards: Indices, samples: Indices) -> Indices:
    """Return one number for each pair of a shard and a sample in it: int64."""
    return (shards << _SHIFT) | samples


def split_rows(rows: Indices) -> tuple[Indices, Indices]:
    """Return the shards and the samples of `pack_rows`."""
    return rows >> _SHIFT, rows & ((1 << _SHIFT) - 1)
