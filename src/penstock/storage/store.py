"""The cache of remote objects: complete copies of one version each, shared by all processes of a machine.

    objects/KEY/       NAME, .entry.json      KEY is the xxh3 of the URL, and of the URL with size and etag
    partial/KEY/       NAME, .entry.json      a download in progress, or left by a killed process
    locks/KEY.lock     held by the process that downloads
    failures/KEY.json  how the last attempt failed, for the processes that waited for it
    futures/ID.uses    when a live job will use which objects, see `penstock.storage.futures`
    trash/             about to be deleted

Promises: a folder in ``objects`` is complete, since it is renamed into place after it was synced. kill -9 at any point
loses the blocks in transfer at most. One process downloads an object while the others wait for its lock, which the
system frees when the process dies. Evicted copies are unlinked: a process that has one open or mapped can still read
it. The limit in bytes holds before and after each download; only copies whose path was returned in the last minute, and
concurrent downloads of several processes, may exceed it. A full disk shrinks the cache; it is an error only if nothing
can be evicted.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import secrets
import time
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock, Timeout

from penstock import errors
from penstock.errors import ConfigError, NotCachedError, PenstockError, StorageError, StorageUnavailableError
from penstock.progress import progress_bar
from penstock.storage.cache import cache_root, sync_folder
from penstock.storage.cache_entry import Entry
from penstock.storage.download import ENTRY, Download, fill, hash_file, new_entry, read_entry, write_entry
from penstock.storage.eviction import FULL, POLL, Room
from penstock.storage.files import STORED, File
from penstock.storage.futures import Futures, object_name
from penstock.storage.urls import basename, shown

__all__ = ["Cache"]

_TRIES = 5
_NO_FILE = (errno.ENOENT, errno.EISDIR)  # of a copy whose file is gone, or was replaced by a folder
_EPOCH = 1_000_000_000  # modification times of copies are between 2001 and 2017, unlike any file written now


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
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | None = None,
        verify: bool = False,
    ) -> None:
        given: Any = max_bytes
        if given is not None and (not isinstance(given, Real) or given < 1):
            raise ConfigError(f"max_bytes must be a positive number of bytes, not {max_bytes!r}")
        self.max_bytes, self.verify_on_open = max_bytes, verify
        self.folder = Path(os.path.abspath(folder)) if folder is not None else cache_root() / "objects"
        self._room = Room(self.folder, max_bytes)
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
        return _cache, (str(self.folder), self.max_bytes, self.verify_on_open)

    # ------------------------------------------------------------------ getting

    def open(
        self, source: Download, *, keep: bool = False, only_later: bool = False, progress: bool | None = None
    ) -> File:
        """Return an open, complete copy of this version of an object; download it if needed.

        Args:
            source: see `penstock.storage.open_source`.
            keep: the caller uses its *path*, so the copy must stay for a minute.
            only_later: make room only by evicting copies that the jobs of this machine need later than this object, or
                not at all (`futures`).
            progress: show a bar while downloading.

        Raises:
            NotCachedError: with ``only_later``, the copies in the cache are needed sooner. Read the object by ranges.
            StorageError: the download fails (see `transfer`), the disk is full, or the object exceeds the limit.

        If another process downloads the object, this one waits, and raises the same error if it fails.
        """
        key = self.key(source)
        try:
            for _ in range(_TRIES):
                found = self._look(key, keep)
                if found is not None:
                    return found
                made = self._obtain(key, source, progress, only_later=only_later)
                # Its readers keep it even if it has been evicted already. Its path would be invalid.
                if made is not None and not keep:
                    return made
        except PenstockError:
            raise
        except OSError as error:
            raise _disk_error(self.folder, source.url, error) from error
        raise StorageError(
            f"{shown(source.url)} was evicted from the cache {self.folder} after each download: other processes fill "
            "it at the same time; raise its limit (max_bytes=)"
        )

    def find(self, source: Download, *, keep: bool = False) -> File | None:
        """Return an open copy of this version of an object, or None if the cache has none; never download."""
        try:
            return self._look(self.key(source), keep)
        except OSError as error:
            raise _disk_error(self.folder, source.url, error) from error

    def find_key(self, key: str) -> tuple[File, str] | None:
        """Return an open copy by its `key`, and the xxh3 of its bytes; None if the cache has none."""
        try:
            file = self._look(key, False)
            entry = read_entry(self.folder / "objects" / key)
        except OSError as error:
            raise _disk_error(self.folder, key, error) from error
        return None if file is None or entry is None else (file, str(entry["xxh3"]))

    def has(self, source: Download) -> bool:
        """Return whether the cache has a copy of this version of an object. Costs one small read."""
        return read_entry(self.folder / "objects" / self.key(source)) is not None

    @staticmethod
    def key(source: Download) -> str:
        """Return the name of a copy, unique for each version of an object at a URL."""
        version = f"{source.url}\0{source.fingerprint}".encode("utf-8", "surrogateescape")
        return f"{object_name(source.url):016x}{xxhash.xxh3_64_hexdigest(version)}"

    def place(self, source: Download) -> tuple[Path, int]:
        """Return the path that a copy of this version has or would have, and its modification time in nanoseconds."""
        key = self.key(source)
        return self.folder / "objects" / key / basename(source.url), _modified(key) * 1_000_000_000

    def _look(self, key: str, keep: bool) -> File | None:
        """Return the copy if it is valid; remove an invalid one and return None."""
        folder = self.folder / "objects" / key
        entry = read_entry(folder)
        if entry is None and folder.exists():
            # It may have appeared between the two checks. Then it is complete.
            entry = read_entry(folder)
            if entry is None:
                self._room.discard(folder)
        if entry is None:
            return None
        try:
            file = File(str(folder / entry["name"]), STORED, is_copy=True)
            if file.size != entry["size"] or (
                self.verify_on_open and hash_file(file.fileno(), entry["size"]).hexdigest() != entry["xxh3"]
            ):
                self._room.discard(folder)
                return None
            if os.access(folder, os.W_OK):  # a read-only cache cannot be changed
                self._note_use(folder, keep)
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            # It is being removed right now, or only its file was.
            self._room.discard(folder)
            return None
        return file

    def _note_use(self, folder: Path, keep: bool) -> None:
        if keep:
            with self._room.lock():  # otherwise it could be evicted before the next line
                os.utime(folder)
        os.utime(folder / ENTRY)

    def _obtain(self, key: str, source: Download, progress: bool | None, *, only_later: bool) -> File | None:
        """Download a copy and return it open, or wait for another process's download and return None."""
        self._make_folders()  # they may have been removed
        lock = FileLock(self.folder / "locks" / f"{key}.lock")
        began, waited = time.time(), self._acquire(lock, key, source)
        try:
            if read_entry(self.folder / "objects" / key) is not None:
                return None
            if waited:
                self._raise_failure(key, began)
            try:
                return self._download(key, source, progress, only_later=only_later)
            except StorageError as error:
                # No room under only_later, or the end of a job, is not a failure for processes that must have it.
                if not isinstance(error, NotCachedError) and not source.given_up:
                    self._publish_failure(key, error)
                raise
        finally:
            lock.release()

    def _acquire(self, lock: FileLock, key: str, source: Download) -> bool:
        """Acquire the lock and return whether it had to wait; raise if the holder makes no progress for too long."""
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=0)
            return False
        patience = source.storage.idle + source.storage.deadline
        seen = self._traces(key)
        while True:
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=patience, poll_interval=POLL)
                return True
            now = self._traces(key)
            if now == seen:
                raise StorageUnavailableError(
                    f"another process of this machine downloads {shown(source.url)}, but received nothing for "
                    f"{patience:g} s: it hangs or is stopped; end it and try again "
                    f"(lock: {lock.lock_file})"
                )
            seen = now

    def _traces(self, key: str) -> list[tuple[str, int, int]]:
        """Return file sizes and times that change while a download makes progress."""
        with contextlib.suppress(OSError), os.scandir(self.folder / "partial" / key) as files:
            return sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files)
        return []

    def _download(self, key: str, source: Download, progress: bool | None, *, only_later: bool) -> File:
        partial, final = self.folder / "partial" / key, self.folder / "objects" / key
        with progress_bar(f"downloading {basename(source.url)}", source.size, progress) as advance:
            while True:
                try:
                    self._complete(key, source, advance, only_later=only_later)
                    break
                except OSError as error:
                    if error.errno not in FULL:
                        raise
                    # Each round evicts at least one copy, so the loop ends.
                    if not self._room.shrink(key):
                        self._room.discard(partial)  # do not leave the disk full
                        raise
        if final.exists():
            self._room.discard(final)
        made = File(str(partial / basename(source.url)), STORED, is_copy=True)
        made.path = str(final / basename(source.url))
        os.utime(partial, (0, 0))  # its path has not been returned yet
        os.rename(partial, final)
        sync_folder(final.parent)
        (self.folder / "failures" / f"{key}.json").unlink(missing_ok=True)
        with contextlib.suppress(StorageError):  # the copy is complete in any case
            self.make_room(0, but=key)  # concurrent downloads may have exceeded the limit
        return made

    def _complete(self, key: str, source: Download, advance: Callable[[int], object], *, only_later: bool) -> None:
        """Download the whole object into its folder under ``partial``."""
        partial, name = self.folder / "partial" / key, basename(source.url)
        try:
            partial.mkdir(exist_ok=True)
            entry = read_entry(partial) or new_entry(source, shown(source.url), name)
            # From then on its size counts. Earlier, others would evict copies for a download that may never start.
            take = functools.partial(write_entry, partial, entry, sync=False)
            self._room.make(source.size, but=key, only_later=only_later, take=take)
            fill(source, partial, entry, advance)
        except BaseException:
            # Without range requests, the next attempt starts from scratch.
            if not source.stat.ranged:
                self._room.discard(partial)
            raise
        os.utime(partial / name, (_modified(key), _modified(key)))

    def _publish_failure(self, key: str, error: StorageError) -> None:
        failure = {"kind": type(error).__name__, "message": str(error), "time": time.time(), "pid": os.getpid()}
        with contextlib.suppress(OSError):
            path = self.folder / "failures" / f"{key}.json"
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            temporary.write_text(json.dumps(failure))
            os.replace(temporary, path)

    def _raise_failure(self, key: str, since: float) -> None:
        """Raise the error of the process that this one waited for, instead of repeating its attempt."""
        try:
            failure = json.loads((self.folder / "failures" / f"{key}.json").read_bytes())
            kind, message, when = getattr(errors, failure["kind"]), failure["message"], float(failure["time"])
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return
        if when >= since and issubclass(kind, StorageError):
            raise kind(f"{message} (in process {failure.get('pid')}, whose download this one waited for)")

    # ------------------------------------------------------------------ room

    def limit(self) -> int:
        """Return the limit in bytes: ``max_bytes``, but at most what fits on the disk."""
        return self._room.limit()

    def make_room(self, size: int, *, but: str = "") -> None:
        """Evict copies until ``size`` more bytes are within the limit: unwanted ones first, then those needed last.

        Args:
            but: a key that is never evicted.

        Raises:
            StorageError: the copies that must stay exceed the limit.
        """
        self._room.make(size, but=but)

    def futures(self) -> Futures:
        """Return the planned uses of the live jobs of this machine."""
        return Futures(self.folder)

    # ------------------------------------------------------------------ maintenance

    def entries(self) -> list[Entry]:
        """Return all copies, complete and partial."""
        return self._room.entries()

    def clear(self, *, unused_for: float = 0.0) -> tuple[int, int]:
        """Remove all copies that were unused for this many seconds; return their number and bytes.

        Downloads in progress stay.
        """
        now, count, size = time.time(), 0, 0
        with self._room.lock():
            self._room.empty_trash()
            for entry in self.entries():
                if now - entry.used >= unused_for and (entry.complete or self._room.removable(entry, now)):
                    self._room.discard(entry.folder)
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
                reason = self._damage(entry)
                if reason:
                    bad.append((entry, reason))
                    if remove:
                        self._room.discard(entry.folder)
                advance(entry.size)
        return len(entries), bad

    def _damage(self, entry: Entry) -> str:
        """Return what is wrong with a copy; empty if it is sound or gone."""
        said = read_entry(entry.folder)
        if said is None:
            return ""
        try:
            file = File(str(entry.folder / said["name"]), STORED)
            if file.size != said["size"]:
                return f"has {file.size:,} bytes instead of {said['size']:,}"
            is_sound = hash_file(file.fileno(), file.size).hexdigest() == said["xxh3"]
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            return "" if not entry.folder.exists() else "its file is missing"
        return "" if is_sound else "its bytes are not those that were downloaded"


def _cache(folder: str, max_bytes: int | None, verify: bool) -> Cache:
    return Cache(folder, max_bytes=max_bytes, verify=verify)


def _modified(key: str) -> int:
    """Return the modification time of a version's copies, always the same, so that indexes of old copies stay valid."""
    return _EPOCH + int(key[16:], 16) % (_EPOCH // 2)


def _disk_error(folder: Path, url: str, error: OSError) -> StorageError:
    advice = error.strerror or str(error)
    if error.errno in FULL:
        advice = "the disk is full; free some space, or choose another folder (cache=)"
    elif error.errno == errno.EFBIG:
        advice = "the file would be larger than this process may write; raise the limit (ulimit -f)"
    result = StorageError(f"cannot keep a copy of {shown(url)} in the cache {folder}: {advice}")
    result.errno = error.errno
    return result
