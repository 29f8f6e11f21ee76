"""`LoadBytes`: load the bytes of each record's file, for any file format."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.manifest import Record
from penstock.random import generator
from penstock.storage import Storage
from penstock.storage.remote import read_file

__all__ = ["LoadBytes", "item_of"]


class LoadBytes:
    """Load a file's bytes: ``load(record) -> (data, label)``, or ``(data, label, row)``.

    Picklable; usable as ``load=`` of any dataset. For a manifest without labels, the item is the data alone.

    Args:
        size: None: ``data`` is ``bytes``, as long as the file. A number: ``data`` is a uint8 tensor of this number of
            bytes. A longer file yields a part that begins at a position drawn from the sample's own
            `penstock.generator`; a shorter file is padded with zeros.
        row: append the row number of the manifest to the item.
        storage: access to remote addresses, see `penstock.storage.Storage`.

    Raises:
        ConfigError: the size is not positive.
        DataFileIOError: (when called) a file is missing or cannot be read.
        StorageError: (when called) the store reports an error.

    Reading releases the GIL. A loader's statistics show it as the stage ``read``.

    >>> ps.open("train.txt", root="data", load=ps.LoadBytes())[0]           # doctest: +SKIP
    (b"...", 3)
    """

    pure = True

    def __init__(self, *, size: int | None = None, row: bool = False, storage: Storage | None = None) -> None:
        if size is not None and size < 1:
            raise ConfigError(f"size must be positive, got {size}")
        self.size = size
        self.row = row
        self.storage = storage

    def __call__(self, record: Record) -> Any:
        """Return the item of a record."""
        data: Any = read_file(record.path, self.storage)
        if self.size is not None:
            begin = int(generator().integers(len(data) - self.size + 1)) if len(data) > self.size else 0
            found = np.frombuffer(data, np.uint8)[begin : begin + self.size]
            data = torch.zeros(self.size, dtype=torch.uint8)
            data.numpy()[: len(found)] = found
        return item_of(data, record, row=self.row)


def item_of(value: Any, record: Record, *, row: bool) -> Any:
    """Return an item: the value, followed by the record's label if it has one, and by its row if ``row`` is true."""
    parts = (value, *(() if record.label is None else (record.label,)), *((record.row,) if row else ()))
    return parts if len(parts) > 1 else value
