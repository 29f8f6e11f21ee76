"""`KeptRows`: the rows that a filter keeps, with look-ups from ordinals to rows and back.

The ordinal of a kept row is its number among the kept rows. The stored form::

    header     64 bytes: magic, version, form, rows, kept rows, xxh3_128 of the set
    "rows"     one uint32 (int64 above 2**32 rows) for each kept row
    "bits"     a `penstock.order.bitmap.Bitmap`: bits, counts by block, hints

The smaller form is used: "rows" if fewer than about 3.5 % of the rows are kept, else "bits". Rows in any other order
than ascending, or with repeats (as torch's ``Subset`` accepts), are stored as "rows". More than 64 KiB go to a file in
the user's cache, which all processes of a machine map: private memory does not depend on the number of rows.
"""

from __future__ import annotations

import io
import operator
import shutil
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, BinaryIO, SupportsIndex, overload

import numpy as np
import numpy.typing as npt
import xxhash

from penstock import storage
from penstock.errors import ConfigError, DataFileError
from penstock.order.bitmap import BLOCK, Bitmap
from penstock.order.permutation import Indices, normalise
from penstock.storage import UNWRITABLE, file_lock

__all__ = ["CHUNK", "KeptRows", "Mask"]

Mask = npt.NDArray[np.bool_]

CHUNK = 1 << 20
"""Rows of a mask processed at once: a whole number of blocks."""

_HEADER = struct.Struct("<8sIIqq16s16x")
_MAGIC, _VERSION = b"PSTKKEPT", 1
_ASCENDING, _BITS, _ANY_ORDER = range(3)
_IN_MEMORY = 1 << 16  # bytes; larger sets are stored in a file
_TRAVELS = 32 << 20  # bytes; pickles of larger sets do not hold the rows


class KeptRows:
    """The rows of a table that a filter keeps.

    Args:
        data: header and body of the stored form, uint8.
        path: the mapped file; None if the rows are in memory.

    Use `of_mask`, `of_rows` or `of_masks` to make one. ``kept[i]`` returns the row of an ordinal, or the rows of an
    array of ordinals, int64 of the same shape; `ordinals` is the inverse. Cost: 0.1 to 0.3 microseconds per look-up in
    large requests, a few microseconds for a single one; no private memory if there is a file.

    >>> kept = KeptRows.of_mask(np.array([True, False, True, True]))
    >>> kept[np.array([0, 2])].tolist(), kept.ordinals(np.array([3, 1])).tolist()
    ([0, 3], [2, -1])
    """

    def __init__(self, data: npt.NDArray[np.uint8], path: Path | None = None) -> None:
        magic, version, form, self.rows, self._count, self._digest = _HEADER.unpack(data[: _HEADER.size].tobytes())
        if magic != _MAGIC or version != _VERSION:
            raise DataFileError(
                f"{path} is not a file of filtered rows, or another version of Penstock wrote it: remove it"
            )
        self._data, self.path = data, path
        self._bitmap: Bitmap | None = None
        body = data[_HEADER.size :]
        if form == _BITS:
            blocks = -(-self.rows // BLOCK)
            bits, before = body[: blocks * BLOCK // 8], body[blocks * BLOCK // 8 :]
            counts, hints = before[: 8 * (blocks + 1)], before[8 * (blocks + 1) :]
            self._bitmap = Bitmap(bits.view(np.uint64), counts.view(np.int64), hints.view(np.uint32))
        else:
            self._rows = body.view(_row_type(self.rows))
        self._ascending = form == _ASCENDING

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

    @overload
    def __getitem__(self, ordinals: int) -> int: ...
    @overload
    def __getitem__(self, ordinals: npt.NDArray[Any] | Sequence[int]) -> Indices: ...
    def __getitem__(self, ordinals: Any) -> Any:
        if isinstance(ordinals, SupportsIndex) and not isinstance(ordinals, np.ndarray):
            place = operator.index(ordinals)
            if not -self._count <= place < self._count:
                raise IndexError(f"index {place} is out of range for {self._count} kept rows")
            place %= self._count
            return int(self._rows[place]) if self._bitmap is None else self._bitmap.select_one(place)
        return self.find(normalise(ordinals, self._count))

    def find(self, ordinals: Indices) -> Indices:
        """Return the rows of an int64 array of valid ordinals."""
        if self._bitmap is not None:
            return self._bitmap.select(ordinals)
        return self._rows.take(ordinals).astype(np.int64)

    def ordinals(self, rows: Indices) -> Indices:
        """Return the ordinals of rows: int64 of shape (n,); -1 for a row that is not kept.

        For a row that is kept twice, this is the first ordinal. If the kept rows are not ascending, each row costs a
        pass over them.
        """
        if self._bitmap is not None:
            return self._bitmap.rank(rows)
        if self._ascending:
            at = self._rows.searchsorted(rows)
            found = self._rows.take(np.minimum(at, max(self._count - 1, 0))) if self._count else np.full_like(rows, -1)
            return np.where(found == rows, at, -1)
        places = [np.flatnonzero(self._rows == row)[:1] for row in rows.tolist()]
        return np.array([int(place[0]) if len(place) else -1 for place in places], np.int64)

    def before(self, rows: Indices) -> Indices | None:
        """Return the number of kept rows below each of these rows; None if the kept rows are not ascending."""
        if self._bitmap is None and not self._ascending:
            return None
        low, high = np.zeros(len(rows), np.int64), np.full(len(rows), self._count, np.int64)
        while (searching := low < high).any():
            middle = (low + high) // 2
            below = searching & (self.find(np.minimum(middle, self._count - 1)) < rows)
            low, high = np.where(below, middle + 1, low), np.where(searching & ~below, middle, high)
        return low

    def places_of(self, rows: Indices) -> Indices:
        """Return all ordinals of these rows, ascending: int64. Costs the same as `ordinals`."""
        if self._bitmap is not None or self._ascending:
            places = self.ordinals(rows)
            return np.sort(places[places >= 0])
        return np.flatnonzero(np.isin(self._rows, rows)).astype(np.int64)

    def between(self, begin: int, end: int) -> KeptRows:
        """Return the kept rows from ``begin`` to ``end``, counted from ``begin``."""
        if not (self._ascending or self._bitmap):
            rows = self.find(np.arange(len(self)))
            return KeptRows.of_rows(rows[(rows >= begin) & (rows < end)] - begin, end - begin)
        return KeptRows.of_masks(lambda: self._masks(begin, end), end - begin)

    def _masks(self, begin: int, end: int) -> Iterator[Mask]:
        for start in range(begin, end, CHUNK):
            rows = np.arange(start, min(start + CHUNK, end))
            yield self.ordinals(rows) >= 0

    # Construction.

    @classmethod
    def of_mask(cls, mask: Mask) -> KeptRows:
        """Return the kept rows of a mask: bool of shape (rows,)."""
        return cls.of_masks(lambda: _in_chunks(mask), len(mask))

    @classmethod
    def of_rows(cls, rows: npt.NDArray[np.integer], of: int) -> KeptRows:
        """Return the kept rows from an array of rows of a table of ``of`` rows; negative ones count from the end.

        Raises:
            IndexError: a row is outside the table.
        """
        kind = _row_type(of)
        checked = [normalise(rows[at : at + CHUNK], of) for at in range(0, len(rows), CHUNK)]
        rows = np.concatenate([chunk.astype(kind) for chunk in checked]) if checked else np.empty(0, kind)
        if (rows[1:] > rows[:-1]).all():
            return cls.of_masks(lambda: _masks_of(rows, of), of)
        digest = xxhash.xxh3_128(struct.pack("<q", of) + rows.astype(np.int64).tobytes()).digest()
        header = _HEADER.pack(_MAGIC, _VERSION, _ANY_ORDER, of, len(rows), digest)
        return cls._kept(digest.hex(), header + rows.tobytes())

    @classmethod
    def of_masks(cls, masks: Callable[[], Iterable[Mask]], rows: int, *, name: str | None = None) -> KeptRows:
        """Return the kept rows of a mask in chunks.

        Args:
            masks: a function that returns an iterator over the chunks: `CHUNK` rows each, the last one with the rest.
            rows: number of rows of the table.
            name: identity of the mask, if it is expensive to compute: a file of this name in the cache is used instead.
        """
        if name is None:
            name = _digest(masks(), rows).hex()
        path = _path(name)
        if path.exists():
            return cls._mapped(path)
        with tempfile.TemporaryFile() as bits:
            header, write = _written(bits, masks(), rows)
            made = io.BytesIO()
            if _size(header) <= _IN_MEMORY:
                write(made)
                return cls._kept(name, made.getvalue())
            kept = _in_cache(name, write)
            if kept is not None:
                return cls._mapped(kept)
            write(made)
            return cls(np.frombuffer(made.getvalue(), np.uint8))

    @classmethod
    def _kept(cls, name: str, data: bytes) -> KeptRows:
        path = None if len(data) <= _IN_MEMORY else _in_cache(name, lambda out: out.write(data))
        return cls(np.frombuffer(data, np.uint8)) if path is None else cls._mapped(path)

    @classmethod
    def _mapped(cls, path: Path) -> KeptRows:
        return cls(np.memmap(path, np.uint8, "r"), path)

    # Pickling.

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptRows:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:
            return KeptRows, (self._data,)
        # Workers on this machine map the file. Other machines do not have it.
        travels = get_spawning_popen() is None and len(self._data) <= _TRAVELS
        return _restored, (self.path, self._digest, self._data.tobytes() if travels else None)


def _restored(path: Path, digest: bytes, data: bytes | None) -> KeptRows:
    """Return kept rows from a pickle: from the file, or from the pickle if the file is missing."""
    if path.exists():
        found = KeptRows._mapped(path)
        if found._digest == digest:
            return found
    if data is None:
        raise DataFileError(
            f"{path}, the file with the rows of a filter, is missing on this machine or has other rows, and the rows "
            "are too many to be pickled: set XDG_CACHE_HOME to a folder that all machines share, or pass Subset the "
            "path of an .npy file there"
        )
    return KeptRows._kept(digest.hex(), data)


def _row_type(rows: int) -> np.dtype[Any]:
    return np.dtype("<u4" if rows <= 1 << 32 else "<i8")


def _in_chunks(mask: Mask) -> Iterator[Mask]:
    return (mask[at : at + CHUNK] for at in range(0, len(mask), CHUNK))


def _masks_of(rows: npt.NDArray[np.integer], of: int) -> Iterator[Mask]:
    """Yield the mask of ascending rows, in chunks."""
    for begin in range(0, of, CHUNK):
        low, high = rows.searchsorted([begin, begin + CHUNK])
        mask = np.zeros(min(CHUNK, of - begin), np.bool_)
        mask[rows[low:high].astype(np.int64) - begin] = True
        yield mask


def _digest(masks: Iterable[Mask], rows: int) -> bytes:
    digest = xxhash.xxh3_128(struct.pack("<q", rows))
    for mask in masks:
        digest.update(np.packbits(mask, bitorder="little").tobytes())
    return digest.digest()


def _written(bits: BinaryIO, masks: Iterable[Mask], rows: int) -> tuple[bytes, Callable[[BinaryIO], None]]:
    """Write a mask's bits to a temporary file; return the header of the smaller form, and a function that writes that
    form to a file.
    """
    digest, before, blocks, seen = xxhash.xxh3_128(struct.pack("<q", rows)), 0, [np.zeros(1, np.int64)], 0
    for mask in masks:
        words, counts = Bitmap.arrays(mask, before)
        bits.write(words.tobytes())
        digest.update(np.packbits(mask, bitorder="little").tobytes())
        blocks.append(counts[1:])
        before, seen = int(counts[-1]), seen + len(mask)
    if seen != rows:
        raise ConfigError(f"a mask of {seen} rows does not fit a dataset of {rows}: pass one value for each row")
    counts = np.concatenate(blocks)
    hints = Bitmap.hints_of(counts)
    as_rows = before * _row_type(rows).itemsize < bits.tell() + counts.nbytes + hints.nbytes
    header = _HEADER.pack(_MAGIC, _VERSION, _ASCENDING if as_rows else _BITS, rows, before, digest.digest())

    def write(out: BinaryIO) -> None:
        out.write(header)
        bits.seek(0)
        if not as_rows:
            shutil.copyfileobj(bits, out, 1 << 20)
            out.write(counts.tobytes())
            out.write(hints.tobytes())
            return
        for begin in range(0, rows, CHUNK):
            piece = np.unpackbits(np.frombuffer(bits.read(CHUNK // 8), np.uint8), bitorder="little")
            out.write((np.flatnonzero(piece) + begin).astype(_row_type(rows)).tobytes())

    return header, write


def _size(header: bytes) -> int:
    """Return the approximate size in bytes of the form in a header."""
    _, _, form, rows, kept, _ = _HEADER.unpack(header)
    return int(rows // 7 if form == _BITS else kept * _row_type(rows).itemsize)


def _path(name: str) -> Path:
    return storage.kept_path("filters", f"{name}.kept")


def _in_cache(name: str, write: Callable[[BinaryIO], object]) -> Path | None:
    """Return the file of this name in the cache, which one process writes while others wait; None if it cannot be
    written.
    """
    path = _path(name)
    try:
        path.parent.mkdir(exist_ok=True)
        with file_lock(path):
            if not path.exists():
                with storage.write_kept(path) as out:
                    write(out)
        return path
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        warnings.warn(
            f"{path}: the rows of a filter cannot be stored there ({error.strerror}), so each process holds them in "
            "memory. Free space, or set XDG_CACHE_HOME to another folder",
            stacklevel=2,
        )
        return None
