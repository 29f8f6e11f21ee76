"""Shards as streams of tar data, uncompressed or compressed by gzip, bzip2, xz or zstandard.

with open_stream("train-0001.tar.gz") as file:
    for member, data in walk_stream(file, "train-0001.tar.gz"): ...

The first bytes determine the compression, not the name. Compressed shards can only be read from start to end.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
from collections.abc import Callable
from typing import IO, Any, BinaryIO, cast

import zstandard

from penstock.storage.files import SHARD, CheckedFile

__all__ = ["compression_of", "open_stream"]

_MAGIC = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zst"}
_OPENERS: dict[str, Callable[[Any], Any]] = {
    "gz": lambda file: gzip.GzipFile(fileobj=file),
    "bz2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
    "zst": lambda file: zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True),
}
_LONGEST = max(map(len, _MAGIC))
_BUFFER = 1 << 20


def compression_of(head: bytes) -> str | None:
    """Return ``"gz"``, ``"bz2"``, ``"xz"`` or ``"zst"`` by the first six bytes; None for other data."""
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def open_stream(source: str | os.PathLike[str] | BinaryIO) -> BinaryIO:
    """Open the tar data of a shard for reading from start to end; close it after use (``with`` works).

    Args:
        source: a path, or an open file, which is closed with the stream.

    Raises:
        ShardIOError: the file cannot be opened. `walk_stream` reports bad data, with the shard's name.
        ShardChangedError: (while reading) the file was modified.
    """
    buffered: Any = source
    if isinstance(source, str | os.PathLike):
        with SHARD.naming(source):
            buffered = io.BufferedReader(CheckedFile(source), _BUFFER)
    elif not hasattr(source, "peek"):
        buffered = io.BufferedReader(_Raw(source.read, source), _BUFFER)
    kind = compression_of(buffered.peek(_LONGEST)[:_LONGEST])
    if kind is None:
        return cast(BinaryIO, buffered)
    opened = _OPENERS[kind](buffered)
    # read() would drop what it has decompressed before the end of truncated data.
    return cast(BinaryIO, io.BufferedReader(_Raw(opened.read1, opened, buffered), _BUFFER))


class _Raw(io.RawIOBase):
    """A function that reads up to a number of bytes, as a raw file for buffering; closing it closes the files."""

    def __init__(self, read: Callable[[int], bytes], *files: IO[bytes]) -> None:
        self._read, self._files = read, files

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        data = self._read(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            for file in self._files:
                file.close()
