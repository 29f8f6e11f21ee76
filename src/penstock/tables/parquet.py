"""`ParquetFile`: the row groups of a Parquet file, decoded on demand, reading only the requested columns."""

from __future__ import annotations

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
        # Of a remote file, the needed ranges are read at once; Arrow reads a mapped one itself.
        reader = self._ranges(self.data, number) if isinstance(self.data, RemoteSource) else _mapped(self.data)
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

    def _ranges(self, source: RemoteSource, number: int) -> pa.PythonFile:
        """Return a file with the columns of a row group in memory.

        Close ranges are read as one: a request takes as long as reading about 100 KiB.
        """
        if self._metadata is None:
            self._metadata = pq.read_metadata(_mapped(footer(source)))
        group, found = self._metadata.row_group(number), list[tuple[int, int]]()
        for chunk in map(group.column, range(group.num_columns)):
            path = chunk.path_in_schema
            if any(path == name or path.startswith(f"{name}.") for name in self._columns):
                begin = chunk.data_page_offset
                if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                    begin = min(begin, chunk.dictionary_page_offset)
                found.append((begin, begin + chunk.total_compressed_size))
        joined: list[tuple[int, int]] = []
        for begin, end in sorted(found):
            if joined and begin - joined[-1][1] <= _CLOSE:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((begin, end))
        pieces = [(begin, source.read_at(begin, end - begin)) for begin, end in joined]
        return pa.PythonFile(RangeFile(source, pieces), mode="r")


def _mapped(data: Bytes | bytes) -> pa.BufferReader:
    return pa.BufferReader(pa.py_buffer(data))
