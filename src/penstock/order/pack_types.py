"""Pack types: combinations of document lengths that fill a pack, computed from a histogram of lengths only.

    histogram   length 1: 40 documents, length 2: 7, ...     ->     (7, 2, 1): 5 packs, (6, 4): 3 packs, ...

All documents of a length are placed together, longest first. So the work grows with the capacity, not with the number
of documents. Long documents go to the emptiest packs, so that each pack gets documents of many lengths. The rest goes
to the packs where it fits best, so that packs become full (worst-fit and best-fit decreasing: Coffman, Garey and
Johnson, "Approximation algorithms for bin packing", 1996).
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import OrderError
from penstock.order.permutation import Indices

__all__ = ["TypeTable", "pack_types"]

_BEST_FIT = (0.1, 0.3, 0.6, 1.0)
"""Fractions of all tokens to place by best fit. The first fraction whose number of packs is near the minimum is used.
"""
_HARDLY = 2e-4
"""Relative difference in the number of packs that counts as near."""


class TypeTable(NamedTuple):
    """Pack types: packs with the same document lengths.

    Attributes:
        packs: number of packs of each type: int64 of shape (types,).
        sizes: number of documents in a pack of each type: int64 of shape (types,).
        lengths: the lengths of one type after the other, descending in each: int64 of shape (sizes.sum(),).
    """

    packs: Indices
    sizes: Indices
    lengths: Indices


def pack_types(histogram: npt.ArrayLike, capacity: int, *, max_documents: int | None = None) -> TypeTable:
    """Return types of packs that hold every document of a histogram.

    Args:
        histogram: number of documents of each length; int64 of shape (capacity + 1,) at most. The entry of length 0 is
            ignored.
        capacity: tokens in a pack.
        max_documents: the largest number of documents in a pack; None for no limit.

    Raises:
        OrderError: a document is longer than a pack, a count is negative, or the capacity or limit is below 1.

    Cost: 0.2 to 1 s for a capacity of 8,192 and any number of documents. Returns about one type per length.

    >>> [part.tolist() for part in pack_types([0, 3, 0, 1, 1], 4)]  # (4,), (3, 1) and (1, 1)
    [[1, 1, 1], [1, 2, 2], [4, 3, 1, 1, 1]]
    """
    counts = np.asarray(histogram, dtype=np.int64)
    if capacity < 1 or (max_documents is not None and max_documents < 1):
        raise OrderError(f"capacity and max_documents must be positive, got {capacity} and {max_documents}")
    if counts.ndim != 1 or (counts < 0).any() or counts[capacity + 1 :].any():
        raise OrderError(f"a histogram needs counts of 0 or more, for lengths up to the capacity of {capacity}")
    most = capacity if max_documents is None else max_documents
    tokens, documents = int((counts * np.arange(len(counts))).sum()), int(counts[1:].sum())
    least = max(-(-tokens // capacity), -(-documents // most))
    found = []
    for part in _BEST_FIT:
        found.append(_packed(counts, capacity, most, part))
        # No packing needs fewer packs than `least`, so other fractions need not be tried.
        if sum(found[-1].values()) <= least * (1 + _HARDLY):
            break
    packs = [sum(types.values()) for types in found]
    chosen = next(types for types, number in zip(found, packs, strict=True) if number <= min(packs) * (1 + _HARDLY))
    kinds = sorted(chosen, reverse=True)
    return TypeTable(
        np.array([chosen[lengths] for lengths in kinds], np.int64),
        np.array([len(lengths) for lengths in kinds], np.int64),
        np.array([length for lengths in kinds for length in lengths], np.int64),
    )


def _packed(counts: Indices, capacity: int, most: int, part: float) -> dict[tuple[int, ...], int]:
    """Return the number of packs of each combination of lengths; the last ``part`` of all tokens goes by best fit."""
    tokens = left = int((counts * np.arange(len(counts))).sum())
    spaces = _Spaces(most)
    spaces.add(capacity, -(-tokens // capacity), ())
    for length in np.flatnonzero(counts)[::-1].tolist():
        number = int(counts[length]) if length else 0
        while number:
            taken = spaces.take(length, number, tightest=left <= part * tokens)
            if taken is None:
                spaces.add(capacity, max(-(-number * length // capacity), -(-number // most)), ())
                continue
            space, packs, lengths = taken
            spaces.add(space - length, packs, (*lengths, length))
            number -= packs
            left -= packs * length
    return spaces.packs()


class _Spaces:
    """Packs, indexed by their free space. A pack without space, or with the largest number of documents, is closed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        self._sizes: list[int] = []
        self._closed: dict[tuple[int, ...], int] = {}

    def add(self, space: int, packs: int, lengths: tuple[int, ...]) -> None:
        """Add packs with these lengths and this free space."""
        if not space or len(lengths) >= self._most:
            self._closed[lengths] = self._closed.get(lengths, 0) + packs
            return
        if space not in self._open:
            bisect.insort(self._sizes, space)
            self._open[space] = []
        self._open[space].append((packs, lengths))

    def take(self, length: int, number: int, *, tightest: bool) -> tuple[int, int, tuple[int, ...]] | None:
        """Remove at most ``number`` packs with space for a length; return their space, their number and their lengths.

        Return None if no pack has space.
        """
        if not self._sizes or self._sizes[-1] < length:
            return None
        at = bisect.bisect_left(self._sizes, length) if tightest else len(self._sizes) - 1
        space = self._sizes[at]
        packs, lengths = self._open[space].pop()
        if packs > number:
            self._open[space].append((packs - number, lengths))
        elif not self._open[space]:
            del self._open[space], self._sizes[at]
        return space, min(packs, number), lengths

    def packs(self) -> dict[tuple[int, ...], int]:
        """Return the number of packs of each combination of lengths."""
        found = dict(self._closed)
        for group in self._open.values():
            for packs, lengths in group:
                if lengths:
                    found[lengths] = found.get(lengths, 0) + packs
        return found
