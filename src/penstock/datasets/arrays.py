"""`ArrayDataset`: rows of memory-mapped NumPy files; `LoadArray`: one NumPy file a sample.

dataset = ArrayDataset("features-*.npy", labels="labels-*.npy", seed=0)        # rows of the files, and their labels
for features, labels in DataLoader(dataset, batch_size=256): ...

penstock.open("train.txt", root="arrays", load=LoadArray())     # each line names an .npy file, and a label
penstock.open("arrays")                                         # a folder of .npy files, one a sample
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
import xxhash

from penstock.datasets.raw import item_of
from penstock.datasets.row_cache import RowsAhead
from penstock.datasets.source_dataset import SourceDataset
from penstock.errors import DataFileError, DataFileIOError
from penstock.manifest import Record
from penstock.plan.share import MiniEpoch, SharePlan
from penstock.plan.share_options import ShareOptions, check_share
from penstock.shards.urls import Urls
from penstock.sources.arrays import ArrayFiles, LabelledArrays
from penstock.stages import stage
from penstock.storage import Storage, io_error, write_atomically
from penstock.storage.mapped import said
from penstock.storage.urls import shown
from penstock.storage.whole_file import read_file

__all__ = ["ArrayDataset", "LoadArray", "list_arrays"]

Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class ArrayDataset(SourceDataset):
    """Rows of ``.npy`` files: those of one rank in one mini-epoch, as a map-style data set of exactly that length.

    Args:
        files: paths, patterns, braces, ``::``, or a list of those: arrays of one type whose first dimension is the
            samples. Objects in a store are copied into the local cache, whole, when the data set is made.
        labels: files in the same form and with as many rows; an item is then the pair of both.
        load: ``load(row)``, or ``load((row, label))``, makes the item of tensors, inside the scope of the sample's own
            `penstock.generator`.
        rank, world_size, process_group, mini_epochs, group, seed, remainder, shuffle, block_size, window: see
            `penstock.RankDataset`.
        storage: how a store is reached, see `penstock.storage.Storage`.

    Raises:
        ConfigError, PartitionError: arguments that make no sense.
        DataFileIOError: a file that is missing, or that nobody may read.
        DataFileError: one that is no array of numbers, is truncated, or unlike the others.
        DataFileChangedError: (on access) one that was truncated or written to since.
        ShardIOError: no file matches a pattern.

    An item is a tensor of the file's type (scalars too), or a tuple of two. With Penstock's loader and no ``load`` or
    ``collate_fn`` a batch is written in one copy, from the pages of the files into the memory that it is delivered in.
    Memory does not depend on the rows: files are mapped, and shared by all processes of a machine.
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
        """The rows as they are in the files."""
        self.labels = None if labels is None else ArrayFiles(labels, storage)
        """Those of the labels."""
        if self.labels is not None and len(self.labels) != len(self.arrays):
            raise DataFileError(
                f"{self.arrays.maps.files[0].path} ...: {len(self.arrays)} rows, and labels for {len(self.labels)}"
            )
        self._files = self.arrays if self.labels is None else LabelledArrays(self.arrays, self.labels)
        super().__init__(self._files, SharePlan(self._files, **share), load)
        self._ahead = RowsAhead()
        self.makes_batches = load is None and type(self).makes_batches

    def fetch_batch(
        self, indices: Sequence[int], keys: Sequence[int] | None, empty: Empty, place: MiniEpoch | None = None
    ) -> Any:
        """The rows at several indices, in tensors that ``empty(shape, dtype)`` gives, with labels as a list of two. See
        `penstock.sources.batched.BatchedDataset`."""
        rows = self._ahead.rows(self.plan.view(place), indices)
        with stage("read"):
            found = self._files.gather(rows, empty)
        return found[0] if self.labels is None else found


class LoadArray:
    """``load(record) -> (array, label)``, or ``(array, label, row)``: one ``.npy`` file a sample, as a tensor.

    Rows of a manifest without a label give the array alone.

    Args:
        row: add the row number of the manifest to the item.
        storage: how files at remote addresses are reached: `penstock.storage.Storage`.

    Raises:
        DataFileIOError: (when called) a file that is missing or cannot be read.
        DataFileError: (when called) one that is no ``.npy`` file of numbers, or truncated.
        StorageError: (when called) a store says no.

    It is read, not mapped, so a file that is replaced meanwhile is the old one or the new one.
    """

    pure = True
    releases_gil = True

    def __init__(self, *, row: bool = False, storage: Storage | None = None) -> None:
        self.row = row
        self.storage = storage

    def __call__(self, record: Record) -> Any:
        """The item of a record."""
        data = read_file(record.path, self.storage)
        try:
            with stage("decode"):
                array = np.load(io.BytesIO(data), allow_pickle=False)
                tensor = torch.from_numpy(
                    np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)
                )
        except Exception as error:  # NumPy reads the header as Python, and raises what a damaged one leads to
            what = "is not an .npy file of numbers, or is truncated"
            raise DataFileError(f"{shown(record.path)} {what}: {said(error)}") from error
        return item_of(tensor, record, row=self.row)


def list_arrays(folder: str | os.PathLike[str], out: Path) -> Path | None:
    """Write a manifest of the ``.npy`` files in a folder, without hidden ones, sorted by name; None if there are none.

    Args:
        folder: what is listed; not what is in folders in it.
        out: the folder that the manifest goes to, under a name that follows from the first one's path.

    Raises:
        DataFileIOError: a name with a line break in it, or a folder that cannot be read.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".npy") and not name.startswith("."))
    except OSError as error:
        raise DataFileIOError(str(io_error(folder, error))) from error
    if not names:
        return None
    if any("\n" in name for name in names):
        raise DataFileIOError(f"{folder}: a name with a line break in it; rename that file")
    content = "".join(f"{name}\n" for name in names).encode("utf-8", "surrogateescape")
    path = out / f"{xxhash.xxh3_64_hexdigest(os.fsencode(os.path.realpath(folder)))}-npy.txt"
    out.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != content:
        with write_atomically(path) as file:
            file.write(content)
    return path
