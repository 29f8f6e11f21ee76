"""Parse a tar header of 512 bytes into name, size and type, and the extended PAX and GNU headers before it.

    ustar, GNU   name 0:100, size 124:136, checksum 148:156, type 156, magic 257:265, prefix 345:500 (ustar only)
    old v7       the same without magic
    PAX x, g     records "LENGTH KEY=VALUE\\n" for the next member, or for all
    GNU L, K     a long name, or the long target of a link, for the next member

Invariant: all results are taken from the bytes. An invalid field is a `ShardError` that names shard and byte.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from penstock.errors import ShardError

__all__ = ["BLOCK", "MAX_EXTENDED", "ZEROS", "Header", "decode_name", "parse_header", "pax_records", "rounded"]

BLOCK = 512
ZEROS = bytes(BLOCK)
MAX_EXTENDED = 8 << 20
"""Longer extended headers are refused: they are read into memory, and no valid archive has them."""

_FIELDS = struct.Struct("<100s24x12s12x8sc100x8s80x155s12x")
_LARGEST = 1 << 62
_ADLER = 65521
_SPARSE = "GNU.sparse."


class Header(NamedTuple):
    """The header fields that are used."""

    name: bytes
    size: int
    type: bytes


def rounded(size: int) -> int:
    """Return a size rounded up to whole blocks, in bytes."""
    return -(-size // BLOCK) * BLOCK


def decode_name(name: bytes) -> str:
    """Return a name as text; bytes that are not UTF-8 become lone surrogates, as in file names."""
    return name.decode("utf-8", "surrogateescape")


def parse_header(block: bytes, shard: str, at: int) -> Header:
    """Return the header in a block of 512 bytes, from byte ``at`` of ``shard``.

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
        length = _binary(size)
        if length is None:
            raise ShardError(f"{shard}: byte {at}: the header's size {size!r} is not a number: the archive is damaged")
    name = name.split(b"\0", 1)[0]
    if magic == b"ustar\x0000" and prefix[0]:
        name = prefix.split(b"\0", 1)[0] + b"/" + name
    return Header(name, length, kind)


def _octal(field: bytes) -> int | None:
    """Return an octal number that ends with NUL or space, 0 for an empty field; None for other data."""
    digits = field.rstrip(b" \0")
    if not digits.isdigit():  # rare
        digits = field.split(b"\0", 1)[0].strip(b" ")
        if not digits:
            return 0
        if not digits.isdigit():
            return None
    try:
        return int(digits, 8)
    except ValueError:
        return None


def _binary(field: bytes) -> int | None:
    """Return a number in base 256, marked by the top bit; None if it is negative, too large or not marked."""
    if not field[0] & 0x80 or field[0] & 0x40:
        return None
    value = int.from_bytes(field, "big") - (0x80 << 88)
    return value if value < _LARGEST else None


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


def pax_records(data: bytes, shard: str, at: int, *, everywhere: bool = False) -> dict[str, bytes]:
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


def build_header(
    name: bytes, size: int, *, mode: int = 0o444, mtime: int = 0, user: bytes = b"", group: bytes = b""
) -> bytes:
    """Return all header blocks of a regular file.

    The format is ustar, with a GNU long-name header before it for names over 100 bytes, and sizes in base 256 from 8
    GiB on. `parse_header`, GNU tar and the standard library read it.
    """
    if len(name) <= 100:
        return _build(name, size, b"0", mode, mtime, user, group)
    text = name + b"\0"
    head = _build(b"././@LongLink", len(text), b"L", 0o644, 0, b"", b"")
    return head + text.ljust(rounded(len(text)), b"\0") + _build(name[:100], size, b"0", mode, mtime, user, group)


def _build(name: bytes, size: int, kind: bytes, mode: int, mtime: int, user: bytes, group: bytes) -> bytes:
    length = b"%011o\0" % size if size < 1 << 33 else b"\x80" + size.to_bytes(11, "big")
    block = b"%s%07o\x000000000\x000000000\0%s%011o\0        %s%sustar\x0000%s%s0000000\x000000000\0" % (
        name.ljust(100, b"\0"),
        mode,
        length,
        min(max(mtime, 0), (1 << 33) - 1),
        kind,
        bytes(100),
        user[:31].ljust(32, b"\0"),
        group[:31].ljust(32, b"\0"),
    )
    block = block.ljust(BLOCK, b"\0")
    return b"%s%06o\0 %s" % (block[:148], sum(block), block[156:])
