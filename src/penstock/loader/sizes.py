"""Sizes of recent batches. An unusual batch counts only for a while."""

from __future__ import annotations

from collections import deque

__all__ = ["AHEAD", "LIGHT", "RecentSizes"]

LIGHT = 1 << 18
"""Maximum bytes of a small batch."""

AHEAD = 1 << 25
"""Maximum total bytes of more batches than usual, if the user set no limit."""

_LAST = 8
"""Number of batches after which the largest one is forgotten."""

_USUAL = 16
"""Number of batches of which a quarter may be larger than usual."""


class RecentSizes:
    """Sizes of the last batches.

    Attributes:
        largest: bytes of the largest of the last eight batches, 0 at first. Memory limits use it.
        usual: bytes that three quarters of the last sixteen batches do not exceed (with two or three batches: all but
            the largest). Reserves for future batches use it.

    >>> sizes = RecentSizes()
    >>> for nbytes in (4, 240, 4, 4):
    ...     _ = sizes.add(nbytes)
    >>> sizes.largest, sizes.usual
    (240, 4)
    """

    def __init__(self) -> None:
        self.largest = 0
        self.usual = 0
        self._last: deque[int] = deque(maxlen=_LAST)
        self._sizes: deque[int] = deque(maxlen=_USUAL)
        self._count = 0

    def add(self, nbytes: int) -> bool:
        """Record a batch's size. Return whether `usual` was updated: at first each time, later every fourth time."""
        last, forgotten = self._last, 0
        if len(last) == _LAST:
            forgotten = last[0]
        last.append(nbytes)
        if nbytes >= self.largest:
            self.largest = nbytes
        elif forgotten == self.largest:
            self.largest = max(last)
        self._sizes.append(nbytes)
        self._count += 1
        if self._count > _USUAL and self._count % 4:
            return False
        ranked = sorted(self._sizes, reverse=True)
        self.usual = ranked[max(len(ranked) // 4, min(1, len(ranked) - 1))]
        return True
