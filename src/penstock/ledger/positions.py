"""The rows at positions of an epoch, and the positions of a row. `dataset_positions` has those of our datasets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import ConfigError
from penstock.order.permutation import Indices
from penstock.plan.class_plan import ClassBatchPlan
from penstock.plan.share import EpochRows

__all__ = ["BatchPositions", "Positions", "RowsAt"]

_CHUNK = 1 << 16


class RowsAt(NamedTuple):
    """The rows at some positions.

    Attributes:
        rows: rows of the data, int64 of shape (rows,); for packs, rows of their documents.
        at: index of each row's position in the given positions, int64 of shape (rows,).
        positions: position of each row's sample in the epoch; of a document, that of its pack.
        sources: number of each row's source; -1 without a mixture.
    """

    rows: Indices
    at: Indices
    positions: Indices
    sources: Indices


class Positions:
    """One mini-epoch of the whole job, over an order of rows. Positions after its end are padding, which repeats its
    start.

    Args:
        order: the rows at all positions of the epoch.
        samples: number of positions in the epoch.
    """

    def __init__(self, order: Any, samples: int) -> None:
        self._order, self._samples = order, samples

    def rows(self, positions: Indices) -> RowsAt:
        """Return the rows at positions."""
        rows = np.asarray(self._order[positions % max(1, self._samples)])
        return RowsAt(rows, np.arange(len(rows)), positions, np.full(len(rows), -1))

    def find(self, row: int, source: int | str) -> list[int]:
        """Return the positions of a row without padding; none if the epoch does not contain it.

        Positions outside the mini-epoch may be wrong.

        Raises:
            ConfigError: the source does not exist.
        """
        if source != -1:
            raise ConfigError(f"source={source!r} is for a row of a mixture, and this dataset is none: omit it")
        return self._find(row)

    def _find(self, row: int) -> list[int]:
        if isinstance(self._order, EpochRows):
            return self._order.positions_of(row)
        if not hasattr(self._order, "inverse"):
            return list(self._scanned(row))
        return [int(self._order.inverse[row])] if 0 <= row < len(self._order) else []

    def _scanned(self, row: int) -> Iterator[int]:
        """Yield the positions of a row by a scan, for torch's orders and orders that repeat rows."""
        for begin in range(0, self._samples, _CHUNK):
            rows = np.asarray(self._order[np.arange(begin, min(begin + _CHUNK, self._samples))])
            yield from (begin + np.flatnonzero(rows == row)).tolist()


class BatchPositions(Positions):
    """Batches by class, numbered in the epoch. The position of a sample is its slot."""

    def __init__(self, run: ClassBatchPlan) -> None:
        self._run = run

    def rows(self, positions: Indices) -> RowsAt:
        rows, slots, counts = self._run.samples_of(positions)
        return RowsAt(rows, np.repeat(np.arange(len(counts)), counts), slots, np.full(len(rows), -1))

    def _find(self, row: int) -> list[int]:
        return self._run.numbers_of(row)
