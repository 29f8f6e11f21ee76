"""How large batches are, by the last few of them: one that is unlike the others counts for a while, not for good."""

from __future__ import annotations

from collections import deque

__all__ = ["RecentSizes"]

_LAST = 8
"""Batches after which the largest one is forgotten."""

_USUAL = 16
"""Batches of which a quarter may be larger than usual."""


class RecentSizes:
    """Sizes of the last batches.

    Attributes:
        largest: bytes of the largest of the last eight batches, 0 until there was one. What bounds memory goes by it.
        usual: bytes that three quarters of the last sixteen batches do not exceed; of two or three, what one of them
            does not. What is kept for batches to come goes by it.

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
        """A batch was so large. Returns whether `usual` was looked at again: each time at first, then every fourth."""
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
