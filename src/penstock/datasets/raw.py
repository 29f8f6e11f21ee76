"""`LoadBytes`: the bytes of each record's file, for formats that nobody here knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.manifest import Record
from penstock.random import generator
from penstock.storage import Storage
from penstock.storage.whole_file import read_file

__all__ = ["LoadBytes", "item_of"]


class LoadBytes:
    """``load(record) -> (data, label)``, or ``(data, label, row)``; picklable, for ``load=`` of any data set.

    Rows of a manifest without a label give the data alone.

    Args:
        size: None gives ``bytes``, as long as the file. With a number, a uint8 tensor of so many bytes: of a longer
            file a part that begins at a place drawn from the sample's own `penstock.generator`, a shorter one filled
            up with zeros.
        row: add the row number of the manifest to the item.
        storage: how files at remote addresses are reached: `penstock.storage.Storage`.

    Raises:
        ConfigError: a size that is not positive.
        DataFileIOError: (when called) a file that is missing or cannot be read.
        StorageError: (when called) a store says no.

    Reading releases the GIL; in the statistics of a loader it is the stage ``read``.

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
        """The item of a record."""
        data: Any = read_file(record.path, self.storage)
        if self.size is not None:
            data = self._part(data, self.size)
        return item_of(data, record, row=self.row)

    def _part(self, data: bytes, size: int) -> torch.Tensor:
        begin = int(generator().integers(len(data) - size + 1)) if len(data) > size else 0
        found = np.frombuffer(data, np.uint8)[begin : begin + size]
        out = np.zeros(size, np.uint8)
        out[: len(found)] = found
        return torch.from_numpy(out)


def item_of(value: Any, record: Record, *, row: bool) -> Any:
    """What a record's value, its label if it has one, and its row if that is asked for, are as an item."""
    parts = (value, *(() if record.label is None else (record.label,)), *((record.row,) if row else ()))
    return parts if len(parts) > 1 else value
