"""Where the bytes of a tar archive come from: `Archive`, which is read by position, and `Stream`, which only goes on.

    archive = Archive(ShardFile("a.tar"))
    archive.hold(0, 1 << 20)                # read a piece, in the place of the one before
    header = archive.data[512:1024]         # out of the piece, which begins at byte archive.begin
    data = archive.read(9 << 20, 10 << 20)  # out of memory or out of the file
    archive.check()                         # ShardChangedError: somebody wrote to the file
    ...                                     # now what was read may be used

Both hold one piece in memory: ``data``, the bytes from ``begin`` to before ``end``. ``size`` is the archive's; that of
a stream is `UNKNOWN` until its end was seen.

A file is not mapped: one that shrinks while it is read is an error, where a map of it would end the process (SIGBUS).

Promise: bytes that were read before a `check` that passes are those of the file that was opened. How soon a change of
the same size shows is up to the file's modification time, see `ShardFile.settle`.
"""

from __future__ import annotations

import io
import lzma
import zlib
from typing import Any, BinaryIO, Protocol

import zstandard

from penstock.errors import PenstockError, ShardError, ShardIOError, TruncatedShardError
from penstock.shards.files import ShardFile
from penstock.shards.header import BLOCK

__all__ = ["UNKNOWN", "Archive", "Buffer", "Source", "Stream"]

UNKNOWN = 1 << 63
"""The size of a stream whose end was not seen: more than any archive has."""

_CHUNK = 16 << 20  # read at a time, so that a senseless size does not ask for senseless memory


class Buffer(Protocol):
    """An archive in memory: bytes, a memoryview, an mmap, or anything else with a length and slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes | memoryview: ...


class Archive:
    """An archive in a file or in memory. ``len`` is its size; slices are bytes.

    Args:
        source: an open shard, or the archive itself, which never changes.
    """

    def __init__(self, source: ShardFile | Buffer) -> None:
        self._file: ShardFile | _Sliced | None = None
        self.data = b""
        if isinstance(source, bytes):
            self.data, self.size = source, len(source)
        else:
            self._file = source if isinstance(source, ShardFile) else _Sliced(source)
            self.size = self._file.size
        self.begin, self.end = 0, len(self.data)
        self._kept: dict[int, bytes] = {}

    @classmethod
    def of(cls, source: Archive | Buffer) -> Archive:
        """Return the same archive, or one of these bytes."""
        return source if isinstance(source, Archive) else cls(source)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> bytes:
        begin, end, _ = part.indices(self.size)
        return self.read(begin, max(begin, end))

    def hold(self, begin: int, end: int) -> memoryview:
        """Read a piece and keep it in memory, in the place of the one before; return a view of it.

        Raises as `read` does.
        """
        self._kept = {}
        end = max(begin, min(end, self.size))
        if self._file is None:
            return memoryview(self.data)[begin:end]
        # The old piece goes before the new one comes.
        self.data, self.begin, self.end = b"", begin, begin
        self.data, self.end = self._file.read(end - begin, begin), end
        return memoryview(self.data)

    def keep(self, found: dict[int, bytes]) -> None:
        """Keep some more bytes, by their places, until the next piece is read."""
        self._kept = found

    def read(self, begin: int, end: int) -> bytes:
        """Return bytes of the archive, fewer at its end; out of memory if they are there.

        Raises:
            ShardChangedError: the file is shorter than it was.
            ShardIOError: the file cannot be read.
        """
        if begin >= self.begin and end <= self.end:
            return self.data[begin - self.begin : end - self.begin]
        kept = self._kept.get(begin)
        if kept is not None and len(kept) == end - begin:
            return kept
        if self._file is None:
            return self.data[begin:end]
        if end > self.size:
            end = max(begin, self.size)
        return self._file.read(end - begin, begin)

    def check(self) -> None:
        """Raise `ShardChangedError` if the file was changed. Costs one fstat."""
        if self._file is not None:
            self._file.check()

    def fetch_ahead(self, begin: int, end: int) -> None:
        """Have the system read these bytes from the disk or the network, in one go, unless they are in memory."""
        if isinstance(self._file, ShardFile) and not self._file.is_cached(min(end, self.size) - 1):
            self._file.fetch_ahead(begin, end)


class _Sliced:
    """A buffer that is read as a `ShardFile` is."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer, self.size = buffer, len(buffer)

    def read(self, count: int, position: int) -> bytes:
        return bytes(self._buffer[position : position + count])

    def check(self) -> None:
        """Do nothing: it does not change."""


class Stream:
    """An archive that is read once from front to back: compressed, from a pipe or from a store.

    Args:
        file: anything with ``read(n)``. Where it has ``read1`` as well, what is there is used before
            more is waited for.
        shard: its name, for messages.

    Bytes before the piece in memory, and behind it those before the last that were read, are gone.
    """

    def __init__(self, file: BinaryIO, shard: str) -> None:
        self._read_all = file.read
        self._read_some = getattr(file, "read1", file.read)
        self._shard = shard
        self._position = 0  # of the file: all before it has been read
        self.size = UNKNOWN
        self.data, self.begin, self.end = b"", 0, 0

    def hold(self, begin: int, end: int) -> memoryview:
        """Go on to a piece, keep it in memory in the place of the one before, and return a view of it.

        The piece ends where the stream has nothing more at once, but has 512 bytes at least unless the archive ends.
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
        """Return bytes of the archive, fewer at its end: out of the piece in memory, and what is not read yet.

        Raises:
            ShardError, TruncatedShardError: decompression finds bad data, or too little.
            ShardIOError: the stream cannot be read.

        Memory: what is returned, and no copy of it where it begins behind the piece.
        """
        if end <= self.end and begin >= self.begin:
            return self.data[begin - self.begin : end - self.begin]
        if end <= begin:
            return b""
        held = self.data[begin - self.begin :] if begin < self.end else b""
        if begin - self._position >= BLOCK:
            self.skip(begin)
        # Padding is read along: one call less for each member.
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
        """Go forward to a byte, unless it is behind already or the archive ends before it. Raises as `read` does."""
        while self._position < position and self._some(self._read_all, min(position - self._position, _CHUNK)):
            pass

    def check(self) -> None:
        """Do nothing: the file does so itself, if it is one (`penstock.shards.files.CheckedFile`)."""

    def _some(self, read: Any, count: int) -> bytes:
        """Return the next bytes, none at the end."""
        try:
            piece: bytes = read(count)
        except PenstockError:
            raise
        except (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            raise self._damaged(error, TruncatedShardError if isinstance(error, EOFError) else ShardError) from error
        except OSError as error:
            if error.errno is None:  # gzip and bz2 say so of bad data
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
