"""The files of a table, wherever they are: mapped, or in a store, of which a copy is mapped or ranges are read.

Opening reads the footers of Parquet, many at a time. What is read after that comes out of a copy in the cache, or by
ranges where the cache has no room for one: of a row group the columns that are wanted, of JSON lines the rows. Parquet
of a hub is not copied, so that a data set may be larger than the disk. Arrow files are copied when they are opened.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
import xxhash

from penstock.errors import DataFileError
from penstock.shards.stored import StoredShard
from penstock.storage import CachedFile, SourceFile, Storage, is_remote
from penstock.storage.backend import Stat
from penstock.storage.mapped import MOST_OPEN, MappedFile, MappedFiles, changed, look_at
from penstock.storage.parallel_requests import in_threads
from penstock.storage.remote import RemoteSource
from penstock.storage.urls import scheme

__all__ = ["RangeFile", "TableParts", "footer", "is_stored_parquet", "mapped_copy", "open_parts"]

_PARQUET = (".parquet", ".pq")
_LEAST, _FOOTER, _PART = 16 << 10, 64 << 10, 64  # bytes that are read of a file's end: a part of it, within bounds
_COPIES = 4  # files that are copied at a time


class TableParts(MappedFiles):
    """The files of a table: mapped, or `RemoteSource` of those in a store.

    Args:
        files: by `look_at`.
        sources: by number those in a store that are not copied yet.
    """

    def __init__(self, files: list[MappedFile], sources: dict[int, RemoteSource] | None = None) -> None:
        super().__init__(files)
        self._sources = sources or {}
        self._taken: dict[int, tuple[SourceFile, Any]] = {}
        self._taking = Lock()

    def source(self, number: int) -> RemoteSource | None:
        """Return a file as it is in a store; None of one that is here."""
        return self._sources.get(number)

    def put(self, number: int, source: RemoteSource) -> None:
        """Take the file with this number to be one in a store, unless it is known."""
        if number not in self._sources:
            self.files[number] = _looked_at(source)
            self._sources[number] = source

    def head(self, number: int) -> Any:
        """Return what tells how a file is made, and costs no copy: its source if it has one, else its bytes."""
        return self._sources.get(number) or super().array(number)

    def array(self, number: int) -> Any:
        """The bytes of a file, see `MappedFiles.array`, or the source that ranges are read of."""
        source = self._sources.get(number)
        if source is None:
            return super().array(number)
        if not _is_copied(source):
            return source
        taken = self._taken.get(number) or self._take(number, source)
        if taken is None:
            return source
        file, data = taken
        if (size := file.size_now()) != file.size:
            raise changed(self.files[number], size)
        return data

    def holds(self, number: int, data: Any) -> bool:
        """Whether these are the bytes of a file, or its source, as they are open now."""
        taken = self._taken.get(number)
        if taken is not None:
            return taken[1] is data
        return self._sources.get(number) is data or super().holds(number, data)

    def _take(self, number: int, source: RemoteSource) -> tuple[SourceFile, Any] | None:
        """Open a copy, or decide for ranges; what the cache has removed goes, since its bytes stay on the disk."""
        copy = source.copy_if_wanted()
        if copy is None:
            return None
        taken = mapped_copy(copy)
        with self._taking:
            removed = [at for at, (one, _) in self._taken.items() if one.is_removed]
            oldest = [at for at in self._taken if at not in removed][: max(0, 1 + len(self._taken) - MOST_OPEN)]
            for at in (*removed, *oldest):
                del self._taken[at]
            self._taken[number] = taken
        return taken

    def stored(self) -> list[StoredShard]:
        """Return the files in a store that are copied when they are needed."""
        return [
            StoredShard(number, source.url, source.size, source.storage, source.stat, [])
            for number, source in sorted(self._sources.items())
            if _is_copied(source)
        ]

    def fingerprint(self, number: int) -> str:
        """Identity of a file's content; of one in a store by what the store says of it: size and hash."""
        source = self._sources.get(number)
        if source is None:
            return super().fingerprint(number)
        return xxhash.xxh3_128_hexdigest(f"ranged {source.fingerprint}".encode())

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "sources": self._sources}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._sources = state["sources"]


def _is_copied(source: RemoteSource) -> bool:
    return scheme(source.url) != "hf" or not is_stored_parquet(source.url)


def open_parts(
    found: Sequence[tuple[str, Stat | None]], storage: Storage | None, *, as_they_are: Callable[[str], bool]
) -> TableParts:
    """Open the files of a table: some in a store as they are there, others mapped, after a copy if they are in a store.

    Args:
        found: their names, with versions where these are known. Others are looked up, many at a time.
        storage: how a store is reached.
        as_they_are: says of a name whether nothing is copied yet: it is one of a store then.

    Raises: as `look_at`.
    """
    ranged = [number for number, (name, _) in enumerate(found) if as_they_are(name)]
    opened = in_threads(lambda number: RemoteSource(found[number][0], storage, found[number][1]), ranged)
    sources = dict(zip(ranged, opened, strict=True))
    rest = [name for number, (name, _) in enumerate(found) if number not in sources]
    others = iter(in_threads(lambda name: look_at(name, "uint8", storage), rest, count=_COPIES))
    files = [_looked_at(sources[number]) if number in sources else next(others) for number in range(len(found))]
    return TableParts(files, sources)


def mapped_copy(copy: CachedFile) -> tuple[SourceFile, Any]:
    """Return a copy of the cache as a file that stays open whatever the cache removes, and its bytes."""
    file = SourceFile(str(copy.path), descriptor=os.dup(copy.fileno()))
    return file, np.frombuffer(file.map or b"", np.uint8)


def _looked_at(source: RemoteSource) -> MappedFile:
    return MappedFile(source.url, source.size, 0, 0, "|u1", (source.size,))


def is_stored_parquet(name: str) -> bool:
    """Return whether a name is that of a Parquet file in a store."""
    return is_remote(name) and name.partition("?")[0].lower().endswith(_PARQUET)


# Bounded, and large enough for a file that is opened and read at once.
@lru_cache(maxsize=32)
def footer(source: RemoteSource) -> bytes:
    """Return the end of a Parquet file with all of its footer. One request, of a large footer two.

    To Arrow that is a file by itself, as long as it is asked for metadata alone.

    Raises:
        DataFileError: it does not end as a Parquet file does.
        StorageError: the store says no.
    """
    begin = max(0, source.size - min(_FOOTER, max(_LEAST, source.size // _PART)))
    tail = source.read_at(begin, source.size - begin)
    if tail[-4:] != b"PAR1" or len(tail) < 12:
        raise DataFileError(f"{source.url} is not a Parquet file, or is truncated: it does not end with PAR1")
    length = 8 + int.from_bytes(tail[-8:-4], "little")
    if length > len(tail):
        first = max(0, source.size - length)
        tail = source.read_at(first, begin - first) + tail
    return tail


class RangeFile(io.RawIOBase):
    """A source as a file for Arrow, with pieces of it at hand.

    Args:
        source: what is read.
        pieces: where some ranges of it begin, and their bytes; anything else is asked for.
    """

    def __init__(self, source: RemoteSource, pieces: list[tuple[int, bytes]]) -> None:
        self._source, self._pieces, self._position = source, pieces, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a position, counted from the beginning, from here or from the end."""
        self._position = offset + (0, self._position, self._source.size)[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return so many bytes, fewer at the end alone; by default all that are left."""
        begin = self._position
        end = self._source.size if size < 0 else min(begin + size, self._source.size)
        self._position = max(begin, end)
        for first, data in self._pieces:
            if first <= begin and end <= first + len(data):
                return data[begin - first : end - first]
        return self._source.read_at(begin, end - begin)
