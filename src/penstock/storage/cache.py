"""The user's cache folder, atomic writes, and locks between processes.

What is written here can be made again at any time, so every function may fail and the caller says what that means.
Locks live in the cache folder, never beside the user's data, and the operating system frees them when a process dies.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import xxhash

from penstock.errors import StorageAuthError, StorageError, StorageNotFoundError

if TYPE_CHECKING:
    from filelock import FileLock

__all__ = ["UNWRITABLE", "cache_root", "file_lock", "is_writable", "put_file", "write_atomically"]

UNWRITABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG),
)
"""What the system says where nothing can be written: no right to it, or no room. Another place may do."""

_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_ABANDONED = 3600.0  # seconds without a write


def cache_root() -> Path:
    """The folder for everything that can be made again: ``$XDG_CACHE_HOME/penstock``, else ``~/.cache/penstock``.

    Created when it does not exist, for this user alone: it may hold copies of what others have no credentials for.
    Where that is impossible (no home, a read-only one) a folder of this user in the system's temporary folder takes its
    place; one there that belongs to somebody else, or is a link, is a PermissionError.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # its specification says to ignore a relative one
        base = os.path.expanduser("~/.cache")
    root = Path(base) / "penstock"
    if os.path.isabs(base):  # else this user has no home at all
        with contextlib.suppress(OSError):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_writable(root):
                return root
    return _temporary_root()


def _temporary_root() -> Path:
    """A folder of this user in the system's temporary folder."""
    user = os.getuid() if hasattr(os, "getuid") else os.getlogin()
    fallback = Path(tempfile.gettempdir()) / f"penstock-{user}"
    fallback.mkdir(mode=0o700, exist_ok=True)
    status = fallback.lstat()  # in a folder where anybody may put a link to anywhere
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{fallback} is a link, and not a folder; remove it")
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise PermissionError(f"{fallback} belongs to another user")
    return fallback


def is_writable(folder: str | os.PathLike[str]) -> bool:
    """Whether a file can be created in the folder. Asks the system's access rights and writes nothing."""
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike[str], *, if_absent: bool = False, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a file that appears under ``path`` all at once when the block ends, or not at all when it raises.

    With ``if_absent`` a file that is there stays, also one that comes while the block runs. Without ``sync`` a power
    cut may lose it.

    The bytes go to a temporary file in the same folder; at the end it is synced, renamed, and the folder
    synced. Readers see the old file or the new one, and no temporary file is left after an error.

    Raises:
        FileExistsError: ``if_absent``, and there is a file.
        OSError: of the disk; or there is something under `path` that is no file: a device would become one.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "there is something of this name that is no file", str(path))
    _remove_abandoned(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    # Not tempfile: its files can be read by their owner alone, and an index beside shared data is for everybody.
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)
    try:
        with open(descriptor, "r+b", buffering=1 << 20) as file:
            yield file
            file.flush()
            if sync:
                os.fsync(descriptor)
        if if_absent:
            os.link(temporary, path)
            os.unlink(temporary)
        else:
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if sync:
        _sync_folder(path.parent)


def put_file(path: str, data: bytes, if_absent: bool) -> bool:
    """Write a file by `write_atomically`; False where one stays. Raises errors of stores: see `Storage.put`."""
    try:
        with write_atomically(path, if_absent=if_absent) as file:
            file.write(data)
    except FileExistsError:
        return False
    except PermissionError:
        raise StorageAuthError(f"{path}: no permission to write it") from None
    except FileNotFoundError:
        raise StorageNotFoundError(f"cannot write {path}: there is no such folder") from None
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    return True


def _remove_abandoned(path: Path) -> None:
    """Remove what a writer that was killed has left. One that still writes has a fresh modification time."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED:
                left.unlink()


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut. Some network file systems refuse, and have no need of it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def file_lock(path: str | os.PathLike[str]) -> FileLock:
    """A lock named after ``path``, kept in the cache folder; for one builder among the processes of a machine."""
    name = f"{xxhash.xxh3_64_hexdigest(os.fsencode(os.path.realpath(path)))}.lock"
    try:
        return _lock_in(cache_root(), name)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
    return _lock_in(_temporary_root(), name)  # the disk of the cache is full


def _lock_in(root: Path, name: str) -> FileLock:
    from filelock import FileLock  # who finds all as it should be locks nothing

    folder = root / "locks"
    folder.mkdir(exist_ok=True)
    # Made now: a lock whose file cannot be made would say so only when it is taken.
    os.close(os.open(folder / name, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644))
    return FileLock(folder / name)
