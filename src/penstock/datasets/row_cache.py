"""`RowCache`: cache the rows of the next indices, for datasets whose order is slower to compute than rows are to read.

Computing the order of 64 samples costs about as much as that of a thousand (about a hundred NumPy calls in either
case), and more than copying 64 short rows. Loaders request consecutive indices, so a block of rows is computed at once
and cached. Rows of other indices are computed on request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.order.permutation import Indices, normalise
from penstock.plan.share import EpochView

__all__ = ["RowCache"]

_BLOCK = 4096  # rows, 32 KiB


class RowCache:
    """``rows(view, indices)`` returns the rows of the source at local indices. Thread-safe."""

    def __init__(self) -> None:
        self._kept: tuple[EpochView, int, Indices] | None = None

    def rows(self, view: EpochView, indices: Sequence[int]) -> Indices:
        """Return the rows of some samples of a view, int64 of shape (indices,).

        Raises:
            IndexError: an index is outside this rank's samples.
        """
        local = normalise(indices, len(view))
        begin = int(local[0]) if len(local) else 0
        if len(local) < 2 or int(local[-1]) - begin != len(local) - 1 or (local[1:] - local[:-1] != 1).any():
            return view.rows(local)
        kept = self._kept
        if kept is None or kept[0] is not view or not kept[1] <= begin <= kept[1] + len(kept[2]) - len(local):
            end = min(begin + max(_BLOCK, len(local)), len(view))
            rows = view.rows(np.arange(begin, end))
            self._kept = kept = view, begin, rows
        return kept[2][begin - kept[1] : begin - kept[1] + len(local)]

    def __reduce__(self) -> tuple[type[RowCache], tuple[()]]:
        return RowCache, ()
