"""A keyed bijection on ``[0, n)``: random access to a shuffle that is never stored.

Up to `TABLE_LIMIT` elements, the permutation is a cached table of a keyed Fisher-Yates shuffle. Above that it is a
Feistel network over the mixed radix ``a * b >= n``, with ``a = ceil(sqrt(n))`` and ``b = ceil(n / a)``: an index is
split into the halves ``(i // b, i % b)``, and in turn each half adds a keyed hash of the other, modulo its own size
(Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). Fewer than ``a`` of the ``a * b`` values are
outside ``[0, n)``, about one in ``sqrt(n)``. These are mapped again until they are inside (cycle walking).

In small domains a half has a few thousand values, so a table can hold the hash of every half. This takes half the time
for many indices and a fifth of the time for few.

Promises: a bijection for every n from 0 to 2**62; O(1) memory; the same order on every machine and with every version
of NumPy, frozen by golden vectors in the tests under `ORDER_VERSION`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from penstock.errors import OrderError
from penstock.hashing import MASK64, mix, mix_array

__all__ = ["MAX_N", "ORDER_VERSION", "ROUNDS", "TABLE_LIMIT", "Bijection", "Indices", "Permutation", "normalise"]

Indices = npt.NDArray[np.int64]

ORDER_VERSION = 1
"""Version of the frozen order. A state with another version raises an error."""

MAX_N = 1 << 62
TABLE_LIMIT = 4096
_TABLES = 1024
"""Tables cached at most, of 16 KiB each: enough for a mixture of as many small sources."""
_BLOCK = 32768
"""Indices computed at once: enough to hide NumPy's call overhead, few enough for the L2 cache."""

ROUNDS = 8
"""4 rounds leave structure between neighbours. 6 pass our tests, and 2 more are a margin."""
# The multipliers of MurmurHash3's 32-bit finaliser.
_C1 = 0x85EBCA6B
_C2 = 0xC2B2AE35
_MASK32 = 0xFFFFFFFF

_ROUND_TABLES_LIMIT = 1 << 26
"""The tables of a larger network would not stay in the CPU's cache."""
_WARM_UP = 8
"""Look-ups for each value of a half after which a network builds its tables, so that they pay off."""


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
    """A computed bijection of ``range(n)``: the base class of orders, which have `_rows` and `_find`.

    ``order[position]`` takes an int (negative ones count from the end; IndexError outside the range) or an integer
    array of any shape. ``order.inverse[row]`` returns the position of a row.
    """

    n: int
    """Number of elements."""

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, index: int, inverse: bool = ...) -> int: ...
    @overload
    def __getitem__(self, index: npt.NDArray[Any] | Sequence[int], inverse: bool = ...) -> Indices: ...
    def __getitem__(self, index: Any, inverse: bool = False) -> Any:
        indices = normalise(index, self.n)
        found = (self._find if inverse else self._rows)(indices.reshape(-1)).reshape(indices.shape)
        return found if found.ndim else int(found)

    @cached_property
    def inverse(self) -> Inverse:
        """The inverse bijection, with the same indexing."""
        return Inverse(self)

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
        return self._order.__getitem__(index, True)


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
            self._a = math.isqrt(self.n - 1) + 1
            self._b = -(-self.n // self._a)
            self._keys = [mix(self.key, self.n, r) & _MASK32 for r in range(ROUNDS)]
            self._until_tables = _WARM_UP * self._a

    def __repr__(self) -> str:
        return f"Permutation(n={self.n}, key={self.key:#x})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Permutation, (self.n, self.key))

    def __getitem__(self, index: Any, inverse: bool = False) -> Any:
        if isinstance(index, SupportsIndex) and not isinstance(index, np.ndarray):
            i = operator.index(index)
            if not -self.n <= i < self.n:
                raise IndexError(f"index {i} is out of range for {self.n} elements")
            i %= self.n
            if self.n <= TABLE_LIMIT:
                return int(_tables(self.n, self.key)[inverse][i])
            i = feistel(i, self._a, self._b, self._keys, inverse)
            while i >= self.n:
                i = feistel(i, self._a, self._b, self._keys, inverse)
            return i
        indices = normalise(index, self.n)
        if self.n <= TABLE_LIMIT:
            return _tables(self.n, self.key)[inverse][indices].astype(np.int64)
        if not inverse and self.n <= _ROUND_TABLES_LIMIT:
            self._until_tables -= indices.size
        if not inverse and self._until_tables <= 0:
            walk = self._walk_by_table
        else:
            walk = partial(feistel, a=self._a, b=self._b, keys=self._keys, inverse=inverse)
        flat = indices.reshape(-1).view(np.uint64)
        for begin in range(0, flat.size, _BLOCK):
            flat[begin : begin + _BLOCK] = walk(flat[begin : begin + _BLOCK])
        outside = np.flatnonzero(flat >= self.n)
        while outside.size:
            flat[outside] = walk(flat[outside])
            outside = outside[flat[outside] >= self.n]
        return indices

    @cached_property
    def _walk_by_table(self) -> partial[Any]:
        return partial(feistel_by_table, b=self._b, tables=round_tables(self._a, self._b, self._keys))


def feistel(i: Any, a: Any, b: Any, keys: Any, inverse: bool = False) -> Any:
    """Return the image of an index under the network for one key, or the inverse image.

    Args:
        i: an int, or a uint64 array.
        a, b: sizes of the halves, at most 2**31.
        keys: 32 bits for each of the `ROUNDS` rounds.
        inverse: whether to invert the network.

    For indices of many domains at once, a, b and the keys may be uint32 arrays with one value per index.
    """
    one = isinstance(i, int)
    add: Any = _add_one if one else _add
    high = i // b
    low = i - high * b
    if not one:
        high, low = high.astype(np.uint32), low.astype(np.uint32)
    if inverse:
        for r in range(ROUNDS - 2, -1, -2):
            low = add(low, high, keys[r + 1], b, -1)
            high = add(high, low, keys[r], a, -1)
    else:
        for r in range(0, ROUNDS, 2):
            high = add(high, low, keys[r], a)
            low = add(low, high, keys[r + 1], b)
    return high * b + low if one else high.astype(np.uint64) * np.uint64(b) + low


# The sum of two halves fits 32 bits, and a 32-bit hash times a half fits 64.


def _add_one(x: int, other: int, key: int, modulus: int, sign: int = 1) -> int:
    """Return the sum of a half and the keyed hash of the other half, or their difference, modulo its size."""
    h = ((other ^ key) * _C1) & _MASK32
    h ^= h >> 15
    return (x + sign * ((((h * _C2) & _MASK32) * modulus) >> 32)) % modulus


def _add(
    x: npt.NDArray[np.uint32], other: npt.NDArray[np.uint32], key: Any, modulus: Any, sign: int = 1
) -> npt.NDArray[np.uint32]:
    """Return the same for arrays, in place; key and modulus may be arrays that broadcast."""
    h: npt.NDArray[np.uint32] = other ^ np.uint32(key)
    h *= np.uint32(_C1)
    h ^= h >> np.uint32(15)
    h *= np.uint32(_C2)
    # The multiplication by the modulus uses mostly the high bits, which depend on every bit of the half.
    wide = h.astype(np.uint64)
    wide *= np.uint64(modulus)
    wide >>= np.uint64(32)
    h = wide.astype(np.uint32)
    x += h if sign > 0 else modulus - h
    # If x < modulus, the unsigned x - modulus wraps around to a huge number, so the minimum is the remainder.
    return np.minimum(x, np.subtract(x, np.uint32(modulus), out=h), out=x)


RoundTables = tuple[list[Indices], Indices, Indices]
"""Tables over unreduced halves: the hash of a half by round, ``high % a * b``, and ``low % b``."""


def round_tables(a: int, b: int, keys: Sequence[int]) -> RoundTables:
    """Return the tables of a network: 272 * a bytes. Each table repeats itself, which reduces the half."""
    round_keys = np.array(keys, dtype=np.uint32)[:, None]
    moduli = np.array([a, b] * (ROUNDS // 2), dtype=np.uint64)[:, None]
    halves = np.arange(a, dtype=np.uint32)  # b is a or a - 1
    hashes = _add(np.zeros((ROUNDS, a), np.uint32), halves, round_keys, moduli).astype(np.int64)
    # Halves are sums that are reduced only at the end. By round r, a half has added about r / 2 hashes, so its table
    # repeats that many times.
    rounds = [np.tile(hashes[r, : a if r % 2 else b], (r + 1) // 2 + 1) for r in range(ROUNDS)]
    sums = ROUNDS // 2 + 1
    return rounds, np.tile(np.arange(a, dtype=np.int64) * b, sums), np.tile(np.arange(b, dtype=np.int64), sums)


def feistel_by_table(i: npt.NDArray[np.uint64], b: int, tables: RoundTables) -> npt.NDArray[np.uint64]:
    """Return the same as `feistel`, from the network's tables."""
    rounds, highs, lows = tables
    high = np.floor_divide(i, np.uint64(b)).view(np.int64)
    low = np.multiply(high, -b)
    low += i.view(np.int64)
    step = np.empty_like(high)
    # Indices are never outside their table. mode="wrap" only lets take() write to `out` without a buffer.
    for r in range(0, ROUNDS, 2):
        rounds[r].take(low, out=step, mode="wrap")
        high += step
        rounds[r + 1].take(high, out=step, mode="wrap")
        low += step
    highs.take(high, out=step, mode="wrap")
    lows.take(low, out=high, mode="wrap")
    step += high
    return step.view(np.uint64)


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
