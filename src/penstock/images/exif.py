"""Read an image file's format and EXIF orientation.

Pure functions over bytes, without decoding, for JPEG, PNG, WebP and TIFF; other formats have no orientation.

    >>> kind(b"GIF89a...")
    'gif'
    >>> orientation(b"GIF89a...")
    1
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.images.jpeg import segments

__all__ = ["inverse", "kind", "orientation", "oriented", "tags"]

Data: TypeAlias = bytes | bytearray | memoryview

_ORIENTATION = 0x112
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


def orientation(data: Data) -> int:
    """Return the EXIF orientation, 1 to 8; 1 (as stored) if the file has none or a damaged one."""
    try:
        found = tags(_exif(data)).get(_ORIENTATION, 1)
    except struct.error:
        return 1
    return found if 1 <= found <= 8 else 1


def oriented(image: npt.NDArray[np.uint8], how: int) -> npt.NDArray[np.uint8]:
    """Return `image` (height, width, channels) turned and mirrored by EXIF orientation `how`, C-contiguous."""
    if how >= 5:
        image = image.transpose(1, 0, 2)
    # After the transposition, mirror left to right and top to bottom.
    if how in (2, 3, 6, 7):
        image = image[:, ::-1]
    if how in (3, 4, 7, 8):
        image = image[::-1]
    return np.ascontiguousarray(image)


def inverse(how: int) -> int:
    """Return the orientation that undoes `how`. All but the two quarter turns undo themselves."""
    return {6: 8, 8: 6}.get(how, how)


def tags(tiff: Data) -> dict[int, int]:
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


def _exif(data: Data) -> Data:
    """Return the EXIF block, which begins with a TIFF header; empty if there is none."""
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
    for marker, start, stop in segments(data):
        if marker == 0xDA:
            break
        if marker == 0xE1 and bytes(data[start : start + 6]) == b"Exif\0\0":
            return data[start + 6 : stop]
    return b""


def _chunk(data: Data, at: int, layout: str, name: bytes, after: int, even: int) -> Data:
    """Return the content of a PNG or RIFF chunk. Content is padded to `even`, and `after` bytes follow it."""
    while at + 8 <= len(data):
        first, second = struct.unpack_from(layout, data, at)
        found, size = (first, second) if isinstance(first, bytes) else (second, first)
        if found == name:
            return data[at + 8 : at + 8 + size]
        at += 8 + size + size % even + after
    return b""
