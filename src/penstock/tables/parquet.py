"""`ParquetFile`: the row groups of one Parquet file, decoded when they are asked for, the wanted columns only."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import DataFileError
from penstock.tables.arrow import INVALID, Bytes, Layout

__all__ = ["ParquetFile", "scan_parquet"]


def scan_parquet(path: str, data: Bytes) -> tuple[pa.Schema, Layout]:
    """Columns and layout of a Parquet file, by its footer.

    Raises:
        DataFileError: it is no Parquet file, or truncated.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(pa.py_buffer(data)))
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
        data: its bytes, mapped.
        columns: the names of those that are read.
    """

    def __init__(self, path: str, data: Bytes, columns: list[str]) -> None:
        self.data = data
        self._path, self._columns = path, columns
        self._whole = pa.py_buffer(data)
        self._metadata: pq.FileMetaData | None = None

    def piece(self, number: int) -> tuple[pa.RecordBatch, int]:
        """A row group as a record batch, its columns in the order asked for, and its bytes of memory."""
        try:
            file = pq.ParquetFile(
                pa.BufferReader(self._whole), metadata=self._metadata, page_checksum_verification=True
            )
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
