"""`ClassIndex`: the rows of a table by class, such as documents by length, in one mapped file.

    keys     0 2 1 0 2 2        the class of each row
    rows     0 3 | 2 | 1 4 5    rows of class 0, of class 1, ...; ascending within a class
    starts   0     2   3     6

An order over classes is arithmetic on ``starts``, and ``rows`` maps its positions to rows. An external counting sort,
two passes over the keys, writes the file once; all processes of a machine share it.

Memory: the file takes 4 bytes a row (8 from 2**32 rows on). Building it takes 10 MB and 30 bytes a class, for any
number of rows; using it takes the 8 bytes a class of ``starts``.

File: 64 bytes of header (magic, rows, classes, bytes of a row, checksum), int64 ``starts``, uint32 or int64 ``rows``.
"""

from __future__ import annotations

import os
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ConfigError, DataFileIOError
from penstock.storage.cache import UNWRITABLE, file_lock
from penstock.storage.derived import kept_path, write_kept

__all__ = ["ClassIndex", "Keys", "digest_of"]

_MAGIC = b"PSTKCLS1"
_HEADER = struct.Struct("<8sQQQ")
_HEADER_SIZE = 64
_CHUNK = 1 << 18
_SHARED_FROM = 1 << 16  # rows; a smaller index takes less than 256 KiB, and is built faster than a file

Indices = npt.NDArray[np.int64]


class Keys(Protocol):
    """One small integer for each row: an array, or anything whose slices are arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> npt.NDArray[Any]: ...


class ClassIndex:
    """The rows of each class.

    Attributes:
        rows: all rows by class, ascending within a class: uint32 (int64 from 2**32 rows on) of shape (n,), read-only,
            mapped.
        starts: the start of each class in ``rows``, and the end of the last: int64 of shape (classes + 1,).
        path: the file; None if the index is in memory.

    Pickles as the path of its file, which must exist where it is unpickled.

    >>> index = ClassIndex.open(np.array([0, 2, 1, 0, 2, 2]), 3)
    >>> index.rows.tolist(), index.starts.tolist()
    ([0, 3, 2, 1, 4, 5], [0, 2, 3, 6])
    >>> index.find(np.array([4, 2]), np.array([2, 1])).tolist()  # their positions in rows
    [4, 2]
    """

    def __init__(self, rows: npt.NDArray[Any], starts: Indices, path: Path | None = None) -> None:
        """Use `ClassIndex.open`."""
        self.rows = rows
        self.starts = starts
        self.path = path

    @classmethod
    def open(
        cls, keys: Keys, count: int, *, cache_dir: str | os.PathLike[str] | None = None, digest: str | None = None
    ) -> ClassIndex:
        """Return the index of the rows with these keys, mapped from the cache folder; build it if needed.

        Args:
            keys: the class of each row, 0 to ``count - 1``: an array, mapped or not, or any sequence whose slices are
                integer arrays. They are read in chunks.
            count: number of classes; some may be empty.
            cache_dir: folder of the file, by default ``classes`` in the user's cache folder. Tables of fewer than
                65,536 rows have no file unless a folder is given.
            digest: identity of the keys, by default a hash of all keys (0.1 s a gigabyte, if in memory).

        Raises:
            ConfigError: a key outside the classes, or keys that are not integers.
            DataFileIOError: ``cache_dir`` cannot be written. If the user's cache folder cannot be written, each process
                holds the index in its own memory, with a warning.
        """
        n = len(keys)
        if cache_dir is None and n < _SHARED_FROM:
            return cls(*_in_memory(keys, count))
        name = f"{digest or digest_of(keys)}-{n}-{count}.classes"
        path = kept_path("classes", name) if cache_dir is None else Path(cache_dir) / name
        try:
            return _opened(path, keys, count)
        except OSError as error:
            advice = f"{path}: the index of the classes cannot be stored there: {error.strerror or error}"
            if cache_dir is None and error.errno in UNWRITABLE:
                warnings.warn(
                    f"{advice}. Each process now holds its own copy in memory, {_itemsize(n)} bytes a row. Free space, "
                    "or set XDG_CACHE_HOME to another folder",
                    stacklevel=2,
                )
                return cls(*_in_memory(keys, count))
            raise DataFileIOError(f"{advice}; pass a writable folder as cache_dir=") from error

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def sizes(self) -> Indices:
        """The number of rows of each class: int64 of shape (classes,)."""
        return np.diff(self.starts)

    def find(self, rows: npt.NDArray[Any], classes: npt.NDArray[Any]) -> Indices:
        """Return the positions of rows of known classes in ``rows``: int64 of their shape. Binary search, O(log n).

        Raises:
            ConfigError: a row is not in the given class.
        """
        wanted = np.asarray(rows, dtype=np.int64)
        low: Indices = self.starts[classes]
        high: Indices = self.starts[np.asarray(classes) + 1]
        last = high
        while (open_ := low < high).any():
            middle = (low + high) >> 1
            less = np.zeros_like(open_)
            less[open_] = self.rows[middle[open_]] < wanted[open_]
            low, high = np.where(less, middle + 1, low), np.where(open_ & ~less, middle, high)
        found: npt.NDArray[np.bool_] = low < last
        found[found] = self.rows[low[found]] == wanted[found]
        if not found.all():
            raise ConfigError(f"row {int(wanted[~found].flat[0])} is not in the given class")
        return low

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:
            return ClassIndex, (self.rows, self.starts)
        return _reopen, (self.path, len(self.rows), len(self.starts) - 1)


def digest_of(keys: Keys) -> str:
    """Return a hash of the type and all values of an array, read in chunks."""
    digest = xxhash.xxh3_128(str(keys[0:0].dtype).encode())
    for _, chunk in _chunks(keys):
        digest.update(np.ascontiguousarray(chunk).view(np.uint8).data)
    return digest.hexdigest()


def _chunks(keys: Keys) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield the first row and the keys of each chunk of the table."""
    for begin in range(0, len(keys), _CHUNK):
        yield begin, np.asarray(keys[begin : begin + _CHUNK])


def _count(keys: Keys, count: int) -> Indices:
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


def _place(keys: Keys, starts: Indices, out: npt.NDArray[Any]) -> None:
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


def _in_memory(keys: Keys, count: int) -> tuple[npt.NDArray[Any], Indices]:
    starts = _count(keys, count)
    rows = np.empty(len(keys), dtype=_dtype(len(keys)))
    _place(keys, starts, rows)
    rows.flags.writeable = starts.flags.writeable = False
    return rows, starts


def _opened(path: Path, keys: Keys, count: int) -> ClassIndex:
    """Return the index in a file, which one process builds while the others wait."""
    found = _map(path, len(keys), count)
    if found is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(path):
            found = _map(path, len(keys), count)
            if found is None:
                with write_kept(path) as file:
                    _write(file, keys, count)
                found = _map(path, len(keys), count)
    if found is None:
        raise OSError("it was written, but reads back differently")
    return found


def _write(file: BinaryIO, keys: Keys, count: int) -> None:
    n, starts = len(keys), _count(keys, count)
    file.write(_header(n, count))
    file.write(starts.tobytes())
    file.flush()
    begin, size = _layout(n, count)
    # A full disk raises here; at a write to the map it would kill the process.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        file.truncate(size)
    if n:
        rows = np.memmap(file, _dtype(n), "r+", begin, (n,))
        _place(keys, starts, rows)
        rows.flush()


def _map(path: Path, n: int, count: int) -> ClassIndex | None:
    """Return the index in a file; None if it is missing or incomplete."""
    try:
        mapped = np.memmap(path, dtype=np.uint8, mode="r")
    except (FileNotFoundError, ValueError):  # ValueError: an empty file cannot be mapped
        return None
    begin, size = _layout(n, count)
    if len(mapped) != size or mapped[:_HEADER_SIZE].tobytes() != _header(n, count):
        return None
    body = np.asarray(mapped)
    starts = body[_HEADER_SIZE:begin].view(np.int64).copy()
    return ClassIndex(body[begin:].view(_dtype(n)), starts, path)


def _reopen(path: Path, n: int, count: int) -> ClassIndex:
    found = _map(path, n, count)
    if found is None:
        raise DataFileIOError(f"{path}: the index of the classes is gone; create the sampler or dataset again")
    return found


def _layout(n: int, count: int) -> tuple[int, int]:
    """Return the offset of the rows in a file, and the file size."""
    begin = _HEADER_SIZE + 8 * (count + 1)
    return begin, begin + n * _itemsize(n)


def _header(n: int, count: int) -> bytes:
    body = _HEADER.pack(_MAGIC, n, count, _itemsize(n))
    return (body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))).ljust(_HEADER_SIZE, b"\0")


def _dtype(n: int) -> np.dtype[Any]:
    return np.dtype(np.uint32 if n <= 1 << 32 else np.int64)


def _itemsize(n: int) -> int:
    return _dtype(n).itemsize
