"""`ClipIndex`: the packets of many files of video or sound, in one Arrow file that all processes map.

    one row for each file: name, size, version, how it is coded, and lists of its packets: at, size, ...

It is made in one pass over the files, and kept: in the cache, by the names and versions of the files; or where the user
says, and then the files may be moved, by names and sizes. A file that cannot be read, or holds no video, has a row with
what is wrong with it.
"""

from __future__ import annotations

import errno
import importlib
import os
import stat
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from penstock.clips.media import Bytes
from penstock.clips.packets import Coding, Ints, Packets
from penstock.clips.sound import SoundCoding, SoundPackets
from penstock.clips.tar_members import Part, place_of
from penstock.errors import (
    ClipError,
    DataFileChangedError,
    DataFileError,
    DataFileIOError,
    ManifestChangedError,
    StorageAuthError,
    StorageError,
    StorageUnavailableError,
)
from penstock.progress import progress_bar
from penstock.shards.urls import local_path
from penstock.storage import Storage
from penstock.storage.ahead import in_threads
from penstock.storage.cache import UNWRITABLE, file_lock
from penstock.storage.files import SourceFile, io_error
from penstock.storage.kept import kept_path, write_kept
from penstock.storage.urls import is_remote, shown

__all__ = ["SOUND", "VIDEO", "ClipIndex", "Kind", "open_file", "open_index"]

_VERSION = 3
_AT_A_TIME = 256  # files of a record batch

_TYPES: dict[str, pa.DataType] = {"str": pa.string(), "bytes": pa.binary(), "int": pa.int64(), "bool": pa.bool_()}


class Kind(NamedTuple):
    """What an index is of.

    Attributes:
        name: in words.
        coding: a data class of what a decoder has to know of a file.
        table: a named tuple of arrays, of the packets of a file, which has their `length` and `digest`.
        types: of the arrays.
        scan: the module whose ``scan`` makes both of a file's bytes.
    """

    name: str
    coding: type
    table: Any
    types: tuple[type[np.generic], ...]
    scan: str

    @property
    def schema(self) -> pa.Schema:
        """The columns of an index: of each file what is known of it, its coding, its packets."""
        return pa.schema(
            [
                ("name", pa.binary()),
                ("nbytes", pa.int64()),
                ("version", pa.string()),
                ("error", pa.string()),
                ("length", pa.int64()),
                ("digest", pa.binary(16)),
                *((field.name, _TYPES[str(field.type)]) for field in fields(self.coding)),
                *(
                    (name, pa.list_(pa.from_numpy_dtype(dtype)))
                    for name, dtype in zip(self.table._fields, self.types, strict=True)
                ),
            ],
            metadata={"penstock": f"{self.name} {_VERSION}"},
        )


VIDEO = Kind("videos", Coding, Packets, (np.int64, np.uint32, np.uint32, np.uint32, np.float64), "scan")
SOUND = Kind("recordings", SoundCoding, SoundPackets, (np.int64, np.uint32, np.int64, np.float64), "sound_scan")


class ClipIndex:
    """What is known of the files of an index.

    Args:
        path: of the index.
        kind: what it is of.
        root: what comes before the names of the files.
        exact: whether the files must have the versions that were looked at; if not, their sizes are enough.

    Raises:
        DataFileError: it is none, or cut off, or of another version.
        DataFileIOError: it cannot be read.

    Memory: 8 bytes for each file; the rest is mapped. Safe in threads; a pickle is a handle.
    """

    def __init__(self, path: str | os.PathLike[str], kind: Kind, root: str, *, exact: bool = True) -> None:
        self.path, self.kind, self.root, self.exact = os.path.abspath(path), kind, root, exact
        try:
            self._file = SourceFile(self.path)
        except OSError as error:
            raise DataFileIOError(str(error)) from error
        try:
            opened = pa.ipc.open_file(pa.py_buffer(self._file.map or b""))
            self._batches = [opened.get_batch(number) for number in range(opened.num_record_batches)]
        except (pa.ArrowInvalid, OSError) as error:
            raise DataFileError(f"{self.path} is no index of {kind.name}, or is cut off: {error}") from error
        if not opened.schema.equals(kind.schema, check_metadata=True):
            raise DataFileError(f"{self.path} is no index of {kind.name} of this version; make it again")
        columns = [batch.column("length").to_numpy() for batch in self._batches]
        self.lengths: Ints = np.concatenate([np.zeros(0, np.int64), *columns])
        """Frames or samples of each file, int64; 0 for one with an error."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ClipIndex, exact=self.exact), (self.path, self.kind, self.root)

    def column(self, name: str) -> list[Any]:
        """Return what one column says of all files."""
        return [value for batch in self._batches for value in batch.column(name).to_pylist()]

    def path_of(self, file: int) -> str:
        """Return the path or address of a file."""
        return self.root + os.fsdecode(self._get("name", file).as_py())

    def is_of(self, file: int, source: Bytes) -> bool:
        """Return whether this is what a file held when it was looked at."""
        same = source.size == self._get("nbytes", file).as_py()
        return same and (not self.exact or source.fingerprint == self._get("version", file).as_py())

    def error(self, file: int) -> str:
        """Return what is wrong with a file; empty if nothing is."""
        return str(self._get("error", file).as_py())

    def coding(self, file: int) -> Any:
        """Return how a file is coded."""
        return self.kind.coding(*(self._get(field.name, file).as_py() for field in fields(self.kind.coding)))

    def packets(self, file: int) -> Any:
        """Return the packets of a file, mapped."""
        try:
            self._file.check()
        except ManifestChangedError as error:
            raise DataFileChangedError(f"{self.path} was changed while it was open: open the data set again") from error
        return self.kind.table(*(self._get(name, file).values.to_numpy() for name in self.kind.table._fields))

    def _get(self, name: str, file: int) -> Any:
        batch, row = divmod(file, _AT_A_TIME)
        return self._batches[batch].column(name)[row]


def open_index(
    files: Sequence[str],
    path: str | os.PathLike[str] | None = None,
    *,
    kind: Kind = VIDEO,
    storage: Storage | None = None,
    progress: bool | None = None,
) -> ClipIndex:
    """Return the index of some files; make it where there is none.

    Args:
        files: paths and addresses.
        path: where it is, or is to be; by default in the cache.
        kind: what it is of.
        storage: how stores are reached.
        progress: show a bar: True, False, or None for many files on a terminal.

    Raises:
        DataFileError: at ``path`` is something else, or the index of other files.
        DataFileIOError: the index cannot be written.
        StorageError: a store does not answer.

    Costs: all files are read once; later one look at each, or with ``path`` none.
    """
    root, names = _names(files)
    if path is not None and os.path.exists(path):
        return _of_files(ClipIndex(path, kind, root, exact=False), names)
    if path is not None:
        place = Path(path)
    else:
        place = kept_path("clips", f"{_key(kind, root, names, _versions(files, storage))}.arrow")
    found = _kept(place, kind, root) if path is None else None
    if found is not None:
        return found
    try:
        if path is None:
            place.parent.mkdir(exist_ok=True)
        with file_lock(place):
            if path is not None and place.exists():  # somebody has made it meanwhile
                return _of_files(ClipIndex(place, kind, root, exact=False), names)
            found = _kept(place, kind, root)
            if found is None:
                with write_kept(place) as out:
                    _write(out, kind, root, names, storage=storage, progress=progress)
                found = ClipIndex(place, kind, root, exact=path is None)
    except (StorageError, DataFileIOError):
        raise
    except OSError as error:
        if path is None and error.errno not in (*UNWRITABLE, errno.ENOENT):
            raise
        said = str(io_error(place, error, "the index of clips cannot be written:"))
        raise DataFileIOError(f"{said}; or say with index= where it is to be") from error
    return found


def _names(files: Sequence[str]) -> tuple[str, list[str]]:
    """What the names of all files begin with, up to a folder, and the rest of each."""
    whole = [name if is_remote(name) else os.path.abspath(local_path(name) or name) for name in files]
    # Of addresses, too, so no matter of paths.
    root = os.path.commonprefix(whole).rpartition("/")[0] + "/" if whole else ""  # noqa: RUF071
    root = root if root.count("/") > 2 or not root.partition("://")[1] else ""  # no part of an address's head
    return root, [name[len(root) :] for name in whole]


def _of_files(index: ClipIndex, names: Sequence[str]) -> ClipIndex:
    """The index, if it is that of files of these names."""
    made_of = [os.fsdecode(name) for name in index.column("name")]
    if list(names) != made_of:
        differ = next((pair for pair in zip(names, made_of, strict=False) if pair[0] != pair[1]), None)
        if differ is None:
            what = f"it has {len(made_of)} and not {len(names)}"
        else:
            what = f"it has {differ[1]!r} and not {differ[0]!r}"
        raise DataFileError(f"{index.path} is the index of other files ({what}): remove it, and it is made again")
    return index


def _kept(place: Path, kind: Kind, root: str) -> ClipIndex | None:
    try:
        return ClipIndex(place, kind, root) if place.exists() else None
    except DataFileError:  # of another version, or what a full disk has left
        return None


def _versions(files: Sequence[str], storage: Storage | None) -> list[str]:
    """The version of each file now; empty for one that cannot be opened."""

    def look(name: str) -> str:
        try:
            return open_file(name, storage).fingerprint
        except ClipError:
            return ""
        except StorageError as error:
            if _is_of_file(error):
                return ""
            raise

    return in_threads(look, files)


def _key(kind: Kind, root: str, names: Sequence[str], versions: Sequence[str]) -> str:
    digest = xxhash.xxh3_128(os.fsencode(f"{kind.name} {_VERSION} {root}"))
    for name, version in zip(names, versions, strict=True):
        digest.update(os.fsencode(f"{name}\0{version}\n"))
    return digest.hexdigest()


def open_file(name: str, storage: Storage | None) -> Bytes:
    """Return the bytes of a file, or of a member of a tar archive.

    Raises:
        ClipError: it is not there, or no file.
        StorageError: a store does not answer, or says no.
    """
    place = place_of(name)
    if place is not None:
        archive, begin, size = place
        return Part(open_file(archive, storage), begin, size)
    try:
        if not is_remote(name) and not stat.S_ISREG(os.stat(name).st_mode):
            raise ClipError(f"{shown(name)!r} is no file")  # to open a pipe would wait for who writes it
        return (storage or Storage()).open(name)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ClipError(f"{shown(name)!r} does not exist") from error


def _is_of_file(error: StorageError) -> bool:
    """Whether it is this file that is wrong, and not the way to it."""
    return not isinstance(error, StorageAuthError | StorageUnavailableError)


def _write(
    out: BinaryIO, kind: Kind, root: str, names: Sequence[str], *, storage: Storage | None, progress: bool | None
) -> None:
    # FFmpeg is needed by those alone who make an index, or decode.
    scan = importlib.import_module(f"penstock.clips.{kind.scan}").scan
    schema = kind.schema

    def row(name: str) -> dict[str, Any]:
        try:
            return _row(root, name, schema, scan, storage)
        finally:
            done(1)

    with (
        pa.ipc.new_file(out, schema) as writer,
        progress_bar(
            f"Indexing {kind.name}", len(names), progress if len(names) > 1 else False, in_bytes=False
        ) as done,
    ):
        for begin in range(0, len(names), _AT_A_TIME):
            rows = in_threads(row, names[begin : begin + _AT_A_TIME])
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))


def _row(root: str, name: str, schema: pa.Schema, scan: Any, storage: Storage | None) -> dict[str, Any]:
    """What the index says of a file."""
    row: dict[str, Any] = dict.fromkeys(schema.names)
    row |= {"name": os.fsencode(name), "nbytes": 0, "version": "", "error": "", "length": 0, "digest": bytes(16)}
    try:
        source = open_file(root + name, storage)
        row |= {"nbytes": source.size, "version": source.fingerprint}
        coding, packets = scan(source, root + name)
    except StorageError as error:
        if not _is_of_file(error):
            raise
        return row | {"error": str(error)}
    except ClipError as error:
        return row | {"error": str(error)}
    except Exception as error:  # there is no end to what comes of a damaged file
        what = f"{type(error).__name__}: {error}"
        return row | {"error": f"{shown(root + name)!r} cannot be indexed: {what}"}
    row |= vars(coding) | packets._asdict()
    return row | {"length": packets.length(coding), "digest": packets.digest(coding)}
