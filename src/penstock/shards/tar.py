"""The parser of tar archives: in memory, with random access, or in a forward-only stream.

    for member in walk(archive, "a.tar"):            # Member(name='x/0001.jpg', kind='file', offset=512, size=907, ...)
        data = archive[member.offset : member.offset + member.size]
    for member, data in walk_stream(file, "a.tar"):  # data: bytes, empty for folders and links
        ...

The parser is `scan`. It takes a window of the archive at a time, parses its usual headers together
(`penstock.shards.window`), and all other headers one by one (`member_at`). If headers are few or mostly unusual, a
window costs more than it saves, so some members are parsed one by one before a window is tried again.

It reads old v7, ustar, GNU and PAX archives: long names, names that are not UTF-8, sizes of any length (base 256, PAX).
Sparse files are refused.

Promises, for any source of the bytes and any split into chunks:

* Members are complete and in the order of the archive.
* An archive that is truncated anywhere, even between two members, raises `TruncatedShardError`, and damage raises
  `ShardError`; both name the shard and the byte, and follow all earlier members.
* Reading ends at the end mark, and always terminates: each step advances at least 512 bytes.
* Memory: a window (at most 4 MiB; 1 MiB for a stream), and the current member.
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

_FIRST, _MOST = 16, 1024  # members parsed one by one before a window is tried (again)
_ENOUGH = 1024  # headers in a window
_FEW = 64  # desired headers in the first window
# Blocks of the first window, and of the largest.
_ARCHIVE_BLOCKS, _STREAM_BLOCKS = (512, 8192), (128, 2048)
# Up to these mean distances (bytes between headers of an archive, or members of a stream), windows are read
# completely, or sparsely.
_ARCHIVE_NEAR, _STREAM_NEAR = 7 << 10, 20 << 10
_ARCHIVE_FAR = 256 << 10

Parts = list[Members | list[Member]]
"""Consecutive members: arrays of many, or lists of single ones."""


def walk(buffer: Archive | Buffer, shard: str, *, start: int = 0, require_end: bool = True) -> Iterator[Member]:
    """Yield all members of a tar archive, in order.

    Args:
        buffer: the archive.
        shard: its name, for messages.
        start: the byte to begin at, which must be the first header of a member.
        require_end: whether an archive without the end mark (two blocks of zeros) is an error: it may be truncated.

    Raises:
        TruncatedShardError, ShardError: see above.

    Cost: 1 microsecond per small member; 3 for large members or unusual headers.
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
    """Yield the members of a tar archive that is read once from start to end, with their data.

    Args:
        file: any object with ``read(n)``, such as the result of `penstock.shards.open_stream`.
        shard: its name, for messages.
        select: returns whether to yield the file with a name; the data of other files is not stored.
        require_end: as for `walk`.

    Raises:
        TruncatedShardError, ShardError: see above; also for errors of decompression.
        ShardIOError: the stream cannot be read.

    A member is yielded when all of its data has been read. Reading ahead never blocks: available data of a pipe is
    yielded before more is read.
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
        # Free a large member before the next one is read.
        del data


def scan(source: Source, shard: str, *, start: int = 0, require_end: bool = True) -> Iterator[Parts]:
    """Yield the members of an archive in order, some at a time.

    Args, raises: as `walk`. If a file changes meanwhile, the error is a `ShardChangedError`, and no new content is
    yielded.

    For a stream, only the last member of a group may extend beyond the chunk that the stream holds.

    Cost: about a third of a microsecond per small member.
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
            # The more often windows have failed here, the more rarely one is tried.
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
        del window  # frees its bytes before others are read
        source.check()  # after the reads, so that no changed data is yielded
        if parts:
            yield parts
        if error is not None:
            raise error
        if following is not None:
            distance = (following - position) / headers
        count = _FIRST


def _window(source: Source, position: int, distance: float, blocks: int) -> Window | None:
    """Return a window from a position on; None if parsing one by one is faster."""
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
    """Yield a group of members that were parsed one by one.

    Returns the next position (None at the end), and the mean distance between headers.
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
    """Return the mean distance between headers; extended headers rarely exceed two blocks."""
    headers = sum(1 + (member.offset - member.header) // (2 * BLOCK) for member in members)
    return (members[-1].end - members[0].header) / headers


def _step_stream(
    stream: Stream, shard: str, position: int, count: int, require_end: bool
) -> Generator[Parts, None, tuple[int | None, float]]:
    """Yield members one by one: each must be consumed before the next.

    Returns the next position (None at the end), and the mean distance between members.
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
    """Return the members from a position to the window's end, the next position, and the error after them.

    The next position is None at the end of the archive.
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
    """Return the member whose first header is at a position, or None at the end mark. Raises as `walk`."""
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
        kind = "dir"  # old v7 marks folders this way
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
    """Check the end mark: two blocks of zeros, or one at the very end of the file."""
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
