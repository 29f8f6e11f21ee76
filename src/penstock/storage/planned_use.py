"""Planned uses of objects by the live jobs of a machine: they determine what a cache fetches and evicts first.

    futures/ID.uses     header and records, sorted by name: replaced atomically, mapped by readers
    futures/ID.lock     held by the job's process; the system frees it if the process dies

A job counts its own positions (samples consumed), and publishes the time per position, so the uses of several jobs are
compared in seconds from now. Files of a killed job are ignored and removed.

Jobs and planning choose the objects of an epoch that are copied by the same arithmetic:

    all objects fit the cache, or the objects in use at a time take half of it:   all are copied when they are needed
    else (a global shuffle):                                   as many as fit are copied; of the others, ranges are read
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from filelock import FileLock, Timeout

from penstock.storage.transfer import Cancel, Stat

__all__ = [
    *("NEVER", "JobUses", "PlannedUses", "Use", "UsePublisher"),
    *("all_fit", "bytes_for_copies", "choose_copies", "object_name"),
]

NEVER = 1 << 62
"""The position of a use that never happens."""

_HEADER = struct.Struct("<8sIIQqd")  # magic, version, pid, objects, position, seconds a position
_MAGIC, _VERSION = b"PSTKUSES", 2
_POSITION = struct.Struct("<qd")
_POSITION_AT = _HEADER.size - _POSITION.size
_PACE = 1e-3  # seconds a position, until it is measured
_USE = np.dtype([("name", "<u8"), ("first", "<i8"), ("last", "<i8"), ("again", "<i8"), ("copied", "<i8")])
_IN_USE = 2  # all objects are copied if the objects in use at a time take at most 1/2 of the cache
_SPARE = 100  # 1/100 of the cache stays free, for its other files

Ints = npt.NDArray[np.int64]
Names = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


def object_name(url: str) -> int:
    """Return the name of an object, for all versions, in planned uses and the cache: a 64-bit hash of its URL."""
    return xxhash.xxh3_64_intdigest(url.encode("utf-8", "surrogateescape"))


@dataclass(frozen=True)
class Use:
    """The planned use of one object, in positions: samples, or another unit that the consumer counts.

    Attributes:
        url: the object's URL.
        first: the first position that needs it.
        last: the last position of this use: until then the copy is in use.
        again: the first position of the next use, `NEVER` if unknown.
        copied: False for an object that is read by ranges unless a copy exists: it is not fetched.
        size: in bytes, 0 if unknown.
        stat: its version; looked up by one request if not given.
        fetch: ``fetch(only_later, cancel)`` fetches the object in place of a plain copy; see
            `penstock.storage.Cache.open` on ``only_later``.
    """

    url: str
    first: int
    last: int
    again: int = NEVER
    copied: bool = True
    size: int = 0
    stat: Stat | None = None
    fetch: Callable[[bool, Cancel], object] | None = None


class UsePublisher:
    """The uses that one job publishes in a cache folder, valid until it is closed or its process ends.

    Thread-safe. A forked child does not own it: only `close` may be called there, and does nothing. OSError: the folder
    cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        (folder / "futures").mkdir(parents=True, exist_ok=True)
        self._path = folder / "futures" / f"{secrets.token_hex(8)}.uses"
        # Threads that create and close it may differ.
        lock = FileLock(self._path.with_suffix(".lock"), thread_local=False)
        lock.acquire(timeout=0)
        self._map: mmap.mmap | None = None
        self._pace, self._position, self._began = _PACE, 0, time.monotonic()
        self._close = weakref.finalize(self, _withdraw, self._path, lock, os.getpid())

    def publish(self, uses: Sequence[Use], *, position: int = 0) -> None:
        """Publish the uses of the job, replacing earlier ones. Positions now count from ``position``.

        Costs 40 bytes per object on the disk. OSError: the folder cannot be written to.
        """
        if not self._close.alive:
            return
        rows = [(object_name(use.url), use.first, use.last, use.again, use.copied) for use in uses]
        records = np.array(rows, _USE)
        records.sort(order="name")
        temporary = self._path.with_suffix(".tmp")
        with open(temporary, "w+b") as file:
            file.write(_HEADER.pack(_MAGIC, _VERSION, os.getpid(), len(records), position, self._pace))
            file.write(records.tobytes())
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0)
        os.replace(temporary, self._path)
        self._map, self._position, self._began = mapped, position, time.monotonic()

    def advance(self, position: int) -> None:
        """Publish that the job has consumed this many positions."""
        mapped = self._map
        if mapped is None:
            return
        passed = position - self._position
        if passed > 0:
            self._pace = max((time.monotonic() - self._began) / passed, 1e-9)
        mapped[_POSITION_AT : _HEADER.size] = _POSITION.pack(position, self._pace)

    def close(self) -> None:
        """Withdraw all uses."""
        self._map = None
        self._close()


def _withdraw(path: Path, lock: FileLock, pid: int) -> None:
    if pid == os.getpid():
        _remove(path)
        lock.release()


def _remove(path: Path) -> None:
    for left in (path, path.with_suffix(".tmp"), path.with_suffix(".lock")):
        left.unlink(missing_ok=True)


class JobUses:
    """The uses of one job, as read by others: its pid, position, pace (seconds a position), and columns."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        magic, version, self.pid, count, self.position, self.pace = _HEADER.unpack_from(data)
        if (magic, version) != (_MAGIC, _VERSION) or len(data) != _HEADER.size + _USE.itemsize * count:
            raise ValueError(f"{path} has another format version")
        records = np.frombuffer(data, _USE, count, _HEADER.size) if count else np.empty(0, _USE)
        self.name, self.first, self.last = np.ascontiguousarray(records["name"]), records["first"], records["last"]
        self.again, self.copied = records["again"], records["copied"]

    def find(self, names: Names) -> tuple[Mask, Ints]:
        """Return a mask of the names that the job uses, and their rows."""
        at = np.searchsorted(self.name, names)
        known = at < len(self.name)
        known[known] = self.name[at[known]] == names[known]
        return known, at[known]

    def due(self, rows: Ints) -> npt.NDArray[np.float64]:
        """Return the seconds until the job needs each of these objects."""
        now, first, last, again = self.position, self.first[rows], self.last[rows], self.again[rows]
        position = np.where(now <= last, np.maximum(first, now), again)
        return np.where(position < NEVER, (position - now) * self.pace, np.inf)


class PlannedUses:
    """The current planned uses of all live jobs of a cache folder; files of dead jobs are removed."""

    def __init__(self, folder: Path) -> None:
        self.jobs = list(_live_jobs(folder / "futures"))

    def due(self, names: Names) -> npt.NDArray[np.float64]:
        """Return the seconds until any job needs each object; infinity if none does."""
        soonest = np.full(len(names), np.inf)
        for job in self.jobs:
            known, rows = job.find(names)
            soonest[known] = np.minimum(soonest[known], job.due(rows))
        return soonest

    def prefer_ranges(self, name: int) -> bool:
        """Return whether jobs read this object, but none of them wants a copy."""
        copied = [job.copied[row] for job in self.jobs for row in job.find(np.array([name], np.uint64))[1].tolist()]
        return bool(copied) and not any(copied)


def _live_jobs(folder: Path) -> Iterator[JobUses]:
    for path in folder.glob("*.uses"):
        lock = FileLock(path.with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            # The job may end right now.
            with contextlib.suppress(OSError, ValueError, struct.error):
                yield JobUses(path)
            continue
        except OSError:  # a read-only cache
            continue
        _remove(path)
        lock.release()


def bytes_for_copies(limit: int) -> int:
    """Return the bytes of a cache's limit that are available for copies."""
    return limit * (_SPARE - 1) // _SPARE


def all_fit(sizes: Ints, first: Ints, last: Ints, available: int) -> bool:
    """Return whether all objects of these ``sizes`` can be copied at the time they are needed, in ``available`` bytes.

    ``first`` and ``last`` are the positions that need each object; -1 for ``last`` if none does.
    """
    used = last >= 0
    at = np.concatenate([first[used], last[used] + 1])
    change = np.concatenate([sizes[used], -sizes[used]])
    most_at_once = int(np.cumsum(change[np.lexsort((change, at))]).max(initial=0))
    return bool(sizes.sum() <= available or most_at_once <= available // _IN_USE)


def choose_copies(sizes: Ints, again: Ints, in_cache: Mask, names: list[int], available: int) -> Mask:
    """Return a mask of the objects that are copied and stay in ``available`` bytes, if not all can be.

    ``again`` is the position that needs each object in the next epoch, `NEVER` if none does. ``names`` are hashes, so
    that all processes choose the same objects.
    """
    order = sorted(range(len(sizes)), key=lambda at: (not in_cache[at], again[at] == NEVER, names[at]))
    chosen = np.zeros(len(sizes), np.bool_)
    for at in order:
        if sizes[at] <= available:
            chosen[at] = True
            available -= int(sizes[at])
    return chosen
