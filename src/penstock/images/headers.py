"""Read format, size and EXIF orientation of an image from the bytes of its file, without decoding.

Sizes are ``(width, height)`` as stored, without EXIF rotation; None means that the header is ambiguous or unknown.

OpenCV has no call that reads only a header, so these functions enforce `max_pixels` for its decoders. They are
therefore strict: a header that a decoder could interpret differently has no size.

    >>> kind(b"GIF89a\\x0a\\x00\\x14\\x00"), size_from_header(b"GIF89a\\x0a\\x00\\x14\\x00")
    ('gif', (10, 20))
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import TypeAlias

from penstock.images import jpeg
from penstock.images.jpeg import TruncatedHeader

__all__ = ["TruncatedHeader", "kind", "orientation", "png_is_whole", "size_from_header", "size_of_file", "tiff_block"]

Data: TypeAlias = bytes | bytearray | memoryview
Size: TypeAlias = tuple[int, int]

_JP2 = b"\0\0\0\x0cjP  \r\n\x87\n"
_CODESTREAM = b"\xff\x4f\xff\x51"
_MAX_COMPONENTS = 4
# Decoders differ in how numbers and comments may end, so accept only white space after numbers and line ends.
_PNM = re.compile(rb"P[1-6]\s(?:\s|#[^\r\n]*[\r\n])*(\d{1,10})\s(?:\s|#[^\r\n]*[\r\n])*(\d{1,10})\s")
_WIDTH, _HEIGHT, _TILE_WIDTH, _TILE_HEIGHT, _STRIP_HEIGHT, _ORIENTATION = 0x100, 0x101, 0x142, 0x143, 0x116, 0x112
_DEPTHS = frozenset({0x80E5, 0x80E6})  # tags of three-dimensional images and of their tiles
_ALL_ROWS = 2**32 - 1
_MAX_TAGS = 1024
_NUMBERS = {3: "H", 4: "I"}
_LARGER = _NUMBERS | {16: "Q"}
_TIFF = {
    b"II*\0": ("<", 4, "H", "I", _NUMBERS),
    b"MM\0*": (">", 4, "H", "I", _NUMBERS),
    b"II+\0": ("<", 8, "Q", "Q", _LARGER),
    b"MM\0+": (">", 8, "Q", "Q", _LARGER),
}
"""By the first bytes of a TIFF or BigTIFF: byte order, position of the first directory's offset, struct formats of a
directory's count and of offsets, and the number types that are read."""


def kind(data: Data) -> str:
    """Return the format by the first bytes: jpeg, png, gif, bmp, webp, tiff, or other."""
    start = bytes(data[:12])
    if start[:2] == b"\xff\xd8":
        return "jpeg"
    if start[:8] == b"\x89PNG\r\n\x1a\n":
        return "png"
    if start[:4] in _TIFF:
        return "tiff"
    if start[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "webp"
    return "bmp" if start[:2] == b"BM" else "other"


def size_from_header(data: Data) -> Size | None:
    """Return the size from the first bytes of a file, which may be zero.

    Raises `TruncatedHeader` if more bytes are needed.
    """
    if data[:2] == b"\xff\xd8":
        return jpeg.frame_size(data)
    form = kind(data)
    try:
        if form == "png":
            return _png(data)
        if form == "gif":
            return _pair("<HH", data, 6)
        if form == "bmp":
            return _bmp(data)
        if form == "webp":
            return _webp(data)
        if form == "tiff":
            return _tiff(data)[0]
        if data[:12] == _JP2 or data[:4] == _CODESTREAM:
            return _jpeg2000(data)
    except struct.error:
        raise TruncatedHeader from None
    match = _PNM.match(data[:4096])
    return (int(match[1]), int(match[2])) if match else None


def size_of_file(data: Data) -> Size | None:
    """Return the size from a whole file."""
    try:
        return size_from_header(data)
    except TruncatedHeader:
        return None


def _pair(layout: str, data: Data, offset: int) -> Size:
    width, height = struct.unpack_from(layout, data, offset)
    return width, height


def _png(data: Data) -> Size | None:
    length, name = struct.unpack_from(">I4s", data, 8)
    return _pair(">II", data, 16) if (length, name) == (13, b"IHDR") else None


def _bmp(data: Data) -> Size | None:
    (header_size,) = struct.unpack_from("<i", data, 14)
    if header_size == 12:  # OS/2: 16-bit sizes
        return _pair("<HH", data, 18)
    if header_size < 36:
        return None
    width, height = _pair("<ii", data, 18)
    return abs(width), abs(height)  # a negative height means top-down rows


def _webp(data: Data) -> Size | None:
    name = data[12:16]
    if name == b"VP8 ":
        start, width, height = struct.unpack_from("<3sHH", data, 23)
        return (width & 0x3FFF, height & 0x3FFF) if start == b"\x9d\x01\x2a" else None
    if name == b"VP8L":
        signature, bits = struct.unpack_from("<BI", data, 20)
        return ((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1) if signature == 0x2F else None
    if name == b"VP8X":
        length, low_width, high_width, low_height, high_height = struct.unpack_from("<I4xHBHB", data, 16)
        return ((high_width << 16 | low_width) + 1, (high_height << 16 | low_height) + 1) if length == 10 else None
    return None


def _jpeg2000(data: Data) -> Size | None:
    """Return the size of a codestream, or of a file's first one; None with palettes or subsampling."""
    at = 0
    while data[at : at + 4] != _CODESTREAM:
        length, name = struct.unpack_from(">I4s", data, at)
        start = at + (16 if length == 1 else 8)
        if name == b"jp2c" and data[start : start + 4] == _CODESTREAM:
            at = start
        elif name == b"jp2c" or length < 8 or (name == b"jp2h" and b"pclr" in bytes(data[at : at + length])):
            return None
        else:
            at += length
    right, bottom, left, top, components = struct.unpack_from(">IIII16xH", data, at + 8)
    if not 1 <= components <= _MAX_COMPONENTS:
        return None
    steps = struct.unpack_from(">" + "xBB" * components, data, at + 42)
    return (right - left, bottom - top) if set(steps) == {1} else None


def tiff_block(data: Data) -> Size | None:
    """Return ``(width, height)`` of a TIFF's tiles or strips; None if it has no size."""
    try:
        return _tiff(data)[1]
    except struct.error:
        return None


def _tiff(data: Data) -> tuple[Size | None, Size | None]:
    """Return the size of the first image, and of its tiles or strips; Nones unless all are plain numbers."""
    tags = _tiff_tags(data)
    width, height = tags.get(_WIDTH, -1), tags.get(_HEIGHT, -1)
    rows = tags.get(_STRIP_HEIGHT, _ALL_ROWS)
    block = (tags.get(_TILE_WIDTH, 0) or width, tags.get(_TILE_HEIGHT, 0) or (height if rows == _ALL_ROWS else rows))
    if min(width, height, rows, *block) < 0 or _DEPTHS & tags.keys():
        return None, None
    return (width, height), (block[0], block[1] or height)


def _tiff_tags(tiff: Data) -> dict[int, int]:
    """Return the integers of 16 bits and more of a TIFF's first directory, by tag. EXIF has the same format.

    Other values are -1, and so is the value of a repeated tag, since readers differ in the one they use. A directory of
    more than 1,024 tags yields none. Raises `struct.error` if the directory is truncated.
    """
    layout = _TIFF.get(bytes(tiff[:4]))
    if layout is None:
        return {}
    order, first, counter, number, numbers = layout
    (at,) = struct.unpack_from(order + number, tiff, first)
    if at > len(tiff):  # may exceed the offsets that `unpack_from` accepts
        raise struct.error("the directory is beyond the end")
    (count,) = struct.unpack_from(order + counter, tiff, at)
    begin, step = at + struct.calcsize(counter), 4 + 2 * struct.calcsize(number)
    found: dict[int, int] = {}
    for entry in range(begin, begin + step * count if count <= _MAX_TAGS else begin, step):
        tag, form, values = struct.unpack_from(order + "HH" + number, tiff, entry)
        value = -1
        if tag not in found and values == 1 and form in numbers:
            (value,) = struct.unpack_from(order + numbers[form], tiff, entry + 4 + struct.calcsize(number))
        found[tag] = value
    return found


def orientation(data: Data) -> int:
    """Return the EXIF orientation, 1 to 8, of a JPEG, PNG, WebP or TIFF; 1 (as stored) if it is missing or damaged."""
    try:
        found = _tiff_tags(_exif(data)).get(_ORIENTATION, 1)
    except struct.error:
        return 1
    return found if 1 <= found <= 8 else 1


def _exif(data: Data) -> Data:
    """Return the EXIF block, which begins with a TIFF header; empty if there is none."""
    form = kind(data)
    if form == "tiff":
        return data
    blocks: Iterator[Data] = iter(())
    if form == "jpeg":
        blocks = jpeg.exif_blocks(data)
    elif form in ("png", "webp"):
        blocks = (data[start:stop] for name, start, stop in _chunks(data) if name in (b"eXIf", b"EXIF"))
    block = next(blocks, b"")
    return block[6:] if bytes(block[:6]) == b"Exif\0\0" else block


def png_is_whole(data: Data) -> bool:
    """Return whether all chunks of a PNG end within the data. OpenCV allocates the size that a chunk claims."""
    for name, _, stop in _chunks(data):
        if stop + 4 > len(data):  # a checksum follows
            return False
        if name == b"IEND":
            break
    return True


def _chunks(data: Data) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, and start and stop of the content, of each chunk of a PNG or WebP."""
    is_png = kind(data) == "png"
    at = 8 if is_png else 12
    while at + 8 <= len(data):
        first, second = struct.unpack_from(">I4s" if is_png else "<4sI", data, at)
        size, name = (first, second) if is_png else (second, first)
        yield name, at + 8, at + 8 + size
        at += 8 + size + (4 if is_png else size % 2)  # a checksum, or padding
