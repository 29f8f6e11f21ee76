"""Caches of objects, simulated object by object: the one that knows the order, and one that drops the least recent.

`KnownOrder` does what `penstock.storage` does: objects are fetched in the order of their first use, a part of the bound
ahead, and what is needed last makes room, but nothing that is needed sooner than what comes.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque

import numpy as np
import numpy.typing as npt

from penstock.storage.futures import NEVER
from penstock.storage.prefetch import ahead_bytes

__all__ = ["KnownOrder", "LeastRecentlyUsed"]

Ints = npt.NDArray[np.int64]


class KnownOrder:
    """A cache whose job knows when it needs each object, in this epoch and the next one.

    Args:
        sizes: of all objects, in bytes.
        limit: the bound.
    """

    def __init__(self, sizes: Ints, limit: int) -> None:
        self._sizes, self._limit = sizes.tolist(), limit
        self.has = np.zeros(len(sizes), np.bool_)
        """Which objects are in the cache."""

    def keep(self, objects: Ints) -> None:
        """Hold these, and nothing else."""
        self.has[:] = False
        self.has[objects] = True

    def run(self, first: Ints, last: Ints, again: Ints) -> Ints:
        """Go through an epoch; return the objects that are fetched, in this order, each as often as it is.

        Args:
            first, last: the positions that need each object first and last; `NEVER` and -1 where none does.
            again: the one that needs it in the next epoch, counted on; `NEVER` where none does.

        Cost: O(log objects) for each.
        """
        epoch = _Epoch(self._sizes, self._limit, self.has, first.tolist(), last.tolist(), again.tolist())
        fetched = [number for number in np.argsort(first, kind="stable").tolist() if epoch.use(number)]
        return np.array(fetched, np.int64)


class _Epoch:
    """An epoch under way: the position that the consumer has reached, and what may leave the cache."""

    def __init__(
        self,
        sizes: list[int],
        limit: int,
        has: npt.NDArray[np.bool_],
        first: list[int],
        last: list[int],
        again: list[int],
    ) -> None:
        self._sizes, self._limit, self._has = sizes, limit, has
        self._first, self._last, self._again = first, last, again
        self._bound = ahead_bytes(limit)
        self._position = -1
        self._ahead: deque[tuple[int, int]] = deque()  # first position and bytes of what is fetched and not needed yet
        self._ahead_bytes = 0
        there = np.flatnonzero(has).tolist()
        self._used = sum(sizes[number] for number in there)
        # Those that the epoch needs no more, the last one to be needed in front; those it needs; those in use.
        self._done = [(-again[number], number) for number in there if last[number] < 0]
        self._needed = [(-first[number], number) for number in there if last[number] >= 0]
        self._until = [(last[number], number) for number in there if last[number] >= 0]
        for heap in (self._done, self._needed, self._until):
            heapq.heapify(heap)

    def use(self, number: int) -> bool:
        """Bring an object that is needed next; return whether it was fetched."""
        if self._last[number] < 0:
            return False
        size = self._sizes[number]
        while self._ahead and self._ahead_bytes + size > self._bound:
            self._go_to(self._ahead[0][0])
        if self._has[number]:
            return False
        while not self._make_room(number, size):
            if self._position >= self._first[number]:
                self._force_room(size)
                break
            # Once a copy has been used, there is room; at the latest its consumer takes it.
            until = self._until[0][0] + 1 if self._until else NEVER
            self._go_to(min(self._first[number], max(until, self._position + 1)))
        self._has[number], self._used = True, self._used + size
        heapq.heappush(self._until, (self._last[number], number))
        heapq.heappush(self._needed, (-self._first[number], number))
        self._ahead.append((self._first[number], size))
        self._ahead_bytes += size
        return True

    def _go_to(self, position: int) -> None:
        self._position = position
        while self._ahead and self._ahead[0][0] <= position:
            self._ahead_bytes -= self._ahead.popleft()[1]
        while self._until and self._until[0][0] < position:
            number = heapq.heappop(self._until)[1]
            if self._has[number]:
                heapq.heappush(self._done, (-self._again[number], number))

    def _make_room(self, number: int, size: int) -> bool:
        """Remove what is needed later than an object; return whether that is enough."""
        removed: list[tuple[int, list[tuple[int, int]], tuple[int, int]]] = []
        while self._used + size > self._limit:
            found = self._latest(self._first[number])
            if found is None:
                for other, heap, entry in removed:
                    self._has[other], self._used = True, self._used + self._sizes[other]
                    heapq.heappush(heap, entry)
                return False
            other, heap, entry = found
            self._has[other], self._used = False, self._used - self._sizes[other]
            removed.append((other, heap, entry))
        return True

    def _latest(self, sooner: int) -> tuple[int, list[tuple[int, int]], tuple[int, int]] | None:
        """Take the copy that is needed last off its heap, if that is later than a position."""
        for heap in (self._done, self._needed):
            while heap and not self._has[heap[0][1]]:
                heapq.heappop(heap)
            if heap and -heap[0][0] > max(sooner, self._position):
                entry = heapq.heappop(heap)
                return entry[1], heap, entry
        return None

    def _force_room(self, size: int) -> None:
        """Remove anything, those in use, too: they stay readable for who has them open."""
        for number in np.flatnonzero(self._has).tolist():
            if self._used + size <= self._limit:
                return
            self._has[number], self._used = False, self._used - self._sizes[number]


class LeastRecentlyUsed:
    """A cache that drops what was used longest ago.

    Args:
        sizes: of all objects, in bytes.
        limit: the bound.
    """

    def __init__(self, sizes: Ints, limit: int) -> None:
        self._sizes, self._limit = sizes.tolist(), limit
        self._held: OrderedDict[int, int] = OrderedDict()
        self._used = 0

    def run(self, objects: Ints) -> Ints:
        """Use objects in this order; return those that are fetched."""
        fetched = []
        for number in objects.tolist():
            if number in self._held:
                self._held.move_to_end(number)
                continue
            fetched.append(number)
            self._held[number] = self._sizes[number]
            self._used += self._sizes[number]
            while self._used > self._limit:
                self._used -= self._held.popitem(last=False)[1]
        return np.array(fetched, np.int64)
