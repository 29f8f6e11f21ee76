"""`ParquetFile`: the row groups of a Parquet file, decoded on demand, reading only the requested columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import DataFileError
from penstock.manifest.formats.columns import INVALID
from penstock.storage.remote import RemoteSource
from penstock.tables.arrow import Bytes, Layout
from penstock.tables.ranged import RangeFile, footer

__all__ = ["ParquetFile", "scan_parquet"]

_CLOSE = 128 << 10


def scan_parquet(path: str, data: Bytes | RemoteSource) -> tuple[pa.Schema, Layout]:
    """Return schema and layout of a Parquet file, from its footer.

    Raises:
        DataFileError: it is not a Parquet file, or truncated.
        StorageError: its store fails.
    """
    whole = footer(data) if isinstance(data, RemoteSource) else data
    try:
        file = pq.ParquetFile(_mapped(whole))
        groups = [file.metadata.row_group(k) for k in range(file.num_row_groups)]
        counts = np.array([group.num_rows for group in groups], np.int64)
        nbytes = np.array([group.total_byte_size for group in groups], np.int64)
        return file.schema_arrow, Layout("parquet", counts, nbytes=nbytes)
    except INVALID as error:
        raise DataFileError(f"{path} is not a Parquet file, or is truncated: {error}") from None


class ParquetFile:
    """An open file. Thread-safe: each decoding has its own reader.

    Args:
        path: for messages.
        data: its mapped bytes, or its source in a store.
        columns: the names of the columns to read.
    """

    def __init__(self, path: str, data: Bytes | RemoteSource, columns: list[str]) -> None:
        self.data = data
        self._path, self._columns = path, columns
        self._metadata: pq.FileMetaData | None = None

    def piece(self, number: int) -> tuple[pa.RecordBatch, int]:
        """Return a row group as a record batch, with columns in the requested order, and its bytes in memory."""
        reader = self._reader(number)
        try:
            file = pq.ParquetFile(reader, metadata=self._metadata, page_checksum_verification=True)
            self._metadata = file.metadata
            table = file.read_row_group(number, columns=self._columns, use_threads=False).select(self._columns)
            table.validate(full=True)
        except INVALID as error:
            raise DataFileError(f"{self._path}, row group {number}, is damaged: {error}") from None
        if not table.num_rows:
            return pa.RecordBatch.from_pylist([], schema=table.schema), 0
        batches = table.combine_chunks().to_batches()
        if len(batches) > 1:
            raise DataFileError(
                f"{self._path}, row group {number}: a column of more than 2 GiB is too much at once; write it with "
                "smaller row groups"
            )
        return batches[0], batches[0].nbytes

    def _reader(self, number: int) -> Any:
        """Return the file that Arrow reads a row group from: the mapped file, or needed ranges of a remote one."""
        if not isinstance(self.data, RemoteSource):
            return _mapped(self.data)
        if self._metadata is None:
            self._metadata = pq.read_metadata(_mapped(footer(self.data)))
        ranges = _joined(_chunks(self._metadata.row_group(number), self._columns))
        return _ranged(self.data, [(begin, self.data.read_at(begin, end - begin)) for begin, end in ranges])


def _mapped(data: Bytes | bytes) -> Any:
    return pa.BufferReader(pa.py_buffer(data))


def _ranged(source: RemoteSource, pieces: list[tuple[int, bytes]]) -> Any:
    return pa.PythonFile(RangeFile(source, pieces), mode="r")


def _chunks(group: Any, columns: list[str]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the chunks of columns in the file."""
    for number in range(group.num_columns):
        chunk = group.column(number)
        path = chunk.path_in_schema
        if any(path == name or path.startswith(f"{name}.") for name in columns):
            begin = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                begin = min(begin, chunk.dictionary_page_offset)
            yield begin, begin + chunk.total_compressed_size


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges, with close ones merged: a request takes as long as reading about 100 KiB."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin - found[-1][1] <= _CLOSE:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
