"""`ExcludedRows`: rows that are left out (`exclude=`), and the rows that replace them.

Another row replaces each excluded row. It is a function of (seed, epoch, excluded row), so any position and its
inverse can be computed on its own. All other positions keep their rows: excluding rows in the middle of a run changes
nothing else. In `ExcludedMembers` and `ExcludedPieces` the replacement must also fit: a sample into a batch of one
class, a document into a pack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ConfigError, StateError
from penstock.hashing import derive_key, mix_array
from penstock.order.permutation import Indices, normalise
from penstock.plan.filter import KeptRows

__all__ = ["DocumentPieces", "ExcludedMembers", "ExcludedPieces", "ExcludedRows", "ExclusionMark", "check_excluded"]

ExclusionMark = tuple[int, str]
"""The entry of a state for excluded rows: their number, and a hash of them."""

_MOST = 100_000
_STREAM = "excluded rows"


class ExcludedRows:
    """Excluded rows of a source.

    Args:
        rows: rows of the source; negative ones count from the end.
        of: number of rows of the source.

    Raises:
        ConfigError: more than 100,000 rows (use a filter for these), all rows, or not integers.
        IndexError: a row is outside the source.

    Memory: 16 bytes per excluded row, in each process.

    >>> excluded = ExcludedRows([1, 3], 5)
    >>> rows = excluded.replace(np.arange(5), seed=7, turn=0)
    >>> rows[[0, 2, 4]].tolist(), set(rows[[1, 3]].tolist()) <= {0, 2, 4}
    ([0, 2, 4], True)
    """

    def __init__(self, rows: npt.ArrayLike, of: int) -> None:
        given = np.asarray(rows)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ConfigError(f"exclude= takes an array of row numbers, got {given.dtype} of shape {given.shape}")
        try:
            found = np.unique(normalise(given, of))
        except IndexError as error:
            raise IndexError(f"exclude=: {error}") from error
        if len(found) > _MOST:
            raise ConfigError(
                f"exclude= takes at most {_MOST:,} rows, got {len(found):,}: filter them with Subset instead"
            )
        self._set(found, of)

    def _set(self, rows: Indices, of: int) -> None:
        if len(rows) and len(rows) == of:
            raise ConfigError(f"exclude= leaves none of {of} rows: no row is left to replace them")
        self.rows, self.of = rows, of
        # The number of remaining rows before each excluded row.
        self._left_before: Indices = rows - np.arange(len(rows))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def mark(self) -> ExclusionMark | None:
        """Number and identity of the rows; None if there are none."""
        return (len(self.rows), xxhash.xxh3_64_hexdigest(self.rows.tobytes())) if len(self.rows) else None

    def among(self, kept: KeptRows) -> Self:
        """Return the excluded rows that a filter keeps, as ordinals of its kept rows."""
        made: Self = object.__new__(type(self))
        made._set(kept.places_of(self.rows), len(kept))
        return made

    def with_rows(self, rows: npt.ArrayLike) -> ExcludedRows:
        """Return these excluded rows plus ``rows``, which are checked as in `__init__`."""
        return ExcludedRows(np.concatenate([self.rows, ExcludedRows(rows, self.of).rows]), self.of)

    def holds(self, rows: Indices) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that are excluded."""
        if not len(self.rows):
            return np.zeros(rows.shape, np.bool_)
        found: npt.NDArray[np.bool_] = self.rows.take(self.rows.searchsorted(rows), mode="clip") == rows
        return found

    def count(self, begin: Indices, end: Indices) -> Indices:
        """Return the number of remaining rows in each range."""
        return end - begin - (self.rows.searchsorted(end) - self.rows.searchsorted(begin))

    def draw(self, words: npt.NDArray[np.uint64], begin: Any, end: Any) -> Indices:
        """Return a remaining row of a range for each 64-bit word. Every range needs at least one."""
        begin, end = np.asarray(begin, dtype=np.int64), np.asarray(end, dtype=np.int64)
        before = begin - self.rows.searchsorted(begin)
        numbers = before + (words % self.count(begin, end).astype(np.uint64)).astype(np.int64)
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
        rows, key = rows.copy(), derive_key(seed, turn, _STREAM)
        rows[bad] = self.draw(mix_array(key, rows[bad].view(np.uint64)), 0, self.of)
        return rows

    def places_of(self, row: int, seed: int, turn: int) -> list[int]:
        """Return the rows at whose positions a row is read: itself, and the excluded rows that it replaces.

        If the row is excluded itself, the list has only the rows that it replaces, usually none.
        """
        instead: list[int] = self.rows[self.replace(self.rows, seed, turn) == row].tolist()
        return instead if self.holds(np.array([row]))[0] else [row, *instead]


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
    had = state["excluded"]
    # Older states have only the hash.
    count, digest = (None, had) if isinstance(had, str) else _read_mark(had)
    if here is not None and (here[1] == digest or (count is not None and here[0] > count)):
        return
    raise StateError(
        f"this state comes from a run with other excluded rows: {'some' if count is None else f'{count:,}'} with the "
        f"hash {digest}, but exclude= of this {of} has {here[0] if here else 0:,}. Pass the same rows, or the same and "
        "more: a run cannot include excluded rows again"
    )


def _read_mark(entry: Any) -> ExclusionMark:
    match entry:
        case [int(count), str(digest)]:
            return count, digest
    raise StateError(f"this state is damaged: {entry!r} is not the number and the hash of excluded rows")


class ExcludedMembers:
    """Excluded members of classes. Each is replaced by another member of its class.

    If a whole class is excluded, the replacement comes from the next class with members left, or from the last such
    class.

    Args:
        excluded: members, by their place in the class-sorted sequence.
        starts: the first place of each class, then the number of places: int64 of shape (classes + 1,).
        mark: their entry in a state.

    Raises:
        ConfigError: no member of any class is left.
    """

    def __init__(self, excluded: ExcludedRows, starts: Indices, mark: ExclusionMark | None) -> None:
        self.excluded, self.mark, self._starts = excluded, mark, starts
        self._left = np.flatnonzero(excluded.count(starts[:-1], starts[1:]) > 0)
        if not len(self._left):
            raise ConfigError("exclude= leaves no sample of any batch: no sample is left to replace them")

    def replace(self, places: Indices, seed: int, epoch: int) -> Indices:
        """Return the places with the excluded ones replaced, see `ExcludedRows.replace`."""
        bad = np.flatnonzero(self.excluded.holds(places))
        if not len(bad):
            return places
        places, key = places.copy(), derive_key(seed, epoch, _STREAM)
        classes = self._starts.searchsorted(places[bad], "right") - 1
        fits = self._left[np.minimum(self._left.searchsorted(classes), len(self._left) - 1)]
        words = mix_array(key, places[bad].view(np.uint64))
        places[bad] = self.excluded.draw(words, self._starts[fits], self._starts[fits + 1])
        return places

    def places_of(self, place: int, seed: int, epoch: int) -> list[int]:
        """Return the places at which a member is read, see `ExcludedRows.places_of`."""
        rows = self.excluded.rows
        rows = rows[rows >= self._starts[0]]
        instead: list[int] = rows[self.replace(rows, seed, epoch) == place].tolist()
        return instead if self.excluded.holds(np.array([place]))[0] else [place, *instead]


class DocumentPieces(NamedTuple):
    """Parts of documents.

    Attributes:
        places: of the documents, in the class-sorted sequence.
        begins: the first token of each part.
        lengths: number of tokens of each part.
    """

    places: Indices
    begins: Indices
    lengths: Indices


class ExcludedPieces:
    """Excluded documents. Each is replaced by the same number of tokens from other documents.

    A piece of an excluded document is replaced by a document of the same length. If all of these are excluded too, it
    is replaced by the start of a document of the next length. If no longer one is left, it is replaced by a shorter
    document and padding.

    Args:
        excluded: documents, by their place in the class-sorted sequence.
        starts: the first place of each class, then the number of places: int64 of shape (classes + 1,).
        lengths: of the documents of each class: int64 of shape (classes,).
        capacity: tokens in a pack; longer documents have several pieces.

    Raises:
        ConfigError: no document with a token is left.
    """

    def __init__(self, excluded: ExcludedRows, starts: Indices, lengths: Indices, capacity: int) -> None:
        self.excluded, self._capacity = excluded, capacity
        left = np.flatnonzero((excluded.count(starts[:-1], starts[1:]) > 0) & (lengths > 0))
        left = left[np.argsort(lengths[left], kind="stable")]
        if not len(left):
            raise ConfigError("exclude= leaves no document with a token: no document is left to replace them")
        self._lengths, self._begins, self._ends = lengths[left], starts[left], starts[left + 1]
        self._excluded_lengths = lengths[starts.searchsorted(excluded.rows, "right") - 1]

    def replace(self, pieces: DocumentPieces, seed: int, turn: int) -> DocumentPieces:
        """Return pieces with those of excluded documents replaced, see `ExcludedRows.replace`."""
        bad = np.flatnonzero(self.excluded.holds(pieces.places))
        if not len(bad):
            return pieces
        places, begins, lengths = (values.copy() for values in pieces)
        key = derive_key(seed, turn, _STREAM)
        # A long document has several pieces, each with its own replacement.
        words = mix_array(key, mix_array(key, places[bad].view(np.uint64)) ^ begins[bad].view(np.uint64))
        classes = np.minimum(self._lengths.searchsorted(lengths[bad]), len(self._lengths) - 1)
        places[bad] = self.excluded.draw(words, self._begins[classes], self._ends[classes])
        begins[bad] = 0
        lengths[bad] = np.minimum(lengths[bad], self._lengths[classes])
        return DocumentPieces(places, begins, lengths)

    def instead(self, place: int, seed: int, turn: int) -> list[tuple[int, int]]:
        """Return the pieces that a document replaces, each as the place of its document and its number in it."""
        counts = -(-self._excluded_lengths // self._capacity)
        numbers = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = numbers * self._capacity
        lengths = np.minimum(np.repeat(self._excluded_lengths, counts) - begins, self._capacity)
        pieces = DocumentPieces(np.repeat(self.excluded.rows, counts), begins, lengths)
        here = np.flatnonzero(self.replace(pieces, seed, turn).places == place)
        return list(zip(pieces.places[here].tolist(), numbers[here].tolist(), strict=True))
