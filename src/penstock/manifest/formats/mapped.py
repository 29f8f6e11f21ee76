"""`ArrowPart`: a source whose columns are read from a memory-mapped, uncompressed Arrow file."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ManifestError
from penstock.manifest.formats.base import Part, part_fingerprint
from penstock.manifest.formats.columns import (
    INVALID,
    cast_batch,
    damage_of,
    final_schema,
    grouped,
    offsets_of,
    reordered,
)
from penstock.manifest.indices import as_arrow
from penstock.manifest.lines import TooMuch, texts
from penstock.manifest.options import Column
from penstock.storage import File
from penstock.storage.urls import ABSOLUTE

__all__ = ["ArrowPart", "ColumnPart", "damaged", "join_paths", "open_mapped", "python_values"]

Rows = npt.NDArray[np.int64]


def open_mapped(source: File) -> pa.RecordBatchFileReader:
    """Return a reader of the mapped bytes; ArrowInvalid if they are not an Arrow file."""
    return pa.ipc.open_file(pa.BufferReader(pa.py_buffer(source.map if source.map is not None else b"")))


def damaged(path: str, error: Exception) -> ManifestError:
    """Return the error for a file that Arrow can open but not read."""
    return ManifestError(f"{path} is truncated or damaged: {error}; write it anew")


class ColumnPart(Part):
    """A part with columns instead of lines. Subclasses only `gather` rows."""

    def values_of(self, batch: pa.RecordBatch, rows: Rows) -> list[list[Any]]:
        return python_values(batch, self.path, rows)

    def table(self, rows: Rows, prefix: str) -> pa.Table:
        return join_paths(pa.Table.from_batches([self.gather(rows)]), prefix)


class ArrowPart(ColumnPart):
    """Columns of a memory-mapped Arrow file.

    Args:
        source: the file that the user named.
        mapped: the Arrow file: the source itself, or its conversion.
        columns: the columns to read from ``mapped``, with their types.
        digest: the hash of the source.
        options: part of the fingerprint.

    Memory: about a kilobyte for each record batch.
    """

    def __init__(self, source: File, mapped: File, columns: tuple[Column, ...], digest: bytes, options: bytes) -> None:
        self.path, self.nbytes = source.path, source.size
        self._sources, self._columns = (source, mapped), columns
        try:
            reader = open_mapped(mapped)
            self.schema = final_schema(source.path, reader.schema, columns)
            self.names = list(self.schema.names)
            wanted = sorted({reader.schema.get_field_index(column.source) for column in columns})
            self._batches = [reader.get_batch(k).select(wanted) for k in range(reader.num_record_batches)]
        except (*INVALID, OSError) as error:
            raise damaged(mapped.path, error) from error
        self._sound = bytearray(len(self._batches))
        pairs = zip(columns, self.schema, strict=True)
        as_is = all(
            reader.schema.field(column.source).type == field.type and not pa.types.is_fixed_size_list(field.type)
            for column, field in pairs
        )
        # The places of the columns in a batch, if `one` can read their values without a cast.
        fields = [wanted.index(reader.schema.get_field_index(column.source)) for column in columns]
        self._places = fields if as_is else None
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        self.rows = int(self._starts[-1])
        self.fingerprint = part_fingerprint(digest, self.rows, options)

    def check(self) -> None:
        for source in self._sources:
            source.check()

    def gather(self, rows: Rows, most: int | None = None) -> pa.RecordBatch:
        self.check()
        if not rows.size:
            return pa.RecordBatch.from_pylist([], schema=self.schema)
        self._check_batches(rows)
        if most is not None and self._text_bytes(rows) > most:
            raise TooMuch
        try:
            return cast_batch(self.path, self._take(rows), self._columns, self.schema, rows)
        except INVALID as error:
            raise damaged(self.path, error) from error

    def one(self, row: int) -> list[Any]:
        self.check()
        number = int(self._starts.searchsorted(row, "right")) - 1
        if self._places is not None and self._sound[number]:
            batch, local = self._batches[number], row - int(self._starts[number])
            try:
                values = [batch.column(place)[local].as_py() for place in self._places]
            except UnicodeDecodeError:
                return super().one(row)
            if values[0] and None not in values:
                return values
        return super().one(row)

    def _check_batches(self, rows: Rows) -> None:
        """Check each batch before its first read: Arrow does not check offsets, and a bad one crashes the process.

        Raises:
            ManifestError: the file is damaged.
        """
        for number in np.unique(np.searchsorted(self._starts, rows, "right") - 1).tolist():
            if not self._sound[number]:
                batch = self._batches[number]
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    if why := damage_of(column):
                        raise ManifestError(f"{self.path} is damaged in column {name!r}, record batch {number}: {why}")
                self._sound[number] = 1

    def _text_bytes(self, rows: Rows) -> int:
        """Return the bytes of the texts of rows; other columns have a fixed size per row."""
        numbers = np.searchsorted(self._starts, rows, "right") - 1
        total = 0
        for number in np.unique(numbers).tolist():
            local = rows[numbers == number] - self._starts[number]
            total += sum(_text_bytes(column, local) for column in self._batches[number].columns)
        return total

    def _take(self, rows: Rows) -> pa.RecordBatch:
        """Return rows in this order, batch by batch: Arrow's own take would first copy all batches into one."""
        numbers = np.searchsorted(self._starts, rows, "right") - 1
        local = rows - self._starts[numbers]
        groups = grouped(numbers)
        return reordered([self._batches[numbers[some[0]]].take(as_arrow(local[some])) for some in groups], groups)


def _text_bytes(column: pa.Array, rows: Rows) -> int:
    offsets = offsets_of(column)
    return 0 if offsets is None else int((offsets[rows + 1] - offsets[rows]).sum(dtype=np.int64))


def python_values(batch: pa.RecordBatch, path: str, rows: Rows) -> list[list[Any]]:
    """Return the columns of a batch as lists of Python objects, the paths first.

    Paths may be any bytes, as file names may.

    Raises:
        ManifestError: other text that is not UTF-8, which Arrow does not check. Names the file and row.
    """
    names, others = batch.schema.names[1:], batch.columns[1:]
    values = [texts(batch.column(0).cast(pa.large_binary()))]
    for name, array in zip(names, others, strict=True):
        try:
            values.append(_python(array))
        except UnicodeDecodeError:
            row = next(row for k, row in enumerate(rows.tolist()) if not _is_utf8(array[k]))
            raise ManifestError(
                f"{path}, row {row}: {name} is not UTF-8. Write the column anew in UTF-8, or leave it out with columns="
            ) from None
    return values


def _is_utf8(value: pa.Scalar) -> bool:
    try:
        value.as_py()
    except UnicodeDecodeError:
        return False
    return True


def join_paths(table: pa.Table, prefix: str) -> pa.Table:
    """Return the table with ``prefix`` put before relative paths, as `join_root` does."""
    if not prefix:
        return table
    paths = table.column("path")
    joined = pc.binary_join_element_wise(pa.scalar(prefix), paths, pa.scalar(""))
    return table.set_column(0, "path", pc.if_else(pc.match_substring_regex(paths, ABSOLUTE), paths, joined))


def _python(array: pa.Array) -> list[Any]:
    values: list[Any] = array.to_pylist()
    return [tuple(value) for value in values] if pa.types.is_fixed_size_list(array.type) else values
