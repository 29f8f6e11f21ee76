"""Manifests on nodes that do not have the file: their rows travel with the call that needs them.

    program:  Manifest -> a handle -> node: opened there, if the file is there and is the same
                                            else a `FarManifest`, whose rows come from the program
    a row that has not come -> `RowsWanted` -> answer "rows" -> the call is made again, with them

So a call is made twice at first; from then on the program sends the rows of a batch's indices along.
"""

from __future__ import annotations

import hashlib
import io
import operator
import pickle
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from ray import cloudpickle

from penstock.errors import ManifestChangedError, ManifestIOError
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.manifest import Manifest, Record

__all__ = ["FarManifest", "RowsWanted", "keep_rows", "pickle_with_handles", "rows_for"]

_KEPT = 200_000
"""Rows that a worker remembers: more than any batch has."""

_rows: OrderedDict[tuple[str, int], Record] = OrderedDict()
"""Of this worker's process, by key of the manifest and row."""

_keeping = threading.Lock()
"""Held to change them: calls to one worker overlap."""


class RowsWanted(BaseException):
    """A worker lacks rows. No error of a sample, so nothing that catches those may catch it.

    Attributes:
        key: of the manifest.
        rows: of it.
    """

    def __init__(self, key: str, rows: list[int]) -> None:
        super().__init__(key, rows)
        self.key = key
        self.rows = rows


class FarManifest:
    """Stands for a manifest whose file is elsewhere: single rows of it can be had."""

    def __init__(self, key: str, rows: int, fingerprint: str, why: str) -> None:
        self._key = key
        self._why = why
        self.rows = rows
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: Any) -> Record:
        number = operator.index(index)
        if not -self.rows <= number < self.rows:
            raise IndexError(f"row {index} is out of range for a manifest of {counted(self.rows, 'row')}")
        return self.records([number % self.rows])[0]

    def records(self, indices: Iterable[Any]) -> list[Record]:
        """As `Manifest.records`.

        Raises:
            RowsWanted: some of them have not come.
        """
        wanted = np.asarray(indices, dtype=np.int64).tolist()
        found = [_rows.get((self._key, row)) for row in wanted]
        missing = [row for row, record in zip(wanted, found, strict=True) if record is None]
        if missing:
            raise RowsWanted(self._key, missing)
        return [record for record in found if record is not None]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ManifestIOError(
            f"the manifest's file is not on this node, where only single rows of it can be had, not {name!r}; put the "
            f"file there. Opening it said: {self._why}"
        )


def pickle_with_handles(value: Any) -> tuple[bytes, dict[str, Manifest]]:
    """A pickle in which manifests are handles, and these manifests by key: two of them never have the same one, also in
    different pickles, since workers keep rows from pass to pass.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    return stream.getvalue(), pickler.manifests


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, stream: io.BytesIO) -> None:
        from penstock.manifest import Manifest  # workers whose data set has none need no pyarrow

        super().__init__(stream, protocol=5)
        self._kind = Manifest
        self.manifests: dict[str, Manifest] = {}

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, self._kind):
            return super().reducer_override(value)
        _, (arguments, fingerprints, view) = value.__reduce__()
        handle = pickle.dumps((arguments, fingerprints, view))
        key = hashlib.blake2b(handle, digest_size=16).hexdigest()
        self.manifests[key] = value
        return _open, (handle, key, len(value), value.fingerprint)


def _open(handle: bytes, key: str, rows: int, fingerprint: str) -> Any:
    from penstock.manifest.table import _reopen

    try:
        return _reopen(*pickle.loads(handle))
    except (ManifestIOError, ManifestChangedError) as error:
        return FarManifest(key, rows, fingerprint, str(error))


def keep_rows(sent: bytes) -> None:
    """In a worker: rows that came with a call."""
    came = pickle.loads(sent)
    with _keeping:
        for key, records in came.items():
            for row, record in records.items():
                _rows[key, row] = record
                _rows.move_to_end((key, row))
        while len(_rows) > _KEPT:
            _rows.popitem(last=False)


def rows_for(manifests: Mapping[str, Manifest], wanted: Mapping[str, Iterable[int]]) -> bytes:
    """In the program: rows, ready to be sent.

    Args:
        manifests: by key.
        wanted: by key, which rows.
    """
    found = {}
    for key, rows in wanted.items():
        unique = sorted(set(rows))
        found[key] = dict(zip(unique, manifests[key].records(unique), strict=True))
    return pickle.dumps(found)
