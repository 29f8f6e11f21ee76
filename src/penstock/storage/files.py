"""An open local file that detects changes: the same for manifests, shards, data files and copies in the cache.

A read of a changed file raises an error, and returns no data of it. If a mapped file shrinks, reading the missing pages
kills the process (SIGBUS). So every read of a map calls `File.check` first: it compares size and modification
time of the *open* file with those at opening. A file that was removed, or replaced by a rename, stays readable and
unchanged: that is the way to update a file in use.
"""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import (
    DataFileChangedError,
    DataFileIOError,
    ManifestChangedError,
    ManifestIOError,
    PenstockError,
    ShardChangedError,
    ShardIOError,
    StorageAuthError,
    StorageChangedError,
    StorageError,
    StorageNotFoundError,
)
from penstock.storage.urls import Name

if TYPE_CHECKING:
    from penstock.storage.stream import BlockStream

__all__ = ["DATA", "MANIFEST", "PIECE", "SHARD", "STORED", "CheckedFile", "Family", "File", "io_error"]

PIECE = 512 << 10
"""Bytes that `File.pieces` reads at a time: they fit the CPU cache."""

_CLOCK_STEP = 20_000_000  # ns; the resolution of file times on Linux is its timer tick, 1 to 10 ms

# Opening a pipe must not block; on Windows, no newline translation.
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

_INSTEAD = "choose another folder with cache_dir="
_ADVICE = {
    errno.ENOENT: "there is no such file",
    errno.EISDIR: "this is a folder; name a file in it, or a pattern like 'folder/*'; penstock.open opens a folder",
    errno.EACCES: "no permission; check the rights of the file and of its folders",
    errno.EPERM: "no permission; check the rights of the file and of its folders",
    errno.EROFS: f"the file system is read-only; {_INSTEAD}",
    errno.ENOSPC: f"the disk is full; free some space, or {_INSTEAD}",
    getattr(errno, "EDQUOT", -1): f"the disk quota is used up; free space, or {_INSTEAD}",
    errno.EFBIG: f"the file would be larger than allowed (ulimit -f); raise the limit, or {_INSTEAD}",
    errno.EMFILE: "too many open files; raise the limit (ulimit -n), or join the sources into fewer files",
    errno.ENFILE: "too many open files on this machine; close some, or join the sources into fewer files",
}


class Family(NamedTuple):
    """The errors that a format raises for its files.

    Attributes:
        changed: the file changed while it was open.
        failed: it cannot be read.
        what: the word for what must be opened again.
        missing, refused: in place of ``failed``, if the file does not exist or the system denies access.
    """

    changed: type[PenstockError]
    failed: type[PenstockError]
    what: str
    missing: type[PenstockError] | None = None
    refused: type[PenstockError] | None = None

    def error(
        self, path: Name, error: OSError, doing: str = "cannot read", instead: str = "", *, more: str = ""
    ) -> Any:
        """Return the error that names the file, the failed operation, and the remedy or alternative (``instead``)."""
        advice = _ADVICE.get(error.errno or 0)
        if advice is None:
            advice = error.strerror or str(error) or type(error).__name__
            advice += f"; {instead}" if instead else ""
        kind = self.failed
        if isinstance(error, FileNotFoundError):
            kind = self.missing or kind
        elif isinstance(error, PermissionError):
            kind = self.refused or kind
        result: Any = kind(f"{doing} {os.fspath(path)}: {advice.replace(_INSTEAD, instead or _INSTEAD)}{more}")
        result.errno = error.errno
        return result

    @contextlib.contextmanager
    def naming(self, path: str | os.PathLike[str], doing: str = "cannot read") -> Iterator[None]:
        """Raise errors of the system in a block as `error`. Penstock's own, which name their file, pass."""
        try:
            yield
        except PenstockError:
            raise
        except OSError as error:
            raise self.error(path, error, doing) from error


MANIFEST = Family(ManifestChangedError, ManifestIOError, "manifest")
SHARD = Family(ShardChangedError, ShardIOError, "shards")
DATA = Family(DataFileChangedError, DataFileIOError, "dataset")
STORED = Family(StorageChangedError, StorageError, "file", StorageNotFoundError, StorageAuthError)
io_error = MANIFEST.error


class File:
    """A file opened for reading: its descriptor, size, modification time and memory map.

    Args:
        path: the file. It must exist and be a regular file.
        family: the errors of its format.
        is_copy: whether it is a copy in the cache, which may evict it while it is open.

    Raises:
        PenstockError: (of the family) missing, a folder, a device or pipe, no permission, too many open files.

    Memory: none; mapped pages belong to the page cache and are shared between processes. A pickle opens the same
    version of the file again, or raises the error for a changed file.
    """

    etag = ""

    def __init__(self, path: str, family: Family = MANIFEST, *, is_copy: bool = False) -> None:
        self.path, self.family, self.is_copy = path, family, is_copy
        self._fd = -1
        try:
            self._fd = os.open(path, _FLAGS)
            status = os.fstat(self._fd)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, "folder", path)
        except OSError as error:
            raise family.error(path, error) from error
        except ValueError as error:  # a NUL, or a lone surrogate
            raise family.failed(f"cannot read {path!r}: {error}") from None
        if not stat.S_ISREG(status.st_mode):
            raise family.failed(f"cannot read {path}: not a regular file (a pipe or a device)")
        self.size, self.mtime_ns, self.inode = status.st_size, status.st_mtime_ns, status.st_ino

    def close(self, _close: Callable[[int], None] = os.close) -> None:  # at exit, module globals may be gone
        """Close the file. Idempotent."""
        if self._fd >= 0:
            _close(self._fd)
            self._fd = -1

    __del__ = close

    def of(self, family: Family) -> File:
        """Return this file, which raises the errors of another format from now on."""
        self.family = family
        return self

    def fileno(self) -> int:
        """Return the descriptor, which closes with this object."""
        return self._fd

    @property
    def url(self) -> str:
        """The path."""
        return self.path

    @property
    def fingerprint(self) -> str:
        """What changes when the file is written again: size and modification time."""
        return f"{self.size}:{self.mtime_ns}"

    @cached_property
    def map(self) -> mmap.mmap | None:
        """The bytes, memory-mapped at first use; None for an empty file. Call `check` before each read."""
        try:
            return mmap.mmap(self._fd, self.size, access=mmap.ACCESS_READ) if self.size else None
        except OSError as error:
            raise self.family.error(self.path, error) from error
        except ValueError:  # it is shorter now
            raise self.changed(self.size_now()) from None

    def read(self, count: int, position: int) -> bytes:
        """Return up to ``count`` bytes from a position, fewer at the end. Unlike the map, safe if the file shrinks."""
        try:
            if hasattr(os, "pread"):
                return os.pread(self._fd, count, position)
            with open(self.path, "rb", buffering=0) as file:  # Windows
                file.seek(position)
                return file.read(count) or b""
        except OSError as error:
            raise self.family.error(self.path, error, more=f" (at byte {position})") from error

    def read_exact(self, count: int, position: int) -> bytes:
        """Return exactly ``count`` bytes from a position. Use `check` to see whether the file has changed.

        Raises:
            PenstockError: (of the family) the file is too short now, or cannot be read.
        """
        try:
            data = os.pread(self._fd, count, position)
        except AttributeError:  # Windows
            data = self.read(count, position)
        except OSError as error:
            raise self.family.error(self.path, error, more=f" (at byte {position})") from error
        if len(data) == count:
            return data
        whole = bytearray(data).ljust(count, b"\0")  # a large read may return less
        self.read_into(memoryview(whole)[len(data) :], position + len(data))
        return bytes(whole)

    def read_into(self, buffer: memoryview, position: int) -> None:
        """Fill a buffer with the bytes from a position on. Raises as `read_exact` does."""
        while len(buffer):
            try:
                if hasattr(os, "preadv"):
                    count = os.preadv(self._fd, [buffer], position)
                else:
                    data = self.read(len(buffer), position)
                    count = len(data)
                    buffer[:count] = data
            except OSError as error:
                raise self.family.error(self.path, error, more=f" (at byte {position})") from error
            if not count:
                raise self.changed(self.size_now(), position)
            buffer, position = buffer[count:], position + count

    def read_at(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes from ``offset`` on, fewer only at the end, and check the file before and after.

        PenstockError (of the family): the file was truncated or modified.
        """
        self.check()
        data = self.read_exact(max(0, min(size, self.size - offset)), offset)
        self.check()
        return data

    def stream(self, begin: int = 0, end: int | None = None) -> BlockStream:
        """Return the bytes ``[begin, end)`` as a stream, checked as in `read_at`."""
        from penstock.storage.stream import BlockStream  # for objects in stores, too: not needed by local formats

        def fetch(first: int, last: int, _: object) -> bytes:
            return self.read_at(first, last - first)

        stop = self.size if end is None else min(end, self.size)
        return BlockStream(fetch, begin, stop, parallel=1, name=self.path)

    def pieces(self, begin: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes ``[begin, end)`` in chunks of `PIECE`, each valid until the next one.

        Raises as `read_exact` does.
        """
        buffer = memoryview(bytearray(min(PIECE, max(0, end - begin))))
        for at in range(begin, end, PIECE):
            piece = buffer[: end - at]
            self.read_into(piece, at)
            yield piece

    def size_now(self) -> int:
        """Return the current size of the open file."""
        return os.fstat(self._fd).st_size

    @property
    def is_evicted(self) -> bool:
        """Whether this is a copy that the cache has removed: its bytes take space on the disk until it is closed."""
        return self.is_copy and self._fd >= 0 and os.fstat(self._fd).st_nlink == 0

    def is_same(self, descriptor: int) -> bool:
        """Return whether another descriptor refers to this file, not to a later one of the same name."""
        return os.path.samestat(os.fstat(self._fd), os.fstat(descriptor))

    def check(self) -> None:
        """Raise the family's error if size or modification time of the open file changed. Costs one fstat."""
        status = os.fstat(self._fd)
        if status.st_size != self.size or status.st_mtime_ns != self.mtime_ns:
            raise self.changed(status.st_size)

    def expect(self, size: int, mtime_ns: int) -> None:
        """Raise the family's error unless the file has this size and modification time, now and in later checks."""
        self.size, self.mtime_ns = size, mtime_ns
        self.check()

    def settle(self) -> None:
        """Wait until a later write would change the modification time, whose resolution is some milliseconds.

        Call it before recording the content of a file that was written just now.
        """
        _settle(self.mtime_ns)

    def changed(self, size: int, at: int | None = None) -> PenstockError:
        """Return the error for a changed file, with its current size, and the byte that was to be read."""
        return _changed(self.family, self.path, self.size, size, at)

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

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self.family, self.size, self.mtime_ns)


class CheckedFile(io.FileIO):
    """An unbuffered file object, of a shard, that raises if the file has changed since it was opened.

    Args:
        path: the file.

    Raises:
        OSError: it cannot be opened.
        ShardChangedError: (while reading) its size or modification time changed.

    Only regular files are checked: pipes and devices have no size.
    """

    def __init__(self, path: Name) -> None:
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

    def readall(self) -> bytes:
        """Read all remaining bytes."""
        data = super().readall()
        self._check()
        return data

    def _check(self) -> None:
        status = os.fstat(self.fileno())
        if self._regular and (status.st_size != self._size or status.st_mtime_ns != self._mtime_ns):
            raise _changed(SHARD, os.fspath(self.name), self._size, status.st_size)


def _reopen(path: str, family: Family, size: int, mtime_ns: int) -> File:
    file = File(path, family)
    file.expect(size, mtime_ns)
    return file


def _settle(mtime_ns: int) -> None:
    age = time.time_ns() - mtime_ns
    if 0 <= age < _CLOCK_STEP:
        time.sleep((_CLOCK_STEP - age) / 1e9)


def _changed(family: Family, path: str, before: int, now: int, at: int | None = None) -> PenstockError:
    what = f"it had {before} bytes and has {now}" if now != before else "its modification time differs"
    where = "" if at is None else f" (byte {at} was to be read)"
    return family.changed(
        f"{path} was changed while it was open: {what}{where}. Open the {family.what} again; to update a file in use, "
        "write a new one and rename it over the old"
    )
