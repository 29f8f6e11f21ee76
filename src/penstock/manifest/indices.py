"""Row numbers: from a user's indices, by part, and to Arrow and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.order.shuffle import groups
from penstock.wording import counted

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Indices", "Rows", "as_arrow", "as_numpy", "by_part", "located", "to_rows"]

Rows = npt.NDArray[np.int64]
Indices = Sequence[int] | range | npt.NDArray[np.integer[Any]]


def to_rows(indices: Indices, view: range) -> Rows:
    """Return the rows of the whole manifest for indices of a view.

    Memory: 8 bytes an index; none for an int64 array and a view that begins with row 0.

    Raises:
        IndexError: an index outside ``[-len(view), len(view))``.
        TypeError: an index that is not an integer.
    """
    if isinstance(indices, range):
        indices = np.arange(indices.start, indices.stop, indices.step)
    array = np.asarray(indices)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise TypeError(f"indices must be a sequence of integers, not {array.dtype} of shape {array.shape}")
    count, rows = len(view), array.astype(np.int64, copy=False)
    # As unsigned integers, negative numbers are huge: one comparison covers both bounds.
    if rows.size and int(np.maximum.reduce(rows.view(np.uint64))) >= count:
        low, high = int(array.min()), int(array.max())
        if low < -count or high >= count:
            raise IndexError(
                f"row {low if low < -count else high} is out of range for a manifest of {counted(count, 'row')}"
            )
        rows = np.where(rows < 0, rows + count, rows)
    return rows if view.start == 0 and view.step == 1 else rows * view.step + view.start


def located(starts: Rows, rows: Rows) -> tuple[Rows, Rows]:
    """Return the number of the part of each row, and the row in it; ``starts`` as for `by_part`."""
    numbers = starts.searchsorted(rows, "right") - 1
    return numbers, rows - starts[numbers]


def by_part(starts: Rows, rows: Rows) -> Iterator[tuple[int, Rows, Rows]]:
    """Yield the number of each part with some of the rows, their positions in ``rows``, and their rows in the part.

    ``starts`` are the first row of each part, and the number of all rows.
    """
    numbers, local = located(starts, rows)
    for number, places in groups(numbers):
        yield number, places, local[places]


def as_arrow(rows: Rows) -> pa.Int64Array:
    """Return rows as an Arrow array, without a copy if they are contiguous.

    `pyarrow.array` would import pandas if it is installed: 50 MiB and 0.1 s in every worker.
    """
    import pyarrow as pa  # imported late: most readers need no Arrow

    buffer = pa.py_buffer(np.ascontiguousarray(rows, np.int64))
    return pa.Int64Array.from_buffers(pa.int64(), len(rows), [None, buffer])


def as_numpy(array: pa.Array) -> npt.NDArray[Any]:
    """Return a view of a numeric Arrow array without nulls. Arrow's own method would import pandas."""
    dtype = np.dtype(array.type.to_pandas_dtype())
    if not len(array):
        return np.empty(0, dtype)
    values: npt.NDArray[Any] = np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)
    values.flags.writeable = False
    return values
