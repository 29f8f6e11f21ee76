"""Memory-mapped files: arrays in raw files (``.bin``) and NumPy's ``.npy``, and tables, also those in a store.

Promises: opening reads only headers; all processes share the pages in the page cache; a file that changes while it is
open raises an error before the next read, whereas the map alone would kill the process (SIGBUS); a pickle is a handle:
unpickled, it opens the same files and refuses others. To update a file in use, rename a new one over it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ConfigError, DataFileError
from penstock.storage import Storage, is_remote, local_path
from penstock.storage.file_pool import FilePool
from penstock.storage.files import DATA, File
from penstock.storage.urls import listed, unsigned

if TYPE_CHECKING:
    from penstock.storage.remote import RemoteSource

__all__ = ["Mapped", "MappedFile", "MappedFiles", "error_text", "inspect_file"]

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

    @classmethod
    def of(cls, source: RemoteSource) -> MappedFile:
        """Return the content of an object in a store: its bytes."""
        return cls(source.url, source.size, 0, 0, "|u1", (source.size,))


def inspect_file(
    name: str | os.PathLike[str], dtype: npt.DTypeLike | None, storage: Storage | None = None
) -> MappedFile:
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
        array = _mapped_array(path)
        if dtype is not None and np.dtype(dtype) != array.dtype:
            raise ConfigError(f"{path} holds {array.dtype}, not {np.dtype(dtype)}: leave dtype= out")
        return MappedFile(path, size, mtime, int(array.offset), array.dtype.str, array.shape, inode)
    if dtype is None:
        raise ConfigError(f"{path}: a raw file does not tell its dtype; pass it, such as dtype='uint16'")
    kind = np.dtype(dtype)
    if size % kind.itemsize:
        raise DataFileError(
            f"{path} has {size} bytes, which is not a whole number of {kind} ({kind.itemsize} bytes each): it is "
            "truncated, or of another dtype"
        )
    return MappedFile(path, size, mtime, 0, kind.str, (size // kind.itemsize,), inode)


def _mapped_array(path: str) -> np.memmap[Any, Any]:
    """Return the array of numbers in an ``.npy`` file."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy parses the header as Python, so a damaged one may raise anything
        raise DataFileError(
            f"{path} is not an .npy file that can be mapped, or is truncated: {error_text(error)}"
        ) from error
    if not isinstance(array, np.memmap) or array.dtype.hasobject or array.dtype.names or not array.ndim:
        what = f"{getattr(array, 'dtype', 'arrays')} of shape {getattr(array, 'shape', '-')}"
        raise DataFileError(f"{path} holds {what}, not an array of numbers")
    if not array.flags.c_contiguous:
        raise DataFileError(f"{path} is in Fortran order: save it with np.save(path, np.ascontiguousarray(array))")
    return array


def error_text(error: Exception) -> str:
    """Return the text of a NumPy error in one line, with its type if the text is empty."""
    text = str(error).partition("\n")[0]
    return text if isinstance(error, ValueError | OSError) and text else f"{type(error).__name__}: {text}"


class Mapped(NamedTuple):
    """An open file, and its bytes as an array."""

    file: File
    array: npt.NDArray[Any]


class MappedFiles:
    """Several files, mapped at first use, and held open within the limit of `FilePool`.

    Files in a store are copied to the cache at first use. If the cache has no room, their bytes are read by ranges.

    Args:
        files: results of `inspect_file`.
        sources: the files in a store, by number.
        in_place: the numbers of the files in a store that are never copied.
        conversions: functions from an open local file to its conversion, which is mapped instead, by number.
    """

    def __init__(
        self,
        files: list[MappedFile],
        sources: dict[int, RemoteSource] | None = None,
        in_place: Set[int] = frozenset(),
        conversions: Mapping[int, Callable[[File], File]] | None = None,
    ) -> None:
        self.files, self.sources, self.in_place = files, sources or {}, in_place
        self._conversions = conversions or {}
        self._fingerprints: dict[int, str] = {}
        self._open: FilePool[Mapped] = FilePool(copies=sources is not None)

    def put(self, number: int, source: RemoteSource) -> None:
        """Set the remote source of a file, unless it is known."""
        if number not in self.sources:
            self.files[number], self.sources[number] = MappedFile.of(source), source

    def head(self, number: int) -> Any:
        """Return an object to read a file's metadata from without a copy: its remote source, or else its bytes."""
        return self.sources.get(number) or self.array(number)

    def array(self, number: int) -> Any:
        """Return the array of one file, read-only, after a check for changes. Use it immediately, or call again.

        For a file in a store that the cache has no room for, return its `RemoteSource`.

        Raises:
            DataFileChangedError: the size or modification time of the file changed.
            DataFileIOError: it cannot be opened.
        """
        opened = self._open.find(number) or self._opened(number)
        if opened is None:
            return self.sources[number]
        opened.file.check()
        return opened.array

    def _opened(self, number: int) -> Mapped | None:
        source, file = self.sources.get(number), self.files[number]
        if source is not None:
            copy = None if number in self.in_place else source.copy_if_wanted()
            if copy is None:
                return None
            return self._open.add(number, Mapped(copy.of(DATA), np.frombuffer(copy.map or b"", np.uint8)))
        opened = File(file.path, DATA)
        opened.expect(file.size, file.mtime_ns)
        convert, count = self._conversions.get(number), int(np.prod(file.shape, dtype=np.int64))
        if convert is not None:
            array = np.frombuffer(convert(opened).map or b"", np.uint8)
        elif opened.map is None or not count:
            array = np.empty(file.shape, file.dtype)
        else:
            array = np.frombuffer(opened.map, file.dtype, count, file.begin).reshape(file.shape)
        return self._open.add(number, Mapped(opened, array))

    def holds(self, number: int, data: Any) -> bool:
        """Return whether `array` would return this object for a file, without opening it."""
        opened = self._open.find(number)
        return data is (self.sources.get(number) if opened is None else opened.array)

    def in_words(self) -> str:
        """Return the first path, and the number of further ones."""
        return listed([file.path for file in self.files])

    def fingerprint(self, number: int) -> str:
        """Return the identity of a file's array: a hash of dtype, shape and content, without names and times.

        Of a large file it hashes samples: 64 KiB at both ends, and 32 blocks between. Of a file in a store it is a hash
        of the store's size and hash.
        """
        if number in self.sources:
            return xxhash.xxh3_128_hexdigest(f"ranged {self.sources[number].fingerprint}".encode())
        found = self._fingerprints.get(number)
        if found is None:
            opened, file = self._open.find(number) or self._opened(number), self.files[number]
            assert opened is not None
            opened.file.check()
            digest = xxhash.xxh3_128(f"{file.dtype} {file.shape} ".encode())
            length = file.size - file.begin
            parts = [(length, file.begin)]
            if length > _WHOLE:
                between = [(_BLOCK, file.begin + k * (length // (_BLOCKS + 2))) for k in range(1, _BLOCKS + 1)]
                parts = [(_ENDS, file.begin), *between, (_ENDS, file.size - _ENDS)]
            for size, begin in parts:
                digest.update(opened.file.read(size, begin))
            self._fingerprints[number] = found = digest.hexdigest()
        return found

    def version(self, number: int) -> str:
        """Return what identifies a file until it is written again: path, size, modification time, inode and layout; in
        a store, address, size and ETag.
        """
        source = self.sources.get(number)
        return repr(tuple(self.files[number])) if source is None else f"{unsigned(source.url)} {source.fingerprint}"
