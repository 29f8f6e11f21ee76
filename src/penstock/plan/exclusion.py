"""`ExcludedRows`: rows that nobody gets any more, and what stands in their places.

In the place of an excluded row stands another one, drawn by arithmetic from (seed, epoch, excluded row), so that
any position is computed alone, and back. All other positions keep theirs: excluding rows in the middle of a run changes
nothing else in it. `ExcludedMembers` and `ExcludedPieces` do so where another row has to fit: a sample in a batch of
one class, a document in a pack.
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

__all__ = ["ExcludedMembers", "ExcludedPieces", "ExcludedRows", "Mark", "PiecesInstead", "check_excluded"]

Mark = tuple[int, str]
"""What a state keeps of excluded rows: how many they are, and a hash of them."""

_MOST = 100_000
_STREAM = "excluded rows"


class ExcludedRows:
    """Some rows of a source.

    Args:
        rows: of the source; negative ones count from the end.
        of: how many rows the source has.

    Raises:
        ConfigError: more than 100,000, which are better filtered, all of them, or no integers.
        IndexError: a row outside the source.

    Memory: 16 bytes a row, in each process.

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
            raise ConfigError(f"exclude= takes {_MOST:,} rows at most, got {len(found):,}: filter them by Subset")
        self._set(found, of)

    def _set(self, rows: Indices, of: int) -> None:
        if len(rows) and len(rows) == of:
            raise ConfigError(f"exclude= leaves none of {of} rows: there is nothing to put in their places")
        self.rows, self.of = rows, of
        # How many rows that are left stand before each of these.
        self._left_before: Indices = rows - np.arange(len(rows))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def mark(self) -> Mark | None:
        """Number and identity of the rows; None if there are none."""
        return (len(self.rows), xxhash.xxh3_64_hexdigest(self.rows.tobytes())) if len(self.rows) else None

    def among(self, kept: KeptRows) -> Self:
        """Return the same rows as a filter counts them: those that it keeps."""
        made: Self = object.__new__(type(self))
        made._set(kept.places_of(self.rows), len(kept))
        return made

    def with_rows(self, rows: npt.ArrayLike) -> ExcludedRows:
        """Return these rows and others, which are checked as those of a new one are."""
        return ExcludedRows(np.concatenate([self.rows, ExcludedRows(rows, self.of).rows]), self.of)

    def holds(self, rows: Indices) -> npt.NDArray[np.bool_]:
        """Return which of these rows are excluded."""
        if not len(self.rows):
            return np.zeros(rows.shape, np.bool_)
        found: npt.NDArray[np.bool_] = self.rows.take(self.rows.searchsorted(rows), mode="clip") == rows
        return found

    def count(self, begin: Indices, end: Indices) -> Indices:
        """Return how many rows of ranges are left."""
        return end - begin - (self.rows.searchsorted(end) - self.rows.searchsorted(begin))

    def draw(self, words: npt.NDArray[np.uint64], begin: Any, end: Any) -> Indices:
        """Return a row for each word, out of those of its range that are left; one at least has to be."""
        begin, end = np.asarray(begin, dtype=np.int64), np.asarray(end, dtype=np.int64)
        before = begin - self.rows.searchsorted(begin)
        numbers = before + (words % self.count(begin, end).astype(np.uint64)).astype(np.int64)
        found: Indices = numbers + self._left_before.searchsorted(numbers, "right")
        return found

    def replace(self, rows: Indices, seed: int, turn: int) -> Indices:
        """Return the rows with others in place of those excluded.

        Args:
            rows: int64 of shape (n,).
            seed, turn: of the draws; a turn is how often somebody went through all rows before, such as the epoch.
        """
        bad = np.flatnonzero(self.holds(rows))
        if not len(bad):
            return rows
        rows, key = rows.copy(), derive_key(seed, turn, _STREAM)
        rows[bad] = self.draw(mix_array(key, rows[bad].view(np.uint64)), 0, self.of)
        return rows

    def places_of(self, row: int, seed: int, turn: int) -> list[int]:
        """Return in place of which rows this one stands: itself, and excluded ones. None if it is excluded."""
        instead: list[int] = self.rows[self.replace(self.rows, seed, turn) == row].tolist()
        return instead if self.holds(np.array([row]))[0] else [row, *instead]


def check_excluded(state: Mapping[str, Any], here: Mark | None, *, of: str) -> None:
    """Refuse a state of a run that left out other rows. More rows than it had are taken to be those and further ones.

    Args:
        state: that has no entry ``excluded`` if nothing was left out.
        here: of the rows that are excluded here.
        of: what the state is loaded into, for messages.
    """
    if "excluded" not in state:
        return
    had = state["excluded"]
    # States of before have the hash alone.
    count, digest = (None, had) if isinstance(had, str) else _read_mark(had)
    if here is not None and (here[1] == digest or (count is not None and here[0] > count)):
        return
    raise StateError(
        f"this state is of a run that left out other rows: {'some' if count is None else f'{count:,}'} with the hash "
        f"{digest}, and exclude= of this {of} has {here[0] if here else 0:,}. Give it the same rows, or those and "
        "further ones: what a run left out stays out"
    )


def _read_mark(entry: Any) -> Mark:
    match entry:
        case [int(count), str(digest)]:
            return count, digest
    raise StateError(f"this state is damaged: {entry!r} is no number of excluded rows and their hash")


class ExcludedMembers:
    """Members of classes that nobody gets any more, and others of the same class in their places.

    If all of a class are excluded, it is one of the next class that has some left. Behind the last of these, it is one
    of that.

    Args:
        excluded: members by their place in a row that is sorted by class.
        starts: where each class begins in it, and the end: int64 of shape (classes + 1,).
        mark: what a state keeps of them.

    Raises:
        ConfigError: no member of any class is left.
    """

    def __init__(self, excluded: ExcludedRows, starts: Indices, mark: Mark | None) -> None:
        self.excluded, self.mark, self._starts = excluded, mark, starts
        self._left = np.flatnonzero(excluded.count(starts[:-1], starts[1:]) > 0)
        if not len(self._left):
            raise ConfigError("exclude= leaves no sample of any batch: there is nothing to put in their places")

    def replace(self, places: Indices, seed: int, epoch: int) -> Indices:
        """Return the places with others for those excluded, see `ExcludedRows.replace`."""
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
        """Return in whose places a member stands, see `ExcludedRows.places_of`."""
        rows = self.excluded.rows
        rows = rows[rows >= self._starts[0]]
        instead: list[int] = rows[self.replace(rows, seed, epoch) == place].tolist()
        return instead if self.excluded.holds(np.array([place]))[0] else [place, *instead]


class PiecesInstead(NamedTuple):
    """Parts of documents.

    Attributes:
        places: of the documents, by class.
        begins: the first token of each.
        lengths: tokens of each.
    """

    places: Indices
    begins: Indices
    lengths: Indices


class ExcludedPieces:
    """Documents that nobody gets any more, and as many tokens of others in their places.

    A piece of an excluded document becomes one of a document that is as long. If all those are excluded, too, it is the
    beginning of one of the next length, and if there is none, a shorter document, so that padding follows.

    Args:
        excluded: documents by their place in a row that is sorted by class.
        starts: where each class begins in it, and the end: int64 of shape (classes + 1,).
        lengths: of the documents of each class: int64 of shape (classes,).
        capacity: tokens of a pack: longer documents have several pieces.

    Raises:
        ConfigError: no document with a token is left.
    """

    def __init__(self, excluded: ExcludedRows, starts: Indices, lengths: Indices, capacity: int) -> None:
        self.excluded, self._capacity = excluded, capacity
        left = np.flatnonzero((excluded.count(starts[:-1], starts[1:]) > 0) & (lengths > 0))
        left = left[np.argsort(lengths[left], kind="stable")]
        if not len(left):
            raise ConfigError("exclude= leaves no document with a token: there is nothing to put in their places")
        self._lengths, self._begins, self._ends = lengths[left], starts[left], starts[left + 1]
        self._excluded_lengths = lengths[starts.searchsorted(excluded.rows, "right") - 1]

    def replace(self, pieces: PiecesInstead, seed: int, turn: int) -> PiecesInstead:
        """Return pieces of documents with others in place of those excluded, see `ExcludedRows.replace`."""
        bad = np.flatnonzero(self.excluded.holds(pieces.places))
        if not len(bad):
            return pieces
        places, begins, lengths = (values.copy() for values in pieces)
        key = derive_key(seed, turn, _STREAM)
        # A long document has several pieces, each of which becomes another one's.
        words = mix_array(key, mix_array(key, places[bad].view(np.uint64)) ^ begins[bad].view(np.uint64))
        classes = np.minimum(self._lengths.searchsorted(lengths[bad]), len(self._lengths) - 1)
        places[bad] = self.excluded.draw(words, self._begins[classes], self._ends[classes])
        begins[bad] = 0
        lengths[bad] = np.minimum(lengths[bad], self._lengths[classes])
        return PiecesInstead(places, begins, lengths)

    def instead(self, place: int, seed: int, turn: int) -> list[tuple[int, int]]:
        """Return in place of which pieces a document stands: the place of each one's document, and its number there."""
        counts = -(-self._excluded_lengths // self._capacity)
        numbers = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = numbers * self._capacity
        lengths = np.minimum(np.repeat(self._excluded_lengths, counts) - begins, self._capacity)
        pieces = PiecesInstead(np.repeat(self.excluded.rows, counts), begins, lengths)
        here = np.flatnonzero(self.replace(pieces, seed, turn).places == place)
        return list(zip(pieces.places[here].tolist(), numbers[here].tolist(), strict=True))
