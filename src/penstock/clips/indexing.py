"""`open_index`: opens the index of some media files, or builds it in one pass over them.

By default the index is stored in the cache, under a key of the files' names and versions. At a path that the user
chooses, it is matched by names and sizes, so the files may be moved.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from penstock.clips.clip_index import FILES_OF_BATCH, INDEX_VERSION, VIDEO, ClipIndex, Kind, check_is_index
from penstock.clips.media import open_file
from penstock.clips.scan_process import ScanProcesses
from penstock.cores import cores
from penstock.errors import (
    ClipError,
    ConfigError,
    DataFileError,
    DataFileIOError,
    StorageAuthError,
    StorageError,
    StorageUnavailableError,
)
from penstock.progress import progress_bar
from penstock.storage import Storage
from penstock.storage.derived import derived_path, load_or_write, write_derived
from penstock.storage.files import io_error
from penstock.storage.local import UNWRITABLE, file_lock
from penstock.storage.stream import in_threads
from penstock.storage.urls import is_remote, path_of, shown, unsigned

__all__ = ["open_index"]

_IN_STORES = 16  # minimum number of remote files that are read at a time, to hide latency


def open_index(
    files: Sequence[str],
    path: str | os.PathLike[str] | None = None,
    *,
    kind: Kind = VIDEO,
    storage: Storage | None = None,
    progress: bool | None = None,
    renew: bool = False,
) -> ClipIndex:
    """Return the index of some files; build it if it does not exist.

    Args:
        files: paths and URLs.
        path: path of the index; by default it is in the cache.
        kind: the kind of the index: `VIDEO` or `SOUND`.
        storage: access to object stores.
        progress: True or False: show a progress bar or not; None: show it for many files on a terminal.
        renew: rebuild the index at ``path``, or a cached one that contains unreadable files.

    Raises:
        ConfigError: PyAV is not installed.
        DataFileError: ``path`` is not an index, or is the index of other files.
        DataFileIOError: the index cannot be written, or files cannot be scanned on this machine.
        StorageError: a store does not answer.

    Costs: the first call reads all files; later calls check the version of each file, or of none with ``path``.
    """
    if find_spec("av") is None:
        raise ConfigError("an index of clips needs PyAV: pip install 'penstock[clips]'")
    named = _Named.of(files)

    def opened(place: str | os.PathLike[str]) -> ClipIndex:
        found = ClipIndex(place, kind, named.root, exact=path is None, addresses=named.signed)
        return found if path is None else _of_files(found, named)

    def write(out: BinaryIO) -> None:
        _write(out, kind, named, storage=storage, progress=progress)

    if path is not None:
        return _at(Path(path), kind, opened, write, renew=renew)
    place = derived_path("clips", f"{_key(kind, named, _versions(named.addresses, storage))}.arrow")
    with _wrapped(place, (*UNWRITABLE, errno.ENOENT)):
        found = _kept(place, opened) if renew else None
        if found is not None and any(found.column("error")):
            place.unlink(missing_ok=True)
        return load_or_write([place], lambda place: _kept(place, opened), write)


def _at(
    place: Path, kind: Kind, opened: Callable[[Path], ClipIndex], write: Callable[[BinaryIO], None], *, renew: bool
) -> ClipIndex:
    """Return the index at a path that the user has chosen."""
    if place.exists() and not renew:
        return opened(place)
    if place.exists():
        check_is_index(place, kind)  # overwrite only indexes
    with _wrapped(place, ()), file_lock(place):
        if renew or not place.exists():  # another process may have built it meanwhile
            with write_derived(place) as out:
                write(out)
        return opened(place)


@contextlib.contextmanager
def _wrapped(place: Path, expected: Collection[int]) -> Iterator[None]:
    """Convert errors of the disk to `DataFileIOError`: all errors if ``expected`` is empty, else only these."""
    try:
        yield
    except (StorageError, DataFileIOError):
        raise
    except OSError as error:
        if expected and error.errno not in expected:
            raise
        said = io_error(place, error, "the index of clips cannot be written:", "pass another path with index=")
        raise DataFileIOError(str(said)) from error


class _Named(NamedTuple):
    """Files with names relative to a common root.

    Attributes:
        root: the common prefix of all files, up to a folder.
        names: the rest of each path or URL, without a signature.
        addresses: the full paths and URLs, with signatures.
    """

    root: str
    names: list[str]
    addresses: list[str]

    @classmethod
    def of(cls, files: Sequence[str]) -> _Named:
        """Split paths and URLs into a root and names."""
        addresses = [name if is_remote(name) else os.path.abspath(path_of(name) or name) for name in files]
        whole = [unsigned(address) for address in addresses]
        # os.path.commonpath does not work for URLs.
        root = os.path.commonprefix(whole).rpartition("/")[0] + "/" if whole else ""  # noqa: RUF071
        root = root if root.count("/") > 2 or not root.partition("://")[1] else ""  # not within scheme and host
        return cls(root, [name[len(root) :] for name in whole], addresses)

    @property
    def signed(self) -> list[str] | None:
        """The URLs, if they have signatures, which the index does not store; else None."""
        same = all(map(str.endswith, self.addresses, self.names))
        return None if same else self.addresses


def _of_files(index: ClipIndex, named: _Named) -> ClipIndex:
    """Return an index restricted to these files, which may be all or some of its files, in any order.

    Raises:
        DataFileError: the index does not contain one of them.
    """
    known = [os.fsdecode(name) for name in index.column("name")]
    if known == named.names:
        return index
    rows, whole = {name: row for row, name in enumerate(known)}, [named.root + name for name in named.names]
    unknown = named.names[0]
    for root in _roots(whole[0], rows):
        found = [rows.get(name.removeprefix(root), -1) if name.startswith(root) else -1 for name in whole]
        if min(found) >= 0:
            return ClipIndex(
                index.path, index.kind, root, exact=False, addresses=named.signed, rows=np.array(found, np.int64)
            )
        unknown = named.names[found.index(-1)]
    raise DataFileError(
        f"{index.path} is the index of other files: it does not contain {shown(unknown)!r}. Build an "
        "index of all files with: penstock clips index"
    )


def _roots(name: str, rows: Collection[str]) -> Iterator[str]:
    """Return the folders of a name, such that the rest is in the index; the shortest first."""
    places = [0, *(place + 1 for place, sign in enumerate(name) if sign == "/")]
    return (name[:place] for place in places if name[place:] in rows)


def _kept(place: Path, opened: Callable[[Path], ClipIndex]) -> ClipIndex | None:
    try:
        return opened(place) if place.exists() else None
    except DataFileError:  # of another version, or truncated by a full disk
        return None


def _versions(files: Sequence[str], storage: Storage | None) -> list[str]:
    """Return the current version of each file; empty for one that cannot be opened."""

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


def _key(kind: Kind, named: _Named, versions: Sequence[str]) -> str:
    digest = xxhash.xxh3_128(os.fsencode(f"{kind.name} {INDEX_VERSION} {named.root}"))
    with contextlib.suppress(PackageNotFoundError):
        digest.update(version("av").encode())  # another FFmpeg may read files that this one cannot
    for name, made in zip(named.names, versions, strict=True):
        digest.update(os.fsencode(f"{name}\0{made}\n"))
    return digest.hexdigest()


def _is_of_file(error: StorageError) -> bool:
    """Return whether the error concerns only this file, not access to the store."""
    return not isinstance(error, StorageAuthError | StorageUnavailableError)


def _write(out: BinaryIO, kind: Kind, named: _Named, *, storage: Storage | None, progress: bool | None) -> None:
    schema, files = kind.schema, list(zip(named.names, named.addresses, strict=True))
    count = max(cores(), _IN_STORES if any(map(is_remote, named.addresses)) else 0)
    with (
        ThreadPoolExecutor(count, "penstock-scans") as pool,
        ScanProcesses(kind.scan) as processes,  # closed before the pool, so that Ctrl-C does not wait for scans
        pa.ipc.new_file(out, schema) as writer,
        progress_bar(
            f"Indexing {kind.name}", len(files), progress if len(files) > 1 else False, in_bytes=False
        ) as done,
    ):

        def row(file: tuple[str, str]) -> dict[str, Any]:
            try:
                return _row(*file, schema, processes, storage)
            finally:
                done(1)

        for begin in range(0, len(files), FILES_OF_BATCH):
            rows = list(pool.map(row, files[begin : begin + FILES_OF_BATCH]))
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))


def _row(
    name: str, address: str, schema: pa.Schema, processes: ScanProcesses, storage: Storage | None
) -> dict[str, Any]:
    """Scan a file and return its row of the index."""
    row: dict[str, Any] = dict.fromkeys(schema.names)
    row |= {"name": os.fsencode(name), "nbytes": 0, "version": "", "error": "", "length": 0, "digest": bytes(16)}
    try:
        source = open_file(address, storage)
        row |= {"nbytes": source.size, "version": source.fingerprint}
        coding, packets = processes.scan(source, address)
    except StorageError as error:
        if not _is_of_file(error):
            raise
        return row | {"error": str(error)}
    except ClipError as error:
        return row | {"error": str(error)}
    row |= vars(coding) | packets._asdict()
    return row | {"length": packets.length(coding), "digest": packets.digest(coding)}
