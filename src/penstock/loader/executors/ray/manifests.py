"""Manifests on nodes without the file: an actor on the program's node reads their rows.

program:  Manifest -> a handle -> node: opened there, if the same file exists
                                        else `RemoteRows` -> an actor on the program's node -> rows
"""

from __future__ import annotations

import hashlib
import io
import operator
import pickle
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray import cloudpickle
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.errors import ManifestChangedError, ManifestIOError
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.manifest import Manifest, Record

__all__ = ["RemoteRows", "pickle_with_handles"]

_ATTEMPTS = 5
_PAUSE_S = 1.0  # between attempts


@dataclass(eq=False)
class RemoteRows:
    """Represents a manifest whose file is on the program's node only, and provides single rows of it.

    Attributes:
        handle: the pickled manifest, which only says how to open it.
        rows: number of rows.
        fingerprint: the manifest's.
        home: id of the program's node.
        why: why the file cannot be opened here.
    """

    handle: bytes
    rows: int
    fingerprint: str
    home: str
    why: str

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: Any) -> Record:
        number = operator.index(index)
        if not -self.rows <= number < self.rows:
            raise IndexError(f"row {index} is out of range for a manifest of {counted(self.rows, 'row')}")
        return self.records([number % self.rows])[0]

    def records(self, indices: Iterable[Any]) -> list[Record]:
        """Return records, as `Manifest.records`."""
        rows = np.asarray(indices, dtype=np.int64).tolist()
        for _ in range(_ATTEMPTS):
            try:
                found: list[Record] = ray.get(self._reader.records.remote(rows))
                return found
            except (ActorDiedError, ActorUnavailableError) as error:
                # It ends with the worker that has started it. The next attempt starts another one.
                failure = error
                del self._reader
                time.sleep(_PAUSE_S)
        raise failure

    @cached_property
    def _reader(self) -> Any:
        """The actor, which all workers of the program share."""
        made = ray.remote(_Reader).options(
            name=f"penstock-rows-{hashlib.blake2b(self.handle, digest_size=16).hexdigest()}",
            get_if_exists=True,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self.home, soft=False),
        )
        return made.remote(self.handle)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ManifestIOError(
            f"the manifest's file is not on this node, so only single rows are available, not {name!r}; copy the file "
            f"to this node. Opening it failed: {self.why}"
        )


class _Reader:
    """The actor that reads the rows of a manifest on the program's node."""

    def __init__(self, handle: bytes) -> None:
        self._handle = handle
        self._manifest: Manifest | None = None

    def records(self, rows: list[int]) -> list[Record]:
        """Return records."""
        if self._manifest is None:
            self._manifest = pickle.loads(self._handle)
        return self._manifest.records(rows)


def pickle_with_handles(value: Any) -> bytes:
    """Return a pickle in which manifests are handles."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, value: Any) -> Any:
        from penstock.manifest import Manifest  # imported late: workers without manifests need no pyarrow

        if not isinstance(value, Manifest):
            return super().reducer_override(value)
        home = ray.get_runtime_context().get_node_id()
        return _open, (pickle.dumps(value), len(value), value.fingerprint, home)


def _open(handle: bytes, rows: int, fingerprint: str, home: str) -> Any:
    try:
        return pickle.loads(handle)
    except (ManifestIOError, ManifestChangedError) as error:
        return RemoteRows(handle, rows, fingerprint, home, str(error))
