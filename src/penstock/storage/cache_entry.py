"""What lies in the cache: `CachedFile`, an open copy, and `Entry`, what is known of one without opening it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from penstock.storage.download import ENTRY, read_entry

__all__ = ["CachedFile", "Entry"]

_SECTOR = 512


class CachedFile:
    """An open, complete copy of an object. What the cache does to it afterwards does not matter to its readers."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:  # modules may be empty by then
        if self._fd >= 0:
            _close(self._fd)

    def fileno(self) -> int:
        """The descriptor, which closes with this object."""
        return self._fd

    @cached_property
    def map(self) -> mmap.mmap | bytes:
        """The bytes, memory-mapped."""
        return mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) if self.size else b""

    def read_at(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset`` on, fewer at the end alone."""
        return bytes(memoryview(self.map)[offset : offset + size])


@dataclass(frozen=True)
class Entry:
    """One copy in the cache, or with ``complete=False`` what is there of it so far. Times are those of `time.time`.

    Attributes:
        size: bytes of all of it, once it is complete; of one that waits for room what is there.
        stored: bytes that it takes on the disk now.
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
        """The object's name, whatever its version; see `penstock.storage.futures.object_name`."""
        try:
            return int(self.folder.name[:16], 16)
        except ValueError:
            return 0

    def again(self) -> Entry | None:
        """What is there now, of a complete copy: what a second look finds, for a tenth of its cost."""
        folder = os.fspath(self.folder)
        try:
            used, leased = os.stat(os.path.join(folder, ENTRY)).st_mtime, os.stat(folder).st_mtime
        except OSError:
            return None
        # Whatever else changes in a folder changes its time.
        return replace(self, used=used) if leased == self.leased else Entry.look(self.folder, complete=True)

    @classmethod
    def look(cls, folder: Path, *, complete: bool) -> Entry | None:
        """None for a folder that is gone, or holds nothing sound.

        A download of which a power cut has left no word counts as what it takes on the disk.
        """
        entry = read_entry(folder)
        if entry is None and complete:
            return None
        try:
            with os.scandir(folder) as files:
                found = {file.name: file.stat() for file in files}
            leased = folder.stat().st_mtime
            if entry is None:
                stored = sum(_stored(status) for status in found.values())
                return cls(folder, "", stored, stored, leased, leased, complete)
            used = found[ENTRY].st_mtime
        except (OSError, KeyError):
            return None
        # Indexes may lie beside it.
        size = entry["size"] + sum(status.st_size for name, status in found.items() if name != entry["name"])
        stored = size if complete else sum(_stored(status) for status in found.values())
        if not complete and not entry.get("has_room"):
            size = stored
        return cls(folder, str(entry.get("url", "")), size, stored, used, leased, complete)


def _stored(status: os.stat_result) -> int:
    """Return the bytes of a file that may have holes."""
    return getattr(status, "st_blocks", -(-status.st_size // _SECTOR)) * _SECTOR
