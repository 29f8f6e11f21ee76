"""How much a cache may hold, and which copies leave it first: those that no live job wants, then those due last.

What is removed goes to ``trash`` in one step and is unlinked there, so whoever has it open keeps it. The bound is what
the cache was given, and never more than its disk has room for: a disk that others fill shrinks it.
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
"""Seconds for which a path that was handed out stays good."""
POLL = 0.02
"""Seconds; a lock between processes cannot be waited for with a deadline in any other way."""

_ABANDONED = 86400.0  # seconds after which a partial download that nobody works at is removed
_PATIENCE = 60.0
_SPARE, _SPARE_PART = 256 << 20, 64  # what stays free on the disk: a part of it, and so much at most

_LOOKING = 20  # of so many seconds, one goes into looking at copies again


@dataclass(frozen=True)
class _Seen:
    """The complete copies of a cache, and until when they need no other look."""

    entries: dict[str, Entry] = field(default_factory=dict)
    until: float = 0.0


_seen: dict[Path, _Seen] = {}
"""Of each cache, as this process saw it last."""

_turn = threading.Lock()
"""For the threads of this process, before the lock between processes."""


def _fork() -> None:
    """Have a lock in the child that no thread of the parent holds."""
    global _turn
    _turn = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fork)


class Room:
    """The copies of a cache, and its bound.

    Args:
        folder: of the cache.
        max_bytes: the bound; None for half of what its disk has free, its own contents included.
    """

    def __init__(self, folder: Path, max_bytes: int | None) -> None:
        self.folder, self.max_bytes = folder, max_bytes

    def entries(self, *, recent: bool = False) -> list[Entry]:
        """Return all copies, complete ones and others.

        With ``recent`` the times and sizes of complete ones may be those of a moment ago. Looking at thousands of them
        for each that comes would cost more than copying it.
        """
        seen, complete, found = _seen.get(self.folder, _Seen()), {}, {}
        began = time.monotonic()
        again = not recent or began >= seen.until
        # A download that ends meanwhile goes from the first folder to the second: it is seen, and once.
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
        """Return the bound in bytes: what was given, but no more than the disk takes now."""
        entries = self.entries(recent=True) if entries is None else entries
        disk = shutil.disk_usage(self.folder)
        fits = disk.free + sum(entry.stored for entry in entries) - min(_SPARE, disk.total // _SPARE_PART)
        if self.max_bytes is not None:
            return max(0, min(self.max_bytes, fits))
        return max(0, min((disk.free + sum(entry.size for entry in entries if entry.complete)) // 2, fits))

    def make(
        self, size: int, *, but: str = "", only_later: bool = False, take: Callable[[], None] | None = None
    ) -> None:
        """Remove copies until ``size`` more bytes are within the bound.

        Args:
            but: a key that stays, whatever happens.
            only_later: remove none that is needed as soon as that one, or sooner.
            take: called before anybody else may remove something. ``size`` is all that the copy ``but`` will take then,
                and what is there of it counts no more.

        Raises:
            NotCachedError: that is not enough. Nothing was removed for it.
            StorageError: what has to stay is larger than the bound by itself.
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
                    f"a copy of {own.url if own else 'an object'} would displace copies in the cache {self.folder} "
                    "that are needed sooner; read it without a copy"
                )
            for entry in chosen:
                self.discard(entry.folder)
            if take is not None:
                take()

    def shrink(self, key: str) -> bool:
        """Remove copies for one whose download has filled the disk; return whether there were any to remove."""
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
        """Return which copies to remove, for so many bytes."""
        if excess <= 0:
            return []
        due = Futures(self.folder).due(np.array([entry.name for entry in entries], np.uint64)).tolist()
        until = due[entries.index(own)] if own is not None and only_later else -1.0
        # What no job has announced is asked for now.
        until = 0.0 if until == np.inf else until
        chosen: list[Entry] = []
        last = [(-when, entry.used, number) for number, (when, entry) in enumerate(zip(due, entries, strict=True))]
        heapq.heapify(last)
        while last and excess > 0 and -last[0][0] > until:
            when, used, number = heapq.heappop(last)
            seen = entries[number]
            entry = seen.again() or seen if seen.complete else seen
            if entry.used != used:
                # Somebody has used it since it was looked at.
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
        """Be the only one that removes anything."""
        lock = FileLock(self.folder / "locks" / "room.lock")
        # Threads of one process wake each other; processes look again and again.
        with _turn:
            try:
                lock.acquire(timeout=_PATIENCE, poll_interval=POLL)
            except Timeout:
                raise StorageError(
                    f"another process has been clearing the cache {self.folder} for {_PATIENCE:g} s: it hangs or is "
                    f"stopped; end it and try again (lock: {lock.lock_file})"
                ) from None
            try:
                yield
            finally:
                lock.release()

    def removable(self, entry: Entry, now: float) -> bool:
        """Return whether nobody downloads a copy, and its path was not handed out a moment ago."""
        if entry.complete:
            return not -LEASE < now - entry.leased <= LEASE  # a clock that went back may not keep it for ever
        lock = FileLock(self.folder / "locks" / f"{entry.folder.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return False
        lock.release()
        return True

    def discard(self, folder: Path) -> None:
        """Remove a folder: out of sight in one step, then its files. Open files and maps of them stay good."""
        away = self.folder / "trash" / secrets.token_hex(8)
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, away)
        shutil.rmtree(away, ignore_errors=True)

    def empty_trash(self) -> None:
        """Remove what a killed process has left on its way out."""
        for left in (self.folder / "trash").iterdir():
            shutil.rmtree(left, ignore_errors=True)
