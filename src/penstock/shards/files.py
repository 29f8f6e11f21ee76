"""A shard as an open file that notices when somebody changes it, and as a map to be read from front to back."""

from __future__ import annotations

import mmap
import os
import stat
import sys
import time
from collections.abc import Callable

from penstock.errors import ShardChangedError, ShardIOError
from penstock.shards.urls import local_path
from penstock.storage import Storage, io_error, is_remote
from penstock.storage import local_path as copy_of

__all__ = ["ShardFile", "file_of"]

_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

_CLOCK_STEP = 20_000_000  # ns, as in `penstock.storage.SourceFile`


class ShardFile:
    """An open shard.

    Args:
        path: the file.

    Raises:
        ShardIOError: missing, a folder, no permission, no regular file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1
        try:
            self._fd = os.open(path, _FLAGS)
            status = os.fstat(self._fd)
        except OSError as error:
            raise ShardIOError(str(io_error(path, error))) from error
        if not stat.S_ISREG(status.st_mode):
            what = "not a regular file (a pipe or a device)"
            if stat.S_ISDIR(status.st_mode):
                what = f"a folder; name a shard in it, or a pattern such as '{os.path.join(path, '*.tar')}'"
            raise ShardIOError(f"cannot read {path}: {what}")
        self.size = status.st_size
        self.mtime_ns = status.st_mtime_ns

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:  # modules may be empty by then
        if self._fd >= 0:
            _close(self._fd)

    def close(self) -> None:
        """Close the file; a map of it stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, count: int, position: int) -> bytes:
        """Exactly so many bytes from a position; ShardChangedError if they are not there any more."""
        data = os.pread(self._fd, count, position)
        while len(data) < count:  # a large read may come in pieces
            more = os.pread(self._fd, count - len(data), position + len(data))
            if not more:
                raise self._changed(os.fstat(self._fd).st_size)
            data += more
        return data

    def map(self) -> mmap.mmap | bytes:
        """The whole file, mapped; it is read in order, which the system is told."""
        if not self.size:
            return b""
        mapped = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        if sys.platform == "linux":
            mapped.madvise(mmap.MADV_SEQUENTIAL)
        return mapped

    def check(self) -> None:
        """Raise `ShardChangedError` if the file has another size or modification time. Costs one fstat."""
        status = os.fstat(self._fd)
        if status.st_size != self.size or status.st_mtime_ns != self.mtime_ns:
            raise self._changed(status.st_size)

    def settle(self) -> None:
        """Wait until a later write would show in the modification time, which moves in steps of some milliseconds."""
        age = time.time_ns() - self.mtime_ns
        if 0 <= age < _CLOCK_STEP:
            time.sleep((_CLOCK_STEP - age) / 1e9)

    def _changed(self, size: int) -> ShardChangedError:
        what = f"it had {self.size} bytes and has {size}" if size != self.size else "its modification time differs"
        return ShardChangedError(
            f"{self.path} was changed while it was open: {what}. Open the shards again; to update one in use, write a "
            "new one and rename it over the old"
        )


def file_of(url: str, storage: Storage | None = None, *, progress: bool | None = False) -> str:
    """The path of a shard's file; of a remote one that of a complete copy in the cache.

    Raises:
        ShardIOError: it is neither a file nor in a store (``pipe:``).
        StorageError: the store says no, see `penstock.storage.local_path`.
    """
    path = local_path(url)
    if path is not None:
        return os.path.abspath(path)
    if not is_remote(url):
        raise ShardIOError(f"{url} is neither a file nor in a store")
    return copy_of(url, storage=storage, progress=progress)
