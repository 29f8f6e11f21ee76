"""LMDB databases as a source: their keys become a manifest, and values are loaded by key. Needs the extra ``lmdb``.

    write_keys("train.lmdb", "train.keys.txt")                 # once
    manifest = Manifest.open("train.keys.txt", label=None)
    dataset = RankDataset(manifest, load=LoadLmdb("train.lmdb", decode=my_decode), seed=0)

Order, partition, resume and constant memory are the same as for any manifest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from penstock.errors import ConfigError, ManifestError, ManifestIOError, PenstockError
from penstock.manifest import Record
from penstock.manifest.scan import BOM
from penstock.storage.local import write_atomically

__all__ = ["LoadLmdb", "write_keys"]


class LoadLmdb:
    """Load the value stored under ``record.path``.

    Args:
        database: folder or file of the database.
        decode: ``decode(key, value_bytes)`` converts the value to the item; by default the item is ``(key, value)``.

    Raises:
        ConfigError: the lmdb package is not installed.
        ManifestIOError: (on access) the database cannot be opened.
        ManifestError: (on access) the database has no such key.

    Each process opens the database once, at first use: LMDB does not allow opening it twice, or using it across a
    fork. The data is mapped, and all processes share it. Picklable if ``decode`` is.
    """

    def __init__(self, database: str | os.PathLike[str], *, decode: Callable[[str, bytes], Any] | None = None) -> None:
        _import()
        self.database = os.fspath(database)
        self.decode = decode

    def __call__(self, record: Record) -> Any:
        """Return the item of a record."""
        with _shared(self.database).begin() as transaction:
            value = transaction.get(os.fsencode(record.path))
        if value is None:
            raise ManifestError(
                f"{self.database} has no key {record.path!r} (row {record.row} of the manifest): write the keys again "
                "with write_keys"
            )
        return (record.path, value) if self.decode is None else self.decode(record.path, value)


def write_keys(database: str | os.PathLike[str], manifest: str | os.PathLike[str]) -> int:
    """Write the keys of a database into a manifest, one per line, in database order; return their number.

    Raises:
        ManifestError: a key contains a line break, or a space or tab at either end, which a manifest cannot represent.
        ManifestIOError: the database cannot be opened, or the manifest cannot be written.
    """
    name, path, count = os.fspath(database), os.fspath(manifest), 0
    with _shared(name).begin() as transaction:
        try:
            with write_atomically(path) as file:
                for key in transaction.cursor().iternext(keys=True, values=False):
                    if b"\n" in key or b"\r" in key:
                        raise ManifestError(f"{name}: the key {key!r} contains a line break")
                    if key != key.strip(b" \t") or key.startswith(BOM):
                        raise ManifestError(
                            f"{name}: the key {key!r} begins or ends with a space, a tab or a byte order mark, which a "
                            "manifest strips: store the value under another key"
                        )
                    file.write(key + b"\n")
                    count += 1
        except OSError as error:
            if isinstance(error, PenstockError):
                raise
            raise ManifestIOError(f"{path} cannot be written: {error.strerror}") from error
    return count


_environments: dict[str, tuple[int, Any]] = {}  # real path -> process that opened it, environment
_lock = threading.Lock()


def _shared(database: str) -> Any:
    """Return this process's environment of a database."""
    path = os.path.realpath(database)
    with _lock:
        process, found = _environments.get(path, (0, None))
        if process != os.getpid():
            # Release an environment inherited from the parent process before opening a new one.
            found = None
            _environments.pop(path, None)
            lmdb, options = _import(), {"readonly": True, "lock": False, "readahead": False, "max_readers": 2048}
            try:
                found = lmdb.open(path, subdir=os.path.isdir(path), **options)
            except lmdb.Error as error:
                raise ManifestIOError(f"{path} cannot be opened as an LMDB database: {error}") from error
            _environments[path] = os.getpid(), found
        return found


def _import() -> Any:
    try:
        import lmdb
    except ImportError as error:
        raise ConfigError("LMDB databases need the lmdb package: pip install 'penstock[lmdb]'") from error
    return lmdb
