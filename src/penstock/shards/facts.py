"""`Facts`: what one process learns of a shard by reading it, and how others of the job hear of that.

facts.to_json(), Facts.of_json(told)    from rank to rank, see `penstock.shards.exchange`
told.write(facts)                       by the process that plans, once all shards are counted
told.read()                             by processes that make batches, and began before that
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

from penstock.storage import UNWRITABLE, cache_root, write_atomically
from penstock.storage.backend import Stat

__all__ = ["Facts", "ToldFacts"]

_DAY = 86_400.0


class Facts(NamedTuple):
    """What is known of a shard once somebody has read it: enough for ranks and workers that have not.

    Attributes:
        version: of the object.
        samples: how many there are.
        digest: xxh3_128 of the content, as hex.
    """

    version: Stat
    samples: int
    digest: str

    def to_json(self) -> list[Any]:
        """Return them as JSON's types."""
        return [astuple(self.version), self.samples, self.digest]

    @classmethod
    def of_json(cls, told: Sequence[Any]) -> Facts:
        """Return the facts that `to_json` has made this of."""
        return cls(Stat(*told[0]), *told[1:])


class ToldFacts:
    """The facts of all shards in a file, which the processes of a machine find by this object.

    The one that made the object writes it, into the user's cache folder; the file goes when that process ends. What a
    process has left that was killed goes after a day, when another one writes.
    """

    def __init__(self) -> None:
        self._path = cache_root() / f"shards-{os.getpid()}-{secrets.token_hex(8)}.json"
        self._pid = os.getpid()
        self._close: weakref.finalize[Any, Any] | None = None

    def write(self, facts: Sequence[Facts]) -> None:
        """Tell the facts of all shards, unless they were told. Where the disk takes no file, others find out."""
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
        """Return what was told; None where nothing was, or on another machine."""
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
    """Remove what processes have left that were killed."""
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
