"""The markers of a JPEG file, found by the rules that libjpeg finds them by.

libjpeg decides how large an image is, so a walk that differs from its own is a way past `max_pixels`. Its rules
(jdmarker.c): the next marker is the next byte 0xFF that is followed by neither 0x00 nor 0xFF, whatever lies before it;
restart markers and TEM have no content; a marker that it does not know ends the walk.

Pure functions over bytes. Decoders check the size with libjpeg itself (`backends`); `frame_size` is for what libjpeg
cannot read, the first kilobytes of a file, and the tests compare the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

__all__ = ["MAX_SCANS", "TruncatedHeader", "frame_size", "has_end", "scans", "segments"]

Data: TypeAlias = bytes | bytearray | memoryview

MAX_SCANS = 200
"""More are refused, here and in `_jpeg.c`: a small file can ask for thousands of passes over a large image."""

# A marker: no stuffed zero, no fill byte, and none of TEM and the restart markers, which have no content.
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")
_SCAN, _END = 0xDA, 0xD9
# Frame headers, which carry the size: C0 to CF without DHT (C4), JPG (C8) and DAC (CC).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
# DHT, DAC, SOS, DQT, DNL, DRI, APP0 to APP15, COM: with the frames, what libjpeg reads or skips by its length.
_WITH_LENGTH = _FRAMES | {0xC4, 0xCC, 0xDA, 0xDB, 0xDC, 0xDD, *range(0xE0, 0xF0), 0xFE}


class TruncatedHeader(Exception):
    """The bytes end before the size. A signal to callers within `penstock.images`, never shown to a user."""


def segments(data: Data, *, beyond: bool = False) -> Iterator[tuple[int, int, int]]:
    """Yield marker, start and stop of the content of each segment, those between scans too.

    The last one is the end of the image, or a marker that libjpeg refuses; both are given as empty, and `beyond` goes
    on behind them. Bytes that end too early end the walk.
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
        # A length counts its own two bytes, which libjpeg has read when it sees a smaller one.
        stop = at + max(2, data[at] << 8 | data[at + 1])
        yield marker, at + 2, stop
        at = stop


def frame_size(data: Data) -> tuple[int, int] | None:
    """Return ``(width, height)`` from the frame header; None where the image ends or a scan begins before it.

    Raises `TruncatedHeader` when more bytes are needed.
    """
    for marker, start, _ in segments(data):
        if marker in _FRAMES:
            if start + 5 > len(data):
                break
            return (data[start + 3] << 8 | data[start + 4]), (data[start + 1] << 8 | data[start + 2])
        if marker == _SCAN or marker not in _WITH_LENGTH:
            return None
    raise TruncatedHeader


def scans(data: Data) -> int:
    """Return how many scans an image has, or more, as metadata may hold their marker; at most `MAX_SCANS` + 1."""
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
    """Whether libjpeg expects more scans behind the first one: of a progressive file, or of other components."""
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
    """Return whether an end-of-image marker follows the beginning of the first scan.

    Coded pixels never hold one, so the first one behind there is the image's.
    """
    whole = bytes(data)
    scan = next((start for marker, start, _ in segments(whole) if marker == _SCAN), len(whole))
    return whole.find(b"\xff\xd9", scan) >= 0
