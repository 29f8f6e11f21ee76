"""The rows at positions of an epoch, and the positions of a row. `dataset_positions` has those of our datasets.

Each class covers one mini-epoch of the whole job, in positions of the epoch: ``rows(positions)`` and its inverse,
``find(row, source)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock.errors import ConfigError
from penstock.order.permutation import Indices
from penstock.plan.class_plan import ClassBatchPlan
from penstock.plan.share import EpochRows

__all__ = ["BatchPositions", "DataPositions", "OrderPositions", "RowsAt", "check_no_source"]

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


class DataPositions(Protocol):
    """One mini-epoch of the whole job. Positions after its end are padding, which repeats its start."""

    def rows(self, positions: Indices) -> RowsAt:
        """Return the rows at positions."""

    def find(self, row: int, source: int | str) -> list[int]:
        """Return the positions of a row without padding; none if the epoch does not contain it.

        Positions outside the mini-epoch may be wrong.

        Raises:
            ConfigError: the source does not exist.
        """


def check_no_source(source: int | str) -> None:
    """Raise `ConfigError` if a source is given for data without sources."""
    if source != -1:
        raise ConfigError(f"source={source!r} is for a row of a mixture, and this dataset is none: omit it")


class BatchPositions:
    """Batches by class, numbered in the epoch. The position of a sample is its slot."""

    def __init__(self, run: ClassBatchPlan) -> None:
        self._run = run

    def rows(self, positions: Indices) -> RowsAt:
        """Return the rows of batches."""
        rows, slots, counts = self._run.samples_of(positions)
        return RowsAt(rows, np.repeat(np.arange(len(counts)), counts), slots, np.full(len(rows), -1))

    def find(self, row: int, source: int | str) -> list[int]:
        """Return the numbers of the batches with a row."""
        check_no_source(source)
        return self._run.numbers_of(row)


class OrderPositions:
    """An order of rows, of which the epoch has the first ``samples``."""

    def __init__(self, order: Any, samples: int) -> None:
        self._order, self._samples = order, samples

    def rows(self, positions: Indices) -> RowsAt:
        """Return the row at each position."""
        rows = np.asarray(self._order[positions % max(1, self._samples)])
        return RowsAt(rows, np.arange(len(rows)), positions, np.full(len(rows), -1))

    def find(self, row: int, source: int | str) -> list[int]:
        """Return the positions of a row."""
        check_no_source(source)
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
