"""Convert Arrow columns to the values of samples.

==============================  =======================================================================
in the file                     in a sample
==============================  =======================================================================
numbers, booleans               a NumPy scalar of that type
lists of numbers, any depth     an array; if inner lists differ in length, a list of arrays
arrays of fixed shape           an array of that shape (``Array2D`` of `datasets`, Arrow tensors)
text, bytes                     ``str``, ``bytes``
structs                         a dict
all other types                 Python objects: dates, decimals, lists of text or of structs, maps
null                            ``None``; within a list of numbers NaN, and the list becomes float
==============================  =======================================================================

A batch equals the result of the default collate function over these values; numeric columns skip that function.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import ConfigError
from penstock.manifest.indices import as_numpy

__all__ = [
    "Plain",
    "as_array",
    "as_values",
    "check_type",
    "fixed_shape",
    "is_text",
    "is_view",
    "plain_batch",
    "plain_type",
    "shaped",
]

Array = npt.NDArray[Any]

_types = pa.types
_VIEWS = {"string_view": pa.string(), "binary_view": pa.binary()}


def check_type(where: str, kind: pa.DataType) -> None:
    """Raise ConfigError for a column type without Python values."""
    if isinstance(kind, pa.BaseExtensionType):
        check_type(where, kind.storage_type)
    elif _types.is_union(kind):
        raise ConfigError(f"{where} has the type {kind}, of which there are no values: leave it out with columns=")
    else:
        for number in range(kind.num_fields):
            check_type(where, kind.field(number).type)


def fixed_shape(field: pa.Field) -> tuple[int, ...] | None:
    """Return the shape of an array column's values, from the extension type it was written with; else None.

    A first dimension of -1 varies between values.
    """
    kind = field.type
    if isinstance(kind, pa.FixedShapeTensorType):
        straight = kind.permutation is None or list(kind.permutation) == sorted(kind.permutation)
        return tuple(kind.shape) if straight else None
    written = field.metadata or {}
    name, text = written.get(b"ARROW:extension:name", b""), written.get(b"ARROW:extension:metadata", b"")
    if isinstance(kind, pa.BaseExtensionType) and hasattr(kind, "__arrow_ext_serialize__"):
        name, text = str(kind.extension_name).encode(), kind.__arrow_ext_serialize__()
    if not name.startswith(b"datasets.features.features.Array"):
        return None
    try:
        first, *others = json.loads(text)[0]
        return (-1 if first is None else int(first), *map(int, others))
    except (ValueError, TypeError, LookupError):
        return None


def plain_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch without extension types, dictionaries and views.

    Batches of several files can then be concatenated, and Arrow can take rows from them.
    """
    columns = [_plain(column) for column in batch.columns]
    if all(new is old for new, old in zip(columns, batch.columns, strict=True)):
        return batch
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _plain(array: pa.Array) -> pa.Array:
    if isinstance(array.type, pa.BaseExtensionType):
        return _plain(array.storage)
    if _types.is_dictionary(array.type):
        return _plain(array.dictionary_decode())
    return array.cast(_VIEWS[str(array.type)]) if is_view(array.type) else array


def is_view(kind: pa.DataType) -> bool:
    """Return whether values are views of text or bytes; Arrow's ``take`` does not support these."""
    return str(kind) in _VIEWS


def _is_number(kind: pa.DataType) -> bool:
    return bool(_types.is_integer(kind) or _types.is_floating(kind) or _types.is_boolean(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(_types.is_list(kind) or _types.is_large_list(kind) or _types.is_fixed_size_list(kind))


class Plain(NamedTuple):
    """A type whose values lie in one buffer, one after the other.

    Attributes:
        dtype: of numbers, or of the offsets of text.
        shape: of the numbers of a value; None for text and bytes.
        width: how many numbers a value has.
        is_text: whether values are text, and not bytes.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None = None
    width: int = 1
    is_text: bool = False


def plain_type(kind: pa.DataType) -> Plain | None:
    """Return how values lie in their buffer: numbers, fixed-size lists of these, text and bytes; None for others."""
    is_large = _types.is_large_string(kind) or _types.is_large_binary(kind)
    is_text = _types.is_string(kind) or _types.is_large_string(kind)
    if is_large or is_text or _types.is_binary(kind):
        return Plain(np.dtype(np.int64 if is_large else np.int32), is_text=is_text)
    shape: list[int] = []
    while _types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    if not (_types.is_integer(kind) or _types.is_floating(kind)) or 0 in shape:
        return None
    return Plain(np.dtype(kind.to_pandas_dtype()), tuple(shape), math.prod(shape))


def as_array(array: pa.Array) -> Array | None:
    """Return a column as one array, with rows as its first dimension; None if values are not equal-shaped numbers."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return as_array(array.storage)
    if array.null_count:
        return None
    if _types.is_boolean(kind):
        found: Array = array.to_numpy(zero_copy_only=False)
        return found
    if _is_number(kind):
        return as_numpy(array)
    if not _is_list(kind):
        return None
    if _types.is_fixed_size_list(kind):
        length = kind.list_size
    else:
        lengths = np.diff(array.offsets.to_numpy())
        length = int(lengths[0]) if len(lengths) else 0
        if (lengths != length).any():
            return None
    inner = as_array(array.flatten())
    return None if inner is None else inner.reshape(len(array), length, *inner.shape[1:])


def shaped(found: Array, shape: tuple[int, ...] | None) -> Array:
    """Return rows of arrays in the shape of their column: tensors are stored flat, and empty lists lose inner sizes."""
    if shape is None or found.shape[1:] == shape:
        return found
    if shape[0] < 0:
        shape = (found.shape[1], *shape[1:])
    return found.reshape(len(found), *shape) if found.size == len(found) * math.prod(shape) else found


def as_values(array: pa.Array, shape: tuple[int, ...] | None = None) -> list[Any]:
    """Return a column as a list of values, see the module's table; ``shape`` is the type's fixed shape, if any.

    The form of a value does not depend on other values. Arrays are writable.
    """
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return as_values(array.storage, shape)
    found = as_array(array)
    if found is not None:
        return list(_own(shaped(found, shape)))
    if _is_number(kind):
        scalar = np.dtype(kind.to_pandas_dtype()).type
        return [None if value is None else scalar(value) for value in array.to_pylist()]
    if _types.is_struct(kind):
        fields = [as_values(column) for column in array.flatten()]
        names = [kind.field(k).name for k in range(kind.num_fields)]
        rows = zip(*fields, strict=True) if fields else [()] * len(array)
        return _with_nulls([dict(zip(names, row, strict=True)) for row in rows], array)
    if _is_list(kind) and _of_numbers(kind):
        values = _lists(array)
        return values if shape is None else [v if v is None else shaped(v[None], shape)[0] for v in values]
    return array.to_pylist()  # type: ignore[no-any-return]


def _own(found: Array) -> Array:
    return found if found.flags.writeable or found.ndim < 2 else found.copy()


def _of_numbers(kind: pa.DataType) -> bool:
    while _is_list(kind) or isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind.value_type
    return _is_number(kind)


def _lists(array: pa.Array) -> list[Any]:
    """Return lists of numbers that differ in length, are null, or contain nulls."""
    if _types.is_fixed_size_list(array.type):
        array = array.cast(pa.list_(array.type.value_type))
    lengths = np.diff(array.offsets.to_numpy())
    if array.null_count:  # null lists refer to no values
        lengths = np.where(array.is_null().to_numpy(zero_copy_only=False), 0, lengths)
    ends = np.cumsum(lengths).tolist()
    inside = array.flatten()
    spans = zip([0, *ends], ends, strict=False)
    if not _is_number(inside.type):
        flat, empty = as_values(inside), as_array(inside.slice(0, 0))
        parts = [_stacked(flat[first:last]) if first < last else _own(empty) for first, last in spans]  # type: ignore[arg-type]
    elif inside.null_count:
        parts = [_numbers(inside.slice(first, last - first)) for first, last in spans]
    else:
        flat = inside.to_numpy(zero_copy_only=False).copy()
        parts = [flat[first:last] for first, last in spans]
    return _with_nulls(parts, array)


def _numbers(array: pa.Array) -> Array:
    """Return numbers, with NaN for null."""
    kind = np.dtype(array.type.to_pandas_dtype())
    if not array.null_count:
        found: Array = array.to_numpy(zero_copy_only=False)
        return found.copy()
    values = [math.nan if value is None else value for value in array.to_pylist()]
    return np.array(values, kind if kind.kind == "f" else np.float64)


def _stacked(parts: list[Any]) -> Any:
    """Return inner lists as one array, if their shapes are equal."""
    first = parts[0]
    if isinstance(first, np.ndarray) and all(
        isinstance(p, np.ndarray) and (p.shape, p.dtype) == (first.shape, first.dtype) for p in parts
    ):
        return np.stack(parts)
    return parts


def _with_nulls(values: list[Any], array: pa.Array) -> list[Any]:
    if not array.null_count:
        return values
    return [None if null else value for value, null in zip(values, array.is_null().to_pylist(), strict=True)]


def is_text(kind: pa.DataType) -> bool:
    """Return whether values are ``str`` or ``bytes``."""
    tests = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "fixed_size_binary")
    return any(getattr(_types, f"is_{name}")(kind) for name in tests)
