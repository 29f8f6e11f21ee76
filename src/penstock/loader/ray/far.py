"""Manifests on nodes that do not have the file: their rows travel with the call that needs them.

    program:  Manifest -> a handle -> node: opened there, if the file is there and is the same
                                            else a `FarManifest`, whose rows come from the program
    a row that has not come -> `RowsWanted` -> answer "rows" -> the call is made again, with them

So a call is made twice at first; from then on the program sends the rows of a batch's indices along.
"""

from __future__ import annotations

import io
import operator
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from ray import cloudpickle

from penstock.errors import ManifestChangedError, ManifestIOError

if TYPE_CHECKING:
    from penstock.manifest import Manifest, Record

__all__ = ["FarManifest", "RowsWanted", "keep_rows", "pickle_with_handles", "rows_for"]

_KEPT = 200_000
"""Rows that a worker remembers: more than any batch has."""

_rows: OrderedDict[tuple[int, int], Record] = OrderedDict()
"""Of this worker's process, by number of the manifest and row."""


class RowsWanted(BaseException):
    """A worker lacks rows. No error of a sample, so nothing that catches those may catch it.

    Attributes:
        number: of the manifest, in the order in which the program has pickled them.
        rows: of it.
    """

    def __init__(self, number: int, rows: list[int]) -> None:
        super().__init__(number, rows)
        self.number = number
        self.rows = rows


class FarManifest:
    """Stands for a manifest whose file is elsewhere: single rows of it can be had."""

    def __init__(self, number: int, rows: int, fingerprint: str, why: str) -> None:
        self._number = number
        self._why = why
        self.rows = rows
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: Any) -> Record:
        number = operator.index(index)
        if not -self.rows <= number < self.rows:
            raise IndexError(f"row {index} is out of range for a manifest of {self.rows} rows")
        return self.records([number % self.rows])[0]

    def records(self, indices: Iterable[Any]) -> list[Record]:
        """As `Manifest.records`.

        Raises:
            RowsWanted: some of them have not come.
        """
        wanted = np.asarray(indices, dtype=np.int64).tolist()
        found = [_rows.get((self._number, row)) for row in wanted]
        missing = [row for row, record in zip(wanted, found, strict=True) if record is None]
        if missing:
            raise RowsWanted(self._number, missing)
        return [record for record in found if record is not None]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ManifestIOError(
            f"the manifest's file is not on this node, where only single rows of it can be had, not {name!r}; put the "
            f"file there. Opening it said: {self._why}"
        )


def pickle_with_handles(value: Any) -> tuple[bytes, list[Manifest]]:
    """A pickle in which manifests are handles, and these manifests by number."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    return stream.getvalue(), pickler.manifests


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, stream: io.BytesIO) -> None:
        from penstock.manifest import Manifest  # workers whose data set has none need no pyarrow

        super().__init__(stream, protocol=5)
        self._kind = Manifest
        self.manifests: list[Manifest] = []

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, self._kind):
            return super().reducer_override(value)
        self.manifests.append(value)
        _, (arguments, fingerprints, view) = value.__reduce__()
        handle = pickle.dumps((arguments, fingerprints, view))
        return _open, (handle, len(self.manifests) - 1, len(value), value.fingerprint)


def _open(handle: bytes, number: int, rows: int, fingerprint: str) -> Any:
    from penstock.manifest.table import _reopen

    try:
        return _reopen(*pickle.loads(handle))
    except (ManifestIOError, ManifestChangedError) as error:
        return FarManifest(number, rows, fingerprint, str(error))


def keep_rows(sent: bytes) -> None:
    """In a worker: rows that came with a call."""
    for number, records in pickle.loads(sent).items():
        for row, record in records.items():
            _rows[number, row] = record
            _rows.move_to_end((number, row))
    while len(_rows) > _KEPT:
        _rows.popitem(last=False)


def rows_for(manifests: list[Manifest], wanted: Mapping[int, Iterable[int]]) -> bytes:
    """In the program: rows, ready to be sent.

    Args:
        manifests: by number.
        wanted: by number, which rows.
    """
    found = {}
    for number, rows in wanted.items():
        unique = sorted(set(rows))
        found[number] = dict(zip(unique, manifests[number].records(unique), strict=True))
    return pickle.dumps(found)
