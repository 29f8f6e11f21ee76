"""`ArrayDataset`: rows of memory-mapped NumPy files. `LoadArray`: load one NumPy file per sample. `LoadBytes`: load the
bytes of each record's file, for any file format.

dataset = ArrayDataset("features-*.npy", labels="labels-*.npy", seed=0)        # rows of the files, with labels
for features, labels in DataLoader(dataset, batch_size=256): ...

penstock.open("train.txt", root="arrays", load=LoadArray())     # each line names an .npy file and a label
penstock.open("arrays")                                         # a folder with one .npy file per sample
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np
import torch

from penstock.datasets.source_dataset import Empty, SourceDataset
from penstock.errors import ConfigError, DataFileError
from penstock.manifest import Record
from penstock.plan.share import MiniEpoch, SharePlan
from penstock.plan.share_options import ShareOptions, check_share
from penstock.random import generator
from penstock.sources.arrays import ArrayFiles, LabelledArrays
from penstock.stages import stage
from penstock.storage import Storage
from penstock.storage.mapped import error_text
from penstock.storage.names import Urls
from penstock.storage.remote import read_file
from penstock.storage.urls import shown

__all__ = ["ArrayDataset", "LoadArray", "LoadBytes"]


class ArrayDataset(SourceDataset):
    """The rows of ``.npy`` files, split across ranks. A map-style dataset of one rank's samples in one mini-epoch.

    Args:
        files: paths, patterns, braces, ``::``, or a list of these. All arrays have the same dtype and row shape; the
            first dimension is the sample. Objects in a store are downloaded whole into the local cache when you create
            the dataset.
        labels: files in the same form, with the same number of rows. An item is then the pair ``(row, label)``.
        load: ``load(row)``, or ``load((row, label))``, converts the tensors to the item, in the scope of the sample's
            own `penstock.generator`.
        rank, world_size, seed, shuffle, ...: see `penstock.RankDataset`.
        storage: access to object stores, see `penstock.storage.Storage`.

    Raises:
        DataFileError: a file is not a numeric array, is truncated, or differs from the others in dtype or shape; for
            other errors see `penstock.TokenDataset`.

    An item is a tensor of the file's dtype (also for scalars), or a tuple of two. With Penstock's loader, and without
    ``load`` or ``collate_fn``, a batch is written in one copy: from the pages of the files into the batch's memory.
    Memory use does not depend on the number of rows: the files are mapped, and all processes of a machine share them.
    """

    releases_gil = True
    makes_batches = True

    def __init__(
        self,
        files: Urls,
        *,
        labels: Urls | None = None,
        load: Callable[[Any], Any] | None = None,
        storage: Storage | None = None,
        **share: Unpack[ShareOptions],
    ) -> None:
        check_share(type(self), share, load)
        self.arrays = ArrayFiles(files, storage)
        """The rows, in file order."""
        self.labels = None if labels is None else ArrayFiles(labels, storage)
        """The rows of the labels, in file order; None without ``labels=``."""
        if self.labels is not None and len(self.labels) != len(self.arrays):
            raise DataFileError(
                f"{self.arrays.maps.files[0].path} ...: {len(self.arrays)} rows, but labels for {len(self.labels)}"
            )
        self._files = self.arrays if self.labels is None else LabelledArrays(self.arrays, self.labels)
        super().__init__(self._files, SharePlan(self._files, **share), load)
        self.makes_batches = load is None and type(self).makes_batches

    def fetch_batch(
        self, indices: Sequence[int], keys: Sequence[int] | None, empty: Empty, place: MiniEpoch | None = None
    ) -> Any:
        """Return the rows at several indices, in tensors that ``empty(shape, dtype)`` allocates; with labels, a list of
        both tensors. See `penstock.sources.batched.BatchedDataset`.
        """
        rows = self._rows_of_batch(indices, place)
        with stage("read"):
            found = self._files.gather(rows, empty)
        return found[0] if self.labels is None else found


class LoadArray:
    """Load one ``.npy`` file per sample: ``load(record) -> (tensor, label)``, or ``(tensor, label, row)``.

    For a manifest without labels, the item is the tensor alone.

    Args:
        row: append the row number of the manifest to the item.
        storage: access to remote addresses, see `penstock.storage.Storage`.

    Raises:
        DataFileIOError: (when called) a file is missing or cannot be read.
        DataFileError: (when called) a file is not a numeric ``.npy`` file, or is truncated.
        StorageError: (when called) the store reports an error.

    The file is read, not mapped. If another process replaces it meanwhile, you get the old or the new file, never a
    mix.
    """

    pure = True
    releases_gil = True

    def __init__(self, *, row: bool = False, storage: Storage | None = None) -> None:
        self.row = row
        self.storage = storage

    def __call__(self, record: Record) -> Any:
        """Return the item of a record."""
        data = read_file(record.path, self.storage)
        try:
            with stage("decode"):
                array = np.load(io.BytesIO(data), allow_pickle=False)
                native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
                tensor = torch.from_numpy(native.reshape(array.shape))
        # NumPy parses the header as a Python literal, so a damaged header can raise almost any exception.
        except Exception as error:
            what = "is not an .npy file of numbers, or is truncated"
            raise DataFileError(f"{shown(record.path)} {what}: {error_text(error)}") from error
        return _item_of(tensor, record, row=self.row)


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
        return _item_of(data, record, row=self.row)


def _item_of(value: Any, record: Record, *, row: bool) -> Any:
    """Return an item: the value, followed by the record's label if it has one, and by its row if ``row`` is true."""
    parts = (value, *(() if record.label is None else (record.label,)), *((record.row,) if row else ()))
    return parts if len(parts) > 1 else value
