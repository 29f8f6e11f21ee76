"""Columns of memory-mapped Arrow files: Arrow manifests in place, Parquet and CSV manifests through a conversion.

A source that cannot be mapped is converted once, to an uncompressed Arrow file in the cache. It holds only the wanted
columns, in their final types, and is written batch by batch. The metadata of its schema holds a sidecar header: the
source, its state, and the options of the conversion.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.errors import ManifestError
from penstock.manifest.formats.base import Context, Part, part_fingerprint, reject
from penstock.manifest.formats.columns import (
    INVALID,
    as_batch,
    cast_batch,
    check_sound,
    final_schema,
    is_mapped,
    offsets_of,
    reordered,
)
from penstock.manifest.indices import Rows, as_arrow, by_part
from penstock.manifest.lines import TooMuch, texts
from penstock.manifest.options import Column, Options
from penstock.manifest.scan import hash_file
from penstock.manifest.sidecar import NO_OFFSETS, Sidecar, SidecarHeader, load_or_build, places
from penstock.progress import progress_bar
from penstock.storage import File, io_error
from penstock.storage.derived import load_or_write
from penstock.storage.urls import ABSOLUTE

__all__ = ["ArrowPart", "ColumnPart", "convert_batches", "converted", "open_arrow", "open_parquet"]

_RULES = 0  # an Arrow file has no line rules
_KEY = b"penstock"
_READ = 1 << 16  # rows of Parquet read at once
_ROWS = 1 << 20  # rows of a batch of a conversion: few batches make random access fast ...
_BYTES = 64 << 20  # bytes of a batch: ... but each is in memory while it is written


class ColumnPart(Part):
    """A part with columns instead of lines. Subclasses only `gather` rows."""

    def values_of(self, batch: pa.RecordBatch, rows: Rows) -> list[list[Any]]:
        # Paths may be any bytes, as file names may.
        values: list[list[Any]] = [texts(batch.column(0).cast(pa.large_binary()))]
        for name, column in list(zip(batch.schema.names, batch.columns, strict=True))[1:]:
            try:
                found = column.to_pylist()
            except UnicodeDecodeError:
                self._fail_not_text(name, column, rows)
                raise
            values.append([tuple(value) for value in found] if pa.types.is_fixed_size_list(column.type) else found)
        return values

    def _fail_not_text(self, name: str, column: pa.Array, rows: Rows) -> None:
        for value, row in zip(column, rows.tolist(), strict=True):
            try:
                value.as_py()
            except UnicodeDecodeError:
                raise ManifestError(
                    f"{self.path}, row {row}: {name} is not UTF-8. Write the column anew in UTF-8, or leave it out "
                    "with columns="
                ) from None

    def table(self, rows: Rows, prefix: str) -> pa.Table:
        table = pa.Table.from_batches([self.gather(rows)])
        if not prefix:
            return table
        paths = table.column("path")
        joined = pc.binary_join_element_wise(pa.scalar(prefix), paths, pa.scalar(""))  # as `join_root` does
        return table.set_column(0, "path", pc.if_else(pc.match_substring_regex(paths, ABSOLUTE), paths, joined))


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
        self._sources, self._columns = list(dict.fromkeys((source, mapped))), columns
        try:
            reader = _open_mapped(mapped)
            self.schema = final_schema(source.path, reader.schema, columns)
            self.names = list(self.schema.names)
            fields = [reader.schema.get_field_index(column.source) for column in columns]
            self._batches = [reader.get_batch(k).select(fields) for k in range(reader.num_record_batches)]
        except INVALID as error:
            raise _damaged(mapped.path, error) from error
        self._sound = bytearray(len(self._batches))
        # Whether `one` can read the values without a cast.
        self._as_is = all(
            reader.schema.field(number).type == final.type and not pa.types.is_fixed_size_list(final.type)
            for number, final in zip(fields, self.schema, strict=True)
        )
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
        parts, groups, size = [], [], 0
        try:
            for number, places, some in by_part(self._starts, rows):
                batch = self._checked_batch(number)
                for column in batch.columns if most is not None else ():
                    if (offsets := offsets_of(column)) is not None:
                        size += int((offsets[some + 1] - offsets[some]).sum(dtype=np.int64))
                if most is not None and size > most:
                    raise TooMuch
                # Batch by batch: Arrow's take from a table would first copy all batches into one.
                parts.append(batch.take(as_arrow(some)))
                groups.append(places)
            return cast_batch(self.path, reordered(parts, groups), self._columns, self.schema, rows)
        except INVALID as error:
            raise _damaged(self.path, error) from error

    def one(self, row: int) -> list[Any]:
        self.check()
        number = int(self._starts.searchsorted(row, "right")) - 1
        if self._as_is and self._sound[number]:
            batch, local = self._batches[number], row - int(self._starts[number])
            try:
                values = [column[local].as_py() for column in batch.columns]
            except UnicodeDecodeError:
                return super().one(row)
            if values[0] and None not in values:
                return values
        return super().one(row)

    def _checked_batch(self, number: int) -> pa.RecordBatch:
        """Return a batch, checked at its first read: Arrow does not check offsets, and a bad one crashes the process.

        Raises:
            ManifestError: the file is damaged.
        """
        batch = self._batches[number]
        if not self._sound[number]:
            check_sound(self.path, batch, f"record batch {number}")
            self._sound[number] = 1
        return batch


def open_arrow(path: str, options: Options, context: Context) -> ArrowPart:
    """Open an Arrow file. Compressed ones and streams are converted.

    At the first opening the file is hashed, and a sidecar without offsets stores the hash.
    """
    reject(options, header="auto", blank="skip", comment=None)
    source = File(path)
    try:
        reader = _open_mapped(source)
    except INVALID:
        try:
            stream = pa.ipc.open_stream(pa.BufferReader(_whole(source)))
        except INVALID as error:
            raise ManifestError(f"{path} is not an Arrow file: {error}") from None
        return _convert(source, stream.schema, stream, options, context)
    try:
        batches = map(reader.get_batch, range(reader.num_record_batches))
        first = next((batch for batch in batches if batch.num_rows), None)
    except INVALID as error:
        raise _damaged(path, error) from error
    if first is not None and not is_mapped(_whole(source), first):
        batches = map(reader.get_batch, range(reader.num_record_batches))
        return _convert(source, reader.schema, batches, options, context)

    def build(source: File, out: BinaryIO, stale: Sidecar | None) -> SidecarHeader:
        with progress_bar(f"hashing {path}", source.size, context.progress) as progress:
            digest = hash_file(source, progress)
        return SidecarHeader(NO_OFFSETS, 0, source.size, source.mtime_ns, _RULES, digest)

    sidecar = load_or_build(source, ".pstk", context.cache_dir, _RULES, build)
    return ArrowPart(source, source, options.wanted, sidecar.header.digest, options.canonical())


def open_parquet(path: str, options: Options, context: Context) -> ArrowPart:
    """Open a Parquet file through its conversion, which reads only the wanted columns."""
    import pyarrow.parquet as pq  # takes 60 ms

    reject(options, header="auto", blank="skip", comment=None)
    source = File(path)
    try:
        file = pq.ParquetFile(pa.BufferReader(_whole(source)))
        schema = file.schema_arrow
    except INVALID as error:
        raise ManifestError(f"{path} is not a Parquet file: {error}") from None
    names = [column.source for column in options.wanted]
    return _convert(source, schema, file.iter_batches(_READ, columns=names, use_threads=False), options, context)


def _whole(source: File) -> pa.Buffer:
    return pa.py_buffer(source.map if source.map is not None else b"")


def _open_mapped(source: File) -> pa.RecordBatchFileReader:
    """Return a reader of the mapped bytes; ArrowInvalid if they are not an Arrow file."""
    return pa.ipc.open_file(pa.BufferReader(_whole(source)))


def _damaged(path: str, error: Exception) -> ManifestError:
    """Return the error for a file that Arrow can open but not read."""
    return ManifestError(f"{path} is truncated or damaged: {error}; write it anew")


def _convert(
    source: File, schema: pa.Schema, batches: Iterable[pa.RecordBatch], options: Options, context: Context
) -> ArrowPart:
    """Return the part over the conversion of a source with these columns.

    Raises:
        ManifestError: a missing column, a wrong type, a null path or label, or a damaged source.
        ManifestIOError: the conversion cannot be written.
    """
    final = final_schema(source.path, schema, options.wanted)

    def typed() -> Iterator[pa.RecordBatch]:
        start = 0
        try:
            for batch in batches:
                rows = np.arange(start, start + batch.num_rows)
                check_sound(source.path, batch, f"after row {start}")
                start += batch.num_rows
                wanted = batch.select([column.source for column in options.wanted])
                yield cast_batch(source.path, wanted, options.wanted, final, rows)
        except INVALID as error:
            if isinstance(error, ManifestError):
                raise
            raise ManifestError(f"{source.path} is damaged: {error}") from None

    return convert_batches(source, final, typed(), options, options.canonical(), context)


def convert_batches(
    source: File,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    options: Options,
    key: bytes,
    context: Context,
) -> ArrowPart:
    """Return the part over a source's conversion; ``batches`` are read only if it is missing or out of date.

    Args:
        source: the file to convert.
        schema, batches: the columns of the manifest.
        options: the options of the manifest.
        key: the options for the fingerprint.
        context: see `converted`.
    """
    columns = tuple(replace(column, source=column.name) for column in options.wanted)
    mapped, digest = converted(source, key, lambda: (schema, batches), context)
    return ArrowPart(source, mapped, columns, digest, key)


def converted(
    source: File,
    key: bytes,
    read: Callable[[], tuple[pa.Schema, Iterable[pa.RecordBatch]]],
    context: Context,
    instead: str = "",
) -> tuple[File, bytes]:
    """Return the conversion of a source, made if it is missing, damaged or out of date, and the hash of the source.

    Args:
        source: the file to convert.
        key: all that the conversion depends on besides the source.
        read: returns schema and batches of the conversion.
        context: where conversions are, and whether to show a bar.
        instead: what to do if it cannot be written; by default, to choose another ``cache_dir``.
    """
    rules = xxhash.xxh3_64_intdigest(key)
    target = places(source.path, f".{rules:016x}.arrow", context.cache_dir)[-1]

    def load(path: Path) -> tuple[File, bytes] | None:
        if not path.exists():
            return None
        mapped = File(str(path))
        try:
            reader = _open_mapped(mapped)
            header = SidecarHeader.unpack(bytes.fromhex((reader.schema.metadata or {}).get(_KEY, b"").decode()))
            if header is None or header.rules != rules or not header.describes(source):
                return None
            for number in range(reader.num_record_batches):
                reader.get_batch(number)  # an error if it is damaged
            return mapped, header.digest
        except (ValueError, *INVALID):
            return None

    def write(out: BinaryIO) -> None:
        schema, batches = read()
        source.settle()
        with progress_bar(f"converting {os.path.basename(source.path)}", source.size, context.progress) as progress:
            header = SidecarHeader(NO_OFFSETS, 0, source.size, source.mtime_ns, rules, hash_file(source))
            done = 0
            with pa.ipc.new_file(out, schema.with_metadata({_KEY: header.pack().hex()})) as writer:
                for batch in _joined(batches):
                    writer.write_batch(batch)
                    # The progress in the source is unknown; the bytes written are a good estimate.
                    progress(min(batch.nbytes, source.size - done))
                    done = min(done + batch.nbytes, source.size)
            source.check()
            progress(source.size - done)

    try:
        return load_or_write([target], load, write)
    except ManifestError:
        raise
    except OSError as error:
        raise io_error(target, error, f"cannot write the conversion of {source.path} to", instead) from error


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
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
