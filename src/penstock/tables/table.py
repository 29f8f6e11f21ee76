"""`TableFiles`: the rows of Arrow and Parquet files by their numbers, without an order of their own.

    table = TableFiles("data/squad", split="train", columns=["question", "answers"])
    table[0], table[-1]                       the first sample and the last: dicts of their columns
    table.records([5, 3, 5])                  some, in this order
    table.take([5, 3, 5])                     the same as columns of Arrow

Promises: memory does not depend on the rows. Arrow files are mapped, their pages shared by all processes of a machine;
of Parquet, and of compressed Arrow, what was decoded last is kept, up to a bound. A file that changes while it is open
is an error before the next read. A pickle is a handle, which opens the same files elsewhere and refuses others.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, SupportsIndex

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from penstock.errors import ConfigError, DataFileError
from penstock.order.permutation import Indices, normalise
from penstock.shards.stored import StoredShard
from penstock.shards.urls import Urls
from penstock.stages import stage
from penstock.storage import Storage
from penstock.storage.backend import Stat
from penstock.storage.mapped import FilesTable
from penstock.storage.parallel_requests import in_threads
from penstock.storage.remote import RemoteSource
from penstock.tables.arrow import Layout, scan_arrow
from penstock.tables.files import table_files
from penstock.tables.image_columns import (
    IMAGES,
    ImageRecord,
    encoded,
    features_of,
    image_columns,
    label_column,
    make_image,
)
from penstock.tables.parquet import scan_parquet
from penstock.tables.ranged import TableParts, is_stored_parquet, open_parts
from penstock.tables.row_groups import Located, NotText, Pieces
from penstock.tables.values import as_values, check_type, fixed_shape, plain_batch, shaped
from penstock.wording import counted

__all__ = ["CACHE_BYTES", "TableFiles", "read_schema"]

CACHE_BYTES = 256 << 20

Columns = dict[str, Any]
"""By name what was read of some rows: an array of numbers, a list of text, or an array of Arrow."""


class TableFiles(FilesTable):
    """The rows of tables, one file after the other.

    Args:
        source: a folder that `datasets` wrote by ``save_to_disk``, its cache, or any folder with Arrow or Parquet files
            in it; or files: paths, patterns, braces, ``::``, or a list of those. Arrow files in a store are copied into
            the local cache when the table is opened. Of Parquet there only the footers are read at opening; files are
            copied when a loader needs them, and row groups are read by ranges where the cache has no room. Of
            ``hf://datasets/OWNER/NAME[@REVISION]/...`` nothing is copied. A folder in a store needs a store that can
            be listed, unless `datasets` wrote it.
        split: of a folder that holds several: by ``dataset_dict.json``, or by the names of its files.
        columns: which columns to read; by default all. The others of Parquet are not decoded.
        images: columns of images: ``"rgb"`` makes uint8 arrays (height, width, 3); ``"pil"`` Pillow images, as
            `datasets` does; ``"bytes"`` leaves them encoded.
        cache_bytes: memory of each process for row groups of Parquet, and compressed batches, that are decoded. At
            least one is kept, however large.
        storage: how a store is reached, see `penstock.storage.Storage`.

    Raises:
        ConfigError: a column or a split that is not there, a type of which there are no values.
        DataFileIOError: a file that is missing, a folder without tables, or what nobody may read.
        DataFileError: a file that is truncated, damaged, or has other columns than the first.
        DataFileChangedError: (on access) one that was truncated or written to since.
        ShardIOError: no file matches a pattern.
        StorageError: a store says no.

    Opening goes through the headers of the record batches of Arrow streams, some ten microseconds each, or reads the
    footers of the others: of Parquet in a store, by one request or two for each file, 48 at a time. Such a file is
    copied into the cache when a row of it is needed, or read by ranges where the cache has no room. Rows of Arrow may
    be read in any order; a row of Parquet costs its row group, unless that is kept.
    """

    def __init__(
        self,
        source: Urls,
        *,
        split: str | None = None,
        columns: Sequence[str] | None = None,
        images: str = "rgb",
        cache_bytes: int = CACHE_BYTES,
        storage: Storage | None = None,
    ) -> None:
        _check(images, columns)
        self.images = images
        self._storage = storage
        self._open(table_files(source, split, storage), columns, cache_bytes)

    @classmethod
    def of(
        cls,
        files: list[tuple[str, Stat | None]],
        *,
        columns: Sequence[str] | None = None,
        images: str = "rgb",
        cache_bytes: int = CACHE_BYTES,
        storage: Storage | None = None,
    ) -> Self:
        """Return the table of files that were found by `table_files`; arguments are those of the class."""
        table = cls.__new__(cls)
        _check(images, columns)
        table.images, table._storage = images, storage
        table._open(files, columns, cache_bytes)
        return table

    def _open(self, files: list[tuple[str, Stat | None]], columns: Sequence[str] | None, cache_bytes: int) -> None:
        maps = open_parts(files, self._storage, as_they_are=is_stored_parquet)
        found = maps.files
        scanned = in_threads(lambda number: _scan(found[number].path, maps.head(number)), range(len(found)))
        schema = _chosen(found[0].path, scanned[0][0], columns)
        if columns is None:
            for file, (its, _) in zip(found, scanned, strict=True):
                _check_no_more(file.path, its, schema)
        places = [_places(file.path, its, schema) for file, (its, _) in zip(found, scanned, strict=True)]
        self._pieces = Pieces(maps, [layout for _, layout in scanned], schema, places, cache_bytes)
        self._set_up()

    def _set_up(self) -> None:
        pieces = self._pieces
        self.maps: TableParts = pieces.maps
        self.schema: pa.Schema = pieces.schema
        """The columns that are read, as the first file has them."""
        self.starts = pieces.starts
        """First row of each file, and the number of all."""
        self.features = features_of(self.schema)
        """What `datasets` says of the columns, where it wrote the files."""
        self.image_columns = image_columns(self.schema, self.features)
        """The columns that hold images."""
        self.shapes = {field.name: fixed_shape(field) for field in self.schema}
        """By column the shape that all its values have, where its type says one."""

    # What it is.

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __repr__(self) -> str:
        return f"<TableFiles of {counted(len(self), 'row')}: {', '.join(self.columns)}; {self.maps.in_words()}>"

    @property
    def columns(self) -> list[str]:
        """The names of the columns that are read."""
        return list(self.schema.names)

    def class_names(self, column: str) -> list[str]:
        """The names of the classes that the numbers of a column stand for (``ClassLabel``).

        Raises:
            ConfigError: the files do not say.
        """
        said = self.features.get(column)
        if not isinstance(said, dict) or not said.get("names"):
            raise ConfigError(f"the files say no names of classes for the column {column!r}")
        return list(said["names"])

    def label_names(self) -> list[str] | None:
        """Return the names of the classes of the label's column; None if there is no such column, or it has none.

        The label is that of `image_records`; without images the one column whose classes have names, or ``label``.
        """
        said = {column: self.features.get(column) for column in self.columns}
        named = {
            column: found["names"] for column, found in said.items() if isinstance(found, dict) and found.get("names")
        }
        label = next(iter(named)) if len(named) == 1 else "label"
        if self.image_columns:
            try:
                label = label_column(self.columns, self.image_columns[0]) or ""
            except ConfigError:
                return None
        return list(named[label]) if label in named else None

    @property
    def decoded(self) -> int:
        """How many row groups and record batches this process has opened so far, those that were dropped and opened
        again each time: what an order costs in Parquet."""
        return self._pieces.kept.made

    def stored(self) -> list[StoredShard]:
        """Return the files in a store that are copied when they are needed, for look-ahead."""
        return self.maps.stored()

    def prefixes(self, rows: int) -> list[str]:
        return [self._combined(end) for end in np.flatnonzero(self.starts == rows).tolist()]

    def _combined(self, files: int) -> str:
        prints = [self.maps.fingerprint(number) for number in range(files)]
        return xxhash.xxh3_128_hexdigest(" ".join(prints).encode())

    def blocks(self) -> tuple[int, int] | None:
        """Block size and window of a block shuffle that decodes a row group once and keeps what it goes back to: rows
        of the largest row group, and how many such fit into half of ``cache_bytes``. None of Arrow files.

        Costs one row group, which is decoded to see how large it is then.
        """
        pieces = self._pieces
        sizes = np.concatenate([np.zeros(len(g.counts)) if g.nbytes is None else g.nbytes for g in pieces.layouts])
        if not sizes.any():
            return None
        largest = pieces.piece(int(sizes.argmax())).nbytes
        rows = max(int(g.counts.max()) for g in pieces.layouts if g.nbytes is not None and len(g.counts))
        return rows, max(1, pieces.kept.limit // 2 // max(largest, 1))

    # Reading.

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        """One sample. IndexError outside, negative indices count from the end."""
        return self.records([operator.index(index)])[0]

    def records(self, indices: Any) -> list[dict[str, Any]]:
        """The samples at several indices (any order, repeats allowed)."""
        rows = normalise(indices, len(self))
        found = self.read(rows, lambda _, shape, dtype: np.empty(shape, dtype))
        values = [self.values(name, column, rows) for name, column in found.items()]
        return [dict(zip(found, row, strict=True)) for row in zip(*values, strict=True)]

    def values(self, name: str, column: Any, rows: Indices) -> list[Any]:
        """The values of a column that `read` gave for these rows."""
        if isinstance(column, list):
            return column
        if isinstance(column, np.ndarray):
            return list(shaped(column, self.shapes[name]))
        if name in self.image_columns:
            return [make_image(*pair, self.images) for pair in self.encoded(column, rows)]
        return as_values(column, self.shapes[name])

    def encoded(self, column: pa.Array, rows: Indices) -> list[tuple[bytes | None, str]]:
        """The encoded files of a column of images, and what to call them."""
        found = encoded(column, self._storage, lambda number: self._name(None, int(rows[number])))
        return [(data, self._name(path, row)) for (data, path), row in zip(found, rows.tolist(), strict=True)]

    def image_records(self, indices: Any) -> list[ImageRecord]:
        """The samples at several indices as records for `penstock.ImageDataset`: the first column of images, still
        encoded, and its label: the other column if there are two, else the one called ``label``.

        Raises:
            ConfigError: no column of images, or none that is the label.
            ImageError: a row without an image.
        """
        if not self.image_columns:
            raise ConfigError(f"there is no column of images in {self!r}")
        image, label = self.image_columns[0], label_column(self.columns, self.image_columns[0])
        rows = normalise(indices, len(self))
        found = self.read(rows, lambda _, shape, dtype: np.empty(shape, dtype))
        files = self.encoded(found.pop(image), rows)
        others = [self.values(name, column, rows) for name, column in found.items()]
        samples = (
            (dict(zip(found, row, strict=True)) for row in zip(*others, strict=True))
            if found
            else iter([{}] * len(rows))
        )
        return [
            ImageRecord(*file, sample, label, row)
            for file, sample, row in zip(files, samples, rows.tolist(), strict=True)
        ]

    def _name(self, image: str | None, row: int) -> str:
        """The file and row, and the path that the table gives to the image there."""
        file = int(self.starts.searchsorted(row, "right")) - 1
        name = f"{self.maps.files[file].path}, row {row - int(self.starts[file])}"
        return f"{name} ({image})" if image else name

    def take(self, indices: Any, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """The rows at several indices as columns of Arrow: all columns that are read, or these."""
        rows = normalise(indices, len(self))
        numbers = list(range(len(self.schema))) if columns is None else list(map(self.columns.index, columns))
        if not len(rows):
            return plain_batch(pa.RecordBatch.from_pylist([], schema=self.schema)).select(numbers)
        return self._pieces.take(self._pieces.locate(rows), numbers)

    def read(self, rows: Indices, room: Callable[[str, tuple[int, ...], np.dtype[Any]], Any]) -> Columns:
        """The columns of rows, which are checked. Numbers that lie in mapped files are copied once, to where
        ``room(column, shape, dtype)`` says."""
        if not len(rows):
            return dict(zip(self.columns, self.take(rows).columns, strict=True))
        with stage("read"):
            at, found, rest = self._pieces.locate(rows), Columns(), []
            for number, name in enumerate(self.columns):
                found[name] = self._pieces.numbers(at, number, partial(room, name))
                if found[name] is None and name not in self.image_columns:
                    found[name] = self._texts(at, number, name, rows)
                if found[name] is None:
                    rest.append(number)
            if rest:
                batch = self._pieces.take(at, rest)
                found |= zip(batch.schema.names, batch.columns, strict=True)
            return found

    def _texts(self, at: Located, number: int, name: str, rows: Indices) -> list[Any] | None:
        try:
            return self._pieces.texts(at, number)
        except NotText as error:
            raise DataFileError(
                f"{self._name(None, int(rows[error.place]))}: column {name!r} says that it is text, and this value is "
                "not UTF-8. Write the column anew as bytes (pyarrow.binary()), or decoded by the encoding that it is "
                "in; or leave it out with columns="
            ) from None

    # Travelling.

    def __getstate__(self) -> dict[str, Any]:
        return {"images": self.images, "_storage": self._storage, "_pieces": self._pieces}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_up()


def _check(images: str, columns: Sequence[str] | None) -> None:
    if images not in IMAGES:
        raise ConfigError(f"unknown images={images!r}: use one of {', '.join(map(repr, IMAGES))}")
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r} has to be a list of names")


def _scan(path: str, data: npt.NDArray[np.uint8] | RemoteSource) -> tuple[pa.Schema, Layout]:
    if isinstance(data, RemoteSource):
        return scan_parquet(path, data)
    if not len(data):
        raise DataFileError(f"{path} is empty (0 bytes): it was not written to its end")
    schema, layout = (scan_parquet if data[:4].tobytes() == b"PAR1" else scan_arrow)(path, data)
    try:
        _ = schema.names  # Arrow decodes them when they are asked for
    except UnicodeDecodeError as error:
        raise DataFileError(f"{path} is damaged, or not written by the rules: a column's name: {error}") from None
    return schema, layout


def read_schema(name: str, storage: Storage | None = None) -> pa.Schema:
    """The columns of a file, without its data. Raises as `TableFiles`."""
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


def _check_no_more(path: str, schema: pa.Schema, wanted: pa.Schema) -> None:
    """All columns are asked for, and the first file says which there are."""
    more = [name for name in schema.names if name not in wanted.names]
    if more:
        raise DataFileError(
            f"{path} has columns that the first file has not: {', '.join(more)}; open them apart, or choose by columns="
        )


def _places(path: str, schema: pa.Schema, wanted: pa.Schema) -> list[int]:
    """The numbers of the wanted columns in a file, which are the same there as in the first."""
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
