"""Simulated caches of objects: `KnownOrder` knows the order of the epoch, `LeastRecentlyUsed` does not.

`KnownOrder` works like `penstock.storage`. It fetches objects in the order of their first use, ahead by a part of the
limit. It evicts the object whose next use is furthest away, but never one needed sooner than the new object.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque

import numpy as np
import numpy.typing as npt

from penstock.storage.fetcher import ahead_bytes
from penstock.storage.planned_use import NEVER

__all__ = ["KnownOrder", "LeastRecentlyUsed"]

Ints = npt.NDArray[np.int64]


class KnownOrder:
    """A cache for a job that knows when it needs each object, in this epoch and the next.

    Args:
        sizes: sizes of all objects in bytes.
        limit: most bytes in the cache.
    """

    def __init__(self, sizes: Ints, limit: int) -> None:
        self._sizes, self._limit = sizes.tolist(), limit
        self.has = np.zeros(len(sizes), np.bool_)
        """Whether each object is in the cache."""

    def keep(self, objects: Ints) -> None:
        """Set the contents of the cache to these objects."""
        self.has[:] = False
        self.has[objects] = True

    def run(self, first: Ints, last: Ints, again: Ints) -> Ints:
        """Simulate an epoch; return the fetched objects in order, with repeats.

        Args:
            first, last: first and last position that needs each object; `NEVER` and -1 if none does.
            again: position of its first use in the next epoch, counted from the start of this one; `NEVER` if none.

        Cost: O(log objects) for each object.
        """
        epoch = _Epoch(self._sizes, self._limit, self.has, first.tolist(), last.tolist(), again.tolist())
        fetched = [number for number in np.argsort(first, kind="stable").tolist() if epoch.use(number)]
        return np.array(fetched, np.int64)


class _Epoch:
    """State of an epoch: the position of the consumer, and the objects that may be evicted."""

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
        self._ahead: deque[tuple[int, int]] = deque()  # first position and bytes of objects fetched ahead
        self._ahead_bytes = 0
        there = np.flatnonzero(has).tolist()
        self._used = sum(sizes[number] for number in there)
        # Heaps: objects that this epoch no longer needs, and those it still needs, both with the latest need first; and
        # objects by their last use.
        self._done = [(-again[number], number) for number in there if last[number] < 0]
        self._needed = [(-first[number], number) for number in there if last[number] >= 0]
        self._until = [(last[number], number) for number in there if last[number] >= 0]
        for heap in (self._done, self._needed, self._until):
            heapq.heapify(heap)

    def use(self, number: int) -> bool:
        """Make the next object available; return whether it was fetched."""
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
            # Wait until a copy has been used. At its own first use, the object is fetched in any case.
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
        """Evict objects that are needed later than this one; return whether there is room."""
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
        """Pop the copy that is needed last from its heap, if its need is later than a position."""
        for heap in (self._done, self._needed):
            while heap and not self._has[heap[0][1]]:
                heapq.heappop(heap)
            if heap and -heap[0][0] > max(sooner, self._position):
                entry = heapq.heappop(heap)
                return entry[1], heap, entry
        return None

    def _force_room(self, size: int) -> None:
        """Evict any objects, even those in use: processes that have them open can still read them."""
        for number in np.flatnonzero(self._has).tolist():
            if self._used + size <= self._limit:
                return
            self._has[number], self._used = False, self._used - self._sizes[number]


class LeastRecentlyUsed:
    """A cache that evicts the least recently used object.

    Args:
        sizes: sizes of all objects in bytes.
        limit: most bytes in the cache.
    """

    def __init__(self, sizes: Ints, limit: int) -> None:
        self._sizes, self._limit = sizes.tolist(), limit
        self._held: OrderedDict[int, int] = OrderedDict()
        self._used = 0

    def run(self, objects: Ints) -> Ints:
        """Use objects in this order; return the fetched ones."""
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
