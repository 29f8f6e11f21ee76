"""`TableDataset`: this rank's share of Arrow, Parquet or JSON files that hold the samples themselves.

dataset = TableDataset("data/cifar10", split="train", columns=["img", "label"], seed=0)
for batch in DataLoader(dataset, batch_size=256): ...      # {"img": tensor, "label": tensor}
images = ImageDataset(dataset, transform=[RandomResizedCrop(224)])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from penstock.datasets.row_cache import RowsAhead
from penstock.datasets.shards_ahead import ShardsAhead
from penstock.datasets.source_dataset import SourceDataset
from penstock.errors import ConfigError
from penstock.manifest.classes import HasClasses
from penstock.order.permutation import Indices
from penstock.plan.share import EpochView, MiniEpoch, SharePlan
from penstock.plan.share_options import ShareOptions, check_share
from penstock.plan.windows import ShardSamples, WindowPlan, check_window_shards
from penstock.shards.urls import Urls
from penstock.stages import stage
from penstock.storage import Storage, is_remote
from penstock.storage.urls import listed
from penstock.tables.arriving_lines import ArrivingLines
from penstock.tables.files import are_json, table_files
from penstock.tables.image_columns import ImageRecord
from penstock.tables.json_files import JsonFiles
from penstock.tables.table import TableFiles
from penstock.tables.values import as_array, is_text, shaped

__all__ = ["TableDataset"]

_Table = TableFiles | JsonFiles | ArrivingLines

Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class TableDataset(HasClasses, SourceDataset):
    """The rows of tables: those of one rank in one mini-epoch, as a map-style data set of exactly that length.

    Args:
        source: a folder of `huggingface/datasets`, any other with Arrow, Parquet or JSON lines files, the files
            themselves, here or in a store; or an open `TableFiles` or `JsonFiles`.
        split, columns, images, cache_bytes, storage: see `TableFiles`, and of JSON lines `JsonFiles`.
        load: ``load(sample)`` makes the item, inside the scope of the sample's own `penstock.generator`; by default an
            item is the sample, a dict of its columns.
        rank, world_size, process_group, mini_epochs, group, seed, remainder, shuffle, block_size, window: see
            `penstock.RankDataset`. ``shuffle="global"`` jumps anywhere, which costs nothing in Arrow files and in
            Parquet a row group for each sample, as soon as they are more than ``cache_bytes``: there say
            ``shuffle="block"``. Blocks are then as large as a row group, and as many of them are mixed as fit into half
            of ``cache_bytes``, unless ``block_size`` and ``window`` say otherwise.
        window_shards: of JSON lines in a store: how many files of a rank are mixed in the first epoch, see below.

    Raises:
        ConfigError, PartitionError: arguments that make no sense.
        DataFileError, DataFileIOError, StorageError: see `TableFiles`.
        ImageError: (on access) an image that cannot be decoded; it names file and row.

    Rows of JSON lines are dicts of Python's objects, with the keys of their line or those of ``columns``, and batches
    are made by the loader's ``collate_fn``. Nobody knows how many rows files of JSON lines in a store have: the first
    batch comes once the first file is here, and the first epoch has the order that `ShardDataset` describes, with
    ``len`` a `LengthUnknownError` until its end. ``TableDataset(JsonFiles(...))`` reads all of them before it begins.

    Values are those of `penstock.tables.values`: numbers and arrays of the columns' own types, text, ``None``. With
    Penstock's loader and no ``load`` or ``collate_fn`` batches are made whole: numbers that lie in mapped files in one
    copy, from their pages into the memory that the batch is delivered in.

    Every row comes once an epoch, whatever the number of files, ranks and workers. The state is a few integers, and
    loads on any number of ranks. Index ``i`` is the i-th sample of this rank; ``dataset.table[i]`` is the i-th on disk.
    """

    makes_batches = True

    def __init__(
        self,
        source: TableFiles | JsonFiles | Urls,
        *,
        split: str | None = None,
        columns: Sequence[str] | None = None,
        images: str | None = None,
        cache_bytes: int | None = None,
        storage: Storage | None = None,
        window_shards: int = 8,
        load: Callable[[dict[str, Any]], Any] | None = None,
        **share: Unpack[ShareOptions],
    ) -> None:
        check_share(type(self), share, load)
        check_window_shards(window_shards)
        given: dict[str, Any] = {
            "split": split,
            "columns": columns,
            "images": images,
            "cache_bytes": cache_bytes,
            "storage": storage,
        }
        self.table = _table(source, {name: value for name, value in given.items() if value is not None})
        """The samples as they are on disk."""
        super().__init__(self.table, _plan(self.table, window_shards, share), load)
        self._ahead = RowsAhead()
        self.releases_gil = load is None
        """Whether one process with threads makes batches: of Parquet, threads share what is decoded."""
        if not isinstance(self.table, TableFiles):
            self.makes_batches = self.releases_gil = False
            return
        whole = not self.table.image_columns or self.table.images == "bytes"  # workers share the images of a batch
        self.makes_batches = load is None and whole and type(self).makes_batches

    def class_names(self) -> list[str] | None:
        """Return the names of the classes of the label's column, as `datasets` keeps them; None if there are none."""
        return self.table.label_names() if isinstance(self.table, TableFiles) else None

    def fetch_batch(
        self, indices: Sequence[int], keys: Sequence[int] | None, empty: Empty, place: MiniEpoch | None = None
    ) -> dict[str, Any]:
        """The rows at several indices as a dict of columns: tensors that ``empty(shape, dtype)`` gives, lists of text,
        and what the default collate function makes of anything else. See `penstock.sources.batched.BatchedDataset`.
        """
        rows = self._ahead.rows(self.plan.view(place), indices)
        table, batch = self._columns(), dict[str, Any]()

        def room(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
            batch[name] = tensor = empty(shape, _tensor_type(dtype))
            return tensor.numpy()

        found = table.read(rows, room)
        for name, column in found.items():
            if name not in batch:
                batch[name] = self._collated(name, column, rows, room, batch)
        return {name: batch[name] for name in found}

    def _collated(self, name: str, column: Any, rows: Indices, room: Any, batch: dict[str, Any]) -> Any:
        numbers = None if isinstance(column, list) else as_array(column)
        if numbers is not None:
            numbers = shaped(numbers, self._columns().shapes[name])
            np.copyto(room(name, numbers.shape, numbers.dtype), numbers)
            return batch[name]
        values = self._columns().values(name, column, rows)
        if isinstance(column, list) or (is_text(column.type) and not column.null_count):
            return values
        try:
            return default_collate(values)
        except Exception as error:
            error.add_note(f"in the column {name!r}: it needs a load= or a collate_fn=, or leave it out with columns=")
            raise

    def image_records(self, indices: Sequence[int], place: MiniEpoch | None = None) -> list[ImageRecord]:
        """Several samples as records of images, for `penstock.ImageDataset`. See `TableFiles.image_records`."""
        return self._columns().image_records(self.rows(indices, place))

    def _columns(self) -> TableFiles:
        """Return the table, which is one of columns."""
        if not isinstance(self.table, TableFiles):
            raise ConfigError(f"{self.table!r}: JSON lines have no columns of Arrow, which this asks for")
        return self.table

    def _read(self, view: EpochView, local: Indices) -> list[Any]:
        place: Any = view.place
        if not isinstance(place, ShardSamples) or isinstance(self.table, TableFiles):
            return super()._read(view, local)
        with stage("read"):
            return self.table.arrived(view.rows(local), place.versions)


def _plan(table: _Table, window_shards: int, share: ShareOptions) -> SharePlan:
    is_ours = all(share.get(name) is None for name in ("group", "block_size", "window"))
    if share.get("shuffle") == "block" and is_ours and not isinstance(table, ArrivingLines):
        blocks = table.blocks()
        if blocks is not None:
            share["block_size"], share["window"] = blocks
    is_stored = isinstance(table, ArrivingLines) or bool(table.stored())
    ahead = ShardsAhead(table) if is_stored else None
    if is_stored and not isinstance(table, TableFiles):
        return WindowPlan(table, window_shards=window_shards, ahead=ahead, **share)
    return SharePlan(table, ahead=ahead, **share)


def _table(source: TableFiles | JsonFiles | Urls, options: dict[str, Any]) -> _Table:
    if isinstance(source, TableFiles | JsonFiles):
        if options:
            kind = type(source).__name__
            raise ConfigError(f"{', '.join(options)} belong to {kind}(...), and this one is open already")
        return source
    files = table_files(source, options.pop("split", None), options.get("storage"))
    names = [name for name, _ in files]
    if not are_json(names):
        return TableFiles.of(files, **options)
    if "images" in options:
        raise ConfigError(f"{listed(names)}: images= is for Arrow and Parquet files, and these are JSON lines")
    return (ArrivingLines if all(map(is_remote, names)) else JsonFiles).of(files, **options)


def _tensor_type(kind: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, kind)).dtype
