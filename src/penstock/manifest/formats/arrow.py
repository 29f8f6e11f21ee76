"""Arrow IPC: files are memory-mapped in place; compressed ones and streams are converted first."""

from __future__ import annotations

from typing import BinaryIO

import pyarrow as pa

from penstock.errors import ManifestError
from penstock.manifest.formats.base import Context, reject
from penstock.manifest.formats.columns import INVALID
from penstock.manifest.formats.convert import convert_source
from penstock.manifest.formats.mapped import ArrowPart, damaged, open_mapped
from penstock.manifest.options import Options
from penstock.manifest.scan import hash_file
from penstock.manifest.sidecar import NO_OFFSETS, Header, Sidecar, load_or_build
from penstock.progress import progress_bar
from penstock.storage import File

__all__ = ["open_arrow"]

_RULES = 0  # an Arrow file has no line rules


def open_arrow(path: str, options: Options, context: Context) -> ArrowPart:
    """Open an Arrow file. At the first opening it is hashed, and a sidecar without offsets stores the hash."""
    reject(options, header="auto", blank="skip", comment=None)
    source = File(path)
    try:
        reader = open_mapped(source)
    except (*INVALID, OSError):
        return _convert_stream(source, options, context)
    try:
        in_place = _is_usable_in_place(source, reader)
    except (*INVALID, OSError) as error:
        raise damaged(path, error) from error
    if not in_place:
        batches = (reader.get_batch(k) for k in range(reader.num_record_batches))
        return convert_source(source, reader.schema, batches, options, context)

    def build(source: File, out: BinaryIO, stale: Sidecar | None) -> Header:
        with progress_bar(f"hashing {path}", source.size, context.progress) as progress:
            digest = hash_file(source, progress)
        return Header(NO_OFFSETS, 0, source.size, source.mtime_ns, _RULES, digest)

    sidecar = load_or_build(source, ".pstk", context.cache_dir, _RULES, build)
    return ArrowPart(source, source, options.wanted, sidecar.header.digest, options.canonical())


def _convert_stream(source: File, options: Options, context: Context) -> ArrowPart:
    try:
        stream = pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(source.map if source.map is not None else b"")))
    except (*INVALID, OSError) as error:
        raise ManifestError(f"{source.path} is not an Arrow file: {error}") from None
    return convert_source(source, stream.schema, stream, options, context)


def _is_usable_in_place(source: File, reader: pa.RecordBatchFileReader) -> bool:
    """Return whether the arrays are in the mapped bytes: arrays of a compressed file are decompressed elsewhere."""
    whole = pa.py_buffer(source.map)
    for k in range(reader.num_record_batches):
        arrays = reader.get_batch(k).columns
        buffers = [buffer for array in arrays for buffer in array.buffers() if buffer is not None and buffer.size]
        if buffers:
            return all(whole.address <= buffer.address < whole.address + whole.size for buffer in buffers)
    return True
