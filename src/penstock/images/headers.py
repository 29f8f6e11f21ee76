"""Read width and height of an image from the bytes of its file. Pure functions over bytes, without decoding.

`size_from_header(data)` supports JPEG, PNG, GIF, BMP, WebP and PNM, and needs only the first bytes. It returns
``(width, height)`` as stored (without EXIF rotation), or None for an unknown format. It raises `TruncatedHeader` if the
bytes end before the size: the caller then reads more. `size_of_file(data)` needs the whole file and also supports TIFF
and JPEG 2000.

OpenCV has no call that reads only a header, so these functions enforce `max_pixels` for its decoders. They are
therefore strict: a header that a decoder could interpret differently has no size.

    >>> size_from_header(b"GIF89a\\x0a\\x00\\x14\\x00")
    (10, 20)
"""

from __future__ import annotations

import re
import struct
from typing import TypeAlias

from penstock.images import exif, jpeg
from penstock.images.jpeg import TruncatedHeader

__all__ = ["TruncatedHeader", "png_is_whole", "size_from_header", "size_of_file", "tiff_block"]

Data: TypeAlias = bytes | bytearray | memoryview
Size: TypeAlias = tuple[int, int]

_PNG = b"\x89PNG\r\n\x1a\n"
_JP2 = b"\0\0\0\x0cjP  \r\n\x87\n"
_CODESTREAM = b"\xff\x4f\xff\x51"
_MAX_COMPONENTS = 4
# Decoders differ in how numbers and comments may end, so accept only white space after numbers and line ends.
_PNM = re.compile(rb"P[1-6]\s(?:\s|#[^\r\n]*[\r\n])*(\d{1,10})\s(?:\s|#[^\r\n]*[\r\n])*(\d{1,10})\s")
_WIDTH, _HEIGHT, _TILE_WIDTH, _TILE_HEIGHT, _STRIP_HEIGHT = 0x100, 0x101, 0x142, 0x143, 0x116
_DEPTHS = frozenset({0x80E5, 0x80E6})  # tags of three-dimensional images and of their tiles
_ALL_ROWS = 2**32 - 1


def size_from_header(data: Data) -> Size | None:
    """Return ``(width, height)`` in pixels from the first bytes of a file, or None for an unknown format.

    Raises `TruncatedHeader` if more bytes are needed. A size of zero is returned unchanged.
    """
    if data[:2] == b"\xff\xd8":
        return jpeg.frame_size(data)
    try:
        if data[:8] == _PNG:
            return _png(data)
        if data[:6] in (b"GIF87a", b"GIF89a"):
            return _pair("<HH", data, 6)
        if data[:2] == b"BM":
            return _bmp(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _webp(data)
    except struct.error:
        raise TruncatedHeader from None
    match = _PNM.match(data[:4096])
    return (int(match[1]), int(match[2])) if match else None


def size_of_file(data: Data) -> Size | None:
    """Return ``(width, height)`` in pixels of a whole file, or None if the header is ambiguous or unknown."""
    try:
        form = exif.kind(data)
        if form == "tiff":
            return _tiff(data)[0]
        if data[:12] == _JP2 or data[:4] == _CODESTREAM:
            return _jpeg2000(data)
        return size_from_header(data)
    except (TruncatedHeader, struct.error):
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
    kind = data[12:16]
    if kind == b"VP8 ":
        start, width, height = struct.unpack_from("<3sHH", data, 23)
        return (width & 0x3FFF, height & 0x3FFF) if start == b"\x9d\x01\x2a" else None
    if kind == b"VP8L":
        signature, bits = struct.unpack_from("<BI", data, 20)
        return ((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1) if signature == 0x2F else None
    if kind == b"VP8X":
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


def png_is_whole(data: Data) -> bool:
    """Return whether all chunks of a PNG end within the data. OpenCV allocates the size that a chunk claims."""
    at = len(_PNG)
    while at + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        at += 12 + length
        if at > len(data):
            return False
        if name == b"IEND":
            break
    return True


def tiff_block(data: Data) -> Size | None:
    """Return ``(width, height)`` of a TIFF's tiles or strips; None if it has no size."""
    try:
        return _tiff(data)[1]
    except struct.error:
        return None


def _tiff(data: Data) -> tuple[Size | None, Size | None]:
    """Return the size of the first image, and of its tiles or strips; Nones unless all are plain numbers."""
    tags = exif.tags(data)
    width, height = tags.get(_WIDTH, -1), tags.get(_HEIGHT, -1)
    rows = tags.get(_STRIP_HEIGHT, _ALL_ROWS)
    block = (tags.get(_TILE_WIDTH, 0) or width, tags.get(_TILE_HEIGHT, 0) or (height if rows == _ALL_ROWS else rows))
    if min(width, height, rows, *block) < 0 or _DEPTHS & tags.keys():
        return None, None
    return (width, height), (block[0], block[1] or height)
