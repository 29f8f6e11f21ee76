"""`ArrivingLines`: JSON-lines files in a store that are indexed as they are downloaded, see `ArrivingSource`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from penstock.order.permutation import Indices
from penstock.shards.arriving import ArrivingSource
from penstock.shards.shard_file import Facts, ShardFile
from penstock.storage import File, Storage
from penstock.storage.mapped import MappedFile, MappedFiles
from penstock.storage.names import with_versions
from penstock.tables.found_files import Found
from penstock.tables.json_files import CACHE_BYTES, JsonFiles, check_columns
from penstock.tables.line_index import TextIndex, find_index_of, make_index_of

__all__ = ["ArrivingLines"]


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


class ArrivingLines(ArrivingSource):
    """JSON-lines files in a store, some of them not counted yet; when all are counted, `whole` is a `JsonFiles`.

    Args:
        shards, shared: see `ArrivingSource`.
        lines: the same files; versions that are known are set.
    """

    def __init__(self, shards: list[LineShard], shared: str | None, lines: JsonFiles) -> None:
        super().__init__(shards, shared)
        self._lines = lines

    @classmethod
    def of(
        cls,
        found: Sequence[Found],
        *,
        columns: Sequence[str] | None = None,
        cache_bytes: int = CACHE_BYTES,
        storage: Storage | None = None,
    ) -> ArrivingLines:
        """Return files in a store in their current versions, see `with_versions`; arguments as for `JsonFiles`.

        Raises:
            ConfigError: invalid ``columns``.
            StorageUnavailableError: the store does not answer.
        """
        check_columns(columns)
        found = with_versions(found, storage)
        # Versions are added when they become known.
        maps = MappedFiles([MappedFile(name, 0, 0, 0, "|u1", (0,)) for name, _ in found], {})
        shards = [LineShard(name, storage, stat) for name, stat in found]
        return cls(shards, None, JsonFiles.uncounted(maps, columns, cache_bytes))

    @property
    def columns(self) -> list[str] | None:
        """The keys that are read: ``columns``, or the keys of the first rows; None while these are unknown."""
        if self._lines.wanted is not None:
            return self._lines.wanted
        return list(self.whole.columns) if self.complete else None

    def _read(self, numbers: Indices, rows: Indices) -> list[dict[str, Any]]:
        for number in set(numbers.tolist()):
            self._lines.maps.put(number, self._shards[number].source)
        return self._lines.read(numbers, rows)

    @cached_property
    def _all(self) -> JsonFiles:
        for number, shard in enumerate(self._shards):
            self._lines.maps.put(number, shard.source)
        self._lines.count([facts.samples for facts in self.facts(range(len(self.urls)))])
        return self._lines

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrivingLines, (self._shards, self._shared, self._lines)
