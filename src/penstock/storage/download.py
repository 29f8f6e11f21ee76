"""Download one object into a folder, so that a download killed at any byte can resume.

    NAME              the object's bytes, each block at its offset
    .journal          16 bytes for each complete block: its number and its xxh3, u64 each, little-endian
    .entry.json       the identity of the object; once complete, also the hashes of all blocks

A block is written to the file first, then to the journal. Blocks in the journal are hashed before they are trusted, so
a power cut that lost pages costs a few blocks, but never yields a wrong byte.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import xxhash

from penstock.errors import StorageUnavailableError
from penstock.storage.backend import Cancel, Stat
from penstock.storage.cache import write_atomically
from penstock.storage.urls import shown
from penstock.threads import Daemon

__all__ = ["ENTRY", "PIECE", "Download", "fill", "hash_blocks", "read_entry", "write_entry"]

ENTRY, JOURNAL = ".entry.json", ".journal"
PIECE = 4 << 20  # bytes of a block, the unit of hashing and fetching
_RECORD = struct.Struct("<QQ")
_GRACE = 10.0


class Download(Protocol):
    """The interface of an object to download: see `penstock.storage.remote.RemoteSource`."""

    url: str
    size: int
    fingerprint: str
    stat: Stat
    storage: Any

    @property
    def given_up(self) -> bool:
        """Whether this process has cancelled the download."""

    def fetch(self, begin: int, end: int, cancel: Cancel | None = None, data: bytearray | None = None) -> bytearray:
        """Return the bytes ``[begin, end)``."""

    def fetch_into(self, write: Any, begin: int, end: int, cancel: Cancel | None = None) -> None:
        """Fetch the same bytes, and pass them chunk by chunk to ``write(position, chunk)``."""


def read_entry(folder: Path) -> dict[str, Any] | None:
    """Return the entry of a folder; None if it is unreadable, incomplete, or of another version."""
    try:
        entry = json.loads((folder / ENTRY).read_bytes())
    except (OSError, ValueError):
        return None
    sound = isinstance(entry, dict) and entry.get("version") == 1 and isinstance(entry.get("size"), int)
    return entry if sound and isinstance(entry.get("name"), str) and "/" not in entry["name"] else None


def write_entry(folder: Path, entry: dict[str, Any], *, sync: bool = True) -> None:
    """Write the entry of a folder atomically; without ``sync`` a power cut may lose it."""
    with write_atomically(folder / ENTRY, sync=sync) as out:
        out.write(json.dumps(entry).encode())


def hash_blocks(descriptor: int, size: int) -> list[str]:
    """Return the xxh3 of each block of an open file, as hex."""
    pieces = ((begin, min(PIECE, size - begin)) for begin in range(0, size, PIECE))
    return [xxhash.xxh3_64_hexdigest(os.pread(descriptor, length, begin)) for begin, length in pieces]


def fill(source: Download, folder: Path, name: str, progress: Callable[[int], object]) -> list[str]:
    """Download ``source`` into ``folder/name``, resuming an interrupted download.

    Returns:
        The xxh3 of each block, as hex.

    Raises:
        StorageError: as `transfer`. Complete blocks stay, for the next attempt.
        OSError: the disk fails or is full.

    The caller holds the lock of this folder. Memory: one block per parallel request (`Storage.parallel`).
    """
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        os.ftruncate(descriptor, source.size)
        if source.stat.ranged and source.size <= PIECE:
            hashes = _fill_one(source, descriptor, progress)
        elif source.stat.ranged:
            hashes = _fill_blocks(source, folder, descriptor, progress)
        else:
            hashes = _fill_in_order(source, descriptor, progress)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    (folder / JOURNAL).unlink(missing_ok=True)
    return hashes


def _fill_one(source: Download, descriptor: int, progress: Callable[[int], object]) -> list[str]:
    """Download an object of at most one block, without a journal."""
    data = source.fetch(0, source.size)
    _write_all(descriptor, data, 0)
    progress(source.size)
    return [xxhash.xxh3_64_hexdigest(data)] if data else []


def _fill_in_order(source: Download, descriptor: int, progress: Callable[[int], object]) -> list[str]:
    """Download from a server without ranges: one answer from start to end, hashed from the file afterwards."""
    guard, cancel = threading.Lock(), Cancel()

    def write(position: int, piece: bytes | memoryview) -> None:
        with guard:
            if not cancel.is_set():
                _write_all(descriptor, piece, position)
        progress(len(piece))

    try:
        source.fetch_into(write, 0, source.size, cancel)
    finally:
        with guard:  # an abandoned answer must not write to a later file with the same descriptor
            cancel.set()
    return hash_blocks(descriptor, source.size)


def _fill_blocks(source: Download, folder: Path, descriptor: int, progress: Callable[[int], object]) -> list[str]:
    count = -(-source.size // PIECE)
    done = _recover(folder / JOURNAL, descriptor, source.size)
    progress(sum(min(PIECE, source.size - number * PIECE) for number in done))
    missing = iter([number for number in range(count) if number not in done])
    guard, cancel = threading.Lock(), Cancel()
    writing: list[
        threading.Lock
    ] = []  # one lock per thread, held while it writes, so that threads do not wait for each other
    results: queue.SimpleQueue[tuple[int, int] | BaseException] = queue.SimpleQueue()
    with open(folder / JOURNAL, "ab", buffering=0) as journal:

        def work(_: Daemon) -> None:
            mine = threading.Lock()
            with guard:
                writing.append(mine)
            buffer = bytearray(PIECE)  # reused for all blocks: fresh memory costs a page fault for every 4 KiB
            try:
                while True:
                    with guard:
                        number = next(missing, None)
                    if number is None or cancel.is_set():
                        return
                    begin = number * PIECE
                    end = min(begin + PIECE, source.size)
                    data = source.fetch(begin, end, cancel, buffer if end - begin == PIECE else None)
                    value = xxhash.xxh3_64_intdigest(data)
                    with mine:
                        if cancel.is_set():  # the files may have been closed
                            return
                        _write_all(descriptor, data, begin)
                        _start_writing_back(descriptor, begin, end - begin)
                        journal.write(_RECORD.pack(number, value))  # one append, which is atomic
                    results.put((number, value))
            except BaseException as error:
                results.put(error)

        left = count - len(done)
        patience = source.storage.patience.deadline + _GRACE
        try:
            for _ in range(min(source.storage.parallel, left)):
                Daemon(work, name="penstock-download", wake=cancel.set)
            for _ in range(left):
                result = results.get(timeout=patience)
                if isinstance(result, BaseException):
                    try:
                        raise result
                    finally:
                        del result  # its traceback refers to this frame, and to the open files of the callers
                done[result[0]] = result[1]
                progress(min(PIECE, source.size - result[0] * PIECE))
        except queue.Empty:
            raise StorageUnavailableError(
                f"no bytes of {shown(source.url)} and no error arrived for {patience:g} s; giving up"
            ) from None
        finally:
            cancel.set()
            with guard:
                locks = list(writing)
            for lock in locks:
                with lock:
                    pass  # writes in progress are done, and no new one starts
    return [f"{done[number]:016x}" for number in range(count)]


def _recover(journal: Path, descriptor: int, size: int) -> dict[int, int]:
    """Return the blocks that an earlier process completed, verified by hash; cut the journal to whole records."""
    try:
        records = journal.read_bytes()
    except FileNotFoundError:
        return {}
    whole = len(records) // _RECORD.size * _RECORD.size
    if whole < len(records):
        os.truncate(journal, whole)
    found: dict[int, int] = {}
    for number, value in _RECORD.iter_unpack(records[:whole]):
        begin = number * PIECE
        if begin < size:
            data = os.pread(descriptor, min(PIECE, size - begin), begin)
            if xxhash.xxh3_64_intdigest(data) == value:
                found[number] = value
    return found


def _start_writing_back(descriptor: int, begin: int, size: int) -> None:
    """Ask the system to start writing its cached pages, so that the final sync waits less."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # only advice to the system
            os.posix_fadvise(descriptor, begin, size, os.POSIX_FADV_DONTNEED)


def _write_all(descriptor: int, data: bytes | bytearray | memoryview, position: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(descriptor, view, position)
        position, view = position + written, view[written:]
