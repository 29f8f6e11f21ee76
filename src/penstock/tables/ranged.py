"""The files of a table: mapped, or in a store, where a copy is mapped or ranges are read.

Opening reads Parquet footers concurrently. Later reads use a copy in the cache, or range requests if the cache has no
room: the requested columns of a row group, or the rows of JSON lines. Parquet on a hub is not copied, so a dataset may
exceed the disk. Arrow files are copied when they are opened.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np

from penstock.errors import DataFileError
from penstock.storage import File, Storage, is_remote
from penstock.storage.files import DATA
from penstock.storage.mapped import Mapped, MappedFile, MappedFiles, look_at
from penstock.storage.remote import RemoteSource
from penstock.storage.stream import in_threads
from penstock.storage.transfer import Stat
from penstock.storage.urls import scheme
from penstock.tables.files import delimiter_of

__all__ = ["RangeFile", "TableParts", "footer", "is_stored_parquet", "mapped_copy", "open_parts"]

_PARQUET = (".parquet", ".pq")
_LEAST, _FOOTER, _PART = 16 << 10, 64 << 10, 64  # bytes read at a file's end: 1/64 of the file, from 16 to 64 KiB
_COPIES = 4  # files copied at a time


TableParts = MappedFiles


def open_parts(
    found: Sequence[tuple[str, Stat | None]], storage: Storage | None, *, as_they_are: Callable[[str], bool]
) -> MappedFiles:
    """Open the files of a table, given with their versions if known: local ones are mapped. Raises as `look_at`.

    ``as_they_are`` returns whether a remote file is opened in place, without a copy.
    """
    ranged = [number for number, (name, _) in enumerate(found) if as_they_are(name)]
    opened = in_threads(lambda number: RemoteSource(found[number][0], storage, found[number][1]), ranged)
    sources = dict(zip(ranged, opened, strict=True))
    on_hub = {number for number in ranged if scheme(sources[number].url) == "hf"}
    in_place = {number for number in on_hub if is_stored_parquet(sources[number].url)}
    rest = [name for number, (name, _) in enumerate(found) if number not in sources]
    others = iter(in_threads(lambda name: look_at(name, "uint8", storage), rest, count=_COPIES))
    files = [MappedFile.of(sources[number]) if number in sources else next(others) for number in range(len(found))]
    delimiters = {number: sign for number, (name, _) in enumerate(found) if (sign := delimiter_of(name)) is not None}
    conversions = {number: partial(_converted, sign) for number, sign in delimiters.items()}
    return MappedFiles(files, sources, in_place, conversions)


def _converted(delimiter: str, file: File) -> File:
    from penstock.tables.csv import converted_table

    return converted_table(file, delimiter)


def mapped_copy(copy: File) -> Mapped:
    """Return a cached copy, with the errors of data files, and its bytes."""
    return Mapped(copy.of(DATA), np.frombuffer(copy.map or b"", np.uint8))


def is_stored_parquet(name: str) -> bool:
    """Return whether a name is the URL of a Parquet file in a store."""
    return is_remote(name) and name.partition("?")[0].lower().endswith(_PARQUET)


# The size is bounded, but enough for a file that is read right after it is opened.
@lru_cache(maxsize=32)
def footer(source: RemoteSource) -> bytes:
    """Return the end of a Parquet file, including its whole footer. Takes one request, or two for a large footer.

    Arrow can read the metadata from these bytes as if they were the whole file.
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
