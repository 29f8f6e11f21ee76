"""The user's cache folder, atomic writes, and locks between processes.

Files in the cache can be rebuilt at any time, so every function may fail, and the caller decides what that means. Locks
are in the cache folder, never beside the user's data; the operating system frees them when a process dies.
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

__all__ = [
    *("UNWRITABLE", "cache_root", "file_lock", "is_writable", "put_file", "remove_abandoned", "sync_folder"),
    "write_atomically",
]

UNWRITABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG),
)
"""Error numbers for a place that cannot be written: no permission, or no space. Another place may work."""

_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_ABANDONED = 3600.0  # seconds without a write


def cache_root() -> Path:
    """Return the cache folder, created if missing: ``$XDG_CACHE_HOME/penstock``, else ``~/.cache/penstock``.

    Only this user can read it: it may hold copies of objects that others have no credentials for. If it cannot be
    created (no home folder, or a read-only one), a folder of this user in the system's temporary folder is used;
    PermissionError if that belongs to another user or is a link.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification says to ignore relative paths
        base = os.path.expanduser("~/.cache")
    root = Path(base) / "penstock"
    if os.path.isabs(base):  # else this user has no home folder
        with contextlib.suppress(OSError):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_writable(root):
                return root
    return _temporary_root()


def _temporary_root() -> Path:
    """Return a folder of this user in the system's temporary folder."""
    user = os.getuid() if hasattr(os, "getuid") else os.getlogin()
    fallback = Path(tempfile.gettempdir()) / f"penstock-{user}"
    fallback.mkdir(mode=0o700, exist_ok=True)
    status = fallback.lstat()  # lstat: in this folder, anybody may create links
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{fallback} is a link, not a folder; remove it")
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise PermissionError(f"{fallback} belongs to another user")
    return fallback


def is_writable(folder: str | os.PathLike[str]) -> bool:
    """Return whether a file can be created in the folder, by its access rights; writes nothing."""
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike[str], *, if_absent: bool = False, sync: bool = True) -> Iterator[BinaryIO]:
    """Yield a file that appears at ``path`` atomically when the block ends, or not at all if the block raises.

    Until then it is a temporary file in the same folder. With ``if_absent``, an existing file stays, even one that
    appears while the block runs. Without ``sync``, a power cut may lose the file.

    Raises:
        FileExistsError: ``if_absent``, and the file exists.
        OSError: the disk fails or is full; or `path` exists and is not a file: a device would be replaced by one.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        what = "a folder, device or pipe of this name exists: move it, or choose another name"
        raise OSError(errno.EINVAL, what, str(path))
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        remove_abandoned(left)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    # Not tempfile: only the owner may read its files, but an index beside shared data is for everybody.
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)
    owner = os.getpid()
    try:
        with open(descriptor, "r+b", buffering=1 << 20) as file:
            try:
                yield file
            except GeneratorExit:
                if os.getpid() != owner:  # what is buffered here is the owner's, and must not be written twice
                    with open(os.devnull, "wb") as nowhere:
                        os.dup2(nowhere.fileno(), descriptor)
                raise
            file.flush()
            if sync:
                os.fsync(descriptor)
        if if_absent:
            os.link(temporary, path)
            os.unlink(temporary)
        else:
            os.replace(temporary, path)
    except BaseException:
        if os.getpid() == owner:  # not where a forked child collects its copy of this generator
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        raise
    if sync:
        sync_folder(path.parent)


def put_file(path: str, data: bytes, if_absent: bool) -> bool:
    """Write a file by `write_atomically`; return False if an existing one stays. Errors: see `Storage.put`."""
    try:
        with write_atomically(path, if_absent=if_absent) as file:
            file.write(data)
    except FileExistsError:
        return False
    except PermissionError:
        raise StorageAuthError(f"{path}: no permission to write it") from None
    except FileNotFoundError:
        raise StorageNotFoundError(f"cannot write {path}: its folder does not exist") from None
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    return True


def remove_abandoned(left: Path) -> None:
    """Remove the temporary file of a killed writer. A live writer's file has a recent modification time."""
    with contextlib.suppress(OSError):
        if time.time() - left.stat().st_mtime > _ABANDONED:
            left.unlink()


def sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut. Some network file systems refuse this, and do not need it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def file_lock(path: str | os.PathLike[str]) -> FileLock:
    """Return a lock for ``path``, in the cache folder, so that one process of the machine builds a file."""
    name = f"{xxhash.xxh3_64_hexdigest(os.fsencode(os.path.realpath(path)))}.lock"
    try:
        return _lock_in(cache_root(), name)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
    return _lock_in(_temporary_root(), name)  # the disk of the cache folder is full


def _lock_in(root: Path, name: str) -> FileLock:
    from filelock import FileLock  # imported late: if all files exist, no lock is needed

    folder = root / "locks"
    folder.mkdir(exist_ok=True)
    # Created now, since FileLock would report a failure only when the lock is acquired.
    os.close(os.open(folder / name, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644))
    return FileLock(folder / name)
