"""Frames of compressed text: parts of a zstd file that can be decoded independently.

    frame     magic, header, blocks of 3 bytes and their content, checksum (RFC 8878)
    skippable magic 0x184D2A5?, size, any bytes: written between frames by `pzstd` and the seekable format

The headers tell where frames begin and end, so finding them needs no decoding.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from penstock.errors import DataFileError

__all__ = ["Bytes", "decode_frame", "find_frames", "is_gzip", "is_zstd", "stream"]

_ZSTD = b"(\xb5/\xfd"
_CHUNK = 1 << 20  # bytes decoded at a time
_SKIPPABLE = 0x184D2A50

Bytes = npt.NDArray[np.uint8]


def is_gzip(data: Bytes) -> bool:
    """Return whether the bytes of a file are compressed by gzip."""
    return data[:2].tobytes() == b"\x1f\x8b"


def is_zstd(data: Bytes) -> bool:
    """Return whether the bytes of a file are zstd frames, perhaps after skippable ones."""
    head = data[:4].tobytes()
    return head == _ZSTD or (len(head) == 4 and int.from_bytes(head, "little") & ~0xF == _SKIPPABLE)


def find_frames(path: str, data: Bytes) -> list[tuple[int, int]]:
    """Return the begin and end of each frame of a zstd file. Takes a few microseconds per 128 KiB.

    Raises:
        DataFileError: it is not a zstd file, or truncated.
    """
    view: Any = memoryview(data)  # type: ignore[arg-type]
    frames, position = [], 0
    while position < len(view):
        begin = position
        magic = int.from_bytes(view[position : position + 4], "little")
        if magic & ~0xF == _SKIPPABLE:
            position += 8 + int.from_bytes(view[position + 4 : position + 8], "little")
        elif bytes(view[position : position + 4]) == _ZSTD:
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
        # A block of type 1 is one repeated byte.
        position += 3 + (1 if kind == 1 else size)
        if last:
            return position + (4 if parameters.has_checksum else 0)
    raise _truncated(path)


def decode_frame(path: str, frame: Bytes | bytes, begin: int, size: int) -> bytes:
    """Return the content of one frame, ``size`` bytes.

    Args:
        path, begin: the file, and the position of the frame in it, for messages.
        frame: the bytes of the frame.
        size: bytes of its content.

    Raises:
        DataFileError: the frame is damaged.
    """
    try:
        # Decoders are not thread-safe, and a new one costs only microseconds.
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
    """Yield the text of a file in chunks, decoded if it is compressed by zstd or gzip.

    Args:
        path: for messages.
        data: the mapped bytes of the file.
        progress: called with the number of file bytes that were read.

    Raises:
        DataFileError: the file is damaged or truncated.
    """
    if is_zstd(data):
        for begin, end in find_frames(path, data):
            yield from _zstd(path, data[begin:end], progress)
    elif is_gzip(data):
        yield from _gzip(path, data, progress)
    else:
        for begin in range(0, len(data), _CHUNK):
            piece = data[begin : begin + _CHUNK].tobytes()
            progress(len(piece))
            yield piece


def _zstd(path: str, frame: Bytes, progress: Callable[[int], object]) -> Iterator[bytes]:
    try:
        # `zstd --long=31` needs a window of 2 GiB; other frames allocate the window they declare.
        with zstandard.ZstdDecompressor(max_window_size=1 << 31).stream_reader(memoryview(frame)) as reader:  # type: ignore[arg-type]
            while piece := reader.read(_CHUNK):
                yield piece
    except zstandard.ZstdError as error:
        raise DataFileError(f"{path} is damaged: {error}") from None
    progress(len(frame))


def _gzip(path: str, data: Bytes, progress: Callable[[int], object]) -> Iterator[bytes]:
    decoder = zlib.decompressobj(wbits=31)
    try:
        for begin in range(0, len(data), _CHUNK // 4):
            piece = data[begin : begin + _CHUNK // 4].tobytes()
            progress(len(piece))
            while piece:
                # There may be several members, as from `cat a.gz b.gz`.
                if decoder.eof:
                    if not piece.strip(b"\0"):
                        break
                    decoder = zlib.decompressobj(wbits=31)
                yield decoder.decompress(piece, _CHUNK)  # not more: 1 KB may hold 1 MB of text
                piece = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
    except zlib.error as error:
        raise DataFileError(f"{path} is damaged: {error}") from None
    if not decoder.eof:
        raise _truncated(path)


def _truncated(path: str) -> DataFileError:
    return DataFileError(f"{path} ends within its compressed data: it is truncated, or still being written")
