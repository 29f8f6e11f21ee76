"""What an image file says about itself besides its size: its format, and how its pixels want to be turned.

Pure functions over bytes, no decoding, for JPEG, PNG, WebP and TIFF; all others have no orientation.

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
"""By the first bytes of a TIFF or BigTIFF: byte order, where the place of the first directory stands, how the number of
its entries and places are written, and the types of numbers that are read."""


def kind(data: Data) -> str:
    """The format by its first bytes: jpeg, png, gif, bmp, webp, tiff, or other."""
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
    """The EXIF orientation, 1 to 8; 1, which is as stored, where the file has none or a damaged one."""
    try:
        found = tags(_exif(data)).get(_ORIENTATION, 1)
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


def tags(tiff: Data) -> dict[int, int]:
    """Return the numbers of 16 bits and more of the first directory of a TIFF, which is what EXIF is, by tag.

    Any other value is -1, and so is one of a tag that stands there twice: readers differ in which one they take. None
    of a directory with thousands of tags. Raises `struct.error` where the directory is cut.
    """
    layout = _TIFF.get(bytes(tiff[:4]))
    if layout is None:
        return {}
    order, first, counter, number, numbers = layout
    (at,) = struct.unpack_from(order + number, tiff, first)
    if at > len(tiff):  # more than `unpack_from` can be asked for, perhaps
        raise struct.error("the directory is behind the end")
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
    for marker, start, stop in segments(data):
        if marker == 0xDA:
            break
        if marker == 0xE1 and bytes(data[start : start + 6]) == b"Exif\0\0":
            return data[start + 6 : stop]
    return b""


def _chunk(data: Data, at: int, layout: str, name: bytes, after: int, even: int) -> Data:
    """The content of a chunk of PNG or RIFF; `after` bytes follow each content, which is padded to `even`."""
    while at + 8 <= len(data):
        first, second = struct.unpack_from(layout, data, at)
        found, size = (first, second) if isinstance(first, bytes) else (second, first)
        if found == name:
            return data[at + 8 : at + 8 + size]
        at += 8 + size + size % even + after
    return b""
