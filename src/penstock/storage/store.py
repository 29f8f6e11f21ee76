"""The cache of remote objects: complete copies of one version each, shared by all processes of a machine.

    objects/KEY/       NAME, .entry.json      KEY is the xxh3 of the address, and of it with the size and etag
    partial/KEY/       NAME, .journal, ...    one that is being downloaded, or whose process was killed
    locks/KEY.lock     held by the process that downloads
    failures/KEY.json  how the last attempt failed, for those that waited for it
    futures/ID.uses    when a live job will use which objects, see `penstock.storage.futures`
    trash/             on its way out

Promises: a folder in ``objects`` is complete, since it is renamed into place after all of it was synced. kill -9 at any
point costs a few blocks at most. One process downloads an object while the others wait for its lock, which the system
frees when it dies. What is removed is unlinked: whoever has it open or mapped keeps it. The bound in bytes holds
before a download begins and after it; only copies whose path was handed out in the last minute, and what several
processes are downloading at the same time, may exceed it. A full disk shrinks the cache, and is an error only where
nothing is left to remove.
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
from penstock.storage.cache import cache_root
from penstock.storage.cache_entry import CachedFile, Entry
from penstock.storage.download import ENTRY, Download, fill, hash_blocks, read_entry, write_entry
from penstock.storage.eviction import FULL, POLL, Room
from penstock.storage.futures import Futures, object_name
from penstock.storage.urls import basename, shown

__all__ = ["Cache"]

_TRIES = 5
_EPOCH = 1_000_000_000  # copies bear a time between 2001 and 2017, which no clock of a running machine shows


class Cache:
    """A folder of local copies. Picklable; any number of processes may use one folder.

    Args:
        folder: where; None for ``penstock/objects`` in the user's cache folder. Created when it does not exist.
        max_bytes: how much it may hold; None for half of what its disk has free, its own contents included.
        verify: hash a copy each time it is opened, and not only its size: as fast as the disk reads.

    Raises:
        ConfigError: a bound that is not positive.
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
            tag = self.folder / "CACHEDIR.TAG"  # by which backup programs know what to leave out
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
    ) -> CachedFile:
        """A complete copy of this version of an object, open.

        Args:
            source: see `penstock.storage.open_source`.
            keep: its *path* is going to be handed out, so it must stay for a minute.
            only_later: make room for it only by removing what is needed later than this object (or by nobody), as
                the jobs of this machine say (`futures`).
            progress: show a bar while downloading.

        Raises:
            NotCachedError: with ``only_later``, what is there is needed sooner. Read the object by ranges.
            StorageError: the download fails (see `transfer`), the disk is full, the object is larger than the bound.

        Where another process downloads it, this one waits, and gets its error if it fails.
        """
        key = self.key(source)
        try:
            for _ in range(_TRIES):
                found = self._look(key, keep)
                if found is not None:
                    return found
                made = self._obtain(key, source, progress, only_later=only_later)
                # It is good for its readers even if others have made room of it already. Its path is not.
                if made is not None and not keep:
                    return made
        except PenstockError:
            raise
        except OSError as error:
            raise _disk_error(self.folder, source.url, error) from error
        raise StorageError(
            f"{shown(source.url)} was removed from the cache {self.folder} as often as it was downloaded: others fill "
            "it at the same time; give it more room (max_bytes=)"
        )

    def find(self, source: Download, *, keep: bool = False) -> CachedFile | None:
        """The copy of this version of an object, open, if there is one. Nothing is downloaded."""
        try:
            return self._look(self.key(source), keep)
        except OSError as error:
            raise _disk_error(self.folder, source.url, error) from error

    def find_key(self, key: str) -> tuple[CachedFile, list[str]] | None:
        """The copy of this name (see `key`), open, and the xxh3 of each of its blocks of 4 MiB, if there is one."""
        try:
            file = self._look(key, False)
            entry = read_entry(self.folder / "objects" / key)
        except OSError as error:
            raise _disk_error(self.folder, key, error) from error
        return None if file is None or entry is None else (file, list(entry.get("xxh3", [])))

    def has(self, source: Download) -> bool:
        """Whether there is a copy of this version of an object. Costs one small read."""
        return read_entry(self.folder / "objects" / self.key(source)) is not None

    @staticmethod
    def key(source: Download) -> str:
        """Name of the copy: the same for the same version at the same address, and for nothing else."""
        version = f"{source.url}\0{source.fingerprint}".encode("utf-8", "surrogateescape")
        return f"{object_name(source.url):016x}{xxhash.xxh3_64_hexdigest(version)}"

    def place(self, source: Download) -> tuple[Path, int]:
        """Where the copy of this version is, or would be, and its time of modification in nanoseconds."""
        key = self.key(source)
        return self.folder / "objects" / key / basename(source.url), _modified(key) * 1_000_000_000

    def _look(self, key: str, keep: bool) -> CachedFile | None:
        """The copy, if there is a sound one; an unsound one is removed."""
        folder = self.folder / "objects" / key
        entry = read_entry(folder)
        if entry is None and folder.exists():
            # It may have come between the two looks. Then it is whole.
            entry = read_entry(folder)
            if entry is None:
                self._room.discard(folder)
        if entry is None:
            return None
        try:
            file = CachedFile(folder / entry["name"], entry["size"])
            if os.fstat(file.fileno()).st_size != entry["size"] or (
                self.verify_on_open and hash_blocks(file.fileno(), entry["size"]) != entry.get("xxh3")
            ):
                self._room.discard(folder)
                return None
            if os.access(folder, os.W_OK):  # nobody removes anything from a cache that may only be read
                self._note_use(folder, keep)
        except FileNotFoundError:  # it is being removed at this moment; or somebody has removed its file alone
            self._room.discard(folder)
            return None
        return file

    def _note_use(self, folder: Path, keep: bool) -> None:
        if keep:
            with self._room.lock():  # else it might be removed between this and the next line
                os.utime(folder)
        os.utime(folder / ENTRY)

    def _obtain(self, key: str, source: Download, progress: bool | None, *, only_later: bool) -> CachedFile | None:
        """Have the copy in place: download it and return it open, or wait for the process that does."""
        self._make_folders()  # somebody may have removed them
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
                # That there is no room for it now, or that a job ends, says nothing to those who have to have it.
                if not isinstance(error, NotCachedError) and not source.given_up:
                    self._publish_failure(key, error)
                raise
        finally:
            lock.release()

    def _acquire(self, lock: FileLock, key: str, source: Download) -> bool:
        """Take the lock; True if that took waiting. A holder that downloads nothing for too long is an error."""
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=0)
            return False
        patience = source.storage.patience
        seen = self._traces(key)
        while True:
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=patience.idle + patience.deadline, poll_interval=POLL)
                return True
            now = self._traces(key)
            if now == seen:
                raise StorageUnavailableError(
                    f"another process of this machine downloads {shown(source.url)}, and nothing has come for "
                    f"{patience.idle + patience.deadline:g} s: it hangs or is stopped; end it and try again "
                    f"(lock: {lock.lock_file})"
                )
            seen = now

    def _traces(self, key: str) -> list[tuple[str, int, int]]:
        """What changes while somebody downloads."""
        with contextlib.suppress(OSError), os.scandir(self.folder / "partial" / key) as files:
            return sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files)
        return []

    def _download(self, key: str, source: Download, progress: bool | None, *, only_later: bool) -> CachedFile:
        partial, final = self.folder / "partial" / key, self.folder / "objects" / key
        with progress_bar(f"downloading {basename(source.url)}", source.size, progress) as advance:
            while True:
                try:
                    self._complete(key, source, advance, only_later=only_later)
                    break
                except OSError as error:
                    if error.errno not in FULL:
                        raise
                    # Each turn removes a copy at least, so there is a last one.
                    if not self._room.shrink(key):
                        self._room.discard(partial)  # a full disk is not left full
                        raise
        if final.exists():
            self._room.discard(final)
        made = CachedFile(partial / basename(source.url), source.size)
        made.path = final / made.path.name
        os.utime(partial, (0, 0))  # nobody has its path yet
        os.rename(partial, final)
        _sync(final.parent)
        (self.folder / "failures" / f"{key}.json").unlink(missing_ok=True)
        with contextlib.suppress(StorageError):  # the copy is here, whatever became of the disk
            self.make_room(0, but=key)  # others were downloading too, perhaps: what they have completed may go now
        return made

    def _complete(self, key: str, source: Download, advance: Callable[[int], object], *, only_later: bool) -> None:
        """Have all of an object in its folder of partial ones."""
        partial, name = self.folder / "partial" / key, basename(source.url)
        entry = {"version": 1, "url": shown(source.url), "name": name, "size": source.size}
        entry["fingerprint"] = source.fingerprint
        try:
            partial.mkdir(exist_ok=True)
            write_entry(partial, entry, sync=False)  # to go on from; the last one counts
            # Its size counts from there on. Before, others would make room for what may not come.
            take = functools.partial(write_entry, partial, {**entry, "has_room": True}, sync=False)
            self._room.make(source.size, but=key, only_later=only_later, take=take)
            hashes = fill(source, partial, name, advance)
            write_entry(partial, {**entry, "xxh3": hashes})
        except BaseException:
            # From a server without ranges the next attempt begins at the beginning.
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
        """Raise what the process that was waited for has found out, rather than wait for the same again."""
        try:
            failure = json.loads((self.folder / "failures" / f"{key}.json").read_bytes())
            kind, message, when = getattr(errors, failure["kind"]), failure["message"], float(failure["time"])
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return
        if when >= since and issubclass(kind, StorageError):
            raise kind(f"{message} (found by process {failure.get('pid')}, which this one waited for)")

    # ------------------------------------------------------------------ room

    def limit(self) -> int:
        """The bound in bytes: what was given, but no more than the disk has room for."""
        return self._room.limit()

    def make_room(self, size: int, *, but: str = "") -> None:
        """Remove copies until ``size`` more bytes are within the bound: unwanted ones first, then those due last.

        Args:
            but: a key that stays, whatever happens.

        Raises:
            StorageError: what has to stay is larger than the bound by itself.
        """
        self._room.make(size, but=but)

    def futures(self) -> Futures:
        """What the live jobs of this machine want of the cache."""
        return Futures(self.folder)

    # ------------------------------------------------------------------ looking after it

    def entries(self) -> list[Entry]:
        """All copies, complete ones and others."""
        return self._room.entries()

    def clear(self, *, unused_for: float = 0.0) -> tuple[int, int]:
        """Remove all copies that were not used for so many seconds: how many, and how many bytes.

        What others are downloading stays.
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
        """Hash all complete copies: how many there are, and those that are damaged, with the reason.

        ``remove`` removes those.
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
        """What is wrong with a copy; nothing if it is gone."""
        said = read_entry(entry.folder)
        if said is None:
            return ""
        try:
            file = CachedFile(entry.folder / said["name"], said["size"])
            size = os.fstat(file.fileno()).st_size
            if size != said["size"]:
                return f"has {size:,} bytes instead of {said['size']:,}"
            hashes = hash_blocks(file.fileno(), size)
        except FileNotFoundError:
            return "" if not entry.folder.exists() else "its file is missing"
        wrong = [number for number, pair in enumerate(zip(hashes, said["xxh3"], strict=False)) if pair[0] != pair[1]]
        return f"its bytes are not those that were downloaded (block {wrong[0]})" if wrong else ""


def _cache(folder: str, max_bytes: int | None, verify: bool) -> Cache:
    return Cache(folder, max_bytes=max_bytes, verify=verify)


def _modified(key: str) -> int:
    """Return the time that copies of one version bear: what was made of an earlier copy is of the next one, too."""
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


def _sync(folder: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
