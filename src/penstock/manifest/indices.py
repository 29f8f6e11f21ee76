"""From the indices that a user gives to row numbers, and pieces of an answer back into the order asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.wording import counted

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Indices", "Rows", "as_arrow", "as_numpy", "in_order", "to_rows"]

Rows = npt.NDArray[np.int64]
Indices = Sequence[int] | range | npt.NDArray[np.integer[Any]]


def to_rows(indices: Indices, view: range) -> Rows:
    """Indices of a view as rows of the whole. IndexError outside ``[-len(view), len(view))``, TypeError for no integer.

    Memory: 8 bytes for each index, none where they are an array of int64 already and the view begins with row 0.
    """
    if isinstance(indices, range):
        indices = np.arange(indices.start, indices.stop, indices.step)
    array = np.asarray(indices)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise TypeError(f"indices must be a sequence of integers, not {array.dtype} of shape {array.shape}")
    count = len(view)
    if array.dtype == np.uint64 and array.size and int(array.max()) >= count:  # some would be negative as int64
        raise IndexError(f"row {int(array.max())} is out of range for a manifest of {counted(count, 'row')}")
    array = array.astype(np.int64, copy=False)
    # Without a sign negative numbers are huge: one look tells that nothing is to be done.
    if array.size and int(np.maximum.reduce(array.view(np.uint64))) >= count:
        low, high = int(array.min()), int(array.max())
        if low < -count or high >= count:
            raise IndexError(
                f"row {low if low < -count else high} is out of range for a manifest of {counted(count, 'row')}"
            )
        array = np.where(array < 0, array + count, array)
    return array if view.start == 0 and view.step == 1 else array * view.step + view.start


def as_arrow(rows: Rows) -> pa.Int64Array:
    """Rows as an Arrow array, without a copy where they lie side by side. `pyarrow.array` imports pandas, where that is
    installed: 50 MiB in every worker, and a tenth of a second before its first batch.
    """
    import pyarrow as pa  # only where Arrow's arrays are asked for

    buffer = pa.py_buffer(np.ascontiguousarray(rows, np.int64))
    return pa.Int64Array.from_buffers(pa.int64(), len(rows), [None, buffer])


def as_numpy(array: pa.Array) -> npt.NDArray[Any]:
    """View the numbers of an Arrow array without nulls. Its own method imports pandas, where that is installed."""
    dtype = np.dtype(array.type.to_pandas_dtype())
    if not len(array):
        return np.empty(0, dtype)
    values: npt.NDArray[Any] = np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)
    values.flags.writeable = False
    return values


def in_order(pieces: list[tuple[Rows, pa.Array]], kind: pa.DataType) -> pa.Array:
    """Arrays put together so that each element comes to its place; ``kind`` is their type, for none at all."""
    import pyarrow as pa

    if not pieces:
        return pa.array([], kind)
    order = np.argsort(np.concatenate([places for places, _ in pieces]))
    return pa.concat_arrays([piece for _, piece in pieces]).take(as_arrow(order))
