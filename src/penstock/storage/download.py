"""A folder of the cache with one object: its entry, and its download, which can resume when it was killed at any byte.

    NAME              the object's bytes, from its first one on
    .entry.json       the identity of the object, how many of its bytes are there, and their xxh3

Bytes are written to the file first, then counted in the entry, 4 MiB at a time. Before they are trusted, they are
hashed: so a power cut that lost pages costs the download, but never yields a wrong byte.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from penstock.storage.local import write_atomically

if TYPE_CHECKING:
    from penstock.storage.remote import RemoteSource

__all__ = ["ENTRY", "PIECE", "Entry", "download", "hash_file", "read_entry", "write_entry"]

ENTRY = ".entry.json"
PIECE = 4 << 20  # bytes after which a download is noted
_VERSION = 2


@dataclass(frozen=True)
class Entry:
    """A copy in the cache, partial if not ``complete``. Times are of `time.time`.

    Attributes:
        size: bytes of the whole copy; for a download that the cache has no space for yet, the bytes so far.
        stored: bytes on the disk now.
        leased: when its path was returned.
    """

    folder: Path
    url: str
    size: int
    stored: int
    used: float
    leased: float
    complete: bool

    @cached_property
    def name(self) -> int:
        """The name of the object, for all versions; see `penstock.storage.planned_use.object_name`."""
        try:
            return int(self.folder.name[:16], 16)
        except ValueError:
            return 0

    def current(self) -> Entry | None:
        """Return the current entry of a complete copy, at a tenth of the cost of `of_folder`."""
        folder = os.fspath(self.folder)
        try:
            used, leased = os.stat(os.path.join(folder, ENTRY)).st_mtime, os.stat(folder).st_mtime
        except OSError:
            return None
        # Any other change in a folder changes its modification time.
        return replace(self, used=used) if leased == self.leased else Entry.of_folder(self.folder, complete=True)

    @classmethod
    def of_folder(cls, folder: Path, *, complete: bool) -> Entry | None:
        """Return the entry of a folder; None if it is gone or invalid.

        A download without an entry, which waits for space or lost it in a power cut, counts with its bytes on the disk.
        """
        entry = read_entry(folder)
        if entry is None and complete:
            return None
        try:
            with os.scandir(folder) as files:
                found = {file.name: file.stat() for file in files}
            leased = folder.stat().st_mtime
            stored = sum(status.st_size for status in found.values())
            if entry is None:
                return cls(folder, "", stored, stored, leased, leased, complete)
            used = found[ENTRY].st_mtime
        except (OSError, KeyError):
            return None
        # Indexes of the copy may be in its folder, too.
        size = entry["size"] + sum(status.st_size for name, status in found.items() if name != entry["name"])
        return cls(folder, str(entry.get("url", "")), size, size if complete else stored, used, leased, complete)


def read_entry(folder: Path) -> dict[str, Any] | None:
    """Return the entry of a folder; None if it is unreadable, or of another version."""
    try:
        entry = json.loads((folder / ENTRY).read_bytes())
    except (OSError, ValueError):
        return None
    sound = isinstance(entry, dict) and entry.get("version") == _VERSION
    sound = sound and isinstance(entry.get("size"), int) and isinstance(entry.get("done"), int)
    return entry if sound and isinstance(entry.get("name"), str) and "/" not in entry["name"] else None


def write_entry(folder: Path, entry: dict[str, Any], *, sync: bool = True) -> None:
    """Write the entry of a folder atomically; without ``sync`` a power cut may lose it."""
    with write_atomically(folder / ENTRY, sync=sync) as out:
        out.write(json.dumps({"version": _VERSION} | entry).encode())


def hash_file(descriptor: int, size: int) -> xxhash.xxh3_64:
    """Return the xxh3 of the first bytes of an open file."""
    found, piece = xxhash.xxh3_64(), memoryview(bytearray(1 << 20))  # reused, and small enough for the CPU cache
    for begin in range(0, size, len(piece)):
        found.update(piece[: os.preadv(descriptor, [piece[: size - begin]], begin)])
    return found


def download(source: RemoteSource, folder: Path, entry: dict[str, Any], progress: Callable[[int], object]) -> None:
    """Download ``source`` into its folder, and complete the entry. A broken download begins at its last whole part.

    StorageError: as `transfer`; what is complete stays, for the next attempt. OSError: the disk fails or is full. The
    caller holds the lock of this folder.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(folder / entry["name"], flags, 0o666)
    try:
        done = min(entry["done"], source.size) if source.stat.ranged else 0
        hashed = hash_file(descriptor, done)
        if hashed.hexdigest() != entry["xxh3"]:
            done, hashed = 0, xxhash.xxh3_64()
        os.ftruncate(descriptor, done)
        progress(done)

        def write(position: int, piece: bytes | memoryview) -> None:
            nonlocal done
            view, end = memoryview(piece), position + len(piece)
            while len(view):
                view = view[os.pwrite(descriptor, view, end - len(view)) :]
            hashed.update(piece)
            progress(len(piece))
            if end >= done + PIECE:
                if hasattr(os, "posix_fadvise"):
                    with contextlib.suppress(OSError):
                        # Start writing the pages to the disk, so that the final sync waits less.
                        os.posix_fadvise(descriptor, done, end - done, os.POSIX_FADV_DONTNEED)
                done = end
                write_entry(folder, entry | {"done": done, "xxh3": hashed.hexdigest()}, sync=False)

        if done < source.size:
            source.fetch_into(write, done, source.size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    write_entry(folder, entry | {"done": source.size, "xxh3": hashed.hexdigest()})
