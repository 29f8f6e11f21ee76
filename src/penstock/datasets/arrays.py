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
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash

from penstock.datasets.mapped import FilesTable, MappedFiles, look_at, said
from penstock.datasets.place import Place
from penstock.datasets.raw import item_of, read_file
from penstock.datasets.rows_ahead import RowsAhead
from penstock.datasets.share import Share, Slice
from penstock.datasets.share_dataset import ShareDataset
from penstock.errors import ConfigError, DataFileError, DataFileIOError
from penstock.manifest import Record
from penstock.order.permutation import Indices
from penstock.shards.urls import Urls, expand
from penstock.stages import stage
from penstock.storage import Storage, io_error, write_atomically
from penstock.storage.urls import shown

__all__ = ["ArrayDataset", "ArrayFiles", "LoadArray", "list_arrays"]

Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class ArrayFiles(FilesTable):
    """The rows of ``.npy`` files of one type and shape of a row, one file after the other."""

    def __init__(self, files: Urls, storage: Storage | None = None) -> None:
        found = [look_at(_npy(name), None, storage) for name in expand(files, storage)]
        first = found[0]
        for file in found:
            if (file.dtype, file.shape[1:]) != (first.dtype, first.shape[1:]):
                raise DataFileError(
                    f"{file.path} has rows of {np.dtype(file.dtype)} {file.shape[1:]}, and {first.path} of "
                    f"{np.dtype(first.dtype)} {first.shape[1:]}: open them apart"
                )
        self.maps = MappedFiles(found)
        self.row = first.shape[1:]
        self.type = _tensor_type(first.path, np.dtype(first.dtype))
        self.starts = np.cumsum([0, *(file.shape[0] for file in found)], dtype=np.int64)
        """First row of each file, and the number of all."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    def prefixes(self, rows: int) -> list[str]:
        return [self._combined(end) for end in np.flatnonzero(self.starts == rows).tolist()]

    def _combined(self, files: int) -> str:
        prints = [self.maps.fingerprint(number) for number in range(files)]
        return xxhash.xxh3_128_hexdigest(" ".join(prints).encode())

    def read_into(self, out: npt.NDArray[Any], rows: npt.NDArray[np.int64]) -> None:
        """Write rows into an array of shape (rows, *row): one copy, from the file's pages to where they go.

        Raises:
            DataFileChangedError: a file was truncated or written to since it was opened.
        """
        numbers = self.starts.searchsorted(rows, "right") - 1
        for number in np.unique(numbers).tolist():
            array, places = self.maps.array(number), np.flatnonzero(numbers == number)
            local = rows[places] - self.starts[number]
            if len(places) == len(rows) and array.dtype == out.dtype:
                np.take(array, local, axis=0, out=out, mode="clip")  # in range: `normalise` has looked
            else:
                out[places] = array[local]


def _npy(name: str) -> str:
    if not name.lower().partition("?")[0].endswith(".npy"):
        raise ConfigError(f"{name}: rows are read out of .npy files; files of others have load=LoadBytes()")
    return name


def _tensor_type(path: str, kind: np.dtype[Any]) -> torch.dtype:
    try:
        return torch.from_numpy(np.empty(0, kind.newbyteorder("="))).dtype
    except TypeError:
        raise DataFileError(f"{path} holds {kind}, of which there are no tensors") from None


class _Labelled(FilesTable):
    """Rows and their labels as the one table that a state belongs to: with other labels it is another one."""

    def __init__(self, arrays: ArrayFiles, labels: ArrayFiles) -> None:
        self._parts = arrays, labels

    def __len__(self) -> int:
        return len(self._parts[0])

    def prefixes(self, rows: int) -> list[str]:
        return [_both(*pair) for pair in product(*(part.prefixes(rows) for part in self._parts))]


def _both(arrays: str, labels: str) -> str:
    return xxhash.xxh3_128_hexdigest(f"{arrays} with labels {labels}".encode())


class ArrayDataset(ShareDataset):
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
        rank: int | None = None,
        world_size: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        mini_epochs: int = 1,
        group: int | None = None,
        seed: int = 0,
        remainder: str = "pad",
        shuffle: str = "global",
        block_size: int | None = None,
        window: int | None = None,
        storage: Storage | None = None,
    ) -> None:
        self.arrays = ArrayFiles(files, storage)
        """The rows as they are in the files."""
        self.labels = None if labels is None else ArrayFiles(labels, storage)
        """Those of the labels."""
        if self.labels is not None and len(self.labels) != len(self.arrays):
            raise DataFileError(
                f"{self.arrays.maps.files[0].path} ...: {len(self.arrays)} rows, and labels for {len(self.labels)}"
            )
        self._table: FilesTable = self.arrays if self.labels is None else _Labelled(self.arrays, self.labels)
        share = Share(
            self._table,
            rank=rank,
            world_size=world_size,
            process_group=process_group,
            mini_epochs=mini_epochs,
            seed=seed,
            shuffle=shuffle,
            remainder=remainder,
            group=group,
            block_size=block_size,
            window=window,
        )
        super().__init__(share, load)
        self._ahead = RowsAhead()
        self.makes_batches = load is None and type(self).makes_batches

    @property
    def fingerprint(self) -> str:
        """Identity of the rows and their labels, see `MappedFiles.fingerprint`."""
        return self._table.fingerprint

    def fetch_batch(
        self, indices: Sequence[int], keys: Sequence[int] | None, empty: Empty, place: Place | None = None
    ) -> Any:
        """The rows at several indices, in tensors that ``empty(shape, dtype)`` gives, with labels as a list of two. See
        `penstock.datasets.base.BatchedDataset`."""
        rows = self._ahead.rows(self._share, indices, place)
        found = self._gather(rows, empty)
        return found[0] if self.labels is None else found

    def _gather(self, rows: Indices, empty: Empty) -> list[torch.Tensor]:
        found = []
        with stage("read"):
            for files in (self.arrays, self.labels):
                if files is not None:
                    found.append(empty((len(rows), *files.row), files.type))
                    files.read_into(found[-1].numpy(), rows)
        return found

    def _read(self, slice_: Slice, local: Indices) -> list[Any]:
        found = self._gather(slice_.rows(slice_.positions(local)), _ordinary)
        return list(found[0]) if self.labels is None else list(zip(*found, strict=True))

    def _items(self, records: list[Any]) -> list[Any]:
        return records


def _ordinary(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


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
    """Write a manifest of the ``.npy`` files in a folder, sorted by name; None if there are none.

    Args:
        folder: what is listed; not what is in folders in it.
        out: the folder that the manifest goes to, under a name that follows from the first one's path.

    Raises:
        DataFileIOError: a name with a line break in it, or a folder that cannot be read.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(".npy"))
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
