"""`read_file`: read a whole file, local or remote."""

from __future__ import annotations

from penstock.stages import stage
from penstock.storage import Storage, is_remote, read_object
from penstock.storage.files import DATA

__all__ = ["read_file"]


def read_file(path: str, storage: Storage | None = None) -> bytes:
    """Return the bytes of a whole file, local or remote.

    Raises:
        DataFileIOError: it is missing or cannot be read.
        StorageError: a store fails.
    """
    with stage("read"):
        if is_remote(path):
            return read_object(path, storage=storage)
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            raise DATA.error(path, error) from error
