"""Typed columns of a file: which types a manifest accepts, and the cast to the manifest's types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ManifestError
from penstock.manifest.indices import Rows, as_arrow
from penstock.manifest.options import Column

__all__ = [
    "INVALID",
    "as_batch",
    "cast_batch",
    "check_sound",
    "damage_of",
    "final_schema",
    "is_mapped",
    "offsets_of",
    "reordered",
    "shown",
]

INVALID = (
    *(pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowKeyError),
    *(pa.ArrowMemoryError, UnicodeDecodeError, OSError),
)
"""The exceptions of Arrow for invalid files; the last ones for sizes, for column names, and for damaged ones."""


def final_schema(path: str, schema: pa.Schema, columns: tuple[Column, ...]) -> pa.Schema:
    """Return the names and types of the wanted columns after the cast.

    Raises:
        ManifestError: a column is missing, not unique, or of another type than declared.
    """
    fields = []
    try:
        _ = schema.names
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path} is damaged, or not written by the rules: a column's name: {error}") from None
    for column in columns:
        if schema.names.count(column.source) != 1:
            problem = "no column" if column.source not in schema.names else "more than one column"
            raise ManifestError(
                f"{path} has {problem} {column.source!r}; there are {', '.join(schema.names)}. Choose with "
                "columns={'path': ..., 'label': ...}, or leave the label out with label=None"
            )
        have = schema.field(column.source).type
        wanted = column.arrow_type
        if wanted is not None and not _suits(column, have):
            raise ManifestError(
                f"{path}: column {column.source!r} has the type {have}, not {column}; say which with label= or columns="
            )
        fields.append(pa.field(column.name, have if wanted is None else wanted))
    return pa.schema(fields)


def _suits(column: Column, have: pa.DataType) -> bool:
    types = pa.types
    if types.is_dictionary(have):
        have = have.value_type
    if column.width:
        if not (types.is_list(have) or types.is_large_list(have) or types.is_fixed_size_list(have)):
            return False
        have = have.value_type
    if column.kind == "int":
        return bool(types.is_integer(have))
    if column.kind == "float":
        return bool(types.is_floating(have) or types.is_integer(have))
    return bool(types.is_string(have) or types.is_large_string(have) or types.is_string_view(have))


def cast_batch(
    path: str, batch: pa.RecordBatch, columns: tuple[Column, ...], schema: pa.Schema, rows: npt.NDArray[np.int64]
) -> pa.RecordBatch:
    """Return a batch of the sources of ``columns``, cast to ``schema``; ``rows`` are row numbers for errors.

    Raises:
        ManifestError: null or empty paths, null labels, or values that do not fit the type.
    """
    arrays = [
        _cast(path, column, array, field.type, rows)
        for column, array, field in zip(columns, batch.columns, schema, strict=True)
    ]
    return pa.record_batch(arrays, schema=schema)


def _cast(path: str, column: Column, array: pa.Array, wanted: pa.DataType, rows: npt.NDArray[np.int64]) -> pa.Array:
    if pa.types.is_dictionary(array.type) and array.type != wanted:
        array = array.dictionary_decode()
    if array.null_count and column.name in ("path", "label"):
        first = pc.index(array.is_null(), True).as_py()
        raise ManifestError(f"{path}, row {rows[first]}: {column.name} is null")
    exact = column.kind != "float"  # large integers may be rounded
    try:
        result = array if array.type == wanted else array.cast(wanted, safe=exact)
    except INVALID as error:
        for k in range(len(array)):
            try:
                array.slice(k, 1).cast(wanted, safe=exact)
            except INVALID:
                found = shown(array[k])
                raise ManifestError(f"{path}, row {rows[k]}: {column.name} {found} is not {column}") from None
        raise ManifestError(f"{path}: {column.name} cannot be read as {column}: {error}") from None
    if column.name == "path" and (first := pc.index(pc.binary_length(result), pa.scalar(0, pa.int32())).as_py()) >= 0:
        raise ManifestError(f"{path}, row {rows[first]}: path is empty")
    return result


def offsets_of(column: pa.Array) -> npt.NDArray[Any] | None:
    """Return the offsets of a text column: the begin of each text, and the end of the last; None for other columns."""
    kind = column.type
    wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    if not (wide or pa.types.is_string(kind) or pa.types.is_binary(kind)):
        return None
    buffer = column.buffers()[1]
    if buffer is None or not len(column):
        return np.zeros(len(column) + 1, np.int64)
    found: npt.NDArray[Any] = np.frombuffer(buffer, "i8" if wide else "i4", len(column) + 1 + column.offset)
    return found[column.offset :]


def damage_of(column: pa.Array) -> str | None:
    """Return what is damaged in a column, or None. Texts may be any bytes, so only their offsets are checked."""
    try:
        column.validate()
        offsets = offsets_of(column)
        if offsets is None:
            column.validate(full=not pa.types.is_primitive(column.type))
            return None
    except INVALID as error:
        return str(error)
    data = column.buffers()[2]
    inside = int(offsets[0]) >= 0 and int(offsets[-1]) <= (0 if data is None else data.size)
    return None if inside and (offsets[1:] >= offsets[:-1]).all() else "text offsets outside of the column"


def check_sound(path: str, batch: pa.RecordBatch, where: str) -> None:
    """Raise ManifestError for a damaged batch: Arrow would follow a bad offset and crash the process."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if why := damage_of(column):
            raise ManifestError(f"{path} is damaged in column {name!r}, {where}: {why}")


def is_mapped(whole: pa.Buffer, batch: pa.RecordBatch) -> bool:
    """Return whether the arrays of a batch are in the mapped bytes: those of a compressed file are elsewhere."""
    begin, end = whole.address, whole.address + whole.size
    buffers = [buffer for array in batch.columns for buffer in array.buffers() if buffer is not None and buffer.size]
    return all(begin <= buffer.address < end for buffer in buffers)


def shown(value: pa.Scalar) -> str:
    """Return a value for error messages, cut to a readable length."""
    try:
        return repr(value.as_py())[:80]
    except UnicodeDecodeError:
        return "(text that is not UTF-8)"


def as_batch(batches: Sequence[pa.RecordBatch], error: Callable[[str], Exception] = ManifestError) -> pa.RecordBatch:
    """Return batches, at least one, as one; an error if a string column exceeds 2 GiB, the limit of a batch."""
    if len(batches) == 1:
        return batches[0]
    try:
        return pa.concat_batches(batches)
    except pa.ArrowInvalid:
        rows = sum(batch.num_rows for batch in batches)
        raise error(f"{rows} rows hold more than 2 GiB of text, too much for one batch; gather fewer at once") from None


def reordered(
    parts: Sequence[pa.RecordBatch], groups: Sequence[Rows], error: Callable[[str], Exception] = ManifestError
) -> pa.RecordBatch:
    """Return the rows of parts as one batch, each at its position in ``groups``. Raises as `as_batch`."""
    whole, order = as_batch(parts, error), np.concatenate(groups)
    if (order[1:] > order[:-1]).all():
        return whole
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return whole.take(as_arrow(back))
