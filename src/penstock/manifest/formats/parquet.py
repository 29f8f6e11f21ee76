"""Parquet: converted once to an Arrow file in the cache, row group by row group, with the wanted columns only."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import ManifestError
from penstock.manifest.formats.base import Context, reject
from penstock.manifest.formats.columns import INVALID
from penstock.manifest.formats.convert import convert_source
from penstock.manifest.formats.mapped import ArrowPart
from penstock.manifest.options import Options
from penstock.storage import File

__all__ = ["open_parquet"]

_ROWS = 1 << 16  # rows read at once


def open_parquet(path: str, options: Options, context: Context) -> ArrowPart:
    """Open a Parquet file through its conversion."""
    reject(options, header="auto", blank="skip", comment=None)
    source = File(path)
    try:
        file = pq.ParquetFile(pa.BufferReader(pa.py_buffer(source.map if source.map is not None else b"")))
        schema = file.schema_arrow
    except (*INVALID, OSError) as error:
        raise ManifestError(f"{path} is not a Parquet file: {error}") from None
    names = [column.source for column in options.wanted]
    batches = file.iter_batches(_ROWS, columns=names, use_threads=False)
    return convert_source(source, schema, batches, options, context)
