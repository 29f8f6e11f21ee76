"""The parser of tar archives: in memory, read by position, or in a stream that only goes forward.

    for member in walk(archive, "a.tar"):            # Member(name='x/0001.jpg', kind='file', offset=512, size=907, ...)
        data = archive[member.offset : member.offset + member.size]
    for member, data in walk_stream(file, "a.tar"):  # data: bytes, empty for folders and links
        ...

There is one: `scan`. It takes a window of the archive at a time, looks at the usual headers in it many at once
(`penstock.shards.window`), and at each other one by itself (`member_at`). Where headers are few or mostly unusual, a
window costs more than it saves: some members are looked at one by one, before a window is tried again.

It reads old v7, ustar, GNU and PAX archives: long names, names that are not UTF-8, sizes of any length (base 256, PAX).
Sparse files are refused.

Promises, wherever the bytes come from and however they come in pieces:

* Members come in the archive's order and whole.
* An archive that is cut anywhere, between two members as well, is a `TruncatedShardError`, and damage a `ShardError`;
  both name the shard and the byte, and come behind the members that stand before.
* Reading ends at the archive's end mark, and always: each step goes at least 512 bytes forward.
* Memory: a window (4 MiB at most, of a stream 1 MiB), and the member in hand.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import chain
from math import inf
from typing import BinaryIO

from penstock.errors import ShardError, TruncatedShardError
from penstock.shards.archive import Archive, Buffer, Source, Stream
from penstock.shards.header import BLOCK, MAX_EXTENDED, ZEROS, Header, decode_name, parse_header, pax_records, rounded
from penstock.shards.members import Kind, Member, Members
from penstock.shards.window import STRETCH, Window, sparse_window, whole_window
from penstock.storage.urls import shown

__all__ = ["Buffer", "Kind", "Member", "Parts", "member_at", "scan", "walk", "walk_stream"]

_KINDS: dict[bytes, Kind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"5": "dir",
    b"1": "link",
    b"2": "link",
}
_WITHOUT_DATA = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))
_EXTENDED = frozenset((b"x", b"X", b"L", b"K", b"g"))

_FIRST, _MOST = 16, 1024  # members that are looked at one by one before a window is tried (again)
_ENOUGH = 1024  # headers in a window
_FEW = 64  # headers that the first window is to have
# Blocks of a window: at first, and at most.
_ARCHIVE_BLOCKS, _STREAM_BLOCKS = (512, 8192), (128, 2048)
# Bytes from one header of an archive, or one member of a stream, to the next, up to which windows are read as a whole,
# and up to which they are sparse.
_ARCHIVE_NEAR, _STREAM_NEAR = 7 << 10, 20 << 10
_ARCHIVE_FAR = 256 << 10

Parts = list[Members | list[Member]]
"""Consecutive members: many at once as arrays, others one by one."""


def walk(buffer: Archive | Buffer, shard: str, *, start: int = 0, require_end: bool = True) -> Iterator[Member]:
    """Yield the members of a tar archive, in order, all kinds of them.

    Args:
        buffer: the archive.
        shard: its name, for messages.
        start: byte to begin at, which must be the first header of a member.
        require_end: whether an archive that just ends, without the two blocks of zeros, is an error. It may have been
            cut there.

    Raises:
        TruncatedShardError, ShardError: see above.

    Cost: a microsecond a member where they are small, 3 where they are large or have unusual headers.
    """
    for parts in scan(Archive.of(buffer), shard, start=start, require_end=require_end):
        for part in parts:
            yield from part if isinstance(part, list) else part.one_by_one()


def walk_stream(
    file: BinaryIO,
    shard: str,
    *,
    select: Callable[[str], bool] | None = None,
    require_end: bool = True,
) -> Iterator[tuple[Member, bytes]]:
    """Yield the members of a tar archive that is read once from front to back, with their data.

    Args:
        file: anything with ``read(n)``, such as `penstock.shards.open_stream` returns.
        shard: its name, for messages.
        select: files whose name it refuses are left out, and their data is not kept.
        require_end: as for `walk`.

    Raises:
        TruncatedShardError, ShardError: see above; also what decompression complains of.
        ShardIOError: the stream cannot be read.

    A member comes only when all of its data is there. It is read ahead by a window, but not waited for: what a pipe has
    is handed out before more is read.
    """
    stream = Stream(file, shown(shard))
    parts = chain.from_iterable(scan(stream, shard, require_end=require_end))
    for member in chain.from_iterable(part if isinstance(part, list) else part.one_by_one() for part in parts):
        is_file, end = member.kind == "file", member.offset + member.size
        is_wanted = is_file and (select is None or select(member.name))
        data = stream.read(member.offset, end) if is_wanted else b""
        if not is_wanted:
            stream.skip(end)
        if end > stream.size:
            raise _cut(stream, shown(shard), member)
        if is_wanted or not is_file:
            yield member, data
        # A large one goes before the next one comes.
        del data


def scan(source: Source, shard: str, *, start: int = 0, require_end: bool = True) -> Iterator[Parts]:
    """Yield the members of an archive in order, some at a time.

    Args, raises: those of `walk`. Of a file that is changed meanwhile the error is a `ShardChangedError`, and
    nothing of the new content comes.

    Of a stream, only the last of those that come together may reach over the piece that the stream holds.

    Cost: about a third of a microsecond a member where they are small.
    """
    shard, position, distance, count = shown(shard), start, inf, _FIRST
    blocks, most = _STREAM_BLOCKS if isinstance(source, Stream) else _ARCHIVE_BLOCKS
    following: int | None = start
    while following is not None:
        position = following
        if distance < inf:
            blocks = min(max(blocks, int(_FEW * distance) // BLOCK), most)
        window = _window(source, position, distance, blocks)
        if window is None:
            # The more often windows are of no use here, the more seldom one is tried.
            if isinstance(source, Stream):
                following, distance = yield from _step_stream(source, shard, position, count, require_end)
            else:
                following, distance = yield from _step_archive(source, shard, position, count, require_end)
            count = min(4 * count, _MOST)
            continue
        if len(window.number) < _ENOUGH:
            blocks = min(2 * blocks, most)
        headers = len(window.number)
        parts, following, error = _parts(source, shard, window, position, require_end)
        del window  # what it has of the archive's bytes goes before others come
        source.check()  # of what has just been read, so nothing is handed out that has changed
        if parts:
            yield parts
        if error is not None:
            raise error
        if following is not None:
            distance = (following - position) / headers
        count = _FIRST


def _window(source: Source, position: int, distance: float, blocks: int) -> Window | None:
    """Return a window from a position on; None where it is faster to look at one member after the other."""
    window: Window | None = None
    if isinstance(source, Stream):
        if distance <= _STREAM_NEAR:
            window = whole_window(source, position, blocks)
    elif distance <= _ARCHIVE_NEAR:
        window = whole_window(source, position, blocks)
    elif distance <= _ARCHIVE_FAR:
        window = sparse_window(source, position)
    elif distance < inf:
        source.fetch_ahead(position, position + 2 * STRETCH)
    return window if window is not None and window.is_useful else None


def _step_archive(
    archive: Archive, shard: str, position: int, count: int, require_end: bool
) -> Generator[Parts, None, tuple[int | None, float]]:
    """Yield some members, found one by one, together.

    Returns the next position, None at the archive's end, and how far it is from one header to the next.
    """
    members: list[Member] = []
    following: int | None = position
    error: Exception | None = None
    try:
        while following is not None and len(members) < count and following - position < STRETCH:
            member = member_at(archive, shard, following, require_end=require_end)
            if member is not None:
                members.append(member)
            following = None if member is None else member.end
    except Exception as caught:
        error = caught
    archive.check()
    if members:
        yield [members]
    if error is not None:
        raise error
    return following, (0 if following is None else _distance(members[:_FIRST]))


def _distance(members: list[Member]) -> float:
    """Return how far it is from one header to the next; an extended one is seldom more than two blocks."""
    headers = sum(1 + (member.offset - member.header) // (2 * BLOCK) for member in members)
    return (members[-1].end - members[0].header) / headers


def _step_stream(
    stream: Stream, shard: str, position: int, count: int, require_end: bool
) -> Generator[Parts, None, tuple[int | None, float]]:
    """Yield some members one by one: each must have been used before the next comes.

    Returns the next position, None at the archive's end, and how far it is from one member to the next.
    """
    following = position
    for _ in range(count):
        member = member_at(stream, shard, following, require_end=require_end)
        if member is None:
            return None, 0
        yield [[member]]
        following = member.end
    return following, (following - position) / count


def _parts(
    source: Source, shard: str, window: Window, position: int, require_end: bool
) -> tuple[Parts, int | None, Exception | None]:
    """Return the members from a position to the window's end, the next position (None at the archive's end), and the
    error that stands behind these members.
    """
    parts: Parts = []
    following: int | None = position
    try:
        while following is not None and (not parts or following + BLOCK <= window.stop):
            first, stop = window.run(following)
            if stop > first and window.end(stop - 1)[0] <= source.size:
                parts.append(window.members(first, stop))
                following = window.end(stop - 1)[1]
                continue
            member = member_at(source, shard, following, require_end=require_end)
            if member is not None and parts and isinstance(parts[-1], list):
                parts[-1].append(member)
            elif member is not None:
                parts.append([member])
            following = None if member is None else member.end
    except Exception as caught:
        return parts, following, caught
    return parts, following, None


def member_at(source: Source, shard: str, position: int, *, require_end: bool = True) -> Member | None:
    """Return the member whose first header stands at a position, or None at the end mark. Raises as `walk` does."""
    first = at = min(position, source.size)
    long_name: bytes | None = None
    records: dict[str, bytes] = {}
    while True:
        block = source.read(at, at + BLOCK)
        if len(block) < BLOCK:
            if not block and at == first and source.size and not require_end:
                return None
            raise _no_header(shard, source.size, is_within=bool(block) or at != first)
        if block == ZEROS:
            if at != first:
                raise ShardError(f"{shard}: byte {first}: an extended header that belongs to no member")
            _check_end(source, shard, at)
            return None
        header, begin = parse_header(block, shard, at), at + BLOCK
        if header.type not in _EXTENDED:
            return _member(source, shard, header, first, begin, records, long_name)
        data = _extended(source, shard, header, at)
        if header.type == b"L":
            long_name = data.split(b"\0", 1)[0]
        elif header.type != b"K":
            records |= pax_records(data, shard, at, everywhere=header.type == b"g")
        at = begin + rounded(header.size)


def _member(
    source: Source,
    shard: str,
    header: Header,
    first: int,
    offset: int,
    records: dict[str, bytes],
    long_name: bytes | None,
) -> Member:
    if header.type == b"S":
        raise ShardError(f"{shard}: byte {first}: a sparse file; pack it again without --sparse")
    raw = header.name if long_name is None else long_name
    kind = _KINDS.get(header.type, "special")
    if header.type == b"\0" and raw.endswith(b"/"):
        kind = "dir"  # old v7 has no other way to say so
    name = decode_name(records["path"].rstrip(b"/") if "path" in records else raw)
    size = int(records["size"]) if "size" in records else header.size
    if header.type in _WITHOUT_DATA or kind == "dir":
        size = 0
    member = Member(name, kind, offset, size, first, offset + rounded(size))
    if offset + size > source.size:
        raise _cut(source, shard, member)
    return member


def _extended(source: Source, shard: str, header: Header, at: int) -> bytes:
    """Return the data of the extended header at a byte."""
    if header.size > MAX_EXTENDED:
        raise ShardError(f"{shard}: byte {at}: an extended header of {header.size} bytes: damaged")
    begin, size = at + BLOCK, rounded(header.size)
    data = source.read(begin, begin + size)
    if len(data) < size:
        raise TruncatedShardError(f"{shard}: ends at byte {source.size}, within the header at byte {at}")
    return data[: header.size]


def _check_end(source: Source, shard: str, at: int) -> None:
    """An end mark is two blocks of zeros. One at the very end is taken too: nothing is missing."""
    if source.read(at + BLOCK, at + 2 * BLOCK).strip(b"\0"):
        raise ShardError(f"{shard}: byte {at}: a single block of zeros between members: the archive is damaged here")


def _no_header(shard: str, size: int, *, is_within: bool) -> TruncatedShardError:
    if not size:
        return TruncatedShardError(f"{shard}: an empty file; even a tar archive without members has 1024 bytes")
    if is_within:
        return TruncatedShardError(f"{shard}: ends at byte {size}, within a header")
    return TruncatedShardError(
        f"{shard}: ends at byte {size} between two members, without the end mark of a tar archive: it has been cut "
        "there"
    )


def _cut(source: Source, shard: str, member: Member) -> TruncatedShardError:
    return TruncatedShardError(
        f"{shard}: ends at byte {source.size}, within {member.name!r}, whose {member.size} bytes begin at byte "
        f"{member.offset}: the archive has been cut"
    )
