"""Tar archives member by member, from one that is read by position or from a stream that only goes forward.

    for member in walk(archive, "a.tar"):            # Member(name='x/0001.jpg', kind='file', offset=512, size=907, ...)
        data = archive[member.offset : member.offset + member.size]
    for member, data in walk_stream(file, "a.tar"):  # data: bytes, empty for folders and links
        ...

Reads old v7, ustar, GNU and PAX archives: long names, names that are not UTF-8, sizes of any length (base 256, PAX).
Sparse files are refused.

Promises: members come in the archive's order and whole. An archive that is cut anywhere, between two members as well,
is a `TruncatedShardError`, and damage a `ShardError`; both name the shard and the byte. Reading ends at the archive's
end mark, and always: each step goes at least 512 bytes forward.

`penstock.shards.scan` finds the same members of an archive many at a time, and much faster.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, Literal, NamedTuple, Protocol

import zstandard

from penstock.errors import PenstockError, ShardError, ShardIOError, TruncatedShardError
from penstock.shards.header import BLOCK, MAX_EXTENDED, ZEROS, Header, decode_name, parse_header, pax_records, rounded
from penstock.storage.urls import shown

__all__ = ["Buffer", "Kind", "Member", "member_at", "walk", "walk_stream"]

Kind = Literal["file", "dir", "link", "special"]


class Buffer(Protocol):
    """What is walked: bytes, a `penstock.shards.archive.Archive`, or anything else with a length and slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes | memoryview: ...


_KINDS: dict[bytes, Kind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"5": "dir",
    b"1": "link",
    b"2": "link",
}
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")
_CHUNK = 16 << 20  # read at a time, so that a senseless size does not ask for senseless memory


class Member(NamedTuple):
    """One member: its data is ``size`` bytes from ``offset``, its first header (extended ones included) at ``header``.

    ``end`` is the first byte after it, padding included: where the next member begins.
    """

    name: str
    kind: Kind
    offset: int
    size: int
    header: int
    end: int


class _Source(Protocol):
    """Where blocks come from."""

    position: int
    shard: str

    def take(self, count: int) -> bytes:
        """The next bytes; fewer at the end."""

    def length(self) -> int | None:
        """Bytes in all, if that is known."""


class _Placed:
    """Blocks out of what is read by position."""

    def __init__(self, buffer: Buffer, shard: str, position: int) -> None:
        self._buffer, self.shard, self.position = buffer, shard, min(position, len(buffer))

    def take(self, count: int) -> bytes:
        data = bytes(self._buffer[self.position : self.position + count])
        self.position += len(data)
        return data

    def length(self) -> int | None:
        return len(self._buffer)


class _Stream:
    """Blocks out of a stream; errors of decompression become ours."""

    def __init__(self, file: BinaryIO, shard: str) -> None:
        self._file, self.shard, self.position = file, shard, 0

    def length(self) -> int | None:
        return None

    def take(self, count: int) -> bytes:
        pieces: list[bytes] = []
        left = count
        try:
            while left:
                piece = self._file.read(min(left, _CHUNK))
                if not piece:
                    break
                left -= len(piece)
                pieces.append(piece)
        except PenstockError:
            raise
        except (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            raise self._damaged(error, TruncatedShardError if isinstance(error, EOFError) else ShardError) from error
        except OSError as error:
            if error.errno is None:  # gzip and bz2 say so of bad data
                raise self._damaged(error, ShardError) from error
            raise ShardIOError(f"{self.shard}: cannot be read at byte {self.position}: {error}") from error
        self.position += count - left
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def skip(self, count: int) -> int:
        """Go forward; returns how many bytes there were."""
        left = count
        while left and (done := len(self.take(min(left, _CHUNK)))):
            left -= done
        return count - left

    def _damaged(self, error: Exception, kind: type[ShardError]) -> ShardError:
        what = "ends too early" if kind is TruncatedShardError else "is damaged"
        return kind(f"{self.shard}: the compressed archive {what}, at byte {self.position} of its content: {error}")


def walk(buffer: Buffer, shard: str, *, start: int = 0, require_end: bool = True) -> Iterator[Member]:
    """The members of a tar archive, in order, all kinds of them.

    Args:
        buffer: the archive.
        shard: its name, for messages.
        start: byte to begin at, which must be the first header of a member.
        require_end: whether an archive that just ends, without the two blocks of zeros, is an error. It may have been
            cut there.

    Raises:
        TruncatedShardError, ShardError: see above.

    Cost: about 3 microseconds a member; data is not touched.
    """
    shard, position = shown(shard), start
    while (member := member_at(buffer, shard, position, require_end=require_end)) is not None:
        yield member
        position = member.end


def member_at(buffer: Buffer, shard: str, position: int, *, require_end: bool = True) -> Member | None:
    """The member whose first header stands at a position, or None at the end mark. Raises as `walk` does."""
    return _entry(_Placed(buffer, shard, position), require_end)


def walk_stream(
    file: BinaryIO,
    shard: str,
    *,
    select: Callable[[str], bool] | None = None,
    require_end: bool = True,
) -> Iterator[tuple[Member, bytes]]:
    """The members of a tar archive that is read once from front to back, with their data.

    Args:
        file: anything with ``read(n)``, such as `penstock.shards.open_stream` returns.
        shard: its name, for messages.
        select: files whose name it refuses are left out, and their data is not kept.
        require_end: as for `walk`.

    Raises:
        TruncatedShardError, ShardError: see above; also what decompression complains of.
        ShardIOError: the stream cannot be read.

    A member comes only when all of its data is there. Memory: one member.
    """
    source = _Stream(file, shown(shard))
    while (member := _entry(source, require_end)) is not None:
        padding = member.end - member.offset - member.size
        if member.kind == "file" and (select is None or select(member.name)):
            data = source.take(member.size)
            if len(data) < member.size:
                raise _cut(source.shard, member, source.position)
            yield member, data
            source.take(padding)
            continue
        if source.skip(member.size) < member.size:
            raise _cut(source.shard, member, source.position)
        source.take(padding)
        if member.kind != "file":
            yield member, b""


def _entry(source: _Source, require_end: bool) -> Member | None:
    """The next member, with ``source`` left at its data; None at the end mark."""
    first = source.position
    long_name: bytes | None = None
    records: dict[str, bytes] = {}
    while True:
        at = source.position
        block = source.take(BLOCK)
        if len(block) < BLOCK:
            if not block and at == first and at and not require_end:
                return None
            raise _no_header(source.shard, at, len(block), first)
        if block == ZEROS:
            if at != first:
                raise ShardError(f"{source.shard}: byte {first}: an extended header that belongs to no member")
            _check_end(source, at)
            return None
        header = parse_header(block, source.shard, at)
        if header.type == b"x" or header.type == b"X":
            records |= pax_records(_extended(source, header, at), source.shard, at)
        elif header.type == b"L":
            long_name = _extended(source, header, at).split(b"\0", 1)[0]
        elif header.type == b"K":
            _extended(source, header, at)
        elif header.type == b"g":
            pax_records(_extended(source, header, at), source.shard, at, everywhere=True)
        else:
            return _member(source, header, first, records, long_name)


def _member(source: _Source, header: Header, first: int, records: dict[str, bytes], long_name: bytes | None) -> Member:
    if header.type == b"S":
        raise ShardError(f"{source.shard}: byte {first}: a sparse file; pack it again without --sparse")
    raw = header.name if long_name is None else long_name
    kind = _KINDS.get(header.type, "special")
    if header.type == b"\0" and raw.endswith(b"/"):
        kind = "dir"  # old v7 has no other way to say so
    name = decode_name(records["path"].rstrip(b"/") if "path" in records else raw)
    size = int(records["size"]) if "size" in records else header.size
    offset = source.position
    if header.type in _WITHOUT_DATA or kind == "dir":
        size = 0
    member = Member(name, kind, offset, size, first, offset + rounded(size))
    length = source.length()
    if length is not None and offset + size > length:
        raise _cut(source.shard, member, length)
    return member


def _extended(source: _Source, header: Header, at: int) -> bytes:
    """The data of an extended header."""
    if header.size > MAX_EXTENDED:
        raise ShardError(f"{source.shard}: byte {at}: an extended header of {header.size} bytes: damaged")
    data = source.take(rounded(header.size))
    if len(data) < rounded(header.size):
        raise TruncatedShardError(f"{source.shard}: ends at byte {source.position}, within the header at byte {at}")
    return data[: header.size]


def _check_end(source: _Source, at: int) -> None:
    """An end mark is two blocks of zeros. One at the very end is taken too: nothing is missing."""
    block = source.take(BLOCK)
    if block.strip(b"\0"):
        raise ShardError(
            f"{source.shard}: byte {at}: a single block of zeros between members: the archive is damaged here"
        )


def _no_header(shard: str, at: int, got: int, first: int) -> TruncatedShardError:
    if at == 0 and not got:
        return TruncatedShardError(f"{shard}: an empty file; even a tar archive without members has 1024 bytes")
    if got or at != first:
        return TruncatedShardError(f"{shard}: ends at byte {at + got}, within a header")
    return TruncatedShardError(
        f"{shard}: ends at byte {at} between two members, without the end mark of a tar archive: it has been cut there"
    )


def _cut(shard: str, member: Member, length: int) -> TruncatedShardError:
    return TruncatedShardError(
        f"{shard}: ends at byte {length}, within {member.name!r}, whose {member.size} bytes begin at byte "
        f"{member.offset}: the archive has been cut"
    )
