"""The cache of remote objects: complete copies of one version each, shared by all processes of a machine.

    objects/KEY/       NAME, .entry.json      KEY is the xxh3 of the URL, and of the URL with size and etag
    partial/KEY/       NAME, .entry.json      a download in progress, or left by a killed process
    locks/KEY.lock     held by the process that downloads
    failures/KEY.json  how the last attempt failed, for the processes that waited for it
    futures/ID.uses    when a live job will use which objects, see `penstock.storage.planned_use`
    trash/             about to be deleted

Promises: a folder in ``objects`` is complete, since it is renamed into place after it was synced. kill -9 at any point
loses the blocks in transfer at most. One process downloads an object while the others wait for its lock, which the
system frees when the process dies. Copies that no live job needs are evicted first, then those needed last. They are
moved to ``trash`` atomically and unlinked there: a process that has one open or mapped can still read it. The limit in
bytes is ``max_bytes``, but at most the space on the disk; it holds before and after each download. Only copies whose
path was returned in the last minute, and concurrent downloads of several processes, may exceed it. A full disk shrinks
the cache; it is an error only if nothing can be evicted.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import heapq
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from filelock import FileLock, Timeout

from penstock import errors
from penstock.errors import ConfigError, NotCachedError, PenstockError, StorageError, StorageUnavailableError
from penstock.progress import progress_bar
from penstock.storage.download import ENTRY, Entry, download, hash_file, read_entry, write_entry
from penstock.storage.files import STORED, File
from penstock.storage.local import cache_root, sync_folder, write_atomically
from penstock.storage.planned_use import PlannedUses, object_name
from penstock.storage.urls import basename, shown

if TYPE_CHECKING:
    from penstock.storage.remote import RemoteSource

__all__ = ["Cache"]

_TRIES = 5
_LEASE = 60.0  # seconds for which a returned path stays valid
_POLL = 0.02  # seconds between attempts: waiting for a lock between processes with a deadline needs polling
_LOCK_TIMEOUT_S = 60.0
_ABANDONED = 86400.0  # seconds after which an inactive partial download is removed
_SCANNING = 20  # at most 1/20 of the time is spent on scanning the copies again
_SPARE, _SPARE_PART = 256 << 20, 64  # bytes that stay free on the disk: 1/64 of it, at most 256 MiB
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_NO_FILE = (errno.ENOENT, errno.EISDIR)  # of a copy whose file is gone, or was replaced by a folder
_EPOCH = 1_000_000_000  # modification times of copies are between 2001 and 2017, unlike any file written now


class _Scan(NamedTuple):
    """The complete copies of a cache, and the time until which this list is used."""

    entries: dict[str, Entry]
    until: float


_scans: dict[Path, _Scan] = {}
"""The last scan of each cache by this process."""

_turns: dict[int, threading.Lock] = {}
"""A lock of each process, for which its threads wait before one of them waits for the lock between processes.

A forked child has its own: a thread of the parent may hold the other one.
"""


class Cache:
    """A folder of local copies. Picklable; any number of processes may use one folder.

    Args:
        folder: its folder, created if missing; None for ``penstock/objects`` in the user's cache folder.
        max_bytes: its limit; None for half of the free disk space, including the cache's own contents.
        verify: check the hash of a copy, and not only its size, each time it is opened: at the speed of the disk.

    Raises:
        ConfigError: a limit that is not positive.
        StorageError: the folder cannot be created.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, max_bytes: int | None = None, verify: bool = False
    ) -> None:
        given: Any = max_bytes
        if given is not None and (not isinstance(given, Real) or given < 1):
            raise ConfigError(f"max_bytes must be a positive number of bytes, not {max_bytes!r}")
        self.max_bytes, self.verify_on_open = max_bytes, verify
        self.folder = Path(os.path.abspath(folder)) if folder is not None else cache_root() / "objects"
        try:
            self._make_folders()
            tag = self.folder / "CACHEDIR.TAG"  # backup programs skip folders with this file
            if not tag.exists():
                tag.write_text("Signature: 8a477f597d28d172789f06886806bc55\n")
        except OSError as error:
            raise StorageError(f"cannot use the cache folder {self.folder}: {error.strerror or error}") from error

    def _make_folders(self) -> None:
        for name in ("objects", "partial", "locks", "failures", "futures", "trash"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Cache, max_bytes=self.max_bytes, verify=self.verify_on_open), (str(self.folder),)

    # ------------------------------------------------------------------ getting

    def open(
        self, source: RemoteSource, *, keep: bool = False, only_later: bool = False, progress: bool | None = None
    ) -> File:
        """Return an open, complete copy of this version of an object; download it if needed.

        Args:
            source: see `penstock.storage.open_source`.
            keep: the caller uses its *path*, so the copy must stay for a minute.
            only_later: make room only by evicting copies that the jobs of this machine need later than this object, or
                not at all (`planned_uses`).
            progress: show a bar while downloading.

        Raises:
            NotCachedError: with ``only_later``, the copies in the cache are needed sooner. Read the object by ranges.
            StorageError: the download fails (see `transfer`), the disk is full, or the object exceeds the limit.

        If another process downloads the object, this one waits, and raises the same error if it fails.
        """
        key = self.key(source)
        with self._disk_errors(source.url):
            for _ in range(_TRIES):
                found = self._open_copy(key, keep)
                if found is not None:
                    return found
                made = self._obtain(key, source, progress, only_later=only_later)
                # Its readers keep it even if it has been evicted already. Its path would be invalid.
                if made is not None and not keep:
                    return made
        raise StorageError(
            f"{shown(source.url)} was evicted from the cache {self.folder} after each download: other processes fill "
            "it at the same time; raise its limit (max_bytes=)"
        )

    def find(self, source: RemoteSource, *, keep: bool = False) -> File | None:
        """Return an open copy of this version of an object, or None if the cache has none; never download."""
        with self._disk_errors(source.url):
            return self._open_copy(self.key(source), keep)

    def find_key(self, key: str) -> tuple[File, str] | None:
        """Return an open copy by its `key`, and the xxh3 of its bytes; None if the cache has none."""
        with self._disk_errors(key):
            file = self._open_copy(key, False)
            entry = read_entry(self.folder / "objects" / key)
        return None if file is None or entry is None else (file, str(entry["xxh3"]))

    def has(self, source: RemoteSource) -> bool:
        """Return whether the cache has a copy of this version of an object. Costs one small read."""
        return read_entry(self.folder / "objects" / self.key(source)) is not None

    @staticmethod
    def key(source: RemoteSource) -> str:
        """Return the name of a copy, unique for each version of an object at a URL."""
        version = f"{source.url}\0{source.fingerprint}".encode("utf-8", "surrogateescape")
        return f"{object_name(source.url):016x}{xxhash.xxh3_64_hexdigest(version)}"

    def place(self, source: RemoteSource) -> tuple[Path, int]:
        """Return the path that a copy of this version has or would have, and its modification time in nanoseconds."""
        key = self.key(source)
        return self.folder / "objects" / key / basename(source.url), _modified(key) * 1_000_000_000

    @contextlib.contextmanager
    def _disk_errors(self, url: str) -> Iterator[None]:
        try:
            yield
        except PenstockError:
            raise
        except OSError as error:
            advice = error.strerror or str(error)
            if error.errno in _FULL:
                advice = "the disk is full; free some space, or choose another folder (cache=)"
            elif error.errno == errno.EFBIG:
                advice = "the file would be larger than this process may write; raise the limit (ulimit -f)"
            result = StorageError(f"cannot keep a copy of {shown(url)} in the cache {self.folder}: {advice}")
            result.errno = error.errno
            raise result from error

    def _open_copy(self, key: str, keep: bool) -> File | None:
        """Return the copy if it is valid, and note its use; remove an invalid one and return None."""
        folder = self.folder / "objects" / key
        entry = read_entry(folder)
        if entry is None and folder.exists():
            # It may have appeared between the two checks. Then it is complete.
            entry = read_entry(folder)
            if entry is None:
                self._discard(folder)
        if entry is None:
            return None
        try:
            file = File(str(folder / entry["name"]), STORED, is_copy=True)
            if file.size != entry["size"] or (
                self.verify_on_open and hash_file(file.fileno(), entry["size"]).hexdigest() != entry["xxh3"]
            ):
                self._discard(folder)
                return None
            if os.access(folder, os.W_OK):  # a read-only cache cannot be changed
                if keep:
                    with self._lock():  # otherwise it could be evicted before the next line
                        os.utime(folder)
                os.utime(folder / ENTRY)
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            # It is being removed right now, or only its file was.
            self._discard(folder)
            return None
        return file

    def _obtain(self, key: str, source: RemoteSource, progress: bool | None, *, only_later: bool) -> File | None:
        """Download a copy and return it open, or wait for another process's download and return None."""
        self._make_folders()  # they may have been removed
        lock = FileLock(self.folder / "locks" / f"{key}.lock")
        began, waited = time.time(), self._wait_for_turn(lock, key, source)
        try:
            if read_entry(self.folder / "objects" / key) is not None:
                return None
            if waited:
                self._raise_failure(key, began)
            try:
                return self._download(key, source, progress, only_later=only_later)
            except StorageError as error:
                # No space under only_later, or the end of a job, is not a failure for processes that must have it.
                if not isinstance(error, NotCachedError) and not source.is_cancelled:
                    self._publish_failure(key, error)
                raise
        finally:
            lock.release()

    def _wait_for_turn(self, lock: FileLock, key: str, source: RemoteSource) -> bool:
        """Acquire the lock and return whether it had to wait; raise if the holder makes no progress for too long."""
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=0)
            return False
        patience = source.storage.idle + source.storage.deadline
        seen = self._progress_of(key)
        while True:
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=patience, poll_interval=_POLL)
                return True
            now = self._progress_of(key)
            if now == seen:
                raise StorageUnavailableError(
                    f"another process of this machine downloads {shown(source.url)}, but received nothing for "
                    f"{patience:g} s: it hangs or is stopped; end it and try again "
                    f"(lock: {lock.lock_file})"
                )
            seen = now

    def _progress_of(self, key: str) -> list[tuple[str, int, int]]:
        """Return file sizes and times that change while a download makes progress."""
        with contextlib.suppress(OSError), os.scandir(self.folder / "partial" / key) as files:
            return sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files)
        return []

    def _download(self, key: str, source: RemoteSource, progress: bool | None, *, only_later: bool) -> File:
        partial, final, name = self.folder / "partial" / key, self.folder / "objects" / key, basename(source.url)
        with progress_bar(f"downloading {name}", source.size, progress) as advance:
            while True:
                try:
                    partial.mkdir(exist_ok=True)
                    new = {"url": shown(source.url), "name": name, "size": source.size, "done": 0, "xxh3": ""}
                    entry = read_entry(partial) or new | {"fingerprint": source.fingerprint}
                    # From then on its size counts. Earlier, others would evict copies for a download that may never
                    # start.
                    reserve = functools.partial(write_entry, partial, entry, sync=False)
                    self.make_room(source.size, but=key, only_later=only_later, reserve=reserve)
                    download(source, partial, entry, advance)
                    break
                except BaseException as error:
                    # Without range requests, the next attempt starts from scratch.
                    if not source.stat.ranged:
                        self._discard(partial)
                    if not isinstance(error, OSError) or error.errno not in _FULL:
                        raise
                    # Each round evicts at least one copy, so the loop ends.
                    if not self._shrink(key):
                        self._discard(partial)  # do not leave the disk full
                        raise
        if final.exists():
            self._discard(final)
        os.utime(partial / name, (_modified(key), _modified(key)))
        made = File(str(partial / name), STORED, is_copy=True)
        made.path = str(final / name)
        os.utime(partial, (0, 0))  # its path has not been returned yet
        os.rename(partial, final)
        sync_folder(final.parent)
        (self.folder / "failures" / f"{key}.json").unlink(missing_ok=True)
        with contextlib.suppress(StorageError):  # the copy is complete in any case
            self.make_room(0, but=key)  # concurrent downloads may have exceeded the limit
        return made

    def _publish_failure(self, key: str, error: StorageError) -> None:
        failure = {"kind": type(error).__name__, "message": str(error), "time": time.time(), "pid": os.getpid()}
        path = self.folder / "failures" / f"{key}.json"
        with contextlib.suppress(OSError), write_atomically(path, sync=False) as file:
            file.write(json.dumps(failure).encode())

    def _raise_failure(self, key: str, since: float) -> None:
        """Raise the error of the process that this one waited for, instead of repeating its attempt."""
        try:
            failure = json.loads((self.folder / "failures" / f"{key}.json").read_bytes())
            kind, message, when = getattr(errors, failure["kind"]), failure["message"], float(failure["time"])
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return
        if when >= since and issubclass(kind, StorageError):
            raise kind(f"{message} (in process {failure.get('pid')}, whose download this one waited for)")

    # ------------------------------------------------------------------ the limit

    def planned_uses(self) -> PlannedUses:
        """Return the planned uses of the live jobs of this machine."""
        return PlannedUses(self.folder)

    def entries(self, *, recent: bool = False) -> list[Entry]:
        """Return all copies, complete and partial.

        With ``recent``, times and sizes of complete copies may be slightly old: scanning thousands of them for each new
        one would cost more than copying it.
        """
        scan, complete, found = _scans.get(self.folder, _Scan({}, 0.0)), {}, {}
        began = time.monotonic()
        again = not recent or began >= scan.until
        # A download that ends meanwhile moves from the first folder to the second, so it is seen exactly once.
        for name in sorted(os.listdir(self.folder / "partial")):
            entry = Entry.of_folder(self.folder / "partial" / name, complete=False)
            if entry is not None:
                found[name] = entry
        for name in sorted(os.listdir(self.folder / "objects")):
            entry = scan.entries.get(name)
            if entry is None:
                entry = Entry.of_folder(self.folder / "objects" / name, complete=True)
            elif again:
                entry = entry.current()
            if entry is not None:
                complete[name] = entry
        now = time.monotonic()
        _scans[self.folder] = _Scan(complete, now + _SCANNING * (now - began) if again else scan.until)
        return [*{**found, **complete}.values()]

    def limit(self) -> int:
        """Return the limit in bytes: ``max_bytes``, but at most what fits on the disk."""
        return self._limit(self.entries(recent=True))

    def _limit(self, entries: list[Entry]) -> int:
        disk = shutil.disk_usage(self.folder)
        fits = disk.free + sum(entry.stored for entry in entries) - min(_SPARE, disk.total // _SPARE_PART)
        most = self.max_bytes
        if most is None:
            most = (disk.free + sum(entry.size for entry in entries if entry.complete)) // 2
        return max(0, min(most, fits))

    def make_room(
        self, size: int, *, but: str = "", only_later: bool = False, reserve: Callable[[], None] | None = None
    ) -> None:
        """Evict copies until ``size`` more bytes are within the limit: unwanted ones first, then those needed last.

        Args:
            but: a key that is never evicted.
            only_later: evict only copies that are needed later than ``but``.
            reserve: called before other processes may evict. ``size`` is then the whole size of the copy ``but``, and
                its existing bytes do not count.

        Raises:
            NotCachedError: ``only_later`` frees too little. Nothing was evicted.
            StorageError: the copies that must stay exceed the limit.
        """
        with self._lock():
            self._empty_trash()
            entries, now = self.entries(recent=True), time.time()
            for entry in list(entries):
                is_abandoned = not entry.complete and now - entry.used > _ABANDONED and entry.folder.name != but
                if is_abandoned and self._is_unused(entry, now):
                    self._discard(entry.folder)
                    entries.remove(entry)
            own = next((entry for entry in entries if entry.folder.name == but), None)
            limit, needed = self._limit(entries), size + (own.size if own is not None and reserve is None else 0)
            try:
                if needed > limit:
                    raise self._too_large(needed, limit)
                excess = sum(entry.size for entry in entries if entry is not own) + needed - limit
                chosen = self._choose(entries, own, excess, now, only_later=only_later)
                if only_later and sum(entry.size for entry in chosen) < excess:
                    raise NotCachedError(
                        f"a copy would evict copies in the cache {self.folder} that are needed sooner; read the object "
                        "without a copy"
                    )
            except StorageError:
                if own:
                    self._discard(own.folder)
                raise
            for entry in chosen:
                self._discard(entry.folder)
            if reserve is not None:
                reserve()

    def _shrink(self, key: str) -> bool:
        """Evict copies for a download that has filled the disk; return whether any could be evicted."""
        with self._lock():
            entries = self.entries(recent=True)
            own = next((entry for entry in entries if entry.folder.name == key), None)
            wanted = max(1, own.size - own.stored if own else 1)
            chosen = self._choose(entries, own, wanted, time.time())
            for entry in chosen:
                self._discard(entry.folder)
        return bool(chosen)

    def _choose(
        self, entries: list[Entry], own: Entry | None, excess: int, now: float, *, only_later: bool = False
    ) -> list[Entry]:
        """Return the copies to evict to free ``excess`` bytes."""
        if excess <= 0:
            return []
        due = self.planned_uses().due(np.array([entry.name for entry in entries], np.uint64)).tolist()
        until = due[entries.index(own)] if own is not None and only_later else -1.0
        # An object that no job has announced is needed now.
        until = 0.0 if until == np.inf else until
        chosen: list[Entry] = []
        last = [(-when, entry.used, number) for number, (when, entry) in enumerate(zip(due, entries, strict=True))]
        heapq.heapify(last)
        while last and excess > 0 and -last[0][0] > until:
            when, used, number = heapq.heappop(last)
            seen = entries[number]
            entry = seen.current() or seen if seen.complete else seen
            if entry.used != used:
                # It was used since the scan.
                entries[number] = entry
                heapq.heappush(last, (when, entry.used, number))
            elif seen is not own and self._is_unused(entry, now):
                chosen.append(entry)
                excess -= entry.size
        return chosen

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
    def _lock(self) -> Iterator[None]:
        """Hold the exclusive right to evict."""
        lock = FileLock(self.folder / "locks" / "room.lock")
        # Threads of one process wake each other; processes poll.
        with _turns.setdefault(os.getpid(), threading.Lock()):
            try:
                lock.acquire(timeout=_LOCK_TIMEOUT_S, poll_interval=_POLL)
            except Timeout:
                raise StorageError(
                    f"another process has held the cache {self.folder} for {_LOCK_TIMEOUT_S:g} s: it hangs or is "
                    f"stopped; end it and try again (lock: {lock.lock_file})"
                ) from None
            try:
                yield
            finally:
                lock.release()

    def _is_unused(self, entry: Entry, now: float) -> bool:
        """Return whether a copy is not being downloaded and its path was not returned recently."""
        if entry.complete:
            return not -_LEASE < now - entry.leased <= _LEASE  # a clock that was set back must not keep it forever
        lock = FileLock(self.folder / "locks" / f"{entry.folder.name}.lock")
        with contextlib.suppress(Timeout), lock.acquire(timeout=0):
            return True
        return False

    def _discard(self, folder: Path) -> None:
        """Remove a folder: rename it away atomically, then delete its files. Open files and maps stay valid."""
        away = self.folder / "trash" / secrets.token_hex(8)
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, away)
        shutil.rmtree(away, ignore_errors=True)

    def _empty_trash(self) -> None:
        """Delete what killed processes left in ``trash``."""
        for left in (self.folder / "trash").iterdir():
            shutil.rmtree(left, ignore_errors=True)

    # ------------------------------------------------------------------ maintenance

    def clear(self, *, unused_for: float = 0.0) -> tuple[int, int]:
        """Remove all copies that were unused for this many seconds; return their number and bytes.

        Downloads in progress stay.
        """
        now, count, size = time.time(), 0, 0
        with self._lock():
            self._empty_trash()
            for entry in self.entries():
                if now - entry.used >= unused_for and (entry.complete or self._is_unused(entry, now)):
                    self._discard(entry.folder)
                    count, size = count + 1, size + entry.size
        return count, size

    def verify(self, *, remove: bool = False, progress: bool | None = False) -> tuple[int, list[tuple[Entry, str]]]:
        """Hash all complete copies; return their number, and the damaged ones with the reason.

        With ``remove``, damaged copies are removed.
        """
        entries = [entry for entry in self.entries() if entry.complete]
        bad = []
        with progress_bar("verifying", sum(entry.size for entry in entries), progress) as advance:
            for entry in entries:
                reason = _damage(entry)
                if reason:
                    bad.append((entry, reason))
                    if remove:
                        self._discard(entry.folder)
                advance(entry.size)
        return len(entries), bad


def _damage(entry: Entry) -> str:
    """Return what is wrong with a copy; empty if it is sound or gone."""
    noted = read_entry(entry.folder)
    if noted is None:
        return ""
    try:
        file = File(str(entry.folder / noted["name"]), STORED)
        if file.size != noted["size"]:
            return f"has {file.size:,} bytes instead of {noted['size']:,}"
        is_sound = hash_file(file.fileno(), file.size).hexdigest() == noted["xxh3"]
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        return "" if not entry.folder.exists() else "its file is missing"
    return "" if is_sound else "its bytes are not those that were downloaded"


def _modified(key: str) -> int:
    """Return the modification time of a version's copies, always the same, so that indexes of old copies stay valid."""
    return _EPOCH + int(key[16:], 16) % (_EPOCH // 2)
