"""Width and height of an image from the first bytes of its file. Pure functions over bytes, no decoding.

`size_from_header(data)` knows JPEG, PNG, GIF, BMP, WebP and binary PNM. It returns ``(width, height)`` as the file
stores them (no EXIF rotation), `None` for a format that it does not know, and raises `TruncatedHeader` when the bytes
end before the size was found: the caller then reads further.

    >>> size_from_header(b"GIF89a\\x0a\\x00\\x14\\x00")
    (10, 20)
"""

from __future__ import annotations

import re
import struct
from typing import TypeAlias

__all__ = ["TruncatedHeader", "size_from_header"]

Data: TypeAlias = bytes | bytearray | memoryview

_PNG = b"\x89PNG\r\n\x1a\n"
# Frame headers, which carry the size: C0 to CF without DHT (C4), JPG (C8) and DAC (CC).
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Markers without a length: TEM and the restart markers.
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD8)})
_PNM = re.compile(rb"P[456](?:\s|#[^\n]*\n)+(\d+)(?:\s|#[^\n]*\n)+(\d+)\s")


class TruncatedHeader(Exception):
    """The bytes end before the size. A signal to the caller in `decode.image_size`, never shown to a user."""


def size_from_header(data: Data) -> tuple[int, int] | None:
    """``(width, height)`` in pixels from the first bytes of a file, or `None` for an unknown format.

    Raises `TruncatedHeader` when more bytes are needed. A size of zero is returned as it stands.
    """
    if data[:2] == b"\xff\xd8":
        return _jpeg(data)
    try:
        if data[:8] == _PNG and data[12:16] == b"IHDR":
            return _pair(">II", data, 16)
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


def _pair(layout: str, data: Data, offset: int) -> tuple[int, int]:
    width, height = struct.unpack_from(layout, data, offset)
    return width, height


def _jpeg(data: Data) -> tuple[int, int] | None:
    """Walk from marker to marker; the segments before the frame (EXIF, ICC profile) may be longer than `data`."""
    at, end = 2, len(data)
    while at + 4 <= end:
        if data[at] != 0xFF:
            at += 1  # stray bytes, which libjpeg passes over too
            continue
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
        elif marker in _JPEG_BARE:
            at += 2
        elif marker in _JPEG_FRAMES:
            if at + 9 > end:
                raise TruncatedHeader
            return (data[at + 7] << 8 | data[at + 8]), (data[at + 5] << 8 | data[at + 6])
        elif marker in (0xD9, 0xDA):  # end of image, start of scan: no frame came before
            return None
        else:
            at += 2 + (data[at + 2] << 8 | data[at + 3])
    raise TruncatedHeader


def _bmp(data: Data) -> tuple[int, int]:
    (header_size,) = struct.unpack_from("<I", data, 14)
    if header_size == 12:  # OS/2: 16-bit sizes
        return _pair("<HH", data, 18)
    width, height = _pair("<ii", data, 18)
    return abs(width), abs(height)  # a negative height means top-down rows


def _webp(data: Data) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8 ":
        width, height = _pair("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8X":
        low_width, high_width, low_height, high_height = struct.unpack_from("<HBHB", data, 24)
        return (high_width << 16 | low_width) + 1, (high_height << 16 | low_height) + 1
    return None
