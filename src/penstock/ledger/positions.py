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
from penstock.plan.share import EpochRows

__all__ = ["DataPositions", "RowsAt", "check_no_source", "positions_of_order"]

_CHUNK = 1 << 16


class RowsAt(NamedTuple):
    """The rows at some positions.

    Attributes:
        rows: rows of the data, int64 of shape (rows,); for packs, rows of their documents.
        at: index of each row's position in the given positions, int64 of shape (rows,).
        sources: number of each row's source; -1 without a mixture.
    """

    rows: Indices
    at: Indices
    sources: Indices


class DataPositions(Protocol):
    """One mini-epoch of the whole job."""

    def rows(self, positions: Indices) -> RowsAt:
        """Return the rows at positions."""

    def find(self, row: int, source: int | str) -> list[int]:
        """Return the positions of a row; none if the epoch does not contain it.

        Positions outside the mini-epoch may be wrong.

        Raises:
            ConfigError: the source does not exist.
        """


def positions_of_order(order: Any) -> DataPositions:
    """Return the positions of a sampler's order over unsplit data."""
    return _Ordered(order)


def check_no_source(source: int | str) -> None:
    """Raise `ConfigError` if a source is given for data without sources."""
    if source != -1:
        raise ConfigError(f"source={source!r} is for a row of a mixture, and this dataset is none: omit it")


class _Ordered:
    """An order of rows."""

    def __init__(self, order: Any) -> None:
        self._order = order

    def rows(self, positions: Indices) -> RowsAt:
        rows = np.asarray(self._order[positions])
        return RowsAt(rows, np.arange(len(rows)), np.full(len(rows), -1))

    def find(self, row: int, source: int | str) -> list[int]:
        check_no_source(source)
        if isinstance(self._order, EpochRows):
            return self._order.positions_of(row)
        if not hasattr(self._order, "inverse"):
            return list(self._scanned(row))
        return [int(self._order.inverse[row])] if 0 <= row < len(self._order) else []

    def _scanned(self, row: int) -> Iterator[int]:
        """Yield the positions of a row by a scan, for torch's orders and orders that repeat rows."""
        for begin in range(0, len(self._order), _CHUNK):
            rows = np.asarray(self._order[np.arange(begin, min(begin + _CHUNK, len(self._order)))])
            yield from (begin + np.flatnonzero(rows == row)).tolist()
