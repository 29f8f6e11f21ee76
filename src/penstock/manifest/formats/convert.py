"""Convert sources that cannot be mapped, once, to an uncompressed Arrow file in the cache.

The file holds the wanted columns only, in their final types, and is written batch by batch. The metadata of its schema
holds a sidecar header: the source, its state, and the options of the conversion.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import pyarrow as pa
import xxhash

from penstock.errors import ManifestError
from penstock.manifest.formats.base import Context
from penstock.manifest.formats.columns import INVALID, as_batch, cast_batch, damage_of, final_schema
from penstock.manifest.formats.mapped import ArrowPart, open_mapped
from penstock.manifest.options import Options
from penstock.manifest.scan import hash_file
from penstock.manifest.sidecar import NO_OFFSETS, Header, places
from penstock.progress import progress_bar
from penstock.storage import File, io_error
from penstock.storage.derived import load_or_write

__all__ = ["convert_source", "convert_typed", "converted"]

T = TypeVar("T")

_KEY = b"penstock"
_ROWS = 1 << 20  # rows of a batch: few batches make random access fast ...
_BYTES = 64 << 20  # bytes of a batch: ... but each is in memory while it is written


def convert_source(
    source: File, schema: pa.Schema, batches: Iterable[pa.RecordBatch], options: Options, context: Context
) -> ArrowPart:
    """Return the part over the source's conversion; ``batches`` are read only if it is missing or out of date.

    Raises:
        ManifestError: a missing column, a wrong type, a null path or label, or a damaged source.
        ManifestIOError: the conversion cannot be written.
    """
    final = final_schema(source.path, schema, options.wanted)
    typed = _typed(source.path, batches, options, final)
    return convert_typed(source, final, typed, options, options.canonical(), context)


def convert_typed(
    source: File,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    options: Options,
    key: bytes,
    context: Context,
) -> ArrowPart:
    """Return the same from batches with the columns of the manifest; ``key`` are the options for the fingerprint."""
    columns = tuple(replace(column, source=column.name) for column in options.wanted)
    return converted(
        source,
        key,
        lambda: (schema, batches),
        lambda mapped, digest: ArrowPart(source, mapped, columns, digest, key),
        context,
    )


def converted(
    source: File,
    key: bytes,
    read: Callable[[], tuple[pa.Schema, Iterable[pa.RecordBatch]]],
    use: Callable[[File, bytes], T],
    context: Context,
) -> T:
    """Return ``use(conversion, hash of the source)``. The source is converted if ``use`` cannot read a conversion.

    Args:
        source: the file to convert.
        key: all that the conversion depends on besides the source.
        read: returns schema and batches of the conversion.
        use: raises ManifestError or ValueError, such as ArrowInvalid, for a damaged conversion.
        context: where conversions are, and whether to show a bar.
    """
    rules = xxhash.xxh3_64_intdigest(key)
    target = places(source.path, f".{rules:016x}.arrow", context.cache_dir)[-1]

    def load(path: Path) -> T | None:
        if not path.exists():
            return None
        mapped = File(str(path))
        try:
            metadata = open_mapped(mapped).schema.metadata or {}
            header = Header.unpack(bytes.fromhex(metadata.get(_KEY, b"").decode()))
            if header is None or header.rules != rules or not header.describes(source):
                return None
            return use(mapped, header.digest)
        except (ValueError, ManifestError):
            return None

    try:
        return load_or_write([target], load, lambda out: _write(out, source, rules, *read(), context))
    except ManifestError:
        raise
    except OSError as error:
        raise io_error(target, error, f"cannot write the conversion of {source.path} to") from error


def _write(
    out: BinaryIO,
    source: File,
    rules: int,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    context: Context,
) -> None:
    source.settle()
    title = f"converting {os.path.basename(source.path)}"
    with progress_bar(title, source.size, context.progress) as progress:
        header = Header(NO_OFFSETS, 0, source.size, source.mtime_ns, rules, hash_file(source))
        done = 0
        with pa.ipc.new_file(out, schema.with_metadata({_KEY: header.pack().hex()})) as writer:
            for batch in _regroup(batches):
                writer.write_batch(batch)
                # The progress in the source is unknown; the bytes written are a good estimate.
                progress(min(batch.nbytes, source.size - done))
                done = min(done + batch.nbytes, source.size)
        source.check()
        progress(source.size - done)


def _typed(
    path: str, batches: Iterable[pa.RecordBatch], options: Options, final: pa.Schema
) -> Iterator[pa.RecordBatch]:
    start = 0
    try:
        for batch in batches:
            rows = np.arange(start, start + batch.num_rows)
            start += batch.num_rows
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                if why := damage_of(column):  # Arrow would follow a bad offset and crash the process
                    raise ManifestError(f"{path} is damaged in column {name!r}, after row {int(rows[0])}: {why}")
            yield cast_batch(path, batch, options.wanted, final, rows)
    except (*INVALID, OSError) as error:
        if isinstance(error, ManifestError):
            raise
        raise ManifestError(f"{path} is damaged: {error}") from None


def _regroup(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join small batches into large ones."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= _ROWS or size >= _BYTES:
            yield as_batch(held)
            held, rows, size = [], 0, 0
    if held:
        yield as_batch(held)
