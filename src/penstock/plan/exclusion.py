"""`ExcludedRows`: rows that are left out (`exclude=`), and the rows that replace them.

Another row replaces each excluded row. It is a function of (seed, epoch, excluded row), so any position and its
inverse can be computed on its own. All other positions keep their rows: excluding rows in the middle of a run changes
nothing else. A replacement may have to fit: a sample into a batch of one class, a document into a pack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ConfigError, StateError
from penstock.hashing import derive_key, mix_array
from penstock.order.packing import Pieces
from penstock.order.permutation import Indices, normalise
from penstock.plan.filter import KeptRows

__all__ = ["ExcludedDocuments", "ExcludedRows", "ExclusionMark", "check_excluded"]

ExclusionMark = tuple[int, str]
"""The entry of a state for excluded rows: their number, and a hash of them."""

_MOST = 100_000
_STREAM = "excluded rows"


class ExcludedRows:
    """Excluded rows of a source, and the rows that replace them. Use `of` for rows that a user gives.

    A row of the same class replaces each row. If the whole class is excluded, the replacement comes from the next class
    with rows left, or from the last such class.

    Args:
        rows: excluded rows, in any order.
        starts: the first row of each class, then the number of rows: int64 of shape (classes + 1,).
        mark: their entry in a state, by default number and hash of ``rows``; None if no row is excluded.

    Raises:
        ConfigError: no row of any class is left.

    Memory: 16 bytes per excluded row, in each process.

    >>> excluded = ExcludedRows.of([1, 3], 5)
    >>> rows = excluded.replace(np.arange(5), seed=7, turn=0)
    >>> rows[[0, 2, 4]].tolist(), set(rows[[1, 3]].tolist()) <= {0, 2, 4}
    ([0, 2, 4], True)
    """

    def __init__(self, rows: Indices, starts: Indices, mark: ExclusionMark | None = None) -> None:
        self.rows, self._starts = np.unique(rows), starts
        own = (len(self.rows), xxhash.xxh3_64_hexdigest(self.rows.tobytes())) if len(rows) else None
        self.mark = mark or own
        # The number of remaining rows before each excluded row, and before each class.
        self._left_before: Indices = self.rows - np.arange(len(self.rows))
        self._class_before: Indices = starts - self.rows.searchsorted(starts)
        self._left = np.flatnonzero(np.diff(self._class_before) > 0)
        if len(rows) and not len(self._left):
            raise ConfigError(f"exclude= leaves none of {starts[-1] - starts[0]} rows: no row is left to replace them")

    @classmethod
    def of(cls, rows: npt.ArrayLike, count: int) -> ExcludedRows:
        """Return the excluded rows of a source of ``count`` rows, in one class; negative ones count from the end.

        Raises:
            ConfigError: more than 100,000 rows (use a filter for these), all rows, or not integers.
            IndexError: a row is outside the source.
        """
        given = np.asarray(rows)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ConfigError(f"exclude= takes an array of row numbers, got {given.dtype} of shape {given.shape}")
        try:
            found = np.unique(normalise(given, count))
        except IndexError as error:
            raise IndexError(f"exclude=: {error}") from error
        if len(found) > _MOST:
            raise ConfigError(
                f"exclude= takes at most {_MOST:,} rows, got {len(found):,}: filter them with Subset instead"
            )
        return ExcludedRows(found, np.array([0, count]))

    def __len__(self) -> int:
        return len(self.rows)

    def among(self, kept: KeptRows) -> ExcludedRows:
        """Return the excluded rows that a filter keeps, as ordinals of its kept rows."""
        return ExcludedRows(kept.places_of(self.rows), np.array([0, len(kept)]))

    def with_rows(self, rows: npt.ArrayLike) -> ExcludedRows:
        """Return these excluded rows of a source plus ``rows``, which are checked as in `of`."""
        count = int(self._starts[-1])
        return ExcludedRows.of(np.concatenate([self.rows, ExcludedRows.of(rows, count).rows]), count)

    def holds(self, rows: Indices) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that are excluded."""
        if not len(self.rows):
            return np.zeros(rows.shape, np.bool_)
        found: npt.NDArray[np.bool_] = self.rows.take(self.rows.searchsorted(rows), mode="clip") == rows
        return found

    def _draw(self, words: npt.NDArray[np.uint64], classes: Indices) -> Indices:
        """Return a remaining row of a class for each 64-bit word. Every class needs at least one."""
        before = self._class_before[classes]
        left = self._class_before[classes + 1] - before
        numbers = before + (words % left.astype(np.uint64)).astype(np.int64)
        found: Indices = numbers + self._left_before.searchsorted(numbers, "right")
        return found

    def replace(self, rows: Indices, seed: int, turn: int) -> Indices:
        """Return the rows with the excluded ones replaced.

        Args:
            rows: int64 of shape (n,).
            seed, turn: choose the replacements; the turn counts how often all rows were read, such as the epoch.
        """
        bad = np.flatnonzero(self.holds(rows))
        if not len(bad):
            return rows
        words = mix_array(derive_key(seed, turn, _STREAM), rows[bad].view(np.uint64))
        classes = self._left.searchsorted(self._starts.searchsorted(rows[bad], "right") - 1)
        rows = rows.copy()
        rows[bad] = self._draw(words, self._left[np.minimum(classes, len(self._left) - 1)])
        return rows

    def places_of(self, row: int, seed: int, turn: int) -> list[int]:
        """Return the rows at whose positions a row is read: itself, and the excluded rows that it replaces.

        If the row is excluded itself, the list has only the rows that it replaces, usually none.
        """
        rows = self.rows[self.rows >= self._starts[0]]
        instead: list[int] = rows[self.replace(rows, seed, turn) == row].tolist()
        return instead if self.holds(np.array([row]))[0] else [row, *instead]


class ExcludedDocuments(ExcludedRows):
    """Excluded documents of packs. Each is replaced by the same number of tokens from other documents.

    A piece of an excluded document is replaced by a document of the same length. If all of these are excluded too, it
    is replaced by the start of a document of the next length. If no longer one is left, it is replaced by a shorter
    document and padding.

    Args:
        rows, starts: see `ExcludedRows`; a row is the place of a document in the sequence sorted by class.
        lengths: of the documents of each class: int64 of shape (classes,).
        capacity: tokens in a pack; longer documents have several pieces.

    Raises:
        ConfigError: no document with a token is left.
    """

    def __init__(self, rows: Indices, starts: Indices, lengths: Indices, capacity: int) -> None:
        super().__init__(rows, starts)
        left = self._left[lengths[self._left] > 0]
        if not len(left):
            raise ConfigError("exclude= leaves no document with a token: no document is left to replace them")
        self._by_length = left[np.argsort(lengths[left], kind="stable")]
        self._lengths, self._capacity = lengths, capacity

    def replace_pieces(self, pieces: Pieces, seed: int, turn: int) -> Pieces:
        """Return pieces with those of excluded documents replaced, see `ExcludedRows.replace`."""
        bad = np.flatnonzero(self.holds(pieces.places))
        if not len(bad):
            return pieces
        places, begins, lengths = (values.copy() for values in pieces[:3])
        key = derive_key(seed, turn, _STREAM)
        # A long document has several pieces, each with its own replacement.
        words = mix_array(key, mix_array(key, places[bad].view(np.uint64)) ^ begins[bad].view(np.uint64))
        fits = self._lengths[self._by_length].searchsorted(lengths[bad])
        classes = self._by_length[np.minimum(fits, len(self._by_length) - 1)]
        places[bad] = self._draw(words, classes)
        begins[bad] = 0
        lengths[bad] = np.minimum(lengths[bad], self._lengths[classes])
        return Pieces(places, begins, lengths, pieces.splits)

    def pieces_instead(self, place: int, seed: int, turn: int) -> list[tuple[int, int]]:
        """Return the pieces that a document replaces, each as the place of its document and its number in it."""
        whole = self._lengths[self._starts.searchsorted(self.rows, "right") - 1]
        counts = -(-whole // self._capacity)
        numbers = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = numbers * self._capacity
        lengths = np.minimum(np.repeat(whole, counts) - begins, self._capacity)
        pieces = Pieces(np.repeat(self.rows, counts), begins, lengths, np.arange(len(numbers) + 1))
        here = np.flatnonzero(self.replace_pieces(pieces, seed, turn).places == place)
        return list(zip(pieces.places[here].tolist(), numbers[here].tolist(), strict=True))


def check_excluded(state: Mapping[str, Any], here: ExclusionMark | None, *, of: str) -> None:
    """Raise unless the rows excluded here are the same as in the state, or more.

    Only the numbers are compared if more rows are excluded here.

    Args:
        state: has an entry ``excluded`` if rows were excluded.
        here: number and hash of the rows that are excluded here.
        of: class of the object that loads the state, for messages.

    Raises:
        StateError: other rows are excluded here, or the entry is damaged.
    """
    if "excluded" not in state:
        return
    match state["excluded"]:
        case [int(count), str(digest)]:
            if here is None or (here[1] != digest and here[0] <= count):
                raise StateError(
                    f"this state comes from a run with other excluded rows: {count:,} with the hash {digest}, but "
                    f"exclude= of this {of} has {here[0] if here else 0:,}. Pass the same rows, or the same and more: "
                    "a run cannot include excluded rows again"
                )
        case entry:
            raise StateError(f"this state is damaged: {entry!r} is not the number and the hash of excluded rows")
