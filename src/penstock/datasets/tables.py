"""`TableDataset`: one rank's rows of Arrow, Parquet or JSON lines files that contain the samples themselves.

dataset = TableDataset("data/cifar10", split="train", columns=["img", "label"], seed=0)
for batch in DataLoader(dataset, batch_size=256): ...      # {"img": tensor, "label": tensor}
images = ImageDataset(dataset, transform=[RandomResizedCrop(224)])
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Unpack, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from penstock.datasets.shard_prefetch import ShardPrefetcher
from penstock.datasets.source_dataset import Empty, SourceDataset, opened, with_blocks
from penstock.errors import ConfigError
from penstock.images.sample_record import ColumnRecord, ImageType
from penstock.manifest.classes import HasClasses
from penstock.order.permutation import Indices
from penstock.plan.share import EpochView, MiniEpoch, SharePlan
from penstock.plan.share_options import ShareOptions, check_share
from penstock.shards.first_epoch import ShardSamples, WindowPlan, check_window_shards
from penstock.stages import stage
from penstock.storage import Storage, is_remote
from penstock.storage.names import Urls
from penstock.storage.urls import listed
from penstock.tables.arriving_lines import ArrivingLines
from penstock.tables.found_files import are_json, table_files
from penstock.tables.json_files import JsonFiles
from penstock.tables.table import TableFiles
from penstock.tables.values import as_array, is_text, shaped

__all__ = ["TableDataset"]

_Table = TableFiles | JsonFiles | ArrivingLines


class TableDataset(HasClasses, SourceDataset):
    """The rows of tables, split across ranks. A map-style dataset of one rank's samples in one mini-epoch.

    Args:
        source: a folder of `huggingface/datasets`, any other folder of Arrow, Parquet or JSON lines files, or the files
            themselves, also CSV and TSV, local or in a store; or an open `TableFiles` or `JsonFiles`.
        split, columns, images, images_from, cache_bytes, storage: see `TableFiles`; for JSON lines, `JsonFiles`.
        load: ``load(sample)`` converts the sample to the item, in the scope of the sample's own `penstock.generator`.
            By default the item is the sample: a dict of its columns.
        rank, world_size, seed, shuffle, ...: see `penstock.RankDataset`. ``shuffle="global"`` reads rows at random, at
            no extra cost for Arrow files. For Parquet, each sample decodes a whole row group as soon as the row groups
            exceed ``cache_bytes``: use ``shuffle="block"`` there. Its blocks are by default one row group each, and a
            window has as many blocks as fit into half of ``cache_bytes``; ``block_size`` and ``window`` override this.
        window_shards: for JSON lines in a store: the number of a rank's files that the first epoch mixes, see below.

    Raises:
        ConfigError, PartitionError: invalid arguments.
        DataFileError, DataFileIOError, StorageError: see `TableFiles`.
        ImageError: (on access) an image cannot be decoded; the message names file and row.

    A row of JSON lines is a dict of Python objects, with the keys of its line or the keys in ``columns``. The loader's
    ``collate_fn`` makes the batches. The number of rows of JSON lines files in a store is unknown at first. The first
    batch is ready when the first file has been downloaded; the first epoch has the order that `ShardDataset` describes,
    and ``len`` raises `LengthUnknownError` until its end. To read all files before the start, use
    ``TableDataset(JsonFiles(...))``.

    Values have the types that `penstock.tables.values` defines: numbers and arrays of the columns' own dtypes, text,
    ``None``. With Penstock's loader, and without ``load`` or ``collate_fn``, whole batches are made at once. Numbers in
    mapped files are copied once: from the pages of the files into the batch's memory.

    Each row occurs once per epoch, for any number of files, ranks and workers. The state has a few integers and can be
    loaded on any number of ranks. Index ``i`` is the i-th sample of this rank; ``dataset.table[i]`` is row ``i`` on
    disk.
    """

    makes_batches = True

    def __init__(
        self,
        source: TableFiles | JsonFiles | Urls,
        *,
        split: str | None = None,
        columns: Sequence[str] | None = None,
        images: ImageType | None = None,
        images_from: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        storage: Storage | None = None,
        window_shards: int = 8,
        load: Callable[[dict[str, Any]], Any] | None = None,
        **share: Unpack[ShareOptions],
    ) -> None:
        check_share(type(self), share, load)
        check_window_shards(window_shards)
        given: dict[str, Any] = {"split": split, "columns": columns, "images": images, "images_from": images_from}
        given |= {"cache_bytes": cache_bytes, "storage": storage}
        self.table = _table(source, {name: value for name, value in given.items() if value is not None})
        """The samples, in the order of the files."""
        is_arriving = isinstance(self.table, ArrivingLines)
        if not is_arriving:
            with_blocks(share, self.table)
        ahead = ShardPrefetcher(self.table) if is_arriving or self.table.stored() else None
        if ahead is not None and not isinstance(self.table, TableFiles):
            plan: SharePlan = WindowPlan(self.table, window_shards=window_shards, ahead=ahead, **share)
        else:
            plan = SharePlan(self.table, ahead=ahead, **share)
        super().__init__(self.table, plan, load)
        self.releases_gil = load is None
        """Whether threads of one process can make batches. For Parquet, the threads share the decoded row groups."""
        if not isinstance(self.table, TableFiles):
            self.makes_batches = self.releases_gil = False
            return
        # With images to decode, workers share the images of a batch instead of making whole batches.
        whole = not self.table.image_columns or self.table.images == "bytes"
        self.makes_batches = load is None and whole and type(self).makes_batches

    def class_names(self) -> list[str] | None:
        """Return the class names of the label column, from the metadata that `datasets` writes; None without any."""
        return self.table.label_names() if isinstance(self.table, TableFiles) else None

    def fetch_batch(
        self, indices: Sequence[int], keys: Sequence[int] | None, empty: Empty, place: MiniEpoch | None = None
    ) -> dict[str, Any]:
        """Return the rows at several indices as a dict of columns.

        Numeric columns are tensors that ``empty(shape, dtype)`` allocates, text columns are lists, and other columns go
        through torch's default collate function. See `penstock.sources.batched.BatchedDataset`.
        """
        rows = self._rows_of_batch(indices, place)
        table, batch = self._columns(), dict[str, Any]()

        def room(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
            batch[name] = tensor = empty(shape, torch.from_numpy(np.empty(0, dtype)).dtype)
            return tensor.numpy()

        found = table.read(rows, room)
        for name, column in found.items():
            if isinstance(column, np.ndarray):
                continue
            numbers = None if isinstance(column, list) else as_array(column)
            if numbers is not None:
                numbers = shaped(numbers, table.shapes[name])
                np.copyto(room(name, numbers.shape, numbers.dtype), numbers)
                continue
            values = table.values(name, column, rows)
            if isinstance(column, list) or (is_text(column.type) and not column.null_count):
                batch[name] = values
                continue
            try:
                batch[name] = default_collate(values)
            except Exception as error:
                error.add_note(
                    f"in the column {name!r}: give load= or collate_fn=, or leave the column out with columns="
                )
                raise
        return {name: batch[name] for name in found}

    def image_and_label(self) -> tuple[str, str | None]:
        """Return the columns of images and labels. See `TableFiles.image_and_label`."""
        return self._columns().image_and_label()

    def image_records(self, indices: Sequence[int], place: MiniEpoch | None = None) -> list[ColumnRecord]:
        """Return several samples as image records, for `penstock.ImageDataset`. See `TableFiles.image_records`."""
        return self._columns().image_records(self.rows(indices, place))

    def _columns(self) -> TableFiles:
        """Return the table if it has Arrow columns; raise ConfigError if it is JSON lines."""
        if not isinstance(self.table, TableFiles):
            raise ConfigError(f"{self.table!r}: this needs Arrow columns, and JSON lines have none")
        return self.table

    def _read(self, view: EpochView, local: Indices) -> list[Any]:
        place: Any = view.place
        if not isinstance(place, ShardSamples) or place.facts is None:
            return super()._read(view, local)
        with stage("read"):
            return cast(ArrivingLines, self.table).arrived(view.rows(local), place.facts)


def _table(source: TableFiles | JsonFiles | Urls, options: dict[str, Any]) -> _Table:
    if isinstance(source, TableFiles | JsonFiles):
        return opened(type(source), source, options)
    files = table_files(source, options.pop("split", None), options.get("storage"))
    names = [name for name, _ in files]
    if not are_json(names):
        return TableFiles(files, **options)
    for name in {"images", "images_from"} & options.keys():
        raise ConfigError(f"{listed(names)}: {name}= is for Arrow and Parquet files, but these are JSON lines")
    return ArrivingLines.of(files, **options) if all(map(is_remote, names)) else JsonFiles(files, **options)
