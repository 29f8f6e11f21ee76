"""`Entry`: the facts about a copy in the cache."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from penstock.storage.download import ENTRY, read_entry

__all__ = ["Entry"]


@dataclass(frozen=True)
class Entry:
    """A copy in the cache, partial if not ``complete``. Times are of `time.time`.

    Attributes:
        size: bytes of the whole copy; for a download that waits for room, the bytes so far.
        stored: bytes on the disk now.
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
        """The name of the object, for all versions; see `penstock.storage.futures.object_name`."""
        try:
            return int(self.folder.name[:16], 16)
        except ValueError:
            return 0

    def again(self) -> Entry | None:
        """Return the current entry of a complete copy, at a tenth of the cost of `look`."""
        folder = os.fspath(self.folder)
        try:
            used, leased = os.stat(os.path.join(folder, ENTRY)).st_mtime, os.stat(folder).st_mtime
        except OSError:
            return None
        # Any other change in a folder changes its modification time.
        return replace(self, used=used) if leased == self.leased else Entry.look(self.folder, complete=True)

    @classmethod
    def look(cls, folder: Path, *, complete: bool) -> Entry | None:
        """Return the entry of a folder; None if it is gone or invalid.

        A download without an entry, which waits for room or lost it in a power cut, counts with its bytes on the disk.
        """
        entry = read_entry(folder)
        if entry is None and complete:
            return None
        try:
            with os.scandir(folder) as files:
                found = {file.name: file.stat() for file in files}
            leased = folder.stat().st_mtime
            if entry is None:
                stored = sum(status.st_size for status in found.values())
                return cls(folder, "", stored, stored, leased, leased, complete)
            used = found[ENTRY].st_mtime
        except (OSError, KeyError):
            return None
        # Indexes may be beside it.
        size = entry["size"] + sum(status.st_size for name, status in found.items() if name != entry["name"])
        stored = size if complete else sum(status.st_size for status in found.values())
        return cls(folder, str(entry.get("url", "")), size, stored, used, leased, complete)
