"""Memory-mapped files of numbers: raw files (``.bin``) of a given dtype, and NumPy's ``.npy``.

Promises: opening reads only headers; all processes share the pages in the page cache; a file that changes while it is
open raises an error before the next read, whereas the map alone would kill the process (SIGBUS); a pickle is a handle:
unpickled, it opens the same files and refuses others. To update a file in use, rename a new one over it.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ConfigError, DataFileError
from penstock.storage import Storage, is_remote, local_path
from penstock.storage.file_pool import FilePool
from penstock.storage.files import DATA, File
from penstock.storage.urls import listed

__all__ = ["FilesTable", "Mapped", "MappedFile", "MappedFiles", "look_at", "said"]

_WHOLE = 1 << 18  # files up to this many bytes are hashed completely
# Of larger files: bytes at both ends, and bytes and number of blocks between.
_ENDS, _BLOCK, _BLOCKS = 1 << 16, 1 << 12, 32


class MappedFile(NamedTuple):
    """The content of a file when it was inspected: an array of this dtype and shape, from byte ``begin`` on."""

    path: str
    size: int
    mtime_ns: int
    begin: int
    dtype: str
    shape: tuple[int, ...]
    inode: int = 0


def look_at(name: str | os.PathLike[str], dtype: npt.DTypeLike | None, storage: Storage | None = None) -> MappedFile:
    """Return the content of a file: ``.npy`` files have a header, all others hold numbers of ``dtype`` only.

    Args:
        name: a path, or a URL, which is copied to the local cache.
        dtype: the NumPy dtype. Optional for ``.npy`` files.
        storage: access options for stores.

    Raises:
        DataFileIOError: missing, a folder, no permission.
        DataFileError: not an ``.npy`` file despite its name, truncated, or not a whole number of elements.
        ConfigError: no ``dtype`` for a raw file, or a ``dtype`` that differs from that of the ``.npy`` file.
        StorageError: a store fails.
    """
    path = local_path(name, storage=storage) if is_remote(name) else os.path.abspath(name)
    source = File(path, DATA)
    size, mtime, inode = source.size, source.mtime_ns, source.inode
    if path.endswith(".npy"):
        found, shape, begin = _header(path)
        if dtype is not None and np.dtype(dtype) != found:
            raise ConfigError(f"{path} holds {found}, not {np.dtype(dtype)}: leave dtype= out")
        return MappedFile(path, size, mtime, begin, found.str, shape, inode)
    if dtype is None:
        raise ConfigError(f"{path}: a raw file does not tell its dtype; pass it, such as dtype='uint16'")
    kind = np.dtype(dtype)
    if size % kind.itemsize:
        raise DataFileError(
            f"{path} has {size} bytes, which is not a whole number of {kind} ({kind.itemsize} bytes each): it is "
            "truncated, or of another dtype"
        )
    return MappedFile(path, size, mtime, 0, kind.str, (size // kind.itemsize,), inode)


def _header(path: str) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return dtype, shape and first byte of the array in an ``.npy`` file."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy parses the header as Python, so a damaged one may raise anything
        raise DataFileError(f"{path} is not an .npy file that can be mapped, or is truncated: {said(error)}") from error
    if not isinstance(array, np.memmap) or array.dtype.hasobject or array.dtype.names or not array.ndim:
        what = f"{getattr(array, 'dtype', 'arrays')} of shape {getattr(array, 'shape', '-')}"
        raise DataFileError(f"{path} holds {what}, not an array of numbers")
    if not array.flags.c_contiguous:
        raise DataFileError(f"{path} is in Fortran order: save it with np.save(path, np.ascontiguousarray(array))")
    return array.dtype, array.shape, int(array.offset)


def said(error: Exception) -> str:
    """Return the text of a NumPy error in one line, with its type if the text is empty."""
    text = str(error).partition("\n")[0]
    return text if isinstance(error, ValueError | OSError) and text else f"{type(error).__name__}: {text}"


class Mapped(NamedTuple):
    """An open file, and its bytes as an array."""

    file: File
    array: npt.NDArray[Any]


class MappedFiles:
    """Several files, mapped at first use, and held open within the limit of `FilePool`.

    Args:
        files: results of `look_at`.
    """

    def __init__(self, files: list[MappedFile]) -> None:
        self.files = files
        self._open: FilePool[Mapped] = FilePool()
        self._fingerprints: dict[int, str] = {}

    def array(self, number: int) -> npt.NDArray[Any]:
        """Return the array of one file, read-only, after a check for changes. Use it immediately, or call again.

        Raises:
            DataFileChangedError: the size or modification time of the file changed.
            DataFileIOError: it cannot be opened.
        """
        file, array = self._opened(number)
        file.check()
        return array

    def _opened(self, number: int) -> Mapped:
        found = self._open.find(number)
        if found is not None:
            return found
        file = self.files[number]
        source = File(file.path, DATA)
        source.expect(file.size, file.mtime_ns)
        count = int(np.prod(file.shape, dtype=np.int64))
        if source.map is None or not count:
            array = np.empty(file.shape, file.dtype)
        else:
            array = np.frombuffer(source.map, file.dtype, count, file.begin).reshape(file.shape)
        return self._open.add(number, Mapped(source, array))

    def holds(self, number: int, data: Any) -> bool:
        """Return whether this is the currently mapped array of a file."""
        found = self._open.find(number)
        return found is not None and found.array is data

    def in_words(self) -> str:
        """Return the first path, and the number of further ones."""
        return listed([file.path for file in self.files])

    def fingerprint(self, number: int) -> str:
        """Return the identity of a file's array: a hash of dtype, shape and content, without names and times.

        Of a large file it hashes samples: 64 KiB at both ends, and 32 blocks between.
        """
        found = self._fingerprints.get(number)
        if found is None:
            self.array(number)
            source, file = self._opened(number).file, self.files[number]
            digest = xxhash.xxh3_128(f"{file.dtype} {file.shape} ".encode())
            length = file.size - file.begin
            if length <= _WHOLE:
                digest.update(source.read(length, file.begin))
            else:
                digest.update(source.read(_ENDS, file.begin))
                for k in range(1, _BLOCKS + 1):
                    digest.update(source.read(_BLOCK, file.begin + k * (length // (_BLOCKS + 2))))
                digest.update(source.read(_ENDS, file.size - _ENDS))
            self._fingerprints[number] = found = digest.hexdigest()
        return found

    def version(self, number: int) -> str:
        """Return what identifies a file until it is written again: path, size, modification time, inode and layout."""
        return repr(tuple(self.files[number]))

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "fingerprints": self._fingerprints}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["files"])  # type: ignore[misc]
        self._fingerprints = state["fingerprints"]


class FilesTable(abc.ABC):
    """Rows in a list of files that may grow by more files: its fingerprint, and those of its earlier versions."""

    maps: MappedFiles
    starts: npt.NDArray[np.int64]
    """The first row of each file, and the number of all rows."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    @abc.abstractmethod
    def records(self, rows: npt.NDArray[np.int64]) -> list[Any]:
        """Return the records of rows, in this order."""

    def by_file(
        self, rows: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Yield the number of each file with some of these rows, their places in ``rows``, and their rows there."""
        numbers = self.starts.searchsorted(rows, "right") - 1
        if len(rows) and numbers[0] == numbers[-1] and (numbers == numbers[0]).all():
            yield int(numbers[0]), np.arange(len(rows)), rows - self.starts[numbers[0]]
            return
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            yield number, places, rows[places] - self.starts[number]

    def prefixes(self, rows: int) -> list[str]:
        """Return the fingerprints of the first files with ``rows`` rows in total: several if some files are empty."""
        ends = np.flatnonzero(self.starts == rows).tolist()
        return [xxhash.xxh3_128_hexdigest(" ".join(self.identity(end)).encode()) for end in ends]

    def identity(self, files: int) -> list[str]:
        """Return all that the rows of the first files depend on: by default the fingerprints of the files."""
        return [self.maps.fingerprint(number) for number in range(files)]

    @property
    def fingerprint(self) -> str:
        """The identity of all rows, see `MappedFiles.fingerprint`. For states, which move to other machines."""
        return self.prefixes(len(self))[-1]

    @property
    def version(self) -> str:
        """The version of the files, see `MappedFiles.version`. Keys of cached results hold it besides the fingerprint,
        which does not cover every byte.
        """
        versions = " ".join(map(self.maps.version, range(len(self.maps.files))))
        return xxhash.xxh3_128_hexdigest(versions.encode())

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Return whether files with this fingerprint and number of rows have since grown into these."""
        return fingerprint in self.prefixes(rows)
