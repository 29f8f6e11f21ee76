"""`ParquetFile`: the row groups of a Parquet file, decoded on demand, reading only the requested columns."""

from __future__ import annotations

import io
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import DataFileError
from penstock.manifest.formats.columns import INVALID
from penstock.storage.remote import RemoteSource
from penstock.tables.arrow import Bytes, RowGroupIndex

__all__ = ["ParquetFile", "scan_parquet"]

_CLOSE = 128 << 10
_LEAST, _FOOTER, _PART = 16 << 10, 64 << 10, 64  # bytes read at a file's end: 1/64 of the file, from 16 to 64 KiB


def scan_parquet(path: str, data: Bytes | RemoteSource) -> tuple[pa.Schema, RowGroupIndex]:
    """Return schema and row groups of a Parquet file, from its footer.

    Raises:
        DataFileError: it is not a Parquet file, or truncated.
        StorageError: its store fails.
    """
    whole = _footer(data) if isinstance(data, RemoteSource) else data
    try:
        file = pq.ParquetFile(_mapped(whole))
        groups = [file.metadata.row_group(k) for k in range(file.num_row_groups)]
        counts = np.array([group.num_rows for group in groups], np.int64)
        nbytes = np.array([group.total_byte_size for group in groups], np.int64)
        return file.schema_arrow, RowGroupIndex("parquet", counts, nbytes=nbytes)
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
            self._metadata = pq.read_metadata(_mapped(_footer(source)))
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
        return pa.PythonFile(_RangeFile(source, pieces), mode="r")


def _mapped(data: Bytes | bytes) -> pa.BufferReader:
    return pa.BufferReader(pa.py_buffer(data))


# The size is bounded, but enough for a file that is read right after it is opened.
@lru_cache(maxsize=32)
def _footer(source: RemoteSource) -> bytes:
    """Return the end of a Parquet file, including its whole footer. Takes one request, or two for a large footer.

    Arrow can read the metadata from these bytes as if they were the whole file.
    """
    begin = max(0, source.size - min(_FOOTER, max(_LEAST, source.size // _PART)))
    tail = source.read_at(begin, source.size - begin)
    if tail[-4:] != b"PAR1" or len(tail) < 12:
        raise DataFileError(f"{source.url} is not a Parquet file, or is truncated: it does not end with PAR1")
    length = 8 + int.from_bytes(tail[-8:-4], "little")
    if length > len(tail):
        first = max(0, source.size - length)
        tail = source.read_at(first, begin - first) + tail
    return tail


class _RangeFile(io.RawIOBase):
    """A remote source as a file object for Arrow, with some ranges already in memory.

    Args:
        source: the remote source.
        pieces: the offset and bytes of each range in memory; all other bytes are requested from the source.
    """

    def __init__(self, source: RemoteSource, pieces: list[tuple[int, bytes]]) -> None:
        self._source, self._pieces, self._position = source, pieces, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set the position, relative to the beginning, the current position or the end."""
        self._position = offset + (0, self._position, self._source.size)[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return ``size`` bytes, fewer only at the end; by default all remaining bytes."""
        begin = self._position
        end = self._source.size if size < 0 else min(begin + size, self._source.size)
        self._position = max(begin, end)
        for first, data in self._pieces:
            if first <= begin and end <= first + len(data):
                return data[begin - first : end - first]
        return self._source.read_at(begin, end - begin)
