"""`TableFiles`: random access to the rows of Arrow and Parquet files.

    table = TableFiles("data/squad", split="train", columns=["question", "answers"])
    table[0], table[-1]                       the first and the last sample: dicts of columns
    table.records([5, 3, 5])                  several samples, in this order
    table.take([5, 3, 5])                     the same as Arrow columns

Promises: memory does not depend on the number of rows. Arrow files are mapped, and all processes of a machine share
their pages; for Parquet and compressed Arrow, recently decoded parts are cached, up to a limit. A file that changes
while it is open raises an error before the next read. A pickle is a handle that opens the same files elsewhere and
refuses others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import ConfigError, DataFileError
from penstock.images.sample_record import ColumnRecord, ImageType, check_image_type, label_column
from penstock.order.permutation import Indices, normalise
from penstock.stages import stage
from penstock.storage import Storage
from penstock.storage.names import Urls
from penstock.storage.remote import RemoteSource
from penstock.storage.stream import in_threads
from penstock.tables.arrow import RowGroupIndex, scan_arrow
from penstock.tables.found_files import FoundFiles, is_stored_parquet, open_parts, table_files
from penstock.tables.image_columns import encoded, features_of, image_base, image_columns, make_image
from penstock.tables.lru import LruCache
from penstock.tables.parquet import scan_parquet
from penstock.tables.row_groups import Room, RowGroups
from penstock.tables.values import as_values, check_type, fixed_shape, plain_batch, shaped
from penstock.wording import counted

__all__ = ["CACHE_BYTES", "TableFiles", "read_schema"]

CACHE_BYTES = 256 << 20

Columns = dict[str, Any]
"""The columns of some rows by name: a numeric array, a list of texts, or an Arrow array."""


class TableFiles(RowGroups):
    """The rows of concatenated table files.

    Args:
        source: a folder written by ``save_to_disk`` of `datasets`, its cache, or any folder with Arrow or Parquet
            files; or files: paths, patterns, braces, ``::``, or a list of those. CSV and TSV files with a header
            are converted once, see `penstock.tables.csv`; they and Arrow files in a store are copied to the local cache
            when the table is opened. For Parquet in a store, opening reads only the footers; files are copied when a
            loader needs them, and row groups are read by ranges if the cache has no room. Files of
            ``hf://datasets/OWNER/NAME[@REVISION]/...`` are not copied. A folder in a store must be listable, unless
            `datasets` wrote it.
        split: the split, for a folder that holds several: by ``dataset_dict.json``, or by file names.
        columns: the columns to read; by default all. Other columns of Parquet are not decoded.
        images: the form of image columns: ``"rgb"`` for uint8 arrays (height, width, 3); ``"pil"`` for Pillow images,
            as in `datasets`; ``"bytes"`` leaves them encoded.
        images_from: the folder or address of images that the table names by ``path`` and does not contain. Relative
            paths begin there, others must be inside. None refuses such rows: a table may name any file.
        cache_bytes: memory of each process for decoded row groups and compressed batches; at least one is cached.
        storage: access options, see `penstock.storage.Storage`.

    Raises:
        ConfigError: an unknown column or split, or a column type without Python values.
        DataFileIOError: a missing or unreadable file, or a folder without tables.
        DataFileError: a file that is truncated, damaged, or has other columns than the first.
        DataFileChangedError: (on access) a file was truncated or modified since.
        ShardIOError: no file matches a pattern.
        StorageError: a store fails.

    Opening reads the batch headers of Arrow streams, about ten microseconds each, and the footers of other files: for
    Parquet in a store, with one or two requests per file, 48 at a time. Rows of Arrow files are cheap in any order. To
    read a row of Parquet, its row group must be decoded, unless it is cached.
    """

    def __init__(
        self,
        source: Urls | FoundFiles,
        *,
        split: str | None = None,
        columns: Sequence[str] | None = None,
        images: ImageType = "rgb",
        images_from: str | os.PathLike[str] | None = None,
        cache_bytes: int = CACHE_BYTES,
        storage: Storage | None = None,
    ) -> None:
        check_image_type(images)
        if isinstance(columns, str):
            raise ConfigError(f"columns={columns!r} has to be a list of names")
        self.images, self._images_from, self._storage = images, image_base(images_from), storage
        self.maps = open_parts(table_files(source, split, storage), storage, as_they_are=is_stored_parquet)
        paths = [file.path for file in self.maps.files]
        scanned = in_threads(lambda number: _scan(paths[number], self.maps.head(number)), range(len(paths)))
        schemas, self._indexes = [schema for schema, _ in scanned], [index for _, index in scanned]
        self.schema = _chosen(paths[0], schemas[0], columns)
        self._places = [_places(*pair, self.schema, columns) for pair in zip(paths, schemas, strict=True)]
        self._kept = LruCache(cache_bytes)
        self._set_up()

    def _set_up(self) -> None:
        super()._set_up()
        self.features = features_of(self.schema)
        """The features that `datasets` stored in the files, if it wrote them."""
        self.image_columns = image_columns(self.schema, self.features)
        """The image columns."""
        self.shapes = {field.name: fixed_shape(field) for field in self.schema}
        """The fixed shape of each column's values, if its type defines one."""

    # Properties.

    def __repr__(self) -> str:
        return f"<TableFiles of {counted(len(self), 'row')}: {', '.join(self.columns)}; {self.maps.in_words()}>"

    @property
    def columns(self) -> list[str]:
        """The names of the columns that are read."""
        return list(self.schema.names)

    def class_names(self, column: str) -> list[str]:
        """Return the class names of a ``ClassLabel`` column.

        Raises:
            ConfigError: the files do not define them.
        """
        found = self._names_of(column)
        if not found:
            raise ConfigError(f"the files say no names of classes for the column {column!r}")
        return found

    def _names_of(self, column: str) -> list[str]:
        found = self.features.get(column)
        return list(found.get("names") or ()) if isinstance(found, dict) else []

    def label_names(self) -> list[str] | None:
        """Return the class names of the label column; None if there is no such column, or it has no names.

        The label column is that of `image_records`; without images, the only column with class names, or ``label``.
        """
        if self.image_columns:
            try:
                label = self.image_and_label()[1] or ""
            except ConfigError:
                return None
        else:
            named = [column for column in self.columns if self._names_of(column)]
            label = named[0] if len(named) == 1 else "label"
        return (self._names_of(label) or None) if label in self.columns else None

    @property
    def decoded(self) -> int:
        """The number of row groups and record batches that this process has opened so far, repetitions included.

        Use it to compare how much decoding different orders of Parquet rows need.
        """
        return self._kept.made

    def blocks(self) -> tuple[int, int] | None:
        """Return block size and window of a block shuffle that decodes each row group once; None for Arrow files.

        They are the rows of the largest row group, and the number of such groups that fit in half of ``cache_bytes``.

        This decodes one row group, to measure its size.
        """
        indexes = self._indexes
        sizes = np.concatenate([np.zeros(len(g.counts)) if g.nbytes is None else g.nbytes for g in indexes])
        if not sizes.any():
            return None
        largest = self._batch(int(sizes.argmax())).nbytes
        rows = max(int(g.counts.max()) for g in indexes if g.nbytes is not None and len(g.counts))
        return rows, max(1, self._kept.limit // 2 // max(largest, 1))

    # Reading.

    def records(self, indices: Any) -> list[dict[str, Any]]:
        """Return the samples at ``indices`` (any order, repeats allowed)."""
        rows = normalise(indices, len(self))
        return self._samples(self.read(rows, _empty), rows)

    def _samples(self, columns: Columns, rows: Indices) -> list[dict[str, Any]]:
        values = [self.values(name, column, rows) for name, column in columns.items()]
        if not values:
            return [{} for _ in rows]
        return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]

    def values(self, name: str, column: Any, rows: Indices) -> list[Any]:
        """Return the values of a column from `read`, for these rows."""
        if isinstance(column, list):
            return column
        if isinstance(column, np.ndarray):
            return list(shaped(column, self.shapes[name]))
        if name in self.image_columns:
            return [make_image(*pair, self.images) for pair in self.encoded(column, rows)]
        return as_values(column, self.shapes[name])

    def encoded(self, column: pa.Array, rows: Indices) -> list[tuple[bytes | None, str]]:
        """Return the encoded files of an image column, and their names for messages."""
        return encoded(column, self._images_from, self._storage, list(map(self.row_name, rows.tolist())))

    def image_and_label(self) -> tuple[str, str | None]:
        """Return the columns of images and labels, for `penstock.ImageDataset`: the first image column, and see
        `label_column`.

        Raises:
            ConfigError: no image column, or several columns may be the label.
        """
        path = self.maps.files[0].path
        if not self.image_columns:
            raise ConfigError(
                f"{path}: no column of images. The columns are {', '.join(self.columns)}. An image column has the type "
                "Image of `datasets`, or is a struct of bytes and path. To decode another column, give load=, a "
                "function of a sample, and no options of images, such as size="
            )
        return self.image_columns[0], label_column(path, self.columns, self.image_columns[0])

    def image_records(self, indices: Any) -> list[ColumnRecord]:
        """Return the samples at ``indices`` as image records, for `penstock.ImageDataset`.

        Raises:
            ConfigError: see `image_and_label`.
            ImageError: a row without an image.
        """
        rows, (image, label) = normalise(indices, len(self)), self.image_and_label()
        found = self.read(rows, _empty)
        files = self.encoded(found.pop(image), rows)
        samples = zip(files, self._samples(found, rows), rows.tolist(), strict=True)
        return [ColumnRecord(*file, sample, label, row) for file, sample, row in samples]

    def take(self, indices: Any, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Return the rows at ``indices`` as Arrow columns: all columns that are read, or ``columns``."""
        rows = normalise(indices, len(self))
        numbers = list(range(len(self.schema))) if columns is None else list(map(self.columns.index, columns))
        if not len(rows):
            return plain_batch(pa.RecordBatch.from_pylist([], schema=self.schema)).select(numbers)
        return self._take(self._locate(rows), numbers)

    def read(self, rows: Indices, room: Room) -> Columns:
        """Return the columns of rows that are known to be in range.

        Numbers in mapped files are copied once, into the array that ``room(column, shape, dtype)`` returns.
        """
        if not len(rows):
            return dict(zip(self.columns, self.take(rows).columns, strict=True))
        with stage("read"):
            return self._read(rows, room, self.image_columns)

    # Pickling.

    def __getstate__(self) -> dict[str, Any]:
        names = ("images", "_images_from", "_storage", "maps", "schema", "_indexes", "_places", "_kept")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_up()


def _empty(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.empty(shape, dtype)


def _scan(path: str, data: npt.NDArray[np.uint8] | RemoteSource) -> tuple[pa.Schema, RowGroupIndex]:
    if isinstance(data, RemoteSource):
        return scan_parquet(path, data)
    if not len(data):
        raise DataFileError(f"{path} is empty (0 bytes): it was not written to its end")
    schema, index = (scan_parquet if data[:4].tobytes() == b"PAR1" else scan_arrow)(path, data)
    try:
        _ = schema.names  # Arrow decodes the names at access
    except UnicodeDecodeError as error:
        raise DataFileError(f"{path} is damaged, or not written by the rules: a column's name: {error}") from None
    return schema, index


def read_schema(name: str, storage: Storage | None = None) -> pa.Schema:
    """Return the schema of a file, without reading its data. Raises the same errors as `TableFiles`."""
    maps = open_parts([((storage or Storage()).pinned(name), None)], storage, as_they_are=is_stored_parquet)
    return _scan(maps.files[0].path, maps.head(0))[0]


def _chosen(path: str, schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    names = list(schema.names) if columns is None else list(columns)
    for name in names:
        if schema.names.count(name) != 1:
            what = "no column" if name not in schema.names else "more than one column"
            raise ConfigError(f"{path} has {what} {name!r}; there are {', '.join(schema.names)}: choose with columns=")
        check_type(f"{path}: column {name!r}", schema.field(name).type)
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"columns={columns!r}: at least one, and each once")
    return pa.schema([schema.field(name) for name in names], metadata=schema.metadata)


def _places(path: str, schema: pa.Schema, wanted: pa.Schema, columns: Sequence[str] | None) -> list[int]:
    """Return the numbers of the wanted columns in a file, after a check that it has those of the first file.

    If all columns are read, ``columns=None``, it must have no others.
    """
    more = [name for name in schema.names if name not in wanted.names]
    if more and columns is None:
        raise DataFileError(
            f"{path} has columns that the first file has not: {', '.join(more)}; open them apart, or choose by columns="
        )
    for field in wanted:
        if schema.names.count(field.name) != 1:
            raise DataFileError(
                f"{path} has other columns than the first file: {', '.join(schema.names)}; open them apart"
            )
        found = schema.field(field.name).type
        if found != field.type:
            raise DataFileError(
                f"{path}: column {field.name!r} has the type {found}, and {field.type} in the first file: open them "
                "apart, or choose others with columns="
            )
    return [schema.get_field_index(field.name) for field in wanted]
