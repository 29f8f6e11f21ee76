"""Manifests on nodes without the file: rows are sent with the call that needs them.

    program:  Manifest -> a handle -> node: opened there, if the same file exists
                                            else a `RemoteRows`, whose rows the program sends
    a missing row -> `RowsWanted` -> answer "rows" -> the call is repeated with the rows

So the first call is made twice; from then on, the program sends the rows of a batch's indices along.
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

__all__ = ["RemoteRows", "RowsWanted", "keep_rows", "pickle_with_handles", "rows_for"]

_KEPT = 200_000
"""Rows that a worker caches: more than any batch has."""

_rows: OrderedDict[tuple[str, int], Record] = OrderedDict()
"""The cached rows of this worker's process, by manifest key and row."""

_keeping = threading.Lock()
"""Protects the cached rows, since calls to a worker overlap."""


class RowsWanted(BaseException):
    """A worker lacks rows. A BaseException, so that handlers of sample errors do not catch it.

    Attributes:
        key: the manifest's key.
        rows: the missing rows.
    """

    def __init__(self, key: str, rows: list[int]) -> None:
        super().__init__(key, rows)
        self.key = key
        self.rows = rows


class RemoteRows:
    """Represents a manifest whose file is elsewhere, and provides single rows of it."""

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
        """Return records, as `Manifest.records`.

        Raises:
            RowsWanted: some rows are missing.
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
            f"the manifest's file is not on this node, so only single rows are available, not {name!r}; copy the file "
            f"to this node. Opening it failed: {self._why}"
        )


def pickle_with_handles(value: Any) -> tuple[bytes, dict[str, Manifest]]:
    """Return a pickle in which manifests are handles, and these manifests by key.

    Keys are unique across pickles, since workers cache rows between epoch iterators.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    return stream.getvalue(), pickler.manifests


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, stream: io.BytesIO) -> None:
        from penstock.manifest import Manifest  # imported late: workers without manifests need no pyarrow

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
        return RemoteRows(key, rows, fingerprint, str(error))


def keep_rows(sent: bytes) -> None:
    """Cache rows that were sent with a call; runs in a worker."""
    came = pickle.loads(sent)
    with _keeping:
        for key, records in came.items():
            for row, record in records.items():
                _rows[key, row] = record
                _rows.move_to_end((key, row))
        while len(_rows) > _KEPT:
            _rows.popitem(last=False)


def rows_for(manifests: Mapping[str, Manifest], wanted: Mapping[str, Iterable[int]]) -> bytes:
    """Return rows packed for sending; runs in the program.

    Args:
        manifests: manifests by key.
        wanted: rows by key.
    """
    found = {}
    for key, rows in wanted.items():
        unique = sorted(set(rows))
        found[key] = dict(zip(unique, manifests[key].records(unique), strict=True))
    return pickle.dumps(found)
