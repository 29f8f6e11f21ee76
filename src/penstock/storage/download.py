"""Download one object into a folder, so that a download killed at any byte can resume.

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
from pathlib import Path
from typing import Any, Protocol

import xxhash

from penstock.storage.backend import Stat
from penstock.storage.cache import write_atomically

__all__ = ["ENTRY", "PIECE", "Download", "fill", "hash_file", "new_entry", "read_entry", "write_entry"]

ENTRY = ".entry.json"
PIECE = 4 << 20  # bytes after which a download is noted, and which are hashed at a time
_VERSION = 2


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

    def fetch_into(self, write: Callable[[int, bytes | memoryview], object], begin: int, end: int) -> None:
        """Fetch the bytes ``[begin, end)``, and pass them in order, piece by piece, to ``write(position, piece)``."""


def new_entry(source: Download, url: str, name: str) -> dict[str, Any]:
    """Return the entry of a download that has not begun."""
    entry = {"version": _VERSION, "url": url, "name": name, "size": source.size, "fingerprint": source.fingerprint}
    return entry | {"done": 0, "xxh3": ""}


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
        out.write(json.dumps(entry).encode())


def hash_file(descriptor: int, size: int) -> xxhash.xxh3_64:
    """Return the xxh3 of the first bytes of an open file."""
    found = xxhash.xxh3_64()
    for begin in range(0, size, PIECE):
        found.update(os.pread(descriptor, min(PIECE, size - begin), begin))
    return found


def fill(source: Download, folder: Path, entry: dict[str, Any], progress: Callable[[int], object]) -> None:
    """Download ``source`` into its folder, and complete the entry. A broken download begins at its last whole part.

    Raises:
        StorageError: as `transfer`. What is complete stays, for the next attempt.
        OSError: the disk fails or is full.

    The caller holds the lock of this folder. Memory: one block per parallel request (`Storage.parallel`).
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
            _write_all(descriptor, piece, position)
            hashed.update(piece)
            progress(len(piece))
            if position + len(piece) >= done + PIECE:
                _start_writing_back(descriptor, done, position + len(piece) - done)
                done = position + len(piece)
                write_entry(folder, entry | {"done": done, "xxh3": hashed.hexdigest()}, sync=False)

        if done < source.size:
            source.fetch_into(write, done, source.size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    write_entry(folder, entry | {"done": source.size, "xxh3": hashed.hexdigest()})


def _start_writing_back(descriptor: int, begin: int, size: int) -> None:
    """Ask the system to start writing its cached pages, so that the final sync waits less."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # only advice to the system
            os.posix_fadvise(descriptor, begin, size, os.POSIX_FADV_DONTNEED)


def _write_all(descriptor: int, data: bytes | memoryview, position: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(descriptor, view, position)
        position, view = position + written, view[written:]
