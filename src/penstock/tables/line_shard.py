"""`LineShard`: a JSON-lines file in a store whose rows may not be counted yet."""

from __future__ import annotations

from threading import Lock
from typing import Any

from penstock.shards.exchange import Facts
from penstock.storage import Cache, File, Storage
from penstock.storage.backend import Cancel, Stat
from penstock.storage.remote import RemoteSource
from penstock.storage.urls import shown
from penstock.tables.line_index import LineIndex, find_index, open_index
from penstock.tables.ranged import mapped_copy

__all__ = ["LineShard", "find_index_of", "make_index_of"]


class LineShard:
    """A JSON-lines file in a store; fixed to one version once that is known.

    Args:
        url: its URL.
        storage: access options.
        stat: its version, if known.
        facts: its facts, if known.

    Attributes: ``facts`` is None until this process has read the file, or received the facts from another one.
    """

    def __init__(self, url: str, storage: Storage | None, stat: Stat | None = None, facts: Facts | None = None) -> None:
        self.url, self.storage, self._stat, self.facts = url, storage or Storage(), stat, facts
        self._source: RemoteSource | None = None

    def source(self) -> RemoteSource:
        """Return the counted version, or else the current one, which costs a request.

        Raises:
            StorageError: its version is unknown and it does not exist.
        """
        stat = self._stat if self.facts is None else self.facts.version
        if self._source is None or stat not in (None, self._source.stat):
            self._source = RemoteSource(self.url, self.storage, stat)
        return self._source

    def count(self, cancel: Cancel | None = None) -> Facts:
        """Count the file unless it is counted; return the facts. Raises as `obtain`."""
        return self.obtain(cancel=cancel)

    def obtain(self, *, only_later: bool = False, cancel: Cancel | None = None) -> Facts:
        """Copy and index the file, unless this machine has its index; return the facts.

        Args:
            only_later: see `penstock.storage.Cache.open`.
            cancel: ends the download, which a later call resumes.

        Raises:
            DataFileError: it is damaged, or not text.
            StorageError: it is unavailable.
            NotCachedError: see `penstock.storage.Cache.open` on ``only_later``.
        """
        if self.facts is None:
            source = self.source()
            index = find_index_of(source) or make_index_of(source, self._copy(only_later, cancel))
            self.facts = Facts(source.stat, len(index), source.stat.fingerprint)
        return self.facts

    def fetch(self, cancel: Cancel) -> None:
        """Ensure that the cache has a copy.

        Raises:
            NotCachedError: the cached objects are needed sooner.
        """
        self._copy(True, cancel)

    def _copy(self, only_later: bool, cancel: Cancel | None) -> File:
        source = self.source()
        return self.storage.the_cache().open(source.until(cancel), only_later=only_later, progress=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return LineShard, (self.url, self.storage, self._stat, self.facts)


def find_index_of(source: RemoteSource) -> LineIndex | None:
    """Return the cached index of a version of an object, or None."""
    return find_index(Cache.key(source).encode())


def make_index_of(source: RemoteSource, copy: File) -> LineIndex:
    """Return the index of a version of an object, built from a copy. Raises as `open_index`."""
    with _indexing:
        key, array = Cache.key(source).encode(), mapped_copy(copy).array
        return open_index(shown(source.url), key, lambda: array, progress=False)


_indexing = Lock()
"""Files are indexed one at a time: threads would only contend for the GIL."""
