"""Compressed text as frames: pieces of a zstd file that can be decoded without those before them.

    frame     magic, header, blocks of 3 bytes and their content, checksum (RFC 8878)
    skippable magic 0x184D2A5?, size, anything: what `pzstd` and the seekable format put between frames

Headers alone tell where frames begin and end, so that nothing is decoded to find them.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from penstock.errors import DataFileError

__all__ = ["GZIP", "ZSTD", "decode_frame", "find_frames", "stream"]

ZSTD, GZIP = b"(\xb5/\xfd", b"\x1f\x8b"
_CHUNK = 1 << 20  # bytes that are decoded at a time
_SKIPPABLE = 0x184D2A50

Bytes = npt.NDArray[np.uint8]


def find_frames(path: str, data: Bytes) -> list[tuple[int, int]]:
    """Return where the frames of a zstd file begin and end. Costs a few microseconds for each 128 KiB.

    Raises:
        DataFileError: it is no zstd file, or truncated.
    """
    view: Any = memoryview(data)  # type: ignore[arg-type]
    frames, position = [], 0
    while position < len(view):
        begin = position
        magic = int.from_bytes(view[position : position + 4], "little")
        if magic & ~0xF == _SKIPPABLE:
            position += 8 + int.from_bytes(view[position + 4 : position + 8], "little")
        elif bytes(view[position : position + 4]) == ZSTD:
            position = _end_of_frame(path, view, position)
            frames.append((begin, position))
        else:
            raise DataFileError(f"{path} is damaged: no zstd frame begins at byte {position:,}")
        if position > len(view):
            raise _truncated(path)
    return frames


def _end_of_frame(path: str, view: Any, begin: int) -> int:
    try:
        parameters = zstandard.get_frame_parameters(view[begin : begin + 18])
        position = begin + zstandard.frame_header_size(view[begin : begin + 18])
    except zstandard.ZstdError as error:
        raise DataFileError(f"{path} is damaged, or truncated: the zstd frame at byte {begin:,}: {error}") from None
    while position + 3 <= len(view):
        block = int.from_bytes(view[position : position + 3], "little")
        last, kind, size = block & 1, block >> 1 & 3, block >> 3
        # A block of kind 1 is one byte, repeated.
        position += 3 + (1 if kind == 1 else size)
        if last:
            return position + (4 if parameters.has_checksum else 0)
    raise _truncated(path)


def decode_frame(path: str, frame: Bytes | bytes, begin: int, size: int) -> bytes:
    """Return the content of one frame, ``size`` bytes.

    Args:
        path: of its file, and where it ``begin``s there, for messages.
        frame: its bytes.
        size: of its content.

    Raises:
        DataFileError: the frame is damaged.
    """
    try:
        # Decoders may not be shared by threads, and a new one costs microseconds.
        found = zstandard.ZstdDecompressor().decompress(
            memoryview(frame),  # type: ignore[arg-type]
            max_output_size=max(size, 1),
            read_across_frames=False,
        )
    except zstandard.ZstdError as error:
        raise DataFileError(f"{path} is damaged: the zstd frame at byte {begin:,}: {error}") from None
    if len(found) != size:
        raise DataFileError(f"{path} is damaged: the zstd frame at byte {begin:,} has not {size:,} bytes")
    return found


def stream(path: str, data: Bytes, progress: Callable[[int], object]) -> Iterator[bytes]:
    """Yield the text of a file piece by piece, decoded if it is compressed by zstd or gzip.

    Args:
        path: for messages.
        data: the bytes of the file, mapped.
        progress: called with the number of bytes of the file that were read.

    Raises:
        DataFileError: the file is damaged or truncated.
    """
    head = data[:4].tobytes()
    if head == ZSTD or (len(head) == 4 and int.from_bytes(head, "little") & ~0xF == _SKIPPABLE):
        for begin, end in find_frames(path, data):
            yield from _zstd(path, data[begin:end], progress)
    elif head[:2] == GZIP:
        yield from _gzip(path, data, progress)
    else:
        for begin in range(0, len(data), _CHUNK):
            piece = data[begin : begin + _CHUNK].tobytes()
            progress(len(piece))
            yield piece


def _zstd(path: str, frame: Bytes, progress: Callable[[int], object]) -> Iterator[bytes]:
    source: Any = io.BytesIO(frame.tobytes()) if len(frame) <= _CHUNK else _Reader(frame)
    try:
        # Long-distance matches of `zstd --long=31` need a window of 2 GiB; those of others take what they say.
        with zstandard.ZstdDecompressor(max_window_size=1 << 31).stream_reader(source) as reader:
            while piece := reader.read(_CHUNK):
                yield piece
    except zstandard.ZstdError as error:
        raise DataFileError(f"{path} is damaged: {error}") from None
    progress(len(frame))


class _Reader(io.RawIOBase):
    """Mapped bytes as a file, without a copy of all of them."""

    def __init__(self, data: Bytes) -> None:
        self._data, self._position = data, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        end = len(self._data) if size < 0 else self._position + size
        piece = self._data[self._position : end].tobytes()
        self._position += len(piece)
        return piece


def _gzip(path: str, data: Bytes, progress: Callable[[int], object]) -> Iterator[bytes]:
    decoder = zlib.decompressobj(wbits=31)
    try:
        for begin in range(0, len(data), _CHUNK // 4):
            piece = data[begin : begin + _CHUNK // 4].tobytes()
            progress(len(piece))
            while piece:
                # Several members may follow each other, as `cat a.gz b.gz` makes them.
                if decoder.eof:
                    if not piece.strip(b"\0"):
                        break
                    decoder = zlib.decompressobj(wbits=31)
                yield decoder.decompress(piece)
                piece = decoder.unused_data
    except zlib.error as error:
        raise DataFileError(f"{path} is damaged: {error}") from None
    if not decoder.eof:
        raise _truncated(path)


def _truncated(path: str) -> DataFileError:
    return DataFileError(f"{path} ends within its compressed data: it is truncated, or still being written")
