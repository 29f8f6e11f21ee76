"""Rows of the samples that come next, many at a time: for data sets whose batches cost less than their order.

The permutation of a batch of 64 costs about as much as that of a thousand samples (some hundred NumPy calls either
way), which is more than copying 64 short rows. Loaders ask for indices that follow each other, so a block of them is
worth keeping. Any other indices are computed by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.datasets.place import Place
from penstock.datasets.share import Share, Slice
from penstock.order.permutation import Indices, normalise

__all__ = ["RowsAhead"]

_BLOCK = 4096  # 32 KiB


class RowsAhead:
    """``rows(share, indices, place)``: rows of the table for local indices. Safe in threads."""

    def __init__(self) -> None:
        self._kept: tuple[Slice, int, Indices] | None = None

    def rows(self, share: Share, indices: Sequence[int], place: Place | None) -> Indices:
        """Rows at the present place of a share, or at another one.

        Raises:
            IndexError: an index is outside this rank's share.
        """
        slice_ = share.current() if place is None else share.slice_at(place)
        local = normalise(indices, len(slice_))
        begin = int(local[0]) if len(local) else 0
        if len(local) < 2 or int(local[-1]) - begin != len(local) - 1 or (local[1:] - local[:-1] != 1).any():
            return slice_.rows(slice_.positions(local))
        kept = self._kept
        if kept is None or kept[0] is not slice_ or not kept[1] <= begin <= kept[1] + len(kept[2]) - len(local):
            end = min(begin + max(_BLOCK, len(local)), len(slice_))
            rows = slice_.rows(slice_.positions(np.arange(begin, end)))
            self._kept = kept = slice_, begin, rows
        return kept[2][begin - kept[1] : begin - kept[1] + len(local)]

    def __reduce__(self) -> tuple[type[RowsAhead], tuple[()]]:
        return RowsAhead, ()
