"""Derived files: computed once from a user's data, cached, mapped by all processes, and limited in total size.

Every folder of the user's cache is one of them, except ``objects``, the copies of remote objects: see `KINDS`. Files
that only the cache holds have one format, see `derived_array`::

    classes/KEY.table    magic, version, 0, bytes of the array    8s I I q
                         KEY, 0, xxh3_64 of the bytes before      16s 16x 8s
                         and of the first 64 KiB of the array
                         the array                                from byte 64 on

Promises: the least recently used files are evicted first, until all together take at most half of the free disk space,
their own size included. No file in use is removed: files that a process of this machine has mapped stay (Linux lists
them, Windows refuses), and so do files being written, and files used in the last minute, which a process may be about
to map. Concurrent writers may exceed the limit, by 1/64 each.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import struct
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import DataFileIOError, PenstockError
from penstock.storage.local import UNWRITABLE, cache_root, file_lock, is_writable, remove_abandoned, write_atomically

__all__ = [
    *("KINDS", "DerivedFile", "array_in_memory", "clear", "count_growth", "derived_array", "derived_files"),
    *("derived_path", "evict", "limit_given", "load_or_write", "write_derived"),
]

KINDS = {
    "lines": "rows of JSON lines, and copies of compressed ones",
    "filters": "rows that filters keep",
    "classes": "rows by length or group",
    "lengths": "lengths of documents",
    "packs": "numbers of packs",
    "tokens": "documents in files of tokens",
    "entries": "where JPEGs can be begun",
    "clips": "where the packets of videos lie",
    "manifests": "rows of manifests, and their conversions to Arrow, that are not beside them",
    "folders": "lists of the files in folders",
    "shards": "indexes of shards, of copies or in folders that cannot be written",
    "locks": "empty files by which processes wait for each other",
}
"""The folders and their content."""

T = TypeVar("T")

_MAGIC, _VERSION = b"PSTKTABL", 1
_HEADER = struct.Struct("<8sI4xq16s16x8s")  # a multiple of 64 bytes, the alignment that Arrow recommends
_CHECKED = 1 << 16  # bytes of the array in the checksum: reading them all would make large files slow to open
_LEASE = 60.0  # seconds


class DerivedFile(NamedTuple):
    """A derived file, or several files of one name; ``used`` is a time of `time.time`."""

    kind: str
    paths: tuple[Path, ...]
    size: int
    used: float
    inodes: frozenset[int]


def derived_path(kind: str, name: str) -> Path:
    """Return the path of a derived file, whether it exists or not; mark an existing one as used now.

    DataFileIOError: the path is a folder.
    """
    path = cache_root() / kind / name
    if path.is_dir():
        raise DataFileIOError(f"{path} is a folder, but should be a file ({KINDS[kind]}): remove it")
    with contextlib.suppress(OSError):
        # The modification time stays: other processes detect writes by it.
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    return path


def derived_array(
    kind: str,
    question: str | bytes,
    dtype: npt.DTypeLike,
    write: Callable[[BinaryIO], object],
    what: str,
    folder: str | os.PathLike[str] | None = None,
) -> npt.NDArray[Any]:
    """Return the one-dimensional, read-only array that ``write(file)`` writes: a map of a derived file.

    One process of the machine writes the file while others wait; then all map it. If the cache cannot be written, each
    process holds the array in memory, with a warning. A file that is damaged or of another version is written again.

    Args:
        kind: one of `KINDS`.
        question: all that the array depends on: path or address, size, and modification time or ETag of each input
            file, or a hash of all their bytes; and the computation with its options.
        dtype: the dtype of the numbers; uint8 for several arrays in one file. The first byte is aligned to 64 bytes.
        write: writes the raw bytes, from the position of the file on. It may seek. If the disk is full, it is called
            again.
        what: name of the array, for the warning.
        folder: a folder for the file that the user has chosen, instead of the cache.

    Raises:
        DataFileIOError: the path of the file is a folder.
        OSError: the disk fails; or ``folder`` cannot be written.
    """
    key = xxhash.xxh3_128_digest(os.fsencode(question))
    name = f"{key.hex()}.table"

    def load(path: Path) -> npt.NDArray[Any] | None:
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size - _HEADER.size
                begin = file.read(_HEADER.size + _CHECKED)
                if begin[: _HEADER.size] != _header(key, size, begin[_HEADER.size :]):
                    return None
                return np.memmap(file, dtype, "r", _HEADER.size) if size else np.empty(0, dtype)
        except FileNotFoundError:
            return None

    def write_table(out: BinaryIO) -> None:
        out.write(bytes(_HEADER.size))
        write(out)
        size = out.seek(0, os.SEEK_END) - _HEADER.size
        out.seek(_HEADER.size)
        header = _header(key, size, out.read(_CHECKED))
        out.seek(0)
        out.write(header)

    try:
        path = derived_path(kind, name) if folder is None else Path(folder) / name
        return load_or_write([path], load, write_table)
    except OSError as error:
        if isinstance(error, PenstockError) or error.errno not in UNWRITABLE or folder is not None:
            raise
        warnings.warn(
            f"{error.filename}: {what} cannot be stored there ({error.strerror}): each process holds its own copy in "
            "memory. Free space, or set XDG_CACHE_HOME to another folder",
            stacklevel=2,
        )
        return array_in_memory(dtype, write)


def array_in_memory(dtype: npt.DTypeLike, write: Callable[[BinaryIO], object]) -> npt.NDArray[Any]:
    """Return the read-only array that ``write(file)`` writes, without a file."""
    out = io.BytesIO()
    write(out)
    return np.frombuffer(out.getvalue(), dtype)


def _header(key: bytes, size: int, begin: bytes) -> bytes:
    fields = _HEADER.pack(_MAGIC, _VERSION, size, key, b"")[:-8]
    return fields + xxhash.xxh3_64_digest(fields + begin)


def load_or_write(paths: Sequence[Path], load: Callable[[Path], T | None], write: Callable[[BinaryIO], object]) -> T:
    """Return what ``load`` finds at the first of these paths that has it; else write a file, and load that.

    One process of the machine writes the file, by `write_derived`, while others wait.

    Args:
        paths: best first. The file is written to the first one that can be written; the folder of the last is created.
        load: returns None if the file at the path is missing, damaged or out of date.
        write: writes the content.

    Raises:
        OSError: the file cannot be written; ``filename`` is its path.
        DataFileIOError: it was written, but cannot be loaded.
    """
    for path in paths:
        if (found := load(path)) is not None:
            return found
    with file_lock(paths[0]):
        for path in paths:
            if (found := load(path)) is not None:
                return found  # another process has written it while this one waited
        for path in paths:
            last = path is paths[-1]
            if not last and not is_writable(path.parent):
                continue
            try:
                if last:
                    path.parent.mkdir(parents=True, exist_ok=True)
                with write_derived(path) as out:
                    write(out)
                break
            except OSError as error:
                if not last and error.errno in UNWRITABLE and not isinstance(error, PenstockError):
                    continue  # the file system refuses despite the access rights, or its disk is full
                if not isinstance(error, PenstockError):
                    error.filename = os.fspath(path)
                raise
        found = load(path)
    if found is None:
        raise DataFileIOError(f"{path} was removed or replaced as soon as it was written, or the disk is damaged")
    return found


@contextlib.contextmanager
def write_derived(path: Path) -> Iterator[BinaryIO]:
    """Write a file as `write_atomically` does; if it is a derived file, evict others afterwards."""
    with write_atomically(path) as file:
        yield file
    count_growth(path, path.stat().st_size)


_left = [0]
"""The bytes that this process may write before it must measure all derived files again."""


def count_growth(path: Path, size: int) -> bool:
    """Count bytes that were added to a file; if it is a derived file, evict others as needed.

    Returns whether it may grow further: False if the derived files exceed the limit and no other one can be evicted.
    """
    if path.parent.name not in KINDS or path.parent.parent != cache_root():
        return True
    _left[0] -= size
    if _left[0] >= 0:
        return True
    held, limit = evict(but=path.stem)
    _left[0] = max(limit // 64, (limit - held) // 2)
    return held <= limit


def limit_given(held: int) -> int:
    """Return the limit in bytes, given the bytes held now."""
    return (shutil.disk_usage(cache_root()).free + held) // 2


def evict(limit: int | None = None, *, but: str = "") -> tuple[int, int]:
    """Evict the least recently used files until the rest is within the limit; return the bytes held now, and the limit.

    ``limit`` is `limit_given` by default. ``but`` is the name, without its suffix, of a file that stays.
    """
    files = list(derived_files())
    held = sum(file.size for file in files)
    limit = limit_given(held) if limit is None else limit
    now, mapped = time.time(), _mapped() if held > limit else frozenset()
    for file in sorted(files, key=lambda file: file.used):
        fresh = -_LEASE < now - file.used <= _LEASE  # a clock that was set back must not keep it forever
        # Locks have no size, so that they would never exceed the limit.
        if (held > limit or file.kind == "locks") and not fresh and file.paths[0].stem != but and _remove(file, mapped):
            held -= file.size
    return held, limit


def clear(*, unused_for: float = 0.0) -> tuple[int, int, int]:
    """Remove the files that were unused for this many seconds.

    Returns the number of removed files, their bytes, and the number of files that stay because they are in use; all
    without locks.
    """
    now, mapped, removed, in_use = time.time(), _mapped(), [], 0
    for file in list(derived_files()):
        if now - file.used >= unused_for:
            is_removed = _remove(file, mapped)
            if file.kind != "locks":
                removed += [file.size] if is_removed else []
                in_use += not is_removed
    return len(removed), sum(removed), in_use


def derived_files() -> Iterator[DerivedFile]:
    """Yield all derived files, by kind and name; remove partial files of killed processes on the way."""
    for kind in KINDS:
        names: dict[str, list[os.DirEntry[str]]] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(cache_root() / kind) as entries:
            for entry in entries:
                if entry.name.startswith(".") and entry.name.endswith(".tmp"):
                    remove_abandoned(Path(entry.path))
                elif not entry.name.startswith(".") and entry.is_file(follow_symlinks=False):
                    names.setdefault(Path(entry.name).stem, []).append(entry)
        for stem in sorted(names):
            with contextlib.suppress(FileNotFoundError):  # another process is removing it
                states = [entry.stat() for entry in names[stem]]
                paths = tuple(Path(entry.path) for entry in names[stem])
                used = max(max(state.st_atime, state.st_mtime) for state in states)
                inodes = frozenset(entry.inode() for entry in names[stem])
                yield DerivedFile(kind, paths, sum(state.st_size for state in states), used, inodes)


def _remove(file: DerivedFile, mapped: frozenset[int]) -> bool:
    """Remove a file unless it is in use; return whether it was removed."""
    from filelock import FileLock  # imported late, as in `file_lock`

    if file.inodes & mapped:
        return False
    # A process that waits for a lock that is removed here notices that (filelock 3.21), and waits for the next one.
    locks = [FileLock(path) if file.kind == "locks" else file_lock(path) for path in file.paths]
    with contextlib.ExitStack() as held:
        for lock in locks:
            try:
                held.enter_context(lock.acquire(timeout=0))
            except TimeoutError:  # a process is writing it
                return False
        for path in file.paths:
            try:
                path.unlink(missing_ok=True)
            except PermissionError:  # Windows: the file is open
                return False
        for lock in locks:
            with contextlib.suppress(OSError):  # Windows: it is open
                os.unlink(lock.lock_file)
    return True


def _mapped() -> frozenset[int]:
    """Return the inodes of files that processes of this user have mapped, as far as the system shows them."""
    found: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            found.update(int(line.split(None, 5)[4]) for line in maps.read_bytes().splitlines())
    return frozenset(found - {0})
