"""Parquet files in a store, read by ranges: the footer, and of a row group the columns that are wanted.

Nothing of them is kept on a disk, so that a data set may be larger than it.
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import xxhash

from penstock.errors import DataFileError
from penstock.storage import Storage
from penstock.storage.mapped import MappedFile, MappedFiles, look_at
from penstock.storage.remote import RemoteSource
from penstock.storage.urls import scheme

__all__ = ["RangeFile", "TableParts", "footer", "open_parts"]

_SCHEMES = ("hf",)
_PARQUET = (".parquet", ".pq")
_FOOTER = 64 << 10


class TableParts(MappedFiles):
    """The files of a table: mapped, or `RemoteSource` of Parquet that is read by ranges.

    Args:
        files: by `look_at`.
        sources: by number those that are read by ranges.
    """

    def __init__(self, files: list[MappedFile], sources: dict[int, RemoteSource] | None = None) -> None:
        super().__init__(files)
        self._sources = sources or {}

    def array(self, number: int) -> Any:
        """The bytes of a file, see `MappedFiles.array`, or its source."""
        source = self._sources.get(number)
        return super().array(number) if source is None else source

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


def open_parts(names: list[str], storage: Storage | None) -> TableParts:
    """Open the files of a table: Parquet on a hub by ranges, others mapped, after a copy if they are in a store.

    Raises: as `look_at`.
    """
    files: list[MappedFile] = []
    sources: dict[int, RemoteSource] = {}
    for number, name in enumerate(names):
        if scheme(name) in _SCHEMES and name.endswith(_PARQUET):
            sources[number] = source = RemoteSource(name, storage)
            files.append(MappedFile(name, source.size, 0, 0, "|u1", (source.size,)))
        else:
            files.append(look_at(name, "uint8", storage))
    return TableParts(files, sources)


# Bounded, and large enough for a file that is opened and read at once.
@lru_cache(maxsize=32)
def footer(source: RemoteSource) -> tuple[int, bytes]:
    """Return the end of a Parquet file with all of its footer, and where that begins. One request, of a large footer
    two.

    Raises:
        DataFileError: it does not end as a Parquet file does.
        StorageError: the store says no.
    """
    begin = max(0, source.size - _FOOTER)
    tail = source.read_at(begin, source.size - begin)
    if tail[-4:] != b"PAR1" or len(tail) < 12:
        raise DataFileError(f"{source.url} is not a Parquet file, or is truncated: it does not end with PAR1")
    length = 8 + int.from_bytes(tail[-8:-4], "little")
    if length > len(tail):
        first = max(0, source.size - length)
        begin, tail = first, source.read_at(first, begin - first) + tail
    return begin, tail


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
