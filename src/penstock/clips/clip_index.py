"""`ClipIndex`: the packets of many files of video, in one Arrow file that all processes map.

    one row for each file: name, size, version, how it is coded, and lists: at, size, keys, shown, times

It is made in one pass over the files, and kept: in the cache, by the names and versions of the files; or where the user
says, and then the files may be moved, by names and sizes. A file that cannot be read, or holds no video, has a row with
what is wrong with it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import xxhash

from penstock.clips.media import Bytes
from penstock.clips.packets import Coding, Ints, Packets
from penstock.errors import (
    ClipError,
    DataFileError,
    DataFileIOError,
    StorageAuthError,
    StorageError,
    StorageNotFoundError,
    StorageUnavailableError,
)
from penstock.progress import progress_bar
from penstock.storage import Storage
from penstock.storage.ahead import in_threads
from penstock.storage.cache import UNWRITABLE, file_lock
from penstock.storage.files import SourceFile, io_error
from penstock.storage.kept import kept_path, write_kept
from penstock.storage.urls import is_remote, local_part

__all__ = ["ClipIndex", "open_index"]

_VERSION = 1
_AT_A_TIME = 256  # files of a record batch

_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("nbytes", pa.int64()),
        ("version", pa.string()),
        ("error", pa.string()),
        ("codec", pa.string()),
        ("extradata", pa.binary()),
        *((name, pa.int32()) for name in ("width", "height", "rotation", "colour_range", "colour_space")),
        ("in_ranges", pa.bool_()),
        ("frames", pa.int64()),
        ("digest", pa.binary(16)),
        ("at", pa.list_(pa.int64())),
        ("size", pa.list_(pa.uint32())),
        ("keys", pa.list_(pa.uint32())),
        ("shown", pa.list_(pa.uint32())),
        ("times", pa.list_(pa.float64())),
    ],
    metadata={"penstock": f"clips {_VERSION}"},
)
_CODING = ("codec", "extradata", "width", "height", "rotation", "colour_range", "colour_space", "in_ranges")


class ClipIndex:
    """What is known of the files of an index.

    Args:
        path: of the index.
        root: what comes before the names of the files.
        exact: whether the files must have the versions that were looked at; if not, their sizes are enough.

    Raises:
        DataFileError: it is none, or cut off, or of another version.
        DataFileIOError: it cannot be read.

    Memory: 8 bytes for each file; the rest is mapped. Safe in threads; a pickle is a handle.
    """

    def __init__(self, path: str | os.PathLike[str], root: str, *, exact: bool = True) -> None:
        self.path, self.root, self.exact = os.path.abspath(path), root, exact
        try:
            self._file = SourceFile(self.path)
        except OSError as error:
            raise DataFileIOError(str(error)) from error
        try:
            opened = pa.ipc.open_file(pa.py_buffer(self._file.map or b""))
            self._batches = [opened.get_batch(number) for number in range(opened.num_record_batches)]
        except (pa.ArrowInvalid, OSError) as error:
            raise DataFileError(f"{self.path} is no index of clips, or is cut off: {error}") from error
        if not opened.schema.equals(_SCHEMA, check_metadata=True):
            raise DataFileError(f"{self.path} is no index of clips of this version; make it again")
        columns = [batch.column("frames").to_numpy() for batch in self._batches]
        self.frames: Ints = np.concatenate([np.zeros(0, np.int64), *columns])
        """Frames of each file, int64; 0 for one with an error."""

    def __len__(self) -> int:
        return len(self.frames)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ClipIndex, exact=self.exact), (self.path, self.root)

    def column(self, name: str) -> list[Any]:
        """Return what one column says of all files."""
        return [value for batch in self._batches for value in batch.column(name).to_pylist()]

    def path_of(self, file: int) -> str:
        """Return the path or address of a file."""
        return self.root + str(self._get("name", file).as_py())

    def is_of(self, file: int, source: Bytes) -> bool:
        """Return whether this is what a file held when it was looked at."""
        same = source.size == self._get("nbytes", file).as_py()
        return same and (not self.exact or source.fingerprint == self._get("version", file).as_py())

    def error(self, file: int) -> str:
        """Return what is wrong with a file; empty if nothing is."""
        return str(self._get("error", file).as_py())

    def coding(self, file: int) -> Coding:
        """Return how a file is coded."""
        return Coding(*(self._get(name, file).as_py() for name in _CODING))

    def packets(self, file: int) -> Packets:
        """Return the packets of a file, mapped."""
        self._file.check()
        return Packets(*(self._get(name, file).values.to_numpy() for name in Packets._fields))

    def _get(self, name: str, file: int) -> Any:
        batch, row = divmod(file, _AT_A_TIME)
        return self._batches[batch].column(name)[row]


def open_index(
    files: Sequence[str],
    path: str | os.PathLike[str] | None = None,
    *,
    storage: Storage | None = None,
    progress: bool | None = None,
) -> ClipIndex:
    """Return the index of some files; make it where there is none.

    Args:
        files: paths and addresses.
        path: where it is, or is to be; by default in the cache.
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
        return _of_files(ClipIndex(path, root, exact=False), names)
    if path is not None:
        place = Path(path)
    else:
        place = kept_path("clips", f"{_key(root, names, _versions(files, storage))}.arrow")
    found = _kept(place, root)
    if found is not None:
        return found
    try:
        if path is None:
            place.parent.mkdir(exist_ok=True)
        with file_lock(place):
            found = _kept(place, root)
            if found is None:
                with write_kept(place) as out:
                    _write(out, root, names, storage=storage, progress=progress)
                found = ClipIndex(place, root, exact=path is None)
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
    whole = [name if is_remote(name) else os.path.abspath(local_part(name)) for name in files]
    # Of addresses, too, so no matter of paths.
    root = os.path.commonprefix(whole).rpartition("/")[0] + "/" if whole else ""  # noqa: RUF071
    root = root if root.count("/") > 2 or not root.partition("://")[1] else ""  # no part of an address's head
    return root, [name[len(root) :] for name in whole]


def _of_files(index: ClipIndex, names: Sequence[str]) -> ClipIndex:
    """The index, if it is that of files of these names."""
    made_of = index.column("name")
    if list(names) != made_of:
        differ = next((pair for pair in zip(names, made_of, strict=False) if pair[0] != pair[1]), None)
        if differ is None:
            what = f"it has {len(made_of)} and not {len(names)}"
        else:
            what = f"it has {differ[1]!r} and not {differ[0]!r}"
        raise DataFileError(f"{index.path} is the index of other files ({what}): remove it, and it is made again")
    return index


def _kept(place: Path, root: str) -> ClipIndex | None:
    try:
        return ClipIndex(place, root) if place.exists() else None
    except DataFileError:  # of another version, or what a full disk has left
        return None


def _versions(files: Sequence[str], storage: Storage | None) -> list[str]:
    """The version of each file now; empty for one that cannot be opened."""

    def look(name: str) -> str:
        try:
            return (storage or Storage()).open(name).fingerprint
        except StorageError as error:
            if _is_of_file(error):
                return ""
            raise

    return in_threads(look, files)


def _key(root: str, names: Sequence[str], versions: Sequence[str]) -> str:
    digest = xxhash.xxh3_128(f"{_VERSION} {root}".encode())
    for name, version in zip(names, versions, strict=True):
        digest.update(f"{name}\0{version}\n".encode())
    return digest.hexdigest()


def _is_of_file(error: StorageError) -> bool:
    """Whether it is this file that is wrong, and not the way to it."""
    if isinstance(error, StorageNotFoundError):
        return True
    return not isinstance(error, StorageAuthError | StorageUnavailableError)


def _write(out: BinaryIO, root: str, names: Sequence[str], *, storage: Storage | None, progress: bool | None) -> None:
    with (
        pa.ipc.new_file(out, _SCHEMA) as writer,
        progress_bar("Indexing videos", len(names), progress if len(names) > 1 else False, in_bytes=False) as done,
    ):
        for begin in range(0, len(names), _AT_A_TIME):
            look = partial(_row, root, storage=storage, done=done)
            rows = in_threads(look, names[begin : begin + _AT_A_TIME])
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=_SCHEMA))


def _row(root: str, name: str, *, storage: Storage | None, done: Any) -> dict[str, Any]:
    """What the index says of a file."""
    # FFmpeg is needed by those alone who make an index, or decode.
    from penstock.clips.scan import scan

    row: dict[str, Any] = dict.fromkeys(_SCHEMA.names)
    row |= {"name": name, "nbytes": 0, "version": "", "error": "", "frames": 0, "digest": bytes(16)}
    try:
        source = (storage or Storage()).open(root + name)
        row |= {"nbytes": source.size, "version": source.fingerprint}
        coding, packets = scan(source, root + name)
    except (ClipError, StorageError) as error:
        if isinstance(error, StorageError) and not _is_of_file(error):
            raise
        row["error"] = str(error)
        return row
    finally:
        done(1)
    row |= {field: getattr(coding, field) for field in _CODING} | packets._asdict()
    return row | {"frames": len(packets.shown), "digest": _digest(coding, packets)}


def _digest(coding: Coding, packets: Packets) -> bytes:
    """Identity of a video: how it is coded, the sizes of its packets and their order; not where it lies."""
    digest = xxhash.xxh3_128(repr(coding).encode())
    for values in (packets.size, packets.keys, packets.shown, packets.times):
        digest.update(np.ascontiguousarray(values).data)
    return digest.digest()
