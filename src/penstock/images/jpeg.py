"""Parse the markers of a JPEG file by libjpeg's rules.

libjpeg determines the size of an image, so a parser with other rules could be used to bypass `max_pixels`. Its rules
(jdmarker.c): the next marker is the next byte 0xFF that is followed by neither 0x00 nor 0xFF, regardless of the bytes
before it; restart markers and TEM have no content; an unknown marker ends the parsing.

Pure functions over bytes. Decoders check the size with libjpeg itself (`backends`). `frame_size` is for the first
kilobytes of a file, which libjpeg cannot read, and tests compare the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

__all__ = ["MAX_SCANS", "TruncatedHeader", "exif_blocks", "frame_size", "has_end", "is_lossless", "scans", "segments"]

Data: TypeAlias = bytes | bytearray | memoryview

MAX_SCANS = 200
"""More scans are refused, here and in `c/decode.c`: a small file can cause thousands of passes over a large image."""

# A marker: no stuffed zero, no fill byte, and none of TEM and the restart markers, which have no content.
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")
_SCAN, _END, _APP1 = 0xDA, 0xD9, 0xE1
# Frame headers, which carry the size: C0 to CF without DHT (C4), JPG (C8) and DAC (CC).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
_LOSSLESS = frozenset({0xC3, 0xC7, 0xCB, 0xCF})
# DHT, DAC, SOS, DQT, DNL, DRI, APP0 to APP15, COM: with the frames, segments that libjpeg reads or skips by length.
_WITH_LENGTH = _FRAMES | {0xC4, 0xCC, 0xDA, 0xDB, 0xDC, 0xDD, *range(0xE0, 0xF0), 0xFE}


class TruncatedHeader(Exception):
    """The bytes end before the size. Internal to `penstock.images`; users never see it."""


def segments(data: Data, *, beyond: bool = False) -> Iterator[tuple[int, int, int]]:
    """Yield marker, and start and stop of the content, for each segment, including those between scans.

    The last one is the end of the image, or a marker that libjpeg refuses. Both have no content, and with `beyond` the
    parsing continues after them. Parsing also ends where the bytes end.
    """
    at = 2
    while found := _MARKER.search(data, at):
        at = found.end()
        marker = data[at - 1]
        if marker not in _WITH_LENGTH:
            yield marker, at, at
            if not beyond:
                return
            continue
        if at + 2 > len(data):
            return
        # A length includes its own two bytes, which libjpeg consumes even if the length is smaller.
        stop = at + max(2, data[at] << 8 | data[at + 1])
        yield marker, at + 2, stop
        at = stop


def frame_size(data: Data) -> tuple[int, int] | None:
    """Return ``(width, height)`` from the frame header; None if the image ends or a scan begins before it.

    Raises `TruncatedHeader` if more bytes are needed.
    """
    # Not by `segments`, which takes a third longer: this is called for every image, and small ones take 30 us in all.
    at = 2
    while found := _MARKER.search(data, at):
        at = found.end()
        marker = data[at - 1]
        if marker not in _WITH_LENGTH:
            return None
        if at + (7 if marker in _FRAMES else 2) > len(data):
            break
        if marker in _FRAMES:
            return (data[at + 5] << 8 | data[at + 6]), (data[at + 3] << 8 | data[at + 4])
        if marker == _SCAN:
            return None
        at += max(2, data[at] << 8 | data[at + 1])
    raise TruncatedHeader


def is_lossless(data: Data) -> bool:
    """Return whether the frame header is one of lossless JPEG."""
    return next((marker in _LOSSLESS for marker, _, _ in segments(data) if marker in _FRAMES), False)


def exif_blocks(data: Data) -> Iterator[Data]:
    """Yield the content of the EXIF segments before the first scan."""
    for marker, start, stop in segments(data):
        if marker == _SCAN:
            break
        if marker == _APP1 and bytes(data[start : start + 6]) == b"Exif\0\0":
            yield data[start:stop]


def scans(data: Data) -> int:
    """Return an upper bound of the number of scans (metadata may contain their marker); at most `MAX_SCANS` + 1."""
    if not _has_several_scans(data):
        return 1
    whole = bytes(data)
    found = whole.count(b"\xff\xda")
    if found <= MAX_SCANS:
        return found
    found = 0
    for marker, _, _ in segments(whole, beyond=True):
        found += marker == _SCAN
        if marker == _END or found > MAX_SCANS:
            break
    return found


def _has_several_scans(data: Data) -> bool:
    """Return whether libjpeg expects more scans after the first: of a progressive file, or of other components."""
    progressive, components = False, 0
    for marker, start, _ in segments(data):
        if start + 5 >= len(data):
            break
        if marker in _FRAMES:
            progressive, components = marker in _PROGRESSIVE, data[start + 5]
        elif marker == _SCAN:
            return progressive or data[start] < components
    return True


def has_end(data: Data) -> bool:
    """Return whether an end-of-image marker follows the start of the first scan. Coded pixels never contain one."""
    whole = bytes(data)
    scan = next((start for marker, start, _ in segments(whole) if marker == _SCAN), len(whole))
    return whole.rfind(b"\xff\xd9", scan) >= 0  # from the end, since it is usually there
