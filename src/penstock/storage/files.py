"""An open, memory-mapped source file that detects changes.

If a mapped file shrinks, reading the missing pages kills the process (SIGBUS). So every read calls `SourceFile.check`
first: it compares size and modification time of the *open* file with those at opening. A file that was replaced by a
rename stays readable and unchanged through the old map: that is the way to update a manifest in use.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import time
from collections.abc import Callable

from penstock.errors import ManifestChangedError, ManifestIOError

__all__ = ["SourceFile", "io_error"]

_CLOCK_STEP = 20_000_000  # ns; the resolution of file times on Linux is its timer tick, 1 to 10 ms

# Opening a pipe must not block; on Windows, no newline translation.
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

_INSTEAD = "choose another folder with cache_dir="
_ADVICE = {
    errno.ENOENT: "there is no such file",
    errno.EISDIR: "this is a folder; name a file in it, or a pattern like 'folder/*.txt'; penstock.open opens a folder",
    errno.EACCES: "no permission; check the rights of the file and of its folders",
    errno.EPERM: "no permission; check the rights of the file and of its folders",
    errno.EROFS: f"the file system is read-only; {_INSTEAD}",
    errno.ENOSPC: f"the disk is full; free some space, or {_INSTEAD}",
    getattr(errno, "EDQUOT", -1): f"the disk quota is used up; free space, or {_INSTEAD}",
    errno.EFBIG: f"the file would be larger than allowed (ulimit -f); raise the limit, or {_INSTEAD}",
    errno.EMFILE: "too many open files; raise the limit (ulimit -n), or join the sources into fewer files",
    errno.ENFILE: "too many open files on this machine; close some, or join the sources into fewer files",
}


def io_error(
    path: str | os.PathLike[str], error: OSError, doing: str = "cannot read", instead: str = ""
) -> ManifestIOError:
    """Return a `ManifestIOError` that names the file, the failed operation, and the remedy or alternative."""
    advice = _ADVICE.get(error.errno or 0)
    if advice is None:
        advice = error.strerror or str(error) or type(error).__name__
        advice += f"; {instead}" if instead else ""
    advice = advice.replace(_INSTEAD, instead or _INSTEAD)
    result = ManifestIOError(f"{doing} {os.fspath(path)}: {advice}")
    result.errno = error.errno
    return result


class SourceFile:
    """A file opened for reading: its descriptor, size, modification time and memory map.

    Args:
        path: the file. It must exist and be a regular file.
        descriptor: an open descriptor of the file, which this object takes over.

    Raises:
        ManifestIOError: missing, a folder, a device or pipe, no permission, too many open files.

    Memory: none; mapped pages belong to the page cache and are shared between processes.
    """

    def __init__(self, path: str, *, descriptor: int | None = None) -> None:
        self.path = path
        self._fd = -1 if descriptor is None else descriptor
        try:
            if descriptor is None:
                self._fd = os.open(path, _FLAGS)
            status = os.fstat(self._fd)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, "folder", path)
            if not stat.S_ISREG(status.st_mode):
                raise ManifestIOError(f"cannot read {path}: not a regular file (a pipe or a device)")
            self.size = status.st_size
            self.mtime_ns = status.st_mtime_ns
            self.inode = status.st_ino
            self.map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) if self.size else None
        except ManifestIOError:
            raise
        except OSError as error:
            raise io_error(path, error) from error

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:  # at exit, module globals may be gone
        if self._fd >= 0:
            _close(self._fd)

    def read(self, count: int, position: int) -> bytes:
        """Return up to ``count`` bytes from a position, fewer at the end. Unlike the map, safe if the file shrinks."""
        if hasattr(os, "pread"):
            return os.pread(self._fd, count, position)
        with open(self.path, "rb", buffering=0) as file:  # Windows
            file.seek(position)
            return file.read(count) or b""

    def read_into(self, buffer: memoryview, position: int) -> int:
        """Read into a buffer and return the number of bytes."""
        if hasattr(os, "preadv"):
            return os.preadv(self._fd, [buffer], position)
        data = self.read(len(buffer), position)
        buffer[: len(data)] = data
        return len(data)

    def size_now(self) -> int:
        """Return the current size of the open file."""
        return os.fstat(self._fd).st_size

    @property
    def is_removed(self) -> bool:
        """Return whether the file was unlinked: its bytes exist only while it is open."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0

    def is_same(self, descriptor: int) -> bool:
        """Return whether another descriptor refers to this file, not to a later one of the same name."""
        return os.path.samestat(os.fstat(self._fd), os.fstat(descriptor))

    def check(self) -> None:
        """Raise `ManifestChangedError` if size or modification time of the open file changed. Costs one fstat."""
        status = os.fstat(self._fd)
        if status.st_size != self.size or status.st_mtime_ns != self.mtime_ns:
            raise self.changed(status.st_size)

    def settle(self) -> None:
        """Wait until a later write would change the modification time, whose resolution is some milliseconds.

        Call it before recording the content of a file that was written just now.
        """
        age = time.time_ns() - self.mtime_ns
        if 0 <= age < _CLOCK_STEP:
            time.sleep((_CLOCK_STEP - age) / 1e9)

    def changed(self, size: int) -> ManifestChangedError:
        """Return the error for a changed file, with its current size."""
        what = f"it had {self.size} bytes and has {size}" if size != self.size else "its modification time differs"
        return ManifestChangedError(
            f"{self.path} was changed while it was open: {what}. Open the manifest again; to update a file in use, "
            "write a new one and rename it over the old"
        )
