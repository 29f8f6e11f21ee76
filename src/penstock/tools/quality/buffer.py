"""The order of a shuffle buffer, with random access to any position.

The buffer initially holds the first ``size`` rows. Each step returns the row in a random slot, and refills the slot
with the next row of the file. At the end of the file, the remaining rows are returned in random order. The slot drawn
at step t is a hash of t. So step t returns the row that entered the slot when it was last drawn; a search backwards
over a few times ``size`` steps finds it. The position of a row is found by the same search forwards.

This order is only for comparison: streaming loaders shuffle this way, but Penstock's loaders do not.
"""

from __future__ import annotations

import numpy as np

from penstock.errors import OrderError
from penstock.hashing import mix, mix_array
from penstock.order.permutation import Bijection, Indices, Permutation

__all__ = ["ShuffleBuffer"]

_LARGEST = 1 << 30
_CHUNK = 1 << 16  # fewest steps of one search


class ShuffleBuffer(Bijection):
    """The order in which a shuffle buffer returns the rows of a file.

    Args:
        n: number of rows in the file.
        size: number of rows in the buffer, 1 to 2**30.
        key: 64-bit key, see `penstock.order.derive_key`.

    Raises:
        OrderError: a negative n, or a size outside its range.

    ``order[position]`` is a row, ``order.inverse[row]`` its position; both take an int or an array of ints.
    Cost: neighbouring positions share a search over about ``size * ln(count)`` steps at 100 M steps/s, with the memory
    of a few times ``size`` steps.

    >>> order = ShuffleBuffer(1000, size=10, key=0)
    >>> sorted(order[np.arange(1000)].tolist()) == list(range(1000))
    True
    >>> int(order[0]) < 10  # the buffer holds only the first rows
    True
    """

    streams = True
    """Whether rows are read in the order of the file."""

    def __init__(self, n: int, size: int, key: int) -> None:
        if n < 0:
            raise OrderError(f"an order needs n >= 0, got {n}")
        if not 1 <= size <= _LARGEST:
            raise OrderError(f"a shuffle buffer must hold 1 to 2**30 rows, got {size}")
        self.n = n
        self.size = min(size, max(n, 1))
        self.key = key
        self._steps = max(0, n - self.size)
        """Number of steps that refill the buffer; later steps only empty it."""
        self._last = Permutation(n - self._steps, mix(key, 1))
        self._draws = mix(key, 0)

    def __repr__(self) -> str:
        return f"ShuffleBuffer(n={self.n}, size={self.size})"

    def _rows(self, positions: Indices) -> Indices:
        late = positions >= self._steps
        places = self._place(positions)
        places[late] = self._last[positions[late] - self._steps]
        before = self._drawn(places, np.minimum(positions, self._steps), -1)
        return np.where(before < 0, places, before + self.size)

    def _find(self, rows: Indices) -> Indices:
        first = rows < self.size
        entered = np.where(first, -1, rows - self.size)
        places = np.where(first, rows, self._place(np.maximum(entered, 0)))
        steps = self._drawn(places, entered, 1)
        late = steps < 0
        steps[late] = self._steps + self._last.inverse[places[late]]
        return steps

    def _place(self, steps: Indices) -> Indices:
        """Return the slot of the buffer drawn at each step."""
        high = mix_array(self._draws, steps.astype(np.uint64)) >> np.uint64(32)
        return ((high * np.uint64(self.size)) >> np.uint64(32)).astype(np.int64)

    def _drawn(self, places: Indices, times: Indices, way: int) -> Indices:
        """Return the last step before each time (``way`` -1), or the first after it (1), that draws the slot, or -1."""
        found = np.full(len(places), -1, np.int64)
        order = np.argsort(times, kind="stable")
        chunk = max(_CHUNK, 2 * self.size)
        begin = 0
        for end in [*(np.flatnonzero(np.diff(times[order]) > chunk) + 1).tolist(), len(order)]:
            part = order[begin:end]  # steps close to one another share a search
            if len(part):
                found[part] = self._search(places[part], times[part], way, chunk)
            begin = end
        return found

    def _search(self, places: Indices, times: Indices, way: int, chunk: int) -> Indices:
        found = np.full(len(places), -1, np.int64)
        left = np.arange(len(places))
        at = int(times.max()) if way < 0 else int(times.min()) + 1
        while left.size:
            low, high = (max(0, at - chunk), at) if way < 0 else (at, min(at + chunk, self._steps))
            if low >= high:
                break
            wanted = np.zeros(self.size, np.bool_)
            wanted[places[left]] = True
            drawn = self._place(np.arange(low, high))
            offsets = np.flatnonzero(wanted[drawn])
            width = high - low + 1  # (place, step) as one number, in order
            keys = np.sort(drawn[offsets] * width + offsets)
            inside = np.clip(times[left] - low, -1, width - 1)
            if way < 0:
                spot = np.searchsorted(keys, places[left] * width + np.maximum(inside, 0)) - 1
            else:
                spot = np.searchsorted(keys, places[left] * width + inside, side="right")
            there = (spot >= 0) & (spot < len(keys))
            hit = keys[np.clip(spot, 0, max(len(keys) - 1, 0))] if len(keys) else np.zeros(len(left), np.int64)
            there &= hit // width == places[left]
            found[left[there]] = low + hit[there] % width
            left = left[~there]
            at = low if way < 0 else high
        return found
