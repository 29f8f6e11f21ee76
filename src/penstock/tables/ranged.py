"""The files of a table: mapped, or in a store, where a copy is mapped or ranges are read.

Opening reads Parquet footers concurrently. Later reads use a copy in the cache, or range requests if the cache has no
room: the requested columns of a row group, or the rows of JSON lines. Parquet on a hub is not copied, so a dataset may
exceed the disk. Arrow files are copied when they are opened.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from penstock.errors import DataFileError
from penstock.shards.stored import StoredShard
from penstock.storage import File, Storage, is_remote
from penstock.storage.backend import Stat
from penstock.storage.file_pool import FilePool
from penstock.storage.files import DATA
from penstock.storage.mapped import Mapped, MappedFile, MappedFiles, look_at
from penstock.storage.parallel_requests import in_threads
from penstock.storage.remote import RemoteSource
from penstock.storage.urls import scheme, unsigned
from penstock.tables.files import delimiter_of

__all__ = ["RangeFile", "TableParts", "footer", "is_stored_parquet", "mapped_copy", "open_parts"]

_PARQUET = (".parquet", ".pq")
_LEAST, _FOOTER, _PART = 16 << 10, 64 << 10, 64  # bytes read at a file's end: 1/64 of the file, from 16 to 64 KiB
_COPIES = 4  # files copied at a time


class TableParts(MappedFiles):
    """The files of a table: mapped, or a `RemoteSource` if in a store.

    Args:
        files: results of `look_at`.
        sources: the files in a store that are not copied yet, by number.
        delimiters: of CSV files, by number. Their bytes are those of a conversion to Arrow.
    """

    def __init__(
        self,
        files: list[MappedFile],
        sources: dict[int, RemoteSource] | None = None,
        delimiters: dict[int, str] | None = None,
    ) -> None:
        super().__init__(files)
        self._open = FilePool(copies=True)
        self._sources, self._delimiters = sources or {}, delimiters or {}
        self._conversions: FilePool[Mapped] = FilePool()

    def source(self, number: int) -> RemoteSource | None:
        """Return the remote source of a file; None for a local one."""
        return self._sources.get(number)

    def put(self, number: int, source: RemoteSource) -> None:
        """Set the remote source of a file, unless it is known."""
        if number not in self._sources:
            self.files[number] = _looked_at(source)
            self._sources[number] = source

    def head(self, number: int) -> Any:
        """Return an object to read a file's metadata from without a copy: its remote source, or else its bytes."""
        return self._sources.get(number) or self.array(number)

    def array(self, number: int) -> Any:
        """Return the bytes of a file, see `MappedFiles.array`, or the remote source to read ranges from."""
        source = self._sources.get(number)
        if source is None:
            data = super().array(number)
            return self._conversion(number) if number in self._delimiters else data
        if not _is_copied(source):
            return source
        opened = self._open.find(number)
        if opened is None:
            copy = source.copy_if_wanted()
            if copy is None:
                return source
            opened = self._open.add(number, mapped_copy(copy))
        opened.file.check()
        return opened.array

    def holds(self, number: int, data: Any) -> bool:
        """Return whether this is the current array or source of a file."""
        opened = self._conversions.find(number)
        if opened is not None:
            return opened.array is data
        return super().holds(number, data) or (self._open.find(number) is None and self._sources.get(number) is data)

    def _conversion(self, number: int) -> Any:
        """Return the bytes of the conversion of a CSV file."""
        opened = self._conversions.find(number)
        if opened is None:
            from penstock.tables.csv import converted_table

            file = converted_table(self._opened(number).file, self._delimiters[number])
            opened = self._conversions.add(number, Mapped(file, np.frombuffer(file.map or b"", np.uint8)))
        return opened.array

    def stored(self) -> list[StoredShard]:
        """Return the remote files that are copied when they are needed."""
        return [
            StoredShard(number, source.url, source.size, source.storage, source.stat, [])
            for number, source in sorted(self._sources.items())
            if _is_copied(source)
        ]

    def fingerprint(self, number: int) -> str:
        """Return the identity of a file's content; for a remote file, from the store's size and hash."""
        source = self._sources.get(number)
        if source is None:
            return super().fingerprint(number)
        return xxhash.xxh3_128_hexdigest(f"ranged {source.fingerprint}".encode())

    def version(self, number: int) -> str:
        """Return what identifies a file until it is written again; for a remote file, address, size and ETag."""
        source = self._sources.get(number)
        return super().version(number) if source is None else f"{unsigned(source.url)} {source.fingerprint}"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "sources": self._sources, "delimiters": self._delimiters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._sources, self._delimiters = state["sources"], state["delimiters"]


def _is_copied(source: RemoteSource) -> bool:
    return scheme(source.url) != "hf" or not is_stored_parquet(source.url)


def open_parts(
    found: Sequence[tuple[str, Stat | None]], storage: Storage | None, *, as_they_are: Callable[[str], bool]
) -> TableParts:
    """Open the files of a table: remote ones in place or after a copy, local ones mapped.

    Args:
        found: their names, with versions if known. Missing versions are looked up concurrently.
        storage: access options.
        as_they_are: returns whether a remote file is opened in place, without a copy.

    Raises the same errors as `look_at`.
    """
    ranged = [number for number, (name, _) in enumerate(found) if as_they_are(name)]
    opened = in_threads(lambda number: RemoteSource(found[number][0], storage, found[number][1]), ranged)
    sources = dict(zip(ranged, opened, strict=True))
    rest = [name for number, (name, _) in enumerate(found) if number not in sources]
    others = iter(in_threads(lambda name: look_at(name, "uint8", storage), rest, count=_COPIES))
    files = [_looked_at(sources[number]) if number in sources else next(others) for number in range(len(found))]
    delimiters = {number: sign for number, (name, _) in enumerate(found) if (sign := delimiter_of(name)) is not None}
    return TableParts(files, sources, delimiters)


def mapped_copy(copy: File) -> Mapped:
    """Return a cached copy, with the errors of data files, and its bytes."""
    return Mapped(copy.of(DATA), np.frombuffer(copy.map or b"", np.uint8))


def _looked_at(source: RemoteSource) -> MappedFile:
    return MappedFile(source.url, source.size, 0, 0, "|u1", (source.size,))


def is_stored_parquet(name: str) -> bool:
    """Return whether a name is the URL of a Parquet file in a store."""
    return is_remote(name) and name.partition("?")[0].lower().endswith(_PARQUET)


# The size is bounded, but enough for a file that is read right after it is opened.
@lru_cache(maxsize=32)
def footer(source: RemoteSource) -> bytes:
    """Return the end of a Parquet file, including its whole footer. Takes one request, or two for a large footer.

    Arrow can read the metadata from these bytes as if they were the whole file.

    Raises:
        DataFileError: it does not end like a Parquet file.
        StorageError: a request to the store fails.
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
    """A remote source as a file object for Arrow, with some ranges already in memory.

    Args:
        source: the remote source.
        pieces: the offset and bytes of each range in memory; all other bytes are requested from the source.
    """

    def __init__(self, source: RemoteSource, pieces: list[tuple[int, bytes]]) -> None:
        self._source, self._pieces, self._position = source, pieces, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set the position, relative to the beginning, the current position or the end."""
        self._position = offset + (0, self._position, self._source.size)[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return ``size`` bytes, fewer only at the end; by default all remaining bytes."""
        begin = self._position
        end = self._source.size if size < 0 else min(begin + size, self._source.size)
        self._position = max(begin, end)
        for first, data in self._pieces:
            if first <= begin and end <= first + len(data):
                return data[begin - first : end - first]
        return self._source.read_at(begin, end - begin)
