"""The limit of a cache, and its eviction order: copies that no live job needs, then those needed last.

Evicted copies are moved to ``trash`` atomically and unlinked there, so open ones stay readable. The limit is the
cache's ``max_bytes``, but at most the space on its disk: it shrinks if other programs fill the disk.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from penstock.errors import NotCachedError, StorageError
from penstock.storage.cache_entry import Entry
from penstock.storage.futures import Futures

__all__ = ["FULL", "LEASE", "POLL", "Room"]

FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
LEASE = 60.0
"""Seconds for which a returned path stays valid."""
POLL = 0.02
"""Seconds between attempts: waiting for a lock between processes with a deadline needs polling."""

_ABANDONED = 86400.0  # seconds after which an inactive partial download is removed
_LOCK_TIMEOUT_S = 60.0
_SPARE, _SPARE_PART = 256 << 20, 64  # bytes that stay free on the disk: 1/64 of it, at most 256 MiB

_LOOKING = 20  # at most 1/20 of the time is spent on scanning the copies again


@dataclass(frozen=True)
class _Seen:
    """The complete copies of a cache, and the time until which this list is used."""

    entries: dict[str, Entry] = field(default_factory=dict)
    until: float = 0.0


_seen: dict[Path, _Seen] = {}
"""The last scan of each cache by this process."""

_turns: dict[int, threading.Lock] = {}
"""A lock of each process, for which its threads wait before one of them waits for the lock between processes.

A forked child has its own: a thread of the parent may hold the other one.
"""


class Room:
    """The copies of a cache, and its limit.

    Args:
        folder: the cache's folder.
        max_bytes: the limit; None for half of the free disk space, including the cache's own contents.
    """

    def __init__(self, folder: Path, max_bytes: int | None) -> None:
        self.folder, self.max_bytes = folder, max_bytes

    def entries(self, *, recent: bool = False) -> list[Entry]:
        """Return all copies, complete and partial.

        With ``recent``, times and sizes of complete copies may be slightly old: scanning thousands of them for each new
        one would cost more than copying it.
        """
        seen, complete, found = _seen.get(self.folder, _Seen()), {}, {}
        began = time.monotonic()
        again = not recent or began >= seen.until
        # A download that ends meanwhile moves from the first folder to the second, so it is seen exactly once.
        for name in sorted(os.listdir(self.folder / "partial")):
            entry = Entry.look(self.folder / "partial" / name, complete=False)
            if entry is not None:
                found[name] = entry
        for name in sorted(os.listdir(self.folder / "objects")):
            entry = seen.entries.get(name)
            if entry is None:
                entry = Entry.look(self.folder / "objects" / name, complete=True)
            elif again:
                entry = entry.again()
            if entry is not None:
                complete[name] = entry
        now = time.monotonic()
        _seen[self.folder] = _Seen(complete, now + _LOOKING * (now - began) if again else seen.until)
        return [*{**found, **complete}.values()]

    def limit(self, entries: list[Entry] | None = None) -> int:
        """Return the limit in bytes: ``max_bytes``, but at most what fits on the disk now."""
        entries = self.entries(recent=True) if entries is None else entries
        disk = shutil.disk_usage(self.folder)
        fits = disk.free + sum(entry.stored for entry in entries) - min(_SPARE, disk.total // _SPARE_PART)
        if self.max_bytes is not None:
            return max(0, min(self.max_bytes, fits))
        return max(0, min((disk.free + sum(entry.size for entry in entries if entry.complete)) // 2, fits))

    def make(
        self, size: int, *, but: str = "", only_later: bool = False, take: Callable[[], None] | None = None
    ) -> None:
        """Evict copies until ``size`` more bytes are within the limit.

        Args:
            but: a key that is never evicted.
            only_later: evict only copies that are needed later than ``but``.
            take: called before other processes may evict. ``size`` is then the whole size of the copy ``but``, and its
                existing bytes do not count.

        Raises:
            NotCachedError: ``only_later`` frees too little. Nothing was evicted.
            StorageError: the copies that must stay exceed the limit.
        """
        with self.lock():
            self.empty_trash()
            entries, now = self.entries(recent=True), time.time()
            self._remove_abandoned(entries, but, now)
            own = next((entry for entry in entries if entry.folder.name == but), None)
            there = own.size if own is not None and take is None else 0
            limit, needed = self.limit(entries), size + there
            if needed > limit:
                if own:
                    self.discard(own.folder)
                raise self._too_large(needed, limit)
            excess = sum(entry.size for entry in entries if entry is not own) + needed - limit
            chosen = self._choose(entries, own, excess, now, only_later=only_later)
            if only_later and sum(entry.size for entry in chosen) < excess:
                if own:
                    self.discard(own.folder)
                raise NotCachedError(
                    f"a copy would evict copies in the cache {self.folder} that are needed sooner; read the object "
                    "without a copy"
                )
            for entry in chosen:
                self.discard(entry.folder)
            if take is not None:
                take()

    def shrink(self, key: str) -> bool:
        """Evict copies for a download that has filled the disk; return whether any could be evicted."""
        with self.lock():
            entries = self.entries(recent=True)
            own = next((entry for entry in entries if entry.folder.name == key), None)
            wanted = max(1, own.size - own.stored if own else 1)
            chosen = self._choose(entries, own, wanted, time.time())
            for entry in chosen:
                self.discard(entry.folder)
        return bool(chosen)

    def _choose(
        self, entries: list[Entry], own: Entry | None, excess: int, now: float, *, only_later: bool = False
    ) -> list[Entry]:
        """Return the copies to evict to free ``excess`` bytes."""
        if excess <= 0:
            return []
        due = Futures(self.folder).due(np.array([entry.name for entry in entries], np.uint64)).tolist()
        until = due[entries.index(own)] if own is not None and only_later else -1.0
        # An object that no job has announced is needed now.
        until = 0.0 if until == np.inf else until
        chosen: list[Entry] = []
        last = [(-when, entry.used, number) for number, (when, entry) in enumerate(zip(due, entries, strict=True))]
        heapq.heapify(last)
        while last and excess > 0 and -last[0][0] > until:
            when, used, number = heapq.heappop(last)
            seen = entries[number]
            entry = seen.again() or seen if seen.complete else seen
            if entry.used != used:
                # It was used since the scan.
                entries[number] = entry
                heapq.heappush(last, (when, entry.used, number))
            elif seen is not own and self.removable(entry, now):
                chosen.append(entry)
                excess -= entry.size
        return chosen

    def _remove_abandoned(self, entries: list[Entry], but: str, now: float) -> None:
        for entry in list(entries):
            abandoned = not entry.complete and now - entry.used > _ABANDONED and entry.folder.name != but
            if abandoned and self.removable(entry, now):
                self.discard(entry.folder)
                entries.remove(entry)

    def _too_large(self, needed: int, limit: int) -> StorageError:
        if self.max_bytes is not None and limit < self.max_bytes >= needed:
            error = StorageError(
                f"{needed:,} bytes are more than the disk of the cache {self.folder} takes, which is {limit:,}: the "
                "disk is full; free some space, or choose another folder (cache=)"
            )
            error.errno = errno.ENOSPC
            return error
        return StorageError(
            f"{needed:,} bytes are more than the cache {self.folder} may hold, which is {limit:,}: set a larger "
            "max_bytes, or another folder on a larger disk; or read the object in place (open_source)"
        )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the exclusive right to evict."""
        lock = FileLock(self.folder / "locks" / "room.lock")
        # Threads of one process wake each other; processes poll.
        with _turns.setdefault(os.getpid(), threading.Lock()):
            try:
                lock.acquire(timeout=_LOCK_TIMEOUT_S, poll_interval=POLL)
            except Timeout:
                raise StorageError(
                    f"another process has held the cache {self.folder} for {_LOCK_TIMEOUT_S:g} s: it hangs or is "
                    f"stopped; end it and try again (lock: {lock.lock_file})"
                ) from None
            try:
                yield
            finally:
                lock.release()

    def removable(self, entry: Entry, now: float) -> bool:
        """Return whether a copy is not being downloaded and its path was not returned recently."""
        if entry.complete:
            return not -LEASE < now - entry.leased <= LEASE  # a clock that was set back must not keep it forever
        lock = FileLock(self.folder / "locks" / f"{entry.folder.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return False
        lock.release()
        return True

    def discard(self, folder: Path) -> None:
        """Remove a folder: rename it away atomically, then delete its files. Open files and maps stay valid."""
        away = self.folder / "trash" / secrets.token_hex(8)
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, away)
        shutil.rmtree(away, ignore_errors=True)

    def empty_trash(self) -> None:
        """Delete what killed processes left in ``trash``."""
        for left in (self.folder / "trash").iterdir():
            shutil.rmtree(left, ignore_errors=True)
