"""`ExcludedRows`: rows that nobody gets any more, and what stands in their places.

A position whose row is excluded gets another row, drawn by arithmetic from (seed, epoch, position), that is not. All
other positions keep theirs, so excluding rows in the middle of a run changes nothing else in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ConfigError
from penstock.hashing import derive_key, mix, mix_array
from penstock.order.permutation import Indices, normalise

__all__ = ["ExcludedRows"]

_MOST = 100_000
_STREAM = "excluded rows"


class ExcludedRows:
    """Some rows of a source.

    Args:
        rows: of the source; negative ones count from the end.
        of: how many rows the source has.

    Raises:
        ConfigError: more than 100,000, which are better filtered, or no integers.
        IndexError: a row outside the source.

    Memory: 8 bytes a row, in each process.
    """

    def __init__(self, rows: npt.ArrayLike, of: int) -> None:
        given = np.asarray(rows)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ConfigError(f"exclude= takes an array of row numbers, got {given.dtype} of shape {given.shape}")
        self.rows: Indices = np.unique(normalise(given, of))
        if len(self.rows) > _MOST:
            raise ConfigError(f"exclude= takes {_MOST:,} rows at most, got {len(self.rows):,}: filter them by Subset")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def digest(self) -> str:
        """Identity of the rows."""
        return xxhash.xxh3_64_hexdigest(self.rows.tobytes())

    def holds(self, rows: Indices) -> npt.NDArray[np.bool_]:
        """Return which of these rows are excluded."""
        if not len(self.rows):
            return np.zeros(rows.shape, np.bool_)
        found: npt.NDArray[np.bool_] = self.rows.take(self.rows.searchsorted(rows), mode="clip") == rows
        return found

    def replace(
        self, rows: Indices, positions: Indices, draw: Callable[[Indices], Indices], *, n: int, seed: int, epoch: int
    ) -> Indices:
        """Return the rows with others in place of those excluded.

        Args:
            rows: at the positions.
            positions: of the epoch.
            draw: gives the row of a number from 0 to ``n - 1``.
            n: rows to draw from, one of which at least is not excluded.
            seed, epoch: of the draws.
        """
        bad = np.flatnonzero(self.holds(rows))
        if not len(bad):
            return rows
        rows, key, attempt = rows.copy(), derive_key(seed, epoch, _STREAM), 0
        while len(bad):
            words: Any = mix_array(mix(key, attempt), positions[bad].view(np.uint64))
            rows[bad] = draw((words % np.uint64(n)).astype(np.int64))
            bad = bad[self.holds(rows[bad])]
            attempt += 1
        return rows
