"""Read files into the page cache: whole files in order, or the many small files of a manifest."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from penstock.manifest import Manifest
from penstock.storage import io_error
from penstock.storage.urls import shown
from penstock.threads import map_blocks

__all__ = ["read_files", "read_samples"]

_BUFFER = 1 << 20
_BLOCK = 64  # files per task
_EXAMPLES = 10


class _Reader(threading.local):
    """Reads files to their end, into one buffer per thread."""

    def __init__(self) -> None:
        self._buffer = bytearray(_BUFFER)

    def pieces(self, path: str | os.PathLike[str]) -> Iterator[int]:
        """Read a file to its end; yield the number of bytes of each read."""
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(self._buffer):
                yield count


def read_files(paths: Sequence[Path], progress: Callable[[int, int], object]) -> int:
    """Read whole files one after the other; return the number of bytes.

    ``progress`` is called with the bytes read so far and the total size of the files.

    Raises:
        ManifestIOError: a file that cannot be read.
    """
    reader, done, total = _Reader(), 0, 0
    path = Path()
    try:
        for path in paths:
            total += path.stat().st_size
        for path in paths:
            for count in reader.pieces(path):
                done += count
                progress(done, total)
    except OSError as error:
        raise io_error(path, error) from error
    return done


def read_samples(
    manifest: Manifest, workers: int | None, progress: Callable[[int, int], object]
) -> tuple[int, int, list[str]]:
    """Read the files of all rows on threads; return bytes read, number of failures, and the first error messages.

    ``progress`` is called with the numbers of finished rows and of all rows. Memory: a buffer of 1 MiB per thread.
    """
    reader = _Reader()

    def read_block(part: range) -> tuple[int, list[str]]:
        size, failed = 0, []
        for record in manifest.records(part):
            try:
                size += sum(reader.pieces(record.path))
            except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                failed.append(f"row {record.row}: {shown(record.path)}: {reason}")
        return size, failed

    total, failures, examples = 0, 0, list[str]()
    for size, failed in map_blocks(read_block, len(manifest), block=_BLOCK, workers=workers, progress=progress):
        total, failures = total + size, failures + len(failed)
        examples += failed[: _EXAMPLES - len(examples)]
    return total, failures, examples
