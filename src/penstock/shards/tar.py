"""The parser of tar archives: in memory, with random access, or in a forward-only stream.

    for member in walk(archive, "a.tar"):            # Member(name='x/0001.jpg', kind='file', offset=512, size=907, ...)
        data = archive[member.offset : member.offset + member.size]
    for member, data in walk_stream(file, "a.tar"):  # data: bytes, empty for folders and links
        ...

It reads old v7, ustar, GNU and PAX archives: long names, names that are not UTF-8, sizes of any length (base 256, PAX).
Sparse files are refused. `penstock.shards.runs` reads the usual headers of many members together, and all others by
`member_at`, too.

Promises, for any source of the bytes and any split into chunks:

* Members are complete and in the order of the archive.
* An archive that is truncated anywhere, even between two members, raises `TruncatedShardError`, and damage raises
  `ShardError`; both name the shard and the byte, and follow all earlier members.
* Reading ends at the end mark, and always terminates: each step advances at least 512 bytes.
* Memory: 32 KiB, and the current member.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from mmap import mmap
from typing import BinaryIO, Literal, NamedTuple

from penstock.errors import ShardError, TruncatedShardError
from penstock.shards.archive import BLOCK, Archive, Source, Stream
from penstock.storage.urls import shown

__all__ = ["Kind", "Member", "decode_name", "member_at", "rounded", "walk", "walk_stream"]

Kind = Literal["file", "dir", "link", "special"]

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

_NO_HEADER = bytes(BLOCK)
_MAX_EXTENDED = 8 << 20  # longer extended headers are refused: they are read into memory, and no valid archive has them
_FIELDS = struct.Struct("<100s24x12s12x8sc100x8s80x155s12x")
_LARGEST = 1 << 62
_ADLER = 65521
_SPARSE = "GNU.sparse."
_TIME_ONLY = re.compile(rb"[1-9][0-9] mtime=[^\n]*\n")

_ARCHIVE_CHUNK, _STREAM_CHUNK = 2 << 10, 32 << 10  # bytes read with a header


class Member(NamedTuple):
    """One member: ``size`` bytes of data at ``offset``, its first header (extended ones included) at ``header``.

    ``end`` is the first byte after its padding, where the next member begins.
    """

    name: str
    kind: Kind
    offset: int
    size: int
    header: int
    end: int


def walk(
    buffer: bytes | memoryview | mmap, shard: str, *, start: int = 0, require_end: bool = True
) -> Iterator[Member]:
    """Yield all members of a tar archive, in order.

    Args:
        buffer: the archive; it is copied unless it is bytes.
        shard: its name, for messages.
        start: the byte to begin at, which must be the first header of a member.
        require_end: whether an archive without the end mark (two blocks of zeros) is an error: it may be truncated.

    Raises:
        TruncatedShardError, ShardError: see above.

    Cost: 3 microseconds a member.
    """
    return _each_member(Archive(bytes(buffer[:])), shown(shard), start, require_end=require_end)


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
    for member in _each_member(stream, shown(shard), require_end=require_end):
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


def _each_member(source: Source, shard: str, position: int = 0, *, require_end: bool = True) -> Iterator[Member]:
    """Yield the members of an archive from a position on, as `walk` does.

    The data of a stream's member must be read, or skipped, before the next member is requested.
    """
    chunk = _STREAM_CHUNK if isinstance(source, Stream) else _ARCHIVE_CHUNK
    following = position
    while True:
        if not source.begin <= following <= source.end - BLOCK:
            source.hold(following, following + chunk)
        member = member_at(source, shard, following, require_end=require_end)
        if member is None:
            return
        yield member
        following = member.end


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
        if block == _NO_HEADER:
            if at != first:
                raise ShardError(f"{shard}: byte {first}: an extended header that belongs to no member")
            # The end mark: two blocks of zeros, or one at the very end of the file.
            if source.read(at + BLOCK, at + 2 * BLOCK).strip(b"\0"):
                raise ShardError(
                    f"{shard}: byte {at}: a single block of zeros between members: the archive is damaged here"
                )
            return None
        (raw, size, type), offset = _parse_header(block, shard, at), at + BLOCK
        if type not in _EXTENDED:
            break
        data = _extended(source, shard, size, at)
        if type == b"L":
            long_name = data.split(b"\0", 1)[0]
        elif type != b"K":
            records |= _pax_records(data, shard, at, everywhere=type == b"g")
        at = offset + rounded(size)
    if type == b"S":
        raise ShardError(f"{shard}: byte {first}: a sparse file; pack it again without --sparse")
    raw = raw if long_name is None else long_name
    kind = _KINDS.get(type, "special")
    if type == b"\0" and raw.endswith(b"/"):
        kind = "dir"  # old v7 marks folders this way
    if records:
        raw = records["path"].rstrip(b"/") if "path" in records else raw
        size = int(records.get("size", size))
    if type in _WITHOUT_DATA or kind == "dir":
        size = 0
    member = Member(raw.decode("utf-8", "surrogateescape"), kind, offset, size, first, offset + rounded(size))
    if offset + size > source.size:
        raise _cut(source, shard, member)
    return member


def _extended(source: Source, shard: str, size: int, at: int) -> bytes:
    """Return the data of the extended header at a byte."""
    if size > _MAX_EXTENDED:
        raise ShardError(f"{shard}: byte {at}: an extended header of {size} bytes: damaged")
    begin = at + BLOCK
    data = source.read(begin, begin + rounded(size))
    if len(data) < rounded(size):
        raise TruncatedShardError(f"{shard}: ends at byte {source.size}, within the header at byte {at}")
    return data[:size]


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


# Headers: 512 bytes, and the extended ones of PAX and GNU before them.
#
#   ustar, GNU   name 0:100, size 124:136, checksum 148:156, type 156, magic 257:265, prefix 345:500 (ustar only)
#   old v7       the same without magic
#   PAX x, g     records "LENGTH KEY=VALUE\n" for the next member, or for all
#   GNU L, K     a long name, or the long target of a link, for the next member


def rounded(size: int) -> int:
    """Return a size rounded up to whole blocks, in bytes."""
    return -(-size // BLOCK) * BLOCK


def decode_name(name: bytes) -> str:
    """Return a name as text; bytes that are not UTF-8 become lone surrogates, as in file names."""
    return name.decode("utf-8", "surrogateescape")


def _parse_header(block: bytes, shard: str, at: int) -> tuple[bytes, int, bytes]:
    """Return name, size and type of the header in a block of 512 bytes, from byte ``at`` of ``shard``.

    Raises:
        ShardError: the checksum is wrong, or the size is not a number.

    Cost: about a microsecond.
    """
    name, size, checksum, kind, magic, prefix = _FIELDS.unpack(block)
    stored = _octal(checksum)
    # Adler-32 includes the sum of the bytes, a hundred times faster than a sum in Python.
    expected = ((zlib.adler32(block) & 0xFFFF) - (zlib.adler32(checksum) & 0xFFFF) + 256) % _ADLER
    if stored is None or (stored % _ADLER != expected and stored not in _sums(block)):
        raise ShardError(f"{shard}: byte {at}: {_what_is_wrong(block, at)}")
    length = _octal(size)
    if length is None:
        # In base 256, marked by the top bit; the next bit means a negative number.
        length = int.from_bytes(size, "big") - (0x80 << 88) if size[0] & 0xC0 == 0x80 else _LARGEST
        if length >= _LARGEST:
            raise ShardError(f"{shard}: byte {at}: the header's size {size!r} is not a number: the archive is damaged")
    name = name.split(b"\0", 1)[0]
    if magic == b"ustar\x0000" and prefix[0]:
        name = prefix.split(b"\0", 1)[0] + b"/" + name
    return name, length, kind


def _octal(field: bytes) -> int | None:
    """Return an octal number that ends with NUL or space, 0 for an empty field; None for other data."""
    digits = field.rstrip(b" \0")
    if not digits.isdigit():
        digits = field.split(b"\0", 1)[0].strip(b" ")
        if not digits:
            return 0
        if not digits.isdigit():
            return None
    try:
        return int(digits, 8)
    except ValueError:
        return None


def _sums(block: bytes) -> tuple[int, int]:
    """Return the possible checksums of a header: by unsigned bytes, and by signed ones (some old programs)."""
    others = block[:148] + block[156:]
    return sum(others) + 256, sum(struct.unpack("<504b", others)) + 256


def _what_is_wrong(block: bytes, at: int) -> str:
    if at == 0:
        for magic, name in _OTHERS.items():
            if block.startswith(magic):
                return f"this is {name}, not a tar archive"
        if block[257:262] != b"ustar":
            return "this is no tar archive"
    return "no tar header where one has to be (its checksum is wrong): the archive is damaged here, or just before"


_OTHERS = {
    b"\x1f\x8b": "a gzip file",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ\0": "an xz file",
    b"\x28\xb5\x2f\xfd": "a zstandard file",
    b"PK\x03\x04": "a zip file",
    b"\x89HDF": "an HDF5 file",
    b"\xff\xd8\xff": "a JPEG image",
    b"<": "HTML or XML (the answer of a web server?)",
}


def _pax_records(data: bytes, shard: str, at: int, *, everywhere: bool = False) -> dict[str, bytes]:
    """Return the records of a PAX header that are used: ``path`` and ``size``.

    Args:
        data: the records.
        shard, at: for messages; ``at`` is the byte of the PAX header.
        everywhere: it is a global header (type g), which applies to all later members.

    Raises:
        ShardError: invalid records; a sparse file; a path or size for all members.
    """
    result: dict[str, bytes] = {}
    begin = 0
    if _TIME_ONLY.fullmatch(data) and int(data[:2]) == len(data):  # faster, and what Python's tarfile writes
        return result
    data = data.rstrip(b"\0")
    while begin < len(data):
        space = data.find(b" ", begin, begin + 20)
        digits = data[begin:space] if space > 0 else b""
        end = begin + int(digits) if digits.isdigit() else 0
        equals = data.find(b"=", space + 1, end)
        if not (space < end <= len(data) and equals > 0 and data[end - 1] == 10):
            raise ShardError(f"{shard}: byte {at}: the PAX header is damaged at its byte {begin}")
        key = data[space + 1 : equals].decode("utf-8", "replace")
        if key.startswith(_SPARSE):
            raise ShardError(f"{shard}: byte {at}: a sparse file; pack it again without --sparse")
        if key in ("path", "size"):
            if everywhere:
                raise ShardError(f"{shard}: byte {at}: a global PAX header sets the {key} of all members")
            result[key] = data[equals + 1 : end - 1]
        begin = end
    size = result.get("size", b"0")
    if not size.isdigit() or len(size) > 19 or int(size) >= _LARGEST:
        raise ShardError(f"{shard}: byte {at}: the PAX header's size {size!r} is not a number")
    return result
