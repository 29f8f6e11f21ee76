"""`LineShard`: a file of JSON lines in a store that nobody may have counted yet."""

from __future__ import annotations

from threading import Lock
from typing import Any

from penstock.shards.facts import Facts
from penstock.storage import Cache, CachedFile, Storage
from penstock.storage.backend import Cancel, Stat
from penstock.storage.prefetch import Stoppable
from penstock.storage.remote import RemoteSource
from penstock.storage.urls import shown
from penstock.tables.line_index import LineIndex, find_index, open_index
from penstock.tables.ranged import mapped_copy

__all__ = ["LineShard", "find_index_of", "make_index_of"]


class LineShard:
    """A file of JSON lines in a store: one version of it, once somebody has asked for it.

    Args:
        url: its address.
        storage: how the store is reached.
        stat: its version, where that is known.
        facts: what is known of it.

    Attributes: ``facts`` are None until the file was read here, or somebody who has read it told them.
    """

    def __init__(self, url: str, storage: Storage | None, stat: Stat | None = None, facts: Facts | None = None) -> None:
        self.url, self.storage, self._stat, self.facts = url, storage or Storage(), stat, facts
        self._source: RemoteSource | None = None

    def source(self) -> RemoteSource:
        """Return the version that was counted, or the present one. Costs a request where none is known.

        Raises:
            StorageError: nothing is known of it, and it is not there.
        """
        stat = self._stat if self.facts is None else self.facts.version
        if self._source is None or stat not in (None, self._source.stat):
            self._source = RemoteSource(self.url, self.storage, stat)
        return self._source

    def count(self, cancel: Cancel | None = None) -> Facts:
        """Have the file counted, unless it is. Raises as `obtain` does."""
        return self.obtain(cancel=cancel)

    def obtain(self, *, only_later: bool = False, cancel: Cancel | None = None) -> Facts:
        """Have the file copied and indexed, unless somebody of this machine has done so.

        Args:
            only_later: see `penstock.storage.Cache.open`.
            cancel: ends the download, which goes on another time.

        Raises:
            DataFileError: it is damaged, or no text.
            StorageError: it cannot be had.
            NotCachedError: see `penstock.storage.Cache.open` on ``only_later``.
        """
        if self.facts is None:
            source = self.source()
            index = find_index_of(source) or make_index_of(source, self._copy(only_later, cancel))
            self.facts = Facts(source.stat, len(index), "")
        return self.facts

    def fetch(self, cancel: Cancel) -> None:
        """Have a copy in the cache.

        Raises:
            NotCachedError: what is there is needed sooner.
        """
        self._copy(True, cancel)

    def _copy(self, only_later: bool, cancel: Cancel | None) -> CachedFile:
        source = self.source()
        stoppable = source if cancel is None else Stoppable(source, cancel)
        return self.storage.the_cache().open(stoppable, only_later=only_later, progress=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return LineShard, (self.url, self.storage, self._stat, self.facts)


def find_index_of(source: RemoteSource) -> LineIndex | None:
    """Return the index of a version of an object, if somebody of this machine has made it."""
    return find_index(Cache.key(source).encode())


def make_index_of(source: RemoteSource, copy: CachedFile) -> LineIndex:
    """Return the index of a version of an object, made of a copy. Raises as `open_index` does."""
    with _indexing:
        return open_index(shown(source.url), Cache.key(source).encode(), lambda: mapped_copy(copy)[1], progress=False)


_indexing = Lock()
"""Files are indexed one after the other: threads would wait for Python's lock, and cost more."""
