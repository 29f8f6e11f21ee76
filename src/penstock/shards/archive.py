"""Sources of a tar archive's bytes: `Archive`, with random access, and `Stream`, which only moves forward.

    archive = Archive(File("a.tar", SHARD))
    archive.hold(0, 1 << 20)                # read a chunk into memory, which replaces the previous one
    header = archive.data[512:1024]         # a part of the chunk, which begins at byte archive.begin
    data = archive.read(9 << 20, 10 << 20)  # from memory or from the file
    archive.check()                         # ShardChangedError if the file was modified
    ...                                     # now the bytes may be used

Both hold one chunk in memory: ``data``, the bytes ``[begin, end)``. ``size`` is the size of the archive; for a stream
it is `UNKNOWN` until the end is reached.

Files are not mapped: a file that shrinks while it is read raises an error, but a map would kill the process (SIGBUS).

Promise: if a `check` passes, all bytes read before it are from the file that was opened. The resolution of the
modification time limits how soon a change of the same size is detected, see `File.settle`.
"""

from __future__ import annotations

import io
import lzma
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import zstandard

from penstock.errors import PenstockError, ShardError, ShardIOError, TruncatedShardError
from penstock.storage.files import File

__all__ = ["BLOCK", "UNKNOWN", "Archive", "Source", "Stream"]

BLOCK = 512
"""Bytes of a header; data is padded to a multiple of them."""

UNKNOWN = 1 << 63
"""The size of a stream whose end was not reached: larger than any archive."""

_CHUNK = 16 << 20  # bytes read at a time, so that a corrupt size does not allocate huge memory


class Archive:
    """An archive in a file or in memory.

    Args:
        source: an open shard, or the bytes of the archive.
    """

    def __init__(self, source: File | bytes) -> None:
        self._file = source if isinstance(source, File) else None
        self.data = b"" if isinstance(source, File) else source
        self.begin, self.end = 0, len(self.data)
        self.size = self.end if self._file is None else self._file.size
        self.small: dict[int, bytes] = {}
        """Data of small members that was read with their headers, by its offset."""

    def hold(self, begin: int, end: int) -> memoryview:
        """Read a chunk into memory, in place of the previous one, and return a view of it.

        Raises as `read` does.
        """
        end = max(begin, min(end, self.size))
        if self._file is None:
            return memoryview(self.data)[begin:end]
        # Free the old chunk before the new one is read.
        self.data, self.begin, self.end = b"", begin, begin
        self.data, self.end = self._file.read_exact(end - begin, begin), end
        return memoryview(self.data)

    def read(self, begin: int, end: int) -> bytes:
        """Return bytes of the archive, fewer at its end; from memory if possible.

        Raises:
            ShardChangedError: the file is shorter than it was.
            ShardIOError: the file cannot be read.
        """
        if begin >= self.begin and end <= self.end:
            return self.data[begin - self.begin : end - self.begin]
        if self._file is None:
            return self.data[begin:end]
        small = self.small.get(begin)
        if small is not None and len(small) == end - begin:
            return small
        if end > self.size:
            end = max(begin, self.size)
        return self._file.read_exact(end - begin, begin)

    def pieces(self, begin: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes ``[begin, end)`` of a file in chunks, each valid until the next one. Raises as `read`."""
        assert self._file is not None
        first, last = (min(max(begin, at), end) for at in (self.begin, self.end))
        yield from self._file.pieces(begin, first)
        yield memoryview(self.data)[first - self.begin : last - self.begin]
        yield from self._file.pieces(last, end)

    def check(self) -> None:
        """Raise `ShardChangedError` if the file was changed. Costs one fstat."""
        if self._file is not None:
            self._file.check()

    def fetch_ahead(self, begin: int, end: int) -> None:
        """Ask the system to read these bytes ahead in one request, unless they are in memory."""
        if self._file is not None and not self._file.is_cached(min(end, self.size) - 1):
            self._file.fetch_ahead(begin, end)


class Stream:
    """An archive that is read once, from start to end: compressed, from a pipe or from a store.

    Args:
        file: any object with ``read(n)``. If it has ``read1``, available bytes are used before it waits for more.
        shard: its name, for messages.

    Bytes before the chunk in memory cannot be read again. Reads after the chunk must go forward, too.
    """

    def __init__(self, file: BinaryIO, shard: str) -> None:
        self._read_all = file.read
        self._read_some = getattr(file, "read1", file.read)
        self._shard = shard
        self._position = 0  # position in the file: all bytes before it were read
        self.size = UNKNOWN
        self.data, self.begin, self.end = b"", 0, 0

    def hold(self, begin: int, end: int) -> memoryview:
        """Advance to a chunk, hold it in memory in place of the previous one, and return a view of it.

        The chunk ends where the stream has no more available bytes, but has at least 512 bytes unless the archive ends.
        Raises as `read` does.
        """
        pieces = [self.data[begin - self.begin :]] if begin < self.end else []
        count = sum(map(len, pieces))
        self.data, self.begin, self.end = b"", begin, begin
        self.skip(begin)
        while count < 512 and (piece := self._some(self._read_some, end - begin - count)):
            pieces.append(piece)
            count += len(piece)
        self.data, self.end = pieces[0] if len(pieces) == 1 else b"".join(pieces), begin + count
        return memoryview(self.data)

    def read(self, begin: int, end: int) -> bytes:
        """Return bytes of the archive, fewer at its end: from the chunk in memory and the unread rest.

        Raises:
            ShardError, TruncatedShardError: the compressed data is corrupt or truncated.
            ShardIOError: the stream cannot be read.

        Memory: the returned bytes, without a copy if they begin after the chunk.
        """
        if end <= self.end and begin >= self.begin:
            return self.data[begin - self.begin : end - self.begin]
        if end <= begin:
            return b""
        held = self.data[begin - self.begin :] if begin < self.end else b""
        if begin - self._position >= BLOCK:
            self.skip(begin)
        # Padding is read, too, which saves a call per member.
        gap = begin - self._position if begin > self._position else 0
        left = end - self._position
        piece = self._some(self._read_all, left if left < _CHUNK else _CHUNK)
        if len(piece) == left and not held:
            return piece[gap:]
        whole = io.BytesIO()
        whole.write(held)
        while piece:
            whole.write(piece)
            left -= len(piece)
            piece = self._some(self._read_all, min(left, _CHUNK)) if left else b""
        return whole.getvalue()[gap:]

    def skip(self, position: int) -> None:
        """Advance to a byte, unless it is passed already or the archive ends before it. Raises as `read` does."""
        while self._position < position and self._some(self._read_all, min(position - self._position, _CHUNK)):
            pass

    def check(self) -> None:
        """Do nothing: a file checks itself (`penstock.storage.files.CheckedFile`)."""

    def _some(self, read: Any, count: int) -> bytes:
        """Return the next bytes, none at the end."""
        try:
            piece: bytes = read(count)
        except PenstockError:
            raise
        except (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            raise self._damaged(error, TruncatedShardError if isinstance(error, EOFError) else ShardError) from error
        except OSError as error:
            if error.errno is None:  # gzip and bz2 report corrupt data this way
                raise self._damaged(error, ShardError) from error
            raise ShardIOError(f"{self._shard}: cannot be read at byte {self._position}: {error}") from error
        if not piece:
            self.size = self._position
            return b""
        self._position += len(piece)
        return piece

    def _damaged(self, error: Exception, kind: type[ShardError]) -> ShardError:
        what = "ends too early" if kind is TruncatedShardError else "is damaged"
        return kind(f"{self._shard}: the compressed archive {what}, at byte {self._position} of its content: {error}")


Source = Archive | Stream
