"""A keyed bijection on ``[0, n)``: random access to a shuffle that is never stored.

Up to `TABLE_LIMIT` elements, the permutation is a cached table of a keyed Fisher-Yates shuffle. Above that it is a
Feistel network over the mixed radix ``a * b >= n``, with ``a = ceil(sqrt(n))`` and ``b = ceil(n / a)``
(`penstock.order.feistel`). Fewer than ``a`` of the ``a * b`` values are outside ``[0, n)``, about one in ``sqrt(n)``.
These are mapped again until they are inside (cycle walking).

Promises: a bijection for every n from 0 to 2**62; O(1) memory; the same order on every machine and with every version
of NumPy, frozen by golden vectors in the tests under `ORDER_VERSION`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from penstock.errors import OrderError
from penstock.hashing import MASK64, mix, mix_array
from penstock.order.feistel import ROUNDS, Feistel, Indices

__all__ = ["MAX_N", "ORDER_VERSION", "TABLE_LIMIT", "Bijection", "Indices", "Permutation", "normalise"]

ORDER_VERSION = 1
"""Version of the frozen order. A state with another version raises an error."""

MAX_N = 1 << 62
TABLE_LIMIT = 4096
_TABLES = 1024
"""Tables cached at most, of 16 KiB each: enough for a mixture of as many small sources."""
_BLOCK = 32768
"""Indices computed at once: enough to hide NumPy's call overhead, few enough for the L2 cache."""
_MASK32 = 0xFFFFFFFF

_ROUND_TABLES_LIMIT = 1 << 26
"""The tables of a larger network would not stay in the CPU's cache."""
# Number of look-ups after which a network builds its tables, so that they pay off: the larger of a minimum and a number
# per value of a half.
_WARM_UP = 4096
_WARM_UP_PER_HALF = 8


def normalise(indices: Any, n: int) -> Indices:
    """Return indices as a new int64 array; negative ones count from the end.

    Raises:
        IndexError: an index is outside ``[-n, n)``.
        TypeError: the indices are not integers.
    """
    given = np.asarray(indices)
    if given.size == 0:
        return np.empty(given.shape, dtype=np.int64)
    if given.dtype.kind not in "iu":
        first = given.flat[0]
        if isinstance(first, slice):
            raise TypeError(
                f"indices must be integers, got {first}: an index gives one item; for several at once, __getitems__ "
                "of a dataset takes a list of indices, or a range"
            )
        raise TypeError(f"indices must be integers, got an array of {given.dtype}")
    # Computed before the cast, which makes large uint64 values negative.
    low, high = int(given.min()), int(given.max())
    array = given.astype(np.int64)
    if low < -n or high >= n:
        raise IndexError(f"index {low if low < -n else high} is out of range for {n} elements")
    if low < 0:
        array[array < 0] += n
    return array


class Bijection:
    """A computed bijection of ``range(n)``: the base class of orders, which have `_rows` and `_find`, or `_look_up`.

    ``order[position]`` takes an int (negative ones count from the end; IndexError outside the range) or an integer
    array of any shape. ``order.inverse[row]`` returns the position of a row.
    """

    n: int
    """Number of elements."""

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: npt.NDArray[Any] | Sequence[int]) -> Indices: ...
    def __getitem__(self, index: Any) -> Any:
        return self._look_up(index, False)

    @cached_property
    def inverse(self) -> Inverse:
        """The inverse bijection, with the same indexing."""
        return Inverse(self)

    def _look_up(self, index: Any, inverse: bool) -> Any:
        indices = normalise(index, self.n)
        found = (self._find if inverse else self._rows)(indices.reshape(-1)).reshape(indices.shape)
        return found if found.ndim else int(found)

    def _rows(self, positions: Indices) -> Indices:
        """Return the rows at valid positions: int64 of shape (k,). It may change the argument."""
        raise NotImplementedError

    def _find(self, rows: Indices) -> Indices:
        """Return the positions of valid rows: int64 of shape (k,). It may change the argument."""
        raise NotImplementedError


class Inverse:
    """The inverse of an order: ``inverse[order[i]] == i``."""

    def __init__(self, order: Bijection) -> None:
        self._order = order

    def __len__(self) -> int:
        return self._order.n

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: npt.NDArray[Any] | Sequence[int]) -> Indices: ...
    def __getitem__(self, index: Any) -> Any:
        return self._order._look_up(index, True)


class Permutation(Bijection):
    """A random permutation of ``range(n)`` chosen by a 64-bit key.

    Args:
        n: number of elements, 0 to 2**62.
        key: any integer, taken modulo 2**64; see `penstock.order.derive_key`.

    Raises:
        OrderError: n is outside its range.

    Cost: 8 rounds of a 32-bit hash per index, vectorised. Memory: O(1). Tables of at most 2.2 MiB make it faster for
    n <= 2**26.

    >>> p = Permutation(10, key=7)
    >>> sorted(p[i] for i in range(10)) == list(range(10))
    True
    >>> int(p.inverse[p[3]])
    3
    """

    def __init__(self, n: int, key: int) -> None:
        if not 0 <= n <= MAX_N:
            raise OrderError(f"a permutation needs 0 <= n <= 2**62, got {n}")
        self.n = operator.index(n)
        self.key = operator.index(key) & MASK64
        if self.n > TABLE_LIMIT:
            a = math.isqrt(self.n - 1) + 1
            b = -(-self.n // a)
            self._network = Feistel(a, b, [mix(self.key, self.n, r) & _MASK32 for r in range(ROUNDS)])
            self._until_tables = max(_WARM_UP, _WARM_UP_PER_HALF * a)

    def __repr__(self) -> str:
        return f"Permutation(n={self.n}, key={self.key:#x})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Permutation, (self.n, self.key))

    def _look_up(self, index: Any, inverse: bool) -> Any:
        scalar = isinstance(index, SupportsIndex) and not isinstance(index, np.ndarray)
        if scalar:
            i = operator.index(index)
            if not -self.n <= i < self.n:
                raise IndexError(f"index {i} is out of range for {self.n} elements")
            i %= self.n
            if self.n <= TABLE_LIMIT:
                return int(_tables(self.n, self.key)[inverse][i])
            walk: Callable[[Any], Any] = self._network.decrypt if inverse else self._network.encrypt
            i = walk(i)
            while i >= self.n:
                i = walk(i)
            return i
        indices = normalise(index, self.n)
        if self.n <= TABLE_LIMIT:
            return _tables(self.n, self.key)[inverse][indices].astype(np.int64)
        walk = self._network.decrypt if inverse else self._network.encrypt
        if not inverse and self.n <= _ROUND_TABLES_LIMIT:
            self._until_tables -= indices.size
            if self._until_tables <= 0:
                walk = self._network.encrypt_by_table
        flat = indices.reshape(-1).view(np.uint64)
        for begin in range(0, flat.size, _BLOCK):
            flat[begin : begin + _BLOCK] = walk(flat[begin : begin + _BLOCK])
        outside = np.flatnonzero(flat >= self.n)
        while outside.size:
            flat[outside] = walk(flat[outside])
            outside = outside[flat[outside] >= self.n]
        return indices


@lru_cache(maxsize=_TABLES)
def _tables(n: int, key: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int16]]:
    """Return ``(permutation, inverse)`` of a Fisher-Yates shuffle with keyed draws."""
    draws = mix_array(mix(key, n), np.arange(n, dtype=np.uint64)).tolist()
    order = list(range(n))
    for i in range(n - 1, 0, -1):
        j = (draws[i] * (i + 1)) >> 64
        order[i], order[j] = order[j], order[i]
    forward = np.array(order, dtype=np.int16)
    inverse = np.empty_like(forward)
    inverse[forward] = np.arange(n, dtype=np.int16)
    forward.flags.writeable = inverse.flags.writeable = False
    return forward, inverse
