"""`ClassIndex`: the rows of a table by class, such as documents by length, in one mapped file.

    keys     0 2 1 0 2 2        the class of each row
    rows     0 3 | 2 | 1 4 5    rows of class 0, of class 1, ...; ascending within a class
    starts   0     2   3     6

An order over classes is arithmetic on ``starts``, and ``rows`` maps its positions to rows. An external counting sort,
two passes over the keys, writes the file once; all processes of a machine share it.

Memory: the file takes 4 bytes a row (8 from 2**32 rows on). Building it takes 10 MB and 30 bytes a class, for any
number of rows; using it takes the 8 bytes a class of ``starts``.

File: int64 ``starts``, then uint32 or int64 ``rows``, see `penstock.storage.derived`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ConfigError, DataFileIOError, PenstockError
from penstock.storage.derived import array_in_memory, derived_array

__all__ = ["ClassIndex", "digest_of"]

_CHUNK = 1 << 18
_SHARED_FROM = 1 << 16  # rows; a smaller index takes less than 256 KiB, and is built faster than a file

Indices = npt.NDArray[np.int64]


class ClassIndex:
    """The rows of each class: maps places in the sequence of all rows by class to rows, and back.

    Args:
        values: the class of each row, or a value from which ``classify`` computes it: an array, mapped or not, or an
            object that returns arrays for slices and for arrays of rows. They are read in chunks.
        count: number of classes, which are 0 to ``count - 1``; some may be empty.
        digest: identity of the classes, by default a hash of all values (0.1 s a gigabyte, if in memory).
        classify: returns the classes of an array of values.
        cache_dir: folder of the file, by default ``classes`` in the user's cache folder. Tables of fewer than 65,536
            rows have no file unless a folder is given.

    Raises:
        ConfigError: (at the first use) a class outside the range, or classes that are not integers.
        DataFileIOError: (at the first use) ``cache_dir`` cannot be written. If the user's cache folder cannot be
            written, each process holds the index in its own memory, with a warning.

    The file is mapped at the first use, and built if needed. Each copy, in this process or another, opens it by itself.

    >>> index = ClassIndex(np.array([0, 2, 1, 0, 2, 2]), 3)
    >>> index.rows(np.arange(6)).tolist(), index.starts.tolist()
    ([0, 3, 2, 1, 4, 5], [0, 2, 3, 6])
    >>> index.places(np.array([4, 2])).tolist()
    [4, 2]
    """

    def __init__(
        self,
        values: Any,
        count: int,
        digest: str | None = None,
        classify: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] = np.asarray,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._values, self._classify, self._cache_dir = values, classify, cache_dir
        self.count = count
        self.digest = digest or digest_of(values)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, part: Any) -> npt.NDArray[Any]:
        """Return the classes of a slice or an array of rows."""
        return self._classify(self._values[part])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    @property
    def starts(self) -> Indices:
        """The first place of each class, and the number of rows: int64 of shape (count + 1,)."""
        return self._opened[1]

    def rows(self, places: Indices) -> Indices:
        """Return the rows at places: int64 of the same shape."""
        return self._opened[0][places].astype(np.int64)

    def places(self, rows: Indices) -> Indices:
        """Return the places of rows: int64 of the same shape. Binary search, O(log n)."""
        (by_class, starts), classes = self._opened, self[rows]
        low: Indices = starts[classes]
        high: Indices = starts[classes.astype(np.int64) + 1]
        while (open_ := low < high).any():
            middle = (low + high) >> 1
            less = np.zeros_like(open_)
            less[open_] = by_class[middle[open_]] < rows[open_]
            low, high = np.where(less, middle + 1, low), np.where(open_ & ~less, middle, high)
        return low

    @cached_property
    def _opened(self) -> tuple[npt.NDArray[Any], Indices]:
        """All rows by class, ascending within a class, and the start of each class; from a file, or in memory."""
        n, begin = len(self), 8 * (self.count + 1)
        if self._cache_dir is None and n < _SHARED_FROM:
            data = array_in_memory(np.uint8, self._write)
        else:
            what = f"the index of the classes, {_dtype(n).itemsize} bytes a row,"
            question = f"{self.digest} {n} {self.count}"
            try:
                data = derived_array("classes", question, np.uint8, self._write, what, self._cache_dir)
            except OSError as error:
                if isinstance(error, PenstockError):
                    raise
                raise DataFileIOError(
                    f"{error.filename}: {what} cannot be stored there: {error.strerror or error}; pass a writable "
                    "folder as cache_dir="
                ) from error
        data = np.asarray(data)
        return data[begin:].view(_dtype(n)), data[:begin].view(np.int64).copy()

    def _write(self, out: BinaryIO) -> None:
        """Write the starts, then the rows by class."""
        n, starts = len(self), _count(self, self.count)
        out.write(starts.tobytes())
        if isinstance(out, io.BytesIO) or not n:
            rows = np.empty(n, _dtype(n))
            _place(self, starts, rows)
            out.write(rows.tobytes())
            return
        out.flush()
        begin, size = out.tell(), n * _dtype(n).itemsize
        # A full disk raises here; at a write to the map it would kill the process.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(out.fileno(), begin, size)
        else:
            out.truncate(begin + size)
        mapped = np.memmap(out, _dtype(n), "r+", begin, (n,))
        _place(self, starts, mapped)
        mapped.flush()


def digest_of(keys: Any) -> str:
    """Return a hash of the type and all values of an array, read in chunks."""
    digest = xxhash.xxh3_128(str(keys[0:0].dtype).encode())
    for _, chunk in _chunks(keys):
        digest.update(np.ascontiguousarray(chunk).view(np.uint8).data)
    return digest.hexdigest()


def _chunks(keys: Any) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield the first row and the keys of each chunk of the table."""
    for begin in range(0, len(keys), _CHUNK):
        yield begin, np.asarray(keys[begin : begin + _CHUNK])


def _count(keys: ClassIndex, count: int) -> Indices:
    """Return the start of each class, and the end of the last."""
    sizes = np.zeros(count, dtype=np.int64)
    for begin, chunk in _chunks(keys):
        if chunk.dtype.kind not in "iu" or chunk.ndim != 1:
            raise ConfigError(f"classes must be integers, one a row, got {chunk.dtype} of shape {chunk.shape}")
        if int(chunk.min()) < 0 or int(chunk.max()) >= count:
            bad = int(np.flatnonzero((chunk < 0) | (chunk >= count))[0])
            raise ConfigError(f"row {begin + bad} has class {int(chunk[bad])}, but the classes are 0 to {count - 1}")
        sizes += np.bincount(chunk, minlength=count)
    return np.concatenate([[0], np.cumsum(sizes)])


def _place(keys: ClassIndex, starts: Indices, out: npt.NDArray[Any]) -> None:
    """Write the rows by class, chunk by chunk."""
    count = len(starts) - 1
    free = starts[:-1].copy()
    # NumPy sorts integers of up to 16 bits by radix sort, in linear time.
    small = np.min_scalar_type(max(0, count - 1))
    for begin, chunk in _chunks(keys):
        by_class = np.argsort(chunk.astype(small, copy=False), kind="stable")
        sizes = np.bincount(chunk, minlength=count)
        before = np.cumsum(sizes) - sizes
        places = np.repeat(free - before, sizes)
        places += np.arange(len(chunk))
        by_class += begin
        out[places] = by_class
        free += sizes


def _dtype(n: int) -> np.dtype[Any]:
    return np.dtype(np.uint32 if n <= 1 << 32 else np.int64)
