"""`ArrowFile`: the record batches of a mapped Arrow file, by number.

A stream (the format of `datasets`) has no table of its batches, so the headers of its messages are read once, without
the data between them. A file with a footer has such a table. Uncompressed batches are views of the mapped bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import DataFileError
from penstock.manifest.formats.columns import INVALID, damage_of, is_mapped
from penstock.tables.values import Plain, is_view

__all__ = ["ArrowFile", "RowGroupIndex", "scan_arrow"]

_MAGIC = b"ARROW1"
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_HELD = 1300  # bytes of Python objects per column of a mapped batch

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Piece = Callable[[int], pa.RecordBatch]


class RowGroupIndex(NamedTuple):
    """Where the record batches or row groups of a file are. It is small, and is sent to workers.

    Attributes:
        kind: "stream", "file" or "parquet".
        counts: rows of each record batch or row group.
        offsets: for a stream, the offset of each batch's message.
        nbytes: for Parquet, the uncompressed bytes of each row group.
    """

    kind: str
    counts: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64] | None = None
    nbytes: npt.NDArray[np.int64] | None = None


def scan_arrow(path: str, data: Bytes) -> tuple[pa.Schema, RowGroupIndex]:
    """Return schema and batches of an Arrow file. Takes about ten microseconds per record batch.

    Raises:
        DataFileError: it is not an Arrow file, truncated or damaged; or a stream with dictionaries.
    """
    source = pa.BufferReader(pa.py_buffer(data))
    schema, counts, offsets = None, list[int](), list[int]()
    try:
        if data[:6].tobytes() == _MAGIC:
            reader = pa.ipc.open_file(source)
            counts = [reader.get_batch(k).num_rows for k in range(reader.num_record_batches)]
            return reader.schema, RowGroupIndex("file", np.array(counts, np.int64))
        messages = pa.ipc.MessageReader.open_stream(source)
        while True:
            begin = source.tell()
            try:
                message = messages.read_next_message()
            except StopIteration:
                break
            if message.type == "schema" and schema is None:
                schema = pa.ipc.read_schema(message)
            elif message.type == "record batch" and schema is not None:
                counts.append(pa.ipc.read_record_batch(message, schema).num_rows)
                offsets.append(begin)
            else:
                raise DataFileError(
                    f"{path}: columns with dictionaries in a stream cannot be read in any order; write it as an Arrow "
                    "file (pyarrow.ipc.new_file) or as Parquet"
                )
    except INVALID as error:
        raise DataFileError(f"{path} is not an Arrow file, or is truncated or damaged: {error}") from None
    if schema is None or data[begin : begin + len(_END)].tobytes() != _END:
        raise DataFileError(f"{path} ends without its end mark: it is truncated, or still being written")
    return schema, RowGroupIndex("stream", np.array(counts, np.int64), np.array(offsets, np.int64))


class ArrowFile:
    """An open file.

    Args:
        path: for messages.
        data: its mapped bytes.
        index: the result of `scan_arrow`.
        columns: the numbers of the columns to read.
    """

    def __init__(self, path: str, data: Bytes, index: RowGroupIndex, columns: list[int]) -> None:
        self.data = data
        self._path, self._index, self._columns = path, index, columns
        self._whole = pa.py_buffer(data)
        try:
            if index.kind == "file":
                options = pa.ipc.IpcReadOptions(use_threads=False)
                self._reader = pa.ipc.open_file(pa.BufferReader(self._whole), options=options)
            else:
                self._schema = pa.ipc.read_schema(self._whole)
        except INVALID as error:
            raise self._damaged(error) from None
        self.compressed = False
        """Whether a batch was found that is not a view of the file."""
        self._begins: dict[tuple[int, int], Ints] = {}

    def piece(self, number: int) -> tuple[pa.RecordBatch, int]:
        """Return a record batch with its columns as in the file, and its size in memory in bytes."""
        offsets = self._index.offsets
        try:
            if offsets is None:
                batch = self._reader.get_batch(number)
            else:
                message = pa.ipc.read_message(self._whole.slice(int(offsets[number])))
                batch = pa.ipc.read_record_batch(message, self._schema)
            batch = batch.select(self._columns)
            batch.validate()
            indirect = any(pa.types.is_dictionary(column.type) or is_view(column.type) for column in batch.columns)
            mapped = not indirect and is_mapped(self._whole, batch)
            for column in batch.columns:
                # Arrow does not check offsets before it follows them.
                if not mapped or column.null_count or column.type.num_fields:
                    column.validate(full=True)
                elif why := damage_of(column):
                    raise self._damaged(why)
        except INVALID as error:
            raise self._damaged(error) from None
        if mapped:
            return batch, _HELD * len(self._columns)
        self.compressed = True
        return batch, batch.nbytes

    def items(self, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return the whole file as items of a dtype."""
        return self.data[: len(self.data) // dtype.itemsize * dtype.itemsize].view(dtype)

    def spans(self, column: int, kind: Plain, batches: Ints, local: Ints, piece: Piece) -> tuple[Ints, Ints] | None:
        """Return where values of a column begin and end in the file: numbers in items, text in bytes.

        None if the column must be read in another way: it has nulls, or batches are compressed.

        Args:
            column: its number among the columns to read.
            kind: its type.
            batches, local: the record batch of each row, and its row number there.
            piece: returns the record batch of a number.
        """
        begins = self._begins_of(column, 1, batches, kind.dtype.itemsize, piece)
        if begins is None:
            return None
        if kind.shape is not None:
            first = begins + local * kind.width
            return first, first + kind.width
        data = self._begins_of(column, 2, batches, 1, piece)
        if data is None:
            return None
        offsets, first = self.items(kind.dtype), begins + local
        return data + offsets[first], data + offsets[first + 1]

    def _begins_of(self, column: int, part: int, batches: Ints, itemsize: int, piece: Piece) -> Ints | None:
        """Return the offset of a column's buffer in the file, in items, for each batch.

        ``part`` is the buffer: 1 for numbers and for the offsets of text, 2 for the text itself.
        """
        known = self._begins.get((column, part))
        if known is None:
            known = self._begins[column, part] = np.full(len(self._index.counts), -1, np.int64)
        found = known[batches]
        if (found == -1).any():
            for number in np.unique(batches[found == -1]).tolist():
                known[number] = self._begin(piece(number).column(column), part, itemsize)
            found = known[batches]
        return None if (found < 0).any() else found

    def _begin(self, array: pa.Array, part: int, itemsize: int) -> int:
        offset: int = array.offset
        while pa.types.is_fixed_size_list(array.type):
            if array.null_count:
                return -2
            offset *= array.type.list_size
            array = array.values
            offset += array.offset
        buffer = array.buffers()[part]
        begin: int = (buffer.address if buffer is not None else 0) - self._whole.address
        if array.null_count or begin % itemsize or not 0 <= begin <= self._whole.size:
            return -2
        return begin // itemsize + (offset if part == 1 else 0)

    def _damaged(self, error: object) -> DataFileError:
        return DataFileError(f"{self._path} is damaged: {error}")
