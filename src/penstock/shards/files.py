"""An open shard file that detects changes.

`ShardFile` has random access, `CheckedFile` is a file object that is read from start to end. After a read, the open
file's size and modification time are compared with those at opening, and no data of a changed file is returned. A file
that was removed, or replaced by a rename, stays readable and unchanged.
"""

from __future__ import annotations

import io
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from penstock.errors import ShardChangedError, ShardIOError
from penstock.storage import Storage, io_error, is_remote
from penstock.storage import local_path as copy_of
from penstock.storage.names import path_of

__all__ = ["PIECE", "CheckedFile", "ShardFile", "file_of"]

PIECE = 512 << 10
"""Bytes that `ShardFile.pieces` reads at a time: they fit the CPU cache."""

_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

_CLOCK_STEP = 20_000_000  # ns, as in `penstock.storage.SourceFile`


class ShardFile:
    """An open shard.

    Args:
        path: the file.
        descriptor: an open descriptor of the file, which this object takes over.

    Raises:
        ShardIOError: missing, a folder, no permission, not a regular file.
    """

    def __init__(self, path: str, descriptor: int | None = None) -> None:
        self.path = path
        self._fd = -1
        try:
            self._fd = os.open(path, _FLAGS) if descriptor is None else descriptor
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

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:  # at exit, module globals may be gone
        if self._fd >= 0:
            _close(self._fd)

    @property
    def is_removed(self) -> bool:
        """Return whether the file was unlinked: its bytes exist only while it is open."""
        return os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, count: int, position: int) -> bytes:
        """Return exactly ``count`` bytes from a position. Use `check` to see whether the file has changed.

        Raises:
            ShardChangedError: the file is too short now.
            ShardIOError: the file cannot be read.
        """
        try:
            data = os.pread(self._fd, count, position)
        except OSError as error:
            raise self._unreadable(error, position) from error
        if len(data) == count:
            return data
        whole = bytearray(data).ljust(count, b"\0")  # a large read may return less
        self.read_into(memoryview(whole)[len(data) :], position + len(data))
        return bytes(whole)

    def read_into(self, buffer: memoryview, position: int) -> None:
        """Fill a buffer with the bytes from a position on. Raises as `read` does."""
        while len(buffer):
            try:
                count = os.preadv(self._fd, [buffer], position)
            except OSError as error:
                raise self._unreadable(error, position) from error
            if not count:
                self._refuse(os.fstat(self._fd), position)
            buffer, position = buffer[count:], position + count

    def pieces(self, begin: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes ``[begin, end)`` in chunks of `PIECE`, each valid until the next one.

        Raises as `read` does.
        """
        buffer = memoryview(bytearray(min(PIECE, max(0, end - begin))))
        for at in range(begin, end, PIECE):
            piece = buffer[: end - at]
            self.read_into(piece, at)
            yield piece

    def check(self) -> None:
        """Raise `ShardChangedError` if size or modification time changed. Costs one fstat."""
        status = os.fstat(self._fd)
        if status.st_size != self.size or status.st_mtime_ns != self.mtime_ns:
            self._refuse(status)

    def settle(self) -> None:
        """Wait until a later write would change the modification time, whose resolution is some milliseconds."""
        _settle(self.mtime_ns)

    def is_cached(self, position: int) -> bool:
        """Return whether a byte is in the page cache, as far as the system shows."""
        try:
            return os.preadv(self._fd, [bytearray(1)], position, os.RWF_NOWAIT) == 1
        except (AttributeError, OSError):  # not supported by the system or the file system
            return False

    def fetch_ahead(self, begin: int, end: int) -> None:
        """Tell the system that these bytes will be read soon, without waiting."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def _refuse(self, status: os.stat_result, at: int | None = None) -> NoReturn:
        raise _changed(self.path, self.size, status.st_size, at)

    def _unreadable(self, error: OSError, position: int) -> ShardIOError:
        result = ShardIOError(f"{io_error(self.path, error)} (at byte {position})")
        result.errno = error.errno
        return result


class CheckedFile(io.FileIO):
    """An unbuffered file object that raises if the file has changed since it was opened.

    Args:
        path: the file.

    Raises:
        OSError: it cannot be opened.
        ShardChangedError: (while reading) its size or modification time changed.

    Only regular files are checked: pipes and devices have no size.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "rb")
        status = os.fstat(self.fileno())
        self._regular = stat.S_ISREG(status.st_mode)
        self._size, self._mtime_ns = status.st_size, status.st_mtime_ns
        if self._regular:
            _settle(self._mtime_ns)

    def readinto(self, buffer: Any) -> int | None:
        """Read into a buffer."""
        count = super().readinto(buffer)
        self._check()
        return count

    def read(self, size: int | None = -1) -> bytes:
        """Read at most ``size`` bytes; all remaining bytes by default."""
        data = super().read(-1 if size is None else size)
        self._check()
        return data

    def readall(self) -> bytes:
        """Read all remaining bytes."""
        data = super().readall()
        self._check()
        return data

    def _check(self) -> None:
        status = os.fstat(self.fileno())
        if self._regular and (status.st_size != self._size or status.st_mtime_ns != self._mtime_ns):
            raise _changed(os.fspath(self.name), self._size, status.st_size)


def _settle(mtime_ns: int) -> None:
    age = time.time_ns() - mtime_ns
    if 0 <= age < _CLOCK_STEP:
        time.sleep((_CLOCK_STEP - age) / 1e9)


def _changed(path: str, before: int, now: int, at: int | None = None) -> ShardChangedError:
    what = f"it had {before} bytes and has {now}" if now != before else "its modification time differs"
    where = "" if at is None else f" (byte {at} was to be read)"
    return ShardChangedError(
        f"{path} was changed while it was open: {what}{where}. Open the shards again; to update one in use, write a "
        "new one and rename it over the old"
    )


def file_of(url: str, storage: Storage | None = None, *, progress: bool | None = False) -> str:
    """Return the path of a shard's file; for a remote shard, of a complete copy in the cache.

    Raises:
        ShardIOError: it is neither a file nor in a store (``pipe:``).
        StorageError: the store fails, see `penstock.storage.local_path`.
    """
    path = path_of(url)
    if path is not None:
        return os.path.abspath(path)
    if not is_remote(url):
        raise ShardIOError(f"{url} is neither a file nor in a store")
    return copy_of(url, storage=storage, progress=progress)
