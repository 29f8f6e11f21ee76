"""`KeptRows`: the rows that a filter keeps, as one array of row numbers.

The ordinal of a kept row is its number among the kept rows. The array, after 40 bytes of header (whether the rows
ascend, rows, kept rows, xxh3_128 of them), takes 4 bytes per kept row, 8 from 2**31 rows on. More than 64 KiB go to a
file in the user's cache, which all processes of a machine map: private memory does not depend on the number of rows.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import DataFileError
from penstock.order.permutation import Indices, normalise
from penstock.storage.derived import array_in_memory, derived_array

__all__ = ["CHUNK", "KeptRows"]

CHUNK = 1 << 20
"""Rows processed at once."""

_HEADER = struct.Struct("<?7xqq16s")
_IN_MEMORY = 1 << 16  # bytes; larger arrays are stored in a file
_TRAVELS = 512 << 20  # bytes; pickles of larger arrays do not hold the rows


class KeptRows:
    """The rows of a table that a filter keeps.

    Args:
        data: header and rows of the stored form, uint8.
        name: identity of the rows, under which the user's cache has them.

    Use `of_mask`, `of_rows` or `of_chunks` to make one. ``kept[i]`` returns the row of an ordinal, or the rows of an
    array of ordinals, int64 of the same shape; `places_of` is the inverse. Cost: 0.01 to 0.05 microseconds per look-up
    in large requests; no private memory if there is a file.

    >>> kept = KeptRows.of_mask(np.array([True, False, True, True]))
    >>> kept[np.array([0, 2])].tolist(), kept.places_of(np.array([3, 1])).tolist()
    ([0, 3], [2])
    """

    def __init__(self, data: npt.NDArray[np.uint8], name: str = "") -> None:
        self._ascending, self.rows, self._count, self._digest = _HEADER.unpack(data[: _HEADER.size].tobytes())
        self._name = name
        self.path = Path(str(data.filename)) if isinstance(data, np.memmap) else None
        """The mapped file; None if the rows are in memory."""
        # Indexing is slower for np.memmap than for np.ndarray.
        self._data = np.asarray(data)
        self._rows = self._data[_HEADER.size :].view(_row_type(self.rows))

    def __len__(self) -> int:
        return int(self._count)

    def __repr__(self) -> str:
        return f"<KeptRows: {self._count:,} of {self.rows:,} rows>"

    @property
    def fingerprint(self) -> str:
        """Identity of the rows: the same for a mask and for an ascending array of them."""
        return str(self._digest.hex())

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, in the file that is mapped or in memory."""
        return int(self._data.nbytes)

    def __getitem__(self, ordinals: Any) -> Any:
        rows = self.find(normalise(ordinals, self._count))
        return rows if rows.ndim else int(rows)

    def find(self, ordinals: Indices) -> Indices:
        """Return the rows of an int64 array of valid ordinals."""
        return self._rows.take(ordinals).astype(np.int64)

    def places_of(self, rows: Indices) -> Indices:
        """Return all ordinals of these rows, ascending: int64. Binary search if the kept rows ascend, else one pass."""
        if not self._ascending:
            return np.flatnonzero(np.isin(self._rows, rows)).astype(np.int64)
        # NumPy would copy the whole array if the types differed.
        rows = np.sort(rows).astype(self._rows.dtype)
        found = self._rows.searchsorted(rows)
        return found[found < self._rows.searchsorted(rows, "right")].astype(np.int64)

    def between(self, begin: int, end: int) -> KeptRows:
        """Return the kept rows from ``begin`` to ``end``, counted from ``begin``."""
        rows = self._rows
        if self._ascending:
            low, high = rows.searchsorted(np.array([begin, end], rows.dtype))
            rows = rows[low:high]

        def chunks() -> Iterator[npt.NDArray[np.integer]]:
            for chunk in _cut(rows):
                yield chunk[(chunk >= begin) & (chunk < end)] - begin

        return KeptRows.of_chunks(chunks, end - begin)

    @classmethod
    def of_mask(cls, mask: npt.NDArray[np.bool_]) -> KeptRows:
        """Return the kept rows of a mask: bool of shape (rows,)."""
        return cls.of_chunks(lambda: (np.flatnonzero(part) + k * CHUNK for k, part in enumerate(_cut(mask))), len(mask))

    @classmethod
    def of_rows(cls, rows: npt.NDArray[np.integer], of: int) -> KeptRows:
        """Return the kept rows from an array of rows of a table of ``of`` rows; negative ones count from the end.

        Raises:
            IndexError: a row is outside the table.
        """
        return cls.of_chunks(lambda: (normalise(part, of) for part in _cut(rows)), of)

    @classmethod
    def of_chunks(
        cls, chunks: Callable[[], Iterable[npt.NDArray[np.integer]]], of: int, *, name: str | None = None
    ) -> KeptRows:
        """Return the kept rows from arrays of rows.

        Args:
            chunks: returns the rows, part by part. It may be called twice.
            of: number of rows of the table.
            name: identity of the rows, if they are expensive to compute: they are always stored, and a file of this
                name in the cache is used instead.
        """
        write = partial(_write, chunks, of)
        if name is None:
            with open(os.devnull, "wb") as nowhere:
                *_, count, digest = _HEADER.unpack(write(nowhere))
            name = digest.hex()
            if count * _row_type(of).itemsize <= _IN_MEMORY:
                return cls(array_in_memory(np.uint8, write))
        return cls(derived_array("filters", name, np.uint8, write, "the rows of a filter"), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptRows:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:
            return KeptRows, (self._data,)
        # Workers on this machine map the file. Other machines do not have it.
        travels = get_spawning_popen() is None and self.nbytes <= _TRAVELS
        return _restored, (self._name, self._data.tobytes() if travels else None)


def _restored(name: str, data: bytes | None) -> KeptRows:
    """Return kept rows from a pickle: from the file, or from the pickle if the file is missing."""

    def write(out: BinaryIO) -> None:
        if data is None:
            raise DataFileError(
                "the file with the rows of a filter is missing on this machine, and the rows are too many to be "
                "pickled: set XDG_CACHE_HOME to a folder that all machines share"
            )
        out.write(data)

    return KeptRows(derived_array("filters", name, np.uint8, write, "the rows of a filter"), name)


def _row_type(rows: int) -> np.dtype[Any]:
    return np.dtype("<i4" if rows < 1 << 31 else "<i8")


def _cut(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    return (array[at : at + CHUNK] for at in range(0, len(array), CHUNK))


def _write(chunks: Callable[[], Iterable[npt.NDArray[np.integer]]], of: int, out: BinaryIO) -> bytes:
    """Write the stored form into a file; return the header."""
    begin = out.tell()
    digest, count, ascending, last = xxhash.xxh3_128(struct.pack("<q", of)), 0, True, -1
    out.write(bytes(_HEADER.size))
    for chunk in chunks():
        rows = chunk.astype(_row_type(of))
        out.write(rows.data)
        digest.update(rows.data)
        if len(rows):
            ascending = ascending and bool(last < rows[0] and (rows[1:] > rows[:-1]).all())
            count, last = count + len(rows), int(rows[-1])
    header = _HEADER.pack(ascending, of, count, digest.digest())
    out.seek(begin)
    out.write(header)
    return header
