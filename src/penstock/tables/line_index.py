"""`TextIndex`: the row offsets of a JSON-lines file, computed in one pass, cached and mapped.

    lines/KEY.idx    the offsets of rows, and of frames if the text is compressed, see `penstock.manifest.sidecar`
    lines/KEY.txt    the text of a compressed local file, while the cache has room for it: rows are read in place
    lines/KEY.zst    else a copy of it in small frames that begin at rows: for gzip, and zstd in large frames

KEY is a hash of path, size and modification time of the file, or of the version of an object in a store. One process
builds an index while others on the machine wait for its lock. A killed process leaves nothing behind, and the next one
starts over. The pass needs memory for a few MiB and the longest row, and 16 bytes per frame.
"""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from penstock.errors import DataFileError, PenstockError
from penstock.manifest.scan import BadLine, LineRules, Scanner, json_array, not_text
from penstock.manifest.sidecar import BODY, FRAMES, Sidecar, SidecarHeader
from penstock.progress import progress_bar
from penstock.shards.shard_file import INDEXING
from penstock.storage import UNWRITABLE, Cache, File
from penstock.storage.derived import derived_files, derived_path, limit_given, load_or_write, write_derived
from penstock.storage.files import DATA
from penstock.storage.remote import RemoteSource
from penstock.storage.urls import shown
from penstock.tables.frames import Bytes, find_frames, is_gzip, is_zstd, stream

__all__ = ["TextIndex", "find_index_of", "make_index_of", "open_index"]

FRAME = 128 << 10
"""Bytes of text in a frame of a copy: reading a row decodes this much, in 0.1 to 0.2 ms."""
LARGEST = 2 << 20
"""Frames of up to this many bytes of text are used without a copy."""

_VERSION = 2
_COPIED = 1 << 18  # flag: the frames are those of a copy
_TEXT = 1 << 19  # flag: there is a copy of the text
_RULES = LineRules()

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TextIndex:
    """The index of one file.

    Attributes:
        rows: the offset of each row in the text, and the end of the text, int64 (rows + 1,).
        frames: the offset of each frame in its file and in the text, and both ends, int64 (frames + 1, 2); empty if
            the file or its copy is plain text.
        copy, copied: path and mapped bytes of the file with the copied text; None if the text is read from the source.
            The bytes stay readable even if the file is removed.
    """

    rows: Ints
    frames: Ints
    copy: Path | None = None
    copied: Bytes | None = None
    file: None = None  # for `FilePool`: it is no data file

    def __len__(self) -> int:
        return len(self.rows) - 1


def find_index_of(source: RemoteSource) -> TextIndex | None:
    """Return the cached index of a version of an object in a store, or None."""
    return _load(_place(Cache.key(source).encode()))


def make_index_of(source: RemoteSource, copy: File) -> TextIndex:
    """Return the index of a version of an object, built from a copy. Raises as `open_index`."""
    with INDEXING:
        array = np.frombuffer(copy.of(DATA).map or b"", np.uint8)
        return open_index(shown(source.url), Cache.key(source).encode(), lambda: array, progress=False)


def open_index(
    name: str, identity: bytes, take: Callable[[], Bytes], progress: bool | None = None, *, as_text: bool = False
) -> TextIndex:
    """Return the index of a file; build it if it is missing.

    Args:
        name: the file, for messages.
        identity: unique for each version of each file.
        take: returns the mapped bytes of the file.
        progress: show a bar: True, False, or None for large files on a terminal.
        as_text: whether to copy the text of a compressed file, if the cache has room for it.

    Raises:
        DataFileError: the file is damaged, truncated, or not text.
        DataFileIOError: the cache cannot be written or read.
    """
    path = _place(identity)
    try:
        return load_or_write([path], _load, lambda out: _make(name, take(), out, path, progress, as_text))
    except OSError as error:
        if isinstance(error, PenstockError):
            raise
        # ENOENT: the folder was removed.
        remedy = "; or set XDG_CACHE_HOME to another folder" if error.errno in (*UNWRITABLE, errno.ENOENT) else ""
        raise DATA.error(path, error, "the index of rows cannot be written:", remedy) from error


def _place(identity: bytes) -> Path:
    return derived_path("lines", f"{xxhash.xxh3_128_hexdigest(b'%d %s' % (_VERSION, identity))}.idx")


def _load(path: Path) -> TextIndex | None:
    """Return the index, or None if there is no valid one."""
    sidecar = Sidecar.load(path, _RULES.digest(), DATA)
    if sidecar is None:
        return None
    rows = np.frombuffer(sidecar.offsets, np.int64)
    frames = np.frombuffer(sidecar.map, np.int64, offset=sidecar.header.length).reshape(-1, 2)
    if not sidecar.header.flags & (_COPIED | _TEXT):
        return TextIndex(rows, frames)
    is_text = bool(sidecar.header.flags & _TEXT)
    copy = path.with_suffix(".txt" if is_text else ".zst")
    try:
        copied: Bytes = np.memmap(copy, np.uint8, "r")
    except (FileNotFoundError, ValueError):  # ValueError: it is empty
        return None
    except OSError as error:
        raise DATA.error(copy, error) from error
    size = sidecar.header.size if is_text else frames[-1, 0]
    return TextIndex(rows, frames, copy, copied) if len(copied) == size else None


def _room_for_text() -> int:
    """Return the bytes of text that may be copied: until derived files take half of their limit."""
    held = sum(file.size for file in derived_files())
    return limit_given(held) // 2 - held


def _make(name: str, data: Bytes, out: BinaryIO, path: Path, progress: bool | None, as_text: bool) -> None:
    """Write the index of a file to ``out``, for ``path``, and a copy of its text if needed."""
    with progress_bar(f"indexing {os.path.basename(name)}", len(data), progress) as advance:
        if not is_gzip(data) and not is_zstd(data):
            if wrong := not_text(data[: 64 << 10].tobytes()):
                raise DataFileError(f"{name} {wrong}; JSON lines have one JSON object a line")
            _write(name, out, stream(name, data, advance), array("q"))
            return
        if as_text and len(data) < (room := _room_for_text()):
            try:
                with write_derived(path.with_suffix(".txt")) as text:
                    _write(name, out, _as_text(stream(name, data, advance), text, room), array("q"), _TEXT)
                return
            except OSError as error:
                # The disk has no space for the text. A copy in frames is smaller.
                if error.errno not in UNWRITABLE or isinstance(error, PenstockError):
                    raise
            except _TooLarge:
                pass
        if is_zstd(data):
            frames = array("q")
            with suppress(_TooLarge):
                _write(name, out, _in_frames(name, data, frames, advance), frames)
                return
        frames = array("q")
        # The index appears last, so that its copy exists.
        with write_derived(path.with_suffix(".zst")) as copied:
            _write(name, out, _copied(stream(name, data, advance), copied, frames), frames, _COPIED)


class _TooLarge(Exception):
    """A frame with too much text to decode for a single row, or a file with too much for the cache."""


def _as_text(pieces: Iterator[bytes], copy: BinaryIO, room: int) -> Iterator[bytes]:
    """Yield the text, and write it to a copy."""
    for piece in pieces:
        room -= copy.write(piece)
        if room < 0:
            raise _TooLarge
        yield piece


def _in_frames(path: str, data: Bytes, frames: array[int], progress: Callable[[int], object]) -> Iterator[bytes]:
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


def _write(name: str, out: BinaryIO, pieces: Iterator[bytes], frames: array[int], copied: int = 0) -> None:
    """Write an index anew. ``frames`` is filled while the pieces are consumed; ``copied`` is the flag of a copy."""
    out.seek(0)
    out.truncate()
    out.write(bytes(BODY))
    scanner = Scanner(_RULES, out)
    try:
        for number, piece in enumerate(pieces):
            if number == 0 and (wrong := json_array(piece)):
                raise DataFileError(f"{name}: {wrong}")
            scanner.feed(piece)
        scanner.end()
    except BadLine as error:
        raise DataFileError(
            f"{name}: the line at byte {error.offset:,} of the text {error.reason}: JSON lines have one object a line"
        ) from None
    has_frames = len(frames) > 2
    # An empty text has no frames, and no copy.
    flags = (FRAMES if has_frames else 0) | (copied if has_frames or (copied == _TEXT and scanner.position) else 0)
    out.write(frames.tobytes() if has_frames else b"")
    # The name tells the version of the file.
    header = SidecarHeader(flags, scanner.rows, scanner.position, 0, _RULES.digest(), bytes(16))
    out.seek(0)
    out.write(header.pack())
