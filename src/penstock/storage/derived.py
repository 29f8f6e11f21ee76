"""Files that are made of a user's data once, kept in the cache, mapped by all processes, and bounded in bytes.

    lines/KEY.idx, KEY.zst    see KINDS

Promises: what was used least recently goes first, until all together are at most half of what the disk has free, they
themselves included. Nobody loses a file: what a process of this machine has mapped stays (Linux says so, and Windows
refuses), so does what is being made, and what was used in the last minute, which somebody may be about to map. What
several processes write at the same time may exceed the bound, by 1/64 each.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from penstock.errors import DataFileIOError
from penstock.storage.cache import cache_root, file_lock, write_atomically

__all__ = ["KINDS", "KeptFile", "bound", "clear", "grown", "keep_bound", "kept_files", "kept_path", "write_kept"]

KINDS = {
    "lines": "rows of JSON lines, and copies of compressed ones",
    "filters": "rows that filters keep",
    "classes": "rows by length or group",
    "lengths": "lengths of documents",
    "packs": "numbers of packs",
    "tokens": "documents in files of tokens",
    "weights": "tables of weighted draws",
    "entries": "where JPEGs can be begun",
    "clips": "where the packets of videos lie",
}
"""The folders, and what they hold."""

_LEASE = 60.0  # seconds
_LEFT = 3600.0  # seconds after which a temporary file that nobody writes to is one that a kill has left


@dataclass(frozen=True)
class KeptFile:
    """One thing that is kept, in a file or in several of one name; ``used`` is a time of `time.time`."""

    kind: str
    paths: tuple[Path, ...]
    size: int
    used: float
    inodes: frozenset[int]


def kept_path(kind: str, name: str) -> Path:
    """Return where a file is kept, or would be; if it is there, it has been used now.

    Raises:
        DataFileIOError: a folder is there.
    """
    path = cache_root() / kind / name
    if path.is_dir():
        raise DataFileIOError(f"{path}: a folder is in the place of a file ({KINDS[kind]}): remove it")
    with contextlib.suppress(OSError):
        # The time of change stays: it is how others notice that a file was written to.
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    return path


@contextlib.contextmanager
def write_kept(path: Path) -> Iterator[BinaryIO]:
    """Write a file as `write_atomically` does, and make room for it afterwards, if it is one that is kept.

    Raises:
        OSError: of the disk.
    """
    with write_atomically(path) as file:
        yield file
    grown(path, path.stat().st_size)


def grown(path: Path, size: int) -> bool:
    """Count the bytes that were added to a file, and make room for them, if it is one that is kept.

    Returns whether it may grow on: False where all that is kept exceeds the bound, and nothing else can go.
    """
    is_kept = path.parent.name in KINDS and path.parent.parent == cache_root()
    return not is_kept or _Room.taken(path, size)


class _Room:
    """How many bytes this process may write until it has to count again what all have written."""

    left = 0

    @classmethod
    def taken(cls, path: Path, size: int) -> bool:
        """Whether all is within the bound, after so many bytes more of a file."""
        cls.left -= size
        if cls.left >= 0:
            return True
        held, limit = keep_bound(but=path.stem)
        cls.left = max(limit // 64, (limit - held) // 2)
        return held <= limit


def bound(held: int) -> int:
    """Return how many bytes may be kept, where so many are."""
    return (shutil.disk_usage(cache_root()).free + held) // 2


def keep_bound(limit: int | None = None, *, but: str = "") -> tuple[int, int]:
    """Remove what was used least recently until the rest is within the bound.

    Args:
        limit: in bytes, by default `bound`.
        but: the name, without its ending, of one that stays.

    Returns:
        What is held now, and the limit, in bytes.
    """
    files = list(kept_files())
    held = sum(file.size for file in files)
    limit = bound(held) if limit is None else limit
    if held > limit:
        now, mapped = time.time(), _mapped()
        for file in sorted(files, key=lambda file: file.used):
            fresh = -_LEASE < now - file.used <= _LEASE  # a clock that went back may not keep it for ever
            if held > limit and not fresh and file.paths[0].stem != but and _remove(file, mapped):
                held -= file.size
    return held, limit


def clear(*, unused_for: float = 0.0) -> tuple[int, int, int]:
    """Remove what was not used for so many seconds.

    Returns:
        How many were removed, how many bytes that was, and how many stay since somebody uses them.
    """
    now, mapped, count, size, stay = time.time(), _mapped(), 0, 0, 0
    for file in list(kept_files()):
        if now - file.used >= unused_for:
            if _remove(file, mapped):
                count, size = count + 1, size + file.size
            else:
                stay += 1
    return count, size, stay


def kept_files() -> Iterator[KeptFile]:
    """Yield all that is kept, by kind and name. What a kill has left half-written is removed on the way."""
    for kind in KINDS:
        names: dict[str, list[os.DirEntry[str]]] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(cache_root() / kind) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    _remove_left(entry)
                elif entry.is_file(follow_symlinks=False):
                    names.setdefault(Path(entry.name).stem, []).append(entry)
        for stem in sorted(names):
            with contextlib.suppress(FileNotFoundError):  # somebody removes it at this moment
                states = [entry.stat() for entry in names[stem]]
                paths = tuple(Path(entry.path) for entry in names[stem])
                used = max(max(state.st_atime, state.st_mtime) for state in states)
                inodes = frozenset(entry.inode() for entry in names[stem])
                yield KeptFile(kind, paths, sum(state.st_size for state in states), used, inodes)


def _remove_left(entry: os.DirEntry[str]) -> None:
    with contextlib.suppress(OSError):
        if entry.name.endswith(".tmp") and time.time() - entry.stat().st_mtime > _LEFT:
            os.unlink(entry.path)


def _remove(file: KeptFile, mapped: frozenset[int]) -> bool:
    """Remove it, unless somebody uses it."""
    if file.inodes & mapped:
        return False
    locks = [file_lock(path) for path in file.paths]
    with contextlib.ExitStack() as held:
        for lock in locks:
            try:
                held.enter_context(lock.acquire(timeout=0))
            except TimeoutError:  # somebody makes it
                return False
        for path in file.paths:
            try:
                path.unlink(missing_ok=True)
            except PermissionError:  # Windows, of one that is open
                return False
    return True


def _mapped() -> frozenset[int]:
    """Return the inodes of the files that processes of this user have mapped, as far as the system says."""
    found: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            found.update(int(line.split(None, 5)[4]) for line in maps.read_bytes().splitlines())
    return frozenset(found - {0})
