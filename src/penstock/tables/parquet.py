"""`ParquetFile`: the row groups of one Parquet file, decoded when they are asked for, the wanted columns only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import DataFileError
from penstock.storage.remote import RemoteSource
from penstock.tables.arrow import INVALID, Bytes, Layout
from penstock.tables.ranged import RangeFile, footer

__all__ = ["ParquetFile", "scan_parquet"]

_CLOSE = 128 << 10


def scan_parquet(path: str, data: Bytes | RemoteSource) -> tuple[pa.Schema, Layout]:
    """Columns and layout of a Parquet file, by its footer.

    Raises:
        DataFileError: it is no Parquet file, or truncated.
        StorageError: the store that it is in says no.
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
    """An open file. Safe in threads: each decoding has a reader of its own.

    Args:
        path: for messages.
        data: its bytes, mapped, or where it is in a store.
        columns: the names of those that are read.
    """

    def __init__(self, path: str, data: Bytes | RemoteSource, columns: list[str]) -> None:
        self.data = data
        self._path, self._columns = path, columns
        self._metadata: pq.FileMetaData | None = None

    def piece(self, number: int) -> tuple[pa.RecordBatch, int]:
        """A row group as a record batch, its columns in the order asked for, and its bytes of memory."""
        reader = self._reader(number)
        try:
            file = pq.ParquetFile(reader, metadata=self._metadata, page_checksum_verification=True)
            self._metadata = file.metadata
            table = file.read_row_group(number, columns=self._columns, use_threads=False)
            table.validate(full=True)
        except INVALID as error:
            raise DataFileError(f"{self._path}, row group {number}, is damaged: {error}") from None
        batches = table.select(self._columns).combine_chunks().to_batches()
        if len(batches) > 1:
            raise DataFileError(
                f"{self._path}, row group {number}: a column of more than 2 GiB is too much at once; write it with "
                "smaller row groups"
            )
        schema = table.select(self._columns).schema
        batch = (
            batches[0] if batches else pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
        )
        return batch, batch.nbytes

    def _reader(self, number: int) -> Any:
        """What Arrow reads a row group from: the mapped file, or what it needs of one in a store."""
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
    """Yield where the chunks of some columns begin and end in the file."""
    for number in range(group.num_columns):
        chunk = group.column(number)
        path = chunk.path_in_schema
        if any(path == name or path.startswith(f"{name}.") for name in columns):
            begin = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                begin = min(begin, chunk.dictionary_page_offset)
            yield begin, begin + chunk.total_compressed_size


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges, those that are close to each other as one: a request takes as long as some 100 KiB."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin - found[-1][1] <= _CLOSE:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
