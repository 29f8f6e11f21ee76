"""`Facts`: what a process learns about a shard by reading it, and how it is shared within the job.

facts.to_json(), Facts.of_json(told)    from rank to rank, see `penstock.shards.exchange`
told.write(facts)                       by the main process, once all shards are counted
told.read()                             by workers that started earlier
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
import weakref
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from penstock.storage import UNWRITABLE, cache_root, write_atomically
from penstock.storage.backend import Stat

__all__ = ["CountedFacts", "Facts", "ToldFacts"]

_DAY = 86_400.0


class Facts(NamedTuple):
    """Facts of a shard that was read: enough for ranks and workers that have not read it.

    Attributes:
        version: the version of the object.
        samples: the number of samples.
        digest: xxh3_128 of the content, as hex.
    """

    version: Stat
    samples: int
    digest: str

    @property
    def identity(self) -> str:
        """8 hex digits by which states name the content, or the version of JSON lines, which have no digest."""
        return _identity_of(self.digest or self.version.fingerprint)

    def to_json(self) -> list[Any]:
        """Return the facts as JSON types."""
        return [astuple(self.version), self.samples, self.digest]

    @classmethod
    def of_json(cls, told: Sequence[Any]) -> Facts:
        """Return the facts of a `to_json` result."""
        return cls(Stat(*told[0]), *told[1:])


class CountedFacts(NamedTuple):
    """Facts of a shard that was counted before: its samples, and the identity of its content as in `Facts`."""

    samples: int
    identity: str

    @classmethod
    def of(cls, samples: int, text: str) -> CountedFacts:
        """Return the facts of a shard whose digest or version is a text."""
        return cls(samples, _identity_of(text))


def _identity_of(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogateescape"))[:8]


class ToldFacts:
    """The facts of all shards in a file, shared by the processes of a machine that have this object.

    The process that created the object writes the file into the user's cache folder, and removes it when the process
    ends. Files of killed processes are removed after a day, when another process writes.
    """

    def __init__(self) -> None:
        self._path = cache_root() / f"shards-{os.getpid()}-{secrets.token_hex(8)}.json"
        self._pid = os.getpid()
        self._close: weakref.finalize[Any, Any] | None = None

    def write(self, facts: Sequence[Facts]) -> None:
        """Write the facts of all shards, once. If the disk is full or read-only, other processes read the shards."""
        if self._pid != os.getpid() or self._close is not None:
            return
        self._close = weakref.finalize(self, _remove, self._path, self._pid)
        _sweep(self._path.parent)
        try:
            with write_atomically(self._path) as file:
                file.write(json.dumps([one.to_json() for one in facts]).encode())
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise

    def read(self) -> list[Facts] | None:
        """Return the facts; None if they were not written, or were written on another machine."""
        try:
            return [Facts.of_json(one) for one in json.loads(self._path.read_bytes())]
        except OSError:
            return None

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_pid": 0, "_close": None}


def _remove(path: Path, pid: int) -> None:
    if pid == os.getpid():
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove files of killed processes."""
    for path in folder.glob("shards-*-*.json"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _DAY and not _is_alive(path.name.split("-")[1]):
                path.unlink()


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        return True
    return True
