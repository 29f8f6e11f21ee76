"""`ExcludedRows`: rows that are left out (`exclude=`), and the rows that replace them.

Another row replaces each excluded row. It is a function of (seed, epoch, excluded row), so any position and its
inverse can be computed on its own. All other positions keep their rows: excluding rows in the middle of a run changes
nothing else. A replacement fits: a sample into a batch of one class, a document into the packs of the excluded one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ConfigError, StateError
from penstock.hashing import derive_key, mix_array
from penstock.order.classes import class_of
from penstock.order.permutation import Indices, normalise
from penstock.plan.filter import KeptRows
from penstock.storage.class_index import ClassIndex

__all__ = ["ExcludedRows", "ExclusionMark", "check_excluded"]

ExclusionMark = tuple[int, str]
"""The entry of a state for excluded rows: their number, and a hash of them."""


class ExcludedRows:
    """Excluded rows of a source, and the rows that replace them. Use `of` for rows that a user gives.

    Args:
        rows: excluded rows, in any order.
        starts: the first row of each class, then the number of rows: int64 of shape (classes + 1,).
        lengths: of the rows of each class, by default 1, 2, ... A row is replaced by one of the same length. If none is
            left, by one of the next length with rows left, or of the greatest such length; never by one of length 0.

    Raises:
        ConfigError: no row of any class is left.

    >>> excluded = ExcludedRows.of([1, 3], 5)
    >>> rows = excluded.replace(np.arange(5), seed=7, turn=0)
    >>> rows[[0, 2, 4]].tolist(), set(rows[[1, 3]].tolist()) <= {0, 2, 4}
    ([0, 2, 4], True)
    """

    def __init__(self, rows: Indices, starts: Indices, lengths: Indices | None = None) -> None:
        self.rows, self._count = np.unique(rows), int(starts[-1])
        digest = xxhash.xxh3_64_hexdigest(self.rows.tobytes())
        self.mark: ExclusionMark | None = (len(self.rows), digest) if len(rows) else None
        lengths = np.arange(1, len(starts)) if lengths is None else lengths
        # The number of remaining rows before each excluded row, and before each class.
        self._left_before: Indices = self.rows - np.arange(len(self.rows))
        before: Indices = starts - self.rows.searchsorted(starts)
        left = np.flatnonzero((np.diff(before) > 0) & (lengths > 0))
        if len(rows) and not len(left):
            raise ConfigError(f"exclude= leaves none of {starts[-1] - starts[0]} rows to replace the excluded ones")
        left = left[np.argsort(lengths[left], kind="stable")]
        fits = lengths[left].searchsorted(lengths[class_of(starts, self.rows)])
        classes = left[np.minimum(fits, len(left) - 1)]
        self._begins, self._counts = before[classes], np.diff(before)[classes].astype(np.uint64)

    @classmethod
    def of(cls, rows: npt.ArrayLike, count: int) -> ExcludedRows:
        """Return the excluded rows of a source of ``count`` rows, in one class; negative ones count from the end.

        Raises:
            ConfigError: more than 100,000 rows, all rows, or not integers.
            IndexError: a row is outside the source.
        """
        given = np.asarray(rows)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ConfigError(f"exclude= takes an array of row numbers, got {given.dtype} of shape {given.shape}")
        given = np.unique(given)
        if len(given) > 100_000:
            raise ConfigError(f"exclude= takes at most 100,000 rows, got {len(given):,}: filter them with Subset")
        try:
            return ExcludedRows(normalise(given, count), np.array([0, count]))
        except IndexError as error:
            raise IndexError(f"exclude=: {error}") from error

    @classmethod
    def by_class(cls, rows: npt.ArrayLike | None, samples: ClassIndex, starts: Indices) -> ExcludedRows:
        """Return the places of excluded samples in an index of classes, and their replacements.

        Args:
            rows: the samples; None excludes no sample.
            samples: the index.
            starts: of the classes that have batches, as for `ExcludedRows`.
        """
        given = cls.of([] if rows is None else rows, len(samples))
        found = cls(samples.places(given.rows) if given.mark else given.rows, starts)
        # States compare the rows that the user gave.
        found.mark = given.mark
        return found

    def among(self, kept: KeptRows) -> ExcludedRows:
        """Return the excluded rows that a filter keeps, as ordinals of its kept rows."""
        return ExcludedRows(kept.places_of(self.rows), np.array([0, len(kept)]))

    def with_rows(self, rows: npt.ArrayLike) -> ExcludedRows:
        """Return these excluded rows of a source plus ``rows``, which are checked as in `of`."""
        return ExcludedRows.of(np.union1d(self.rows, ExcludedRows.of(rows, self._count).rows), self._count)

    def holds(self, rows: Indices) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that are excluded."""
        return np.asarray(np.append(self.rows, -1)[self.rows.searchsorted(rows)] == rows)

    def replace(self, rows: Indices, seed: int, turn: int) -> Indices:
        """Return rows with the excluded ones replaced. The turn, such as the epoch, counts how often all were read."""
        bad = np.flatnonzero(self.holds(rows))
        if not len(bad):
            return rows
        words = mix_array(derive_key(seed, turn, "excluded rows"), rows[bad].view(np.uint64))
        at = self.rows.searchsorted(rows[bad])
        numbers = self._begins[at] + (words % self._counts[at]).astype(np.int64)
        rows = rows.copy()
        rows[bad] = numbers + self._left_before.searchsorted(numbers, "right")
        return rows

    def places_of(self, row: int, seed: int, turn: int) -> list[int]:
        """Return the rows at whose positions a row is read: itself unless it is excluded, and those it replaces."""
        own = [] if self.holds(np.array([row]))[0] else [row]
        return [*own, *self.rows[self.replace(self.rows, seed, turn) == row].tolist()]


def check_excluded(state: Mapping[str, Any], here: ExclusionMark | None, *, of: str) -> None:
    """Raise `StateError` unless a state of a class ``of`` excludes the rows that are excluded here, or fewer."""
    match state.get("excluded", (0, "")):
        case [int(count), str(digest)]:
            # If more rows are excluded here, only the numbers are compared.
            if count and (here is None or (here[1] != digest and here[0] <= count)):
                raise StateError(
                    f"this state comes from a run with other excluded rows: {count:,} with the hash {digest}, but "
                    f"exclude= of this {of} has {here[0] if here else 0:,}. Pass the same rows, or the same and more: "
                    "a run cannot include excluded rows again"
                )
        case entry:
            raise StateError(f"this state is damaged: {entry!r} is not the number and the hash of excluded rows")
