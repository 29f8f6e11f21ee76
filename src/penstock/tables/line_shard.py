"""`LineShard`: a JSON-lines file in a store whose rows may not be counted yet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.shards.shard_file import INDEXING, Facts, ShardFile
from penstock.storage import Cache, File
from penstock.storage.files import DATA
from penstock.storage.remote import RemoteSource
from penstock.storage.urls import shown
from penstock.tables.line_index import TextIndex, find_index, open_index

__all__ = ["LineShard", "find_index_of", "make_index_of"]


class LineShard(ShardFile):
    """A JSON-lines file in a store."""

    def find(self) -> Facts | None:
        index = find_index_of(self.source)
        return None if index is None else self._facts(index)

    def index_copy(self, copy: File, progress: Callable[[int], object]) -> Facts:
        index = make_index_of(self.source, copy)
        progress(copy.size)
        return self._facts(index)

    def _facts(self, index: TextIndex) -> Facts:
        return Facts(self.source.stat, len(index), self.source.stat.fingerprint)


def find_index_of(source: RemoteSource) -> TextIndex | None:
    """Return the cached index of a version of an object, or None."""
    return find_index(Cache.key(source).encode())


def make_index_of(source: RemoteSource, copy: File) -> TextIndex:
    """Return the index of a version of an object, built from a copy. Raises as `open_index`."""
    with INDEXING:
        key, array = Cache.key(source).encode(), np.frombuffer(copy.of(DATA).map or b"", np.uint8)
        return open_index(shown(source.url), key, lambda: array, progress=False)
