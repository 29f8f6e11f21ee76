"""`LineIndex`: the row offsets of a JSON-lines file, computed in one pass, cached and mapped.

    lines/KEY.idx    magic, version, rows, frames, bytes of text, copied, checksum, 0      8 x int64, little-endian
                     offset of each row in the text, and the text's end                    (rows + 1) x int64
                     offset of each frame in its file and in the text, and the ends        (frames + 1) x 2 x int64
    lines/KEY.zst    a copy of the text in small frames that begin at rows: for gzip, and zstd in large frames

KEY is a hash of path, size and modification time of the file, or of the version of an object in a store. One process
builds an index while others on the machine wait for its lock. A killed process leaves nothing behind, and the next one
starts over. The pass needs memory for a few MiB, and 16 bytes per frame; for copies also for the longest row.
"""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from penstock.errors import DataFileError, DataFileIOError
from penstock.manifest.scan import BadLine, LineRules, Scanner, json_array, not_text
from penstock.progress import progress_bar
from penstock.storage import UNWRITABLE, io_error
from penstock.storage.derived import derived_path, load_or_write, write_derived
from penstock.tables.frames import find_frames, is_gzip, is_zstd, stream

__all__ = ["LineIndex", "find_index", "open_index"]

FRAME = 128 << 10
"""Bytes of text in a frame of a copy: reading a row decodes this much, in 0.1 to 0.2 ms."""
LARGEST = 2 << 20
"""Frames of up to this many bytes of text are used without a copy."""

_MAGIC, _VERSION, _HEADER = 0x4C4A4B545350, 1, 64

Ints = npt.NDArray[np.int64]


class LineIndex:
    """The index of one file.

    Args:
        data: the bytes of the index.
        copy: the file with the copied text; None if the text is read from the source.

    Attributes:
        rows: the offset of each row in the text, and the end of the text, int64 (rows + 1,).
        frames: the offset of each frame in its file and in the text, and both ends, int64 (frames + 1, 2); empty if
            the file is plain text.
    """

    def __init__(self, data: npt.NDArray[np.uint8], copy: Path | None) -> None:
        rows = int(data[:_HEADER].view(np.int64)[2])
        numbers = data[_HEADER:].view(np.int64)
        self.rows: Ints = numbers[: rows + 1]
        self.frames: Ints = numbers[rows + 1 :].reshape(-1, 2)
        self.copy = copy
        self._copied: npt.NDArray[np.uint8] | None = None

    def copied(self) -> npt.NDArray[np.uint8]:
        """Return the mapped bytes of the copy. They stay readable even if the file is removed."""
        if self._copied is None:
            assert self.copy is not None
            self._copied = np.memmap(self.copy, np.uint8, "r")
        return self._copied

    def __len__(self) -> int:
        return len(self.rows) - 1


def find_index(identity: bytes) -> LineIndex | None:
    """Return the cached index of a file, or None."""
    return _load(_place(identity))


def open_index(
    name: str, identity: bytes, take: Callable[[], npt.NDArray[np.uint8]], progress: bool | None = None
) -> LineIndex:
    """Return the index of a file; build it if it is missing.

    Args:
        name: the file, for messages.
        identity: unique for each version of each file.
        take: returns the mapped bytes of the file.
        progress: show a bar: True, False, or None for large files on a terminal.

    Raises:
        DataFileError: the file is damaged, truncated, or not text.
        DataFileIOError: the cache cannot be written.
    """
    path = _place(identity)
    try:
        return load_or_write([path], _load, lambda out: _make(name, take(), out, path.with_suffix(".zst"), progress))
    except OSError as error:
        # ENOENT: the folder was removed.
        if error.errno not in (*UNWRITABLE, errno.ENOENT):
            raise
        said = str(io_error(path, error, "the index of rows cannot be written:"))
        raise DataFileIOError(f"{said}; or set XDG_CACHE_HOME to another folder") from error


def _place(identity: bytes) -> Path:
    return derived_path("lines", f"{xxhash.xxh3_128_hexdigest(b'%d %s' % (_VERSION, identity))}.idx")


def _load(path: Path) -> LineIndex | None:
    """Return the index, or None if there is no valid one."""
    try:
        data: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError):
        return None
    if len(data) < _HEADER:
        return None
    fields = data[:_HEADER].view(np.int64)
    magic, version, rows, frames, _, copied, checksum, _ = fields.tolist()
    if (magic, version, checksum) != (_MAGIC, _VERSION, _checksum(fields)):
        return None
    if len(data) != _HEADER + 8 * (rows + 1) + 16 * (frames + 1 if frames else 0):
        return None
    copy = path.with_suffix(".zst")
    if not copied:
        return LineIndex(data, None)
    try:
        whole = copy.stat().st_size == int(data[-16:-8].view(np.int64)[0])
    except OSError:
        return None
    return LineIndex(data, copy) if whole else None


def _checksum(fields: Ints) -> int:
    return xxhash.xxh3_64_intdigest(fields[:6].tobytes()) >> 1


def _make(name: str, data: npt.NDArray[np.uint8], out: BinaryIO, copy: Path, progress: bool | None) -> None:
    """Write the index of a file, and a copy of its text if needed."""
    with progress_bar(f"indexing {os.path.basename(name)}", len(data), progress) as advance:
        frames = array("q")
        if not is_gzip(data) and not is_zstd(data):
            if wrong := not_text(data[: 64 << 10].tobytes()):
                raise DataFileError(f"{name} {wrong}; JSON lines have one JSON object a line")
            _write(name, out, stream(name, data, advance), frames, copied=False)
            return
        if is_zstd(data):
            try:
                _write(name, out, _in_frames(name, data, frames, advance), frames, copied=False)
                return
            except _TooLarge:
                frames = array("q")
                out.seek(0)
                out.truncate()
        # The index appears last, so that its copy exists.
        with write_derived(copy) as copied:
            _write(name, out, _copied(stream(name, data, advance), copied, frames), frames, copied=True)


class _TooLarge(Exception):
    """A frame with too much text to decode for a single row."""


def _in_frames(
    path: str, data: npt.NDArray[np.uint8], frames: array[int], progress: Callable[[int], object]
) -> Iterator[bytes]:
    """Yield the text of a file frame by frame, and record the frame offsets."""
    total = 0
    for begin, end in find_frames(path, data):
        frames.extend((begin, total))
        size = 0
        for piece in stream(path, data[begin:end], progress):
            size += len(piece)
            if size > LARGEST:
                raise _TooLarge
            yield piece
        total += size
    frames.extend((len(data), total))


def _copied(pieces: Iterator[bytes], copy: BinaryIO, frames: array[int]) -> Iterator[bytes]:
    """Yield the text, and write it to a copy in frames that end at rows."""
    coder = zstandard.ZstdCompressor(level=3, write_checksum=True)
    held, total, position = bytearray(), 0, 0

    def write(size: int) -> None:
        nonlocal total, position
        frames.extend((position, total))
        position += copy.write(coder.compress(bytes(held[:size])))
        total += size
        del held[:size]

    for piece in pieces:
        held += piece
        while len(held) >= FRAME:
            # A row longer than a frame gets its own frame.
            end = held.rfind(b"\n", 0, FRAME) + 1 or held.find(b"\n", FRAME) + 1
            if not end:
                break
            write(end)
        yield piece
    if held:
        write(len(held))
    frames.extend((position, total))


def _write(name: str, out: BinaryIO, pieces: Iterator[bytes], frames: array[int], *, copied: bool) -> None:
    """Write an index. ``frames`` is filled while the chunks are consumed."""
    out.write(bytes(_HEADER))
    scanner = Scanner(LineRules(), out)
    try:
        for piece in pieces:
            if not scanner.position and (wrong := json_array(piece)):
                raise DataFileError(f"{name}: {wrong}")
            scanner.feed(piece)
        scanner.end()
    except BadLine as error:
        raise DataFileError(
            f"{name}: the line at byte {error.offset:,} of the text {error.reason}: JSON lines have one object a line"
        ) from None
    rows, total = scanner.rows, scanner.position
    out.write(frames.tobytes())
    fields = np.array([_MAGIC, _VERSION, rows, max(0, len(frames) // 2 - 1), total, int(copied), 0, 0], np.int64)
    if len(frames) == 2:
        # No frames: the text is empty.
        out.seek(-16, os.SEEK_CUR)
        out.truncate()
    fields[6] = _checksum(fields)
    out.seek(0)
    out.write(fields.tobytes())
    out.seek(0, os.SEEK_END)
