"""What an image file says about itself besides its size: its format, and how its pixels want to be turned.

Pure functions over bytes, no decoding, for JPEG, PNG, WebP and TIFF; all others have no orientation.

    >>> kind(b"GIF89a...")
    'gif'
    >>> orientation(b"GIF89a...")
    1
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["inverse", "kind", "orientation", "oriented", "scan_offset", "tiff_size"]

Data: TypeAlias = bytes | bytearray | memoryview

_ORIENTATION, _WIDTH, _HEIGHT = 0x112, 0x100, 0x101
_MAX_TAGS = 1024
_BARE = frozenset({0x00, 0x01, *range(0xD0, 0xDA), 0xFF})


def kind(data: Data) -> str:
    """The format by its first bytes: jpeg, png, gif, bmp, webp, tiff, or other."""
    start = bytes(data[:12])
    if start[:2] == b"\xff\xd8":
        return "jpeg"
    if start[:8] == b"\x89PNG\r\n\x1a\n":
        return "png"
    if start[:4] in (b"II*\0", b"MM\0*"):
        return "tiff"
    if start[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "webp"
    return "bmp" if start[:2] == b"BM" else "other"


def orientation(data: Data) -> int:
    """The EXIF orientation, 1 to 8; 1, which is as stored, where the file has none or a damaged one."""
    try:
        found = _tags(_exif(data)).get(_ORIENTATION, 1)
    except struct.error:
        return 1
    return found if 1 <= found <= 8 else 1


def oriented(image: npt.NDArray[np.uint8], how: int) -> npt.NDArray[np.uint8]:
    """`image` (height, width, channels) turned and mirrored as EXIF orientation `how` says, C-contiguous."""
    if how >= 5:
        image = image.transpose(1, 0, 2)
    # After the transposition: mirrored left to right, top to bottom.
    if how in (2, 3, 6, 7):
        image = image[:, ::-1]
    if how in (3, 4, 7, 8):
        image = image[::-1]
    return np.ascontiguousarray(image)


def inverse(how: int) -> int:
    """The orientation that undoes `how`: but for the two quarter turns, each undoes itself."""
    return {6: 8, 8: 6}.get(how, how)


def tiff_size(data: Data) -> tuple[int, int] | None:
    """``(width, height)`` of a TIFF's first picture, `None` where it does not say."""
    try:
        tags = _tags(data)
    except struct.error:
        return None
    return (tags[_WIDTH], tags[_HEIGHT]) if _WIDTH in tags and _HEIGHT in tags else None


def _tags(tiff: Data) -> dict[int, int]:
    """The 16- and 32-bit numbers of the first directory of a TIFF, which is what EXIF is, by tag."""
    order = {b"II": "<", b"MM": ">"}.get(bytes(tiff[:2]))
    if order is None:
        return {}
    (at,) = struct.unpack_from(order + "I", tiff, 4)
    (count,) = struct.unpack_from(order + "H", tiff, at)
    tags = {}
    for entry in range(at + 2, at + 2 + 12 * min(count, _MAX_TAGS), 12):
        tag, form, values = struct.unpack_from(order + "HHI", tiff, entry)
        if values == 1 and form in (3, 4):
            (tags[tag],) = struct.unpack_from(order + ("H" if form == 3 else "I"), tiff, entry + 8)
    return tags


def _exif(data: Data) -> Data:
    """The EXIF block, which begins as a TIFF does, or nothing."""
    form = kind(data)
    if form == "tiff":
        return data
    if form == "jpeg":
        return _exif_of_jpeg(data)
    if form == "png":
        return _chunk(data, 8, ">I4s", b"eXIf", 4, 1)
    if form == "webp":
        block = _chunk(data, 12, "<4sI", b"EXIF", 0, 2)
        return block[6:] if bytes(block[:6]) == b"Exif\0\0" else block
    return b""


def _exif_of_jpeg(data: Data) -> Data:
    for marker, start, stop in _segments(data):
        if marker == 0xE1 and bytes(data[start : start + 6]) == b"Exif\0\0":
            return data[start + 6 : stop]
    return b""


def scan_offset(data: Data) -> int:
    """Where the first scan of a JPEG begins; its end where it has none."""
    return next((start for marker, start, _ in _segments(data) if marker == 0xDA), len(data))


def _segments(data: Data) -> Iterator[tuple[int, int, int]]:
    """Marker, start and stop of the content of a JPEG's segments, up to the first scan's header."""
    at, marker = 2, 0
    while at + 4 <= len(data) and marker != 0xDA:
        if data[at] != 0xFF:
            at += 1  # stray bytes before a marker
            continue
        marker = data[at + 1]
        if marker in _BARE:  # fill bytes, and markers without a length
            at += 1
            continue
        stop = at + 2 + (data[at + 2] << 8 | data[at + 3])
        yield marker, at + 4, stop
        at = stop


def _chunk(data: Data, at: int, layout: str, name: bytes, after: int, even: int) -> Data:
    """The content of a chunk of PNG or RIFF; `after` bytes follow each content, which is padded to `even`."""
    while at + 8 <= len(data):
        first, second = struct.unpack_from(layout, data, at)
        found, size = (first, second) if isinstance(first, bytes) else (second, first)
        if found == name:
            return data[at + 8 : at + 8 + size]
        at += 8 + size + size % even + after
    return b""
