"""A keyed bijection on ``[0, n)``: random access to a shuffle that is never written down.

Up to `TABLE_LIMIT` elements the permutation is a table made by a keyed Fisher-Yates shuffle (cached). Above that it is
a Feistel network over the mixed radix ``a * b >= n``, with ``a = ceil(sqrt(n))`` and ``b = ceil(n / a)``: an index is
split into ``(i // b, i % b)`` and the halves take turns in adding a keyed hash of the other, modulo their own size
(Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). Fewer than ``a`` of the ``a * b`` values lie
outside ``[0, n)``; those are sent through again until they fall inside (cycle walking), about one in ``sqrt(n)``.

Promises: a bijection for every n from 0 to 2**62; O(1) memory; the same order on every machine and with every NumPy,
frozen by golden vectors in the tests under `ORDER_VERSION`.
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
from penstock.order.hashing import MASK64, mix, mix_array

__all__ = ["MAX_N", "ORDER_VERSION", "TABLE_LIMIT", "Inverse", "Permutation", "normalise"]

ORDER_VERSION = 1
"""Version of the frozen order. A state that names another version is refused."""

MAX_N = 1 << 62
TABLE_LIMIT = 4096
ROUNDS = 8  # 4 leave structure between neighbours; 6 pass the tests here, and 2 more are a margin
_BLOCK = 16384  # indices worked on at once: large enough to hide NumPy's call overhead, small enough for the L2 cache

_C1 = 0x85EBCA6B  # the multipliers of MurmurHash3's 32-bit finaliser
_C2 = 0xC2B2AE35
_MASK32 = 0xFFFFFFFF

Indices = npt.NDArray[np.int64]


def normalise(indices: Any, n: int) -> Indices:
    """Indices as a new int64 array with negative ones counted from the end; IndexError outside ``[-n, n)``."""
    given = np.asarray(indices)
    if given.size == 0:
        return np.empty(given.shape, dtype=np.int64)
    if given.dtype.kind not in "iu":
        raise TypeError(f"indices must be integers, got an array of {given.dtype}")
    low, high = int(given.min()), int(given.max())  # before some of uint64 are negative
    array = given.astype(np.int64)
    if low < -n or high >= n:
        raise IndexError(f"index {low if low < -n else high} is out of range for {n} elements")
    if low < 0:
        array[array < 0] += n
    return array


class Permutation:
    """A random permutation of ``range(n)`` chosen by a 64-bit key.

    Args:
        n: number of elements, 0 to 2**62.
        key: any integer, taken modulo 2**64; see `penstock.order.derive_key`.

    Raises:
        OrderError: n outside its range.

    ``p[i]`` takes an int (negative ones count from the end, IndexError outside) or an integer array of any shape, and
    ``p.inverse[j]`` finds the position of an element. Cost: 8 rounds of a 32-bit hash per index, vectorised; memory is
    O(1) (at most 32 KiB for n <= 4096).

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
            self._round_keys = [mix(self.key, self.n, r) & _MASK32 for r in range(ROUNDS)]

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"Permutation(n={self.n}, key={self.key:#x})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Permutation, (self.n, self.key))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: npt.NDArray[Any] | Sequence[int]) -> Indices: ...
    def __getitem__(self, index: Any) -> Any:
        return self._lookup(index, 0, self._encrypt)

    @cached_property
    def inverse(self) -> Inverse:
        """The inverse bijection, indexed in the same way."""
        return Inverse(self.n, self._locate)

    def _locate(self, index: Any) -> Any:
        return self._lookup(index, 1, self._decrypt)

    def _lookup(self, index: Any, table: int, walk: Callable[[Any], Any]) -> Any:
        scalar = isinstance(index, SupportsIndex) and not isinstance(index, np.ndarray)
        if scalar:
            i = operator.index(index)
            if not -self.n <= i < self.n:
                raise IndexError(f"index {i} is out of range for {self.n} elements")
            i %= self.n
            if self.n <= TABLE_LIMIT:
                return int(_tables(self.n, self.key)[table][i])
            i = walk(i)
            while i >= self.n:
                i = walk(i)
            return i
        indices = normalise(index, self.n)
        if self.n <= TABLE_LIMIT:
            return _tables(self.n, self.key)[table][indices]
        flat = indices.reshape(-1).view(np.uint64)
        for begin in range(0, flat.size, _BLOCK):
            flat[begin : begin + _BLOCK] = walk(flat[begin : begin + _BLOCK])
        outside = np.flatnonzero(flat >= self.n)
        while outside.size:
            flat[outside] = walk(flat[outside])
            outside = outside[flat[outside] >= self.n]
        return indices

    # One pass of the network, for a Python int or a uint64 array alike. Halves are at most 2**31: the sum of two fits
    # 32 bits, and a 32-bit hash times a half fits 64.

    def _encrypt(self, i: Any) -> Any:
        high, low, hashed = _split(i, self._b)
        for r in range(0, ROUNDS, 2):
            high = _add(high, hashed(low, self._round_keys[r], self._a), self._a)
            low = _add(low, hashed(high, self._round_keys[r + 1], self._b), self._b)
        return _join(high, low, self._b)

    def _decrypt(self, i: Any) -> Any:
        high, low, hashed = _split(i, self._b)
        for r in range(ROUNDS - 2, -1, -2):
            low = _add(low, self._b - hashed(high, self._round_keys[r + 1], self._b), self._b)
            high = _add(high, self._a - hashed(low, self._round_keys[r], self._a), self._a)
        return _join(high, low, self._b)


class Inverse:
    """``inverse[order[i]] == i``.

    Args:
        n: elements of the order.
        locate: the position of a row; of an array of them, an array of its shape.
    """

    def __init__(self, n: int, locate: Callable[[Any], Any]) -> None:
        self._n = n
        self._locate = locate

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: npt.NDArray[Any] | Sequence[int]) -> Indices: ...
    def __getitem__(self, index: Any) -> Any:
        return self._locate(index)


def _split(i: Any, b: int) -> tuple[Any, Any, Callable[[Any, int, int], Any]]:
    """The two halves, and the hash for their type: ``hashed(half, key, modulus)`` in ``[0, modulus)``."""
    high = i // b
    low = i - high * b
    if isinstance(i, int):
        return high, low, _hash_int
    return high.astype(np.uint32), low.astype(np.uint32), _hash_array


def _join(high: Any, low: Any, b: int) -> Any:
    if isinstance(high, int):
        return high * b + low
    joined = high.astype(np.uint64)
    joined *= np.uint64(b)
    joined += low
    return joined


def _add(x: Any, y: Any, modulus: int) -> Any:
    """``(x + y) % modulus`` for ``0 <= x < modulus`` and ``0 <= y <= modulus``, in place for arrays."""
    if isinstance(x, int):
        return (x + y) % modulus
    x += y
    # Unsigned wrap-around makes x - modulus huge where x < modulus, so the minimum is the remainder.
    return np.minimum(x, np.subtract(x, np.uint32(modulus), out=y), out=x)


def _hash_int(x: int, key: int, modulus: int) -> int:
    x = ((x ^ key) * _C1) & _MASK32
    x ^= x >> 15
    return (((x * _C2) & _MASK32) * modulus) >> 32


def _hash_array(x: npt.NDArray[np.uint32], key: int, modulus: int) -> npt.NDArray[np.uint32]:
    h = x ^ np.uint32(key)
    h *= np.uint32(_C1)
    h ^= h >> np.uint32(15)
    h *= np.uint32(_C2)
    # The multiplication by the modulus looks at the high bits first, and those depend on every bit of the half.
    wide = h.astype(np.uint64)
    wide *= np.uint64(modulus)
    wide >>= np.uint64(32)
    return wide.astype(np.uint32)


@lru_cache(maxsize=64)
def _tables(n: int, key: int) -> tuple[Indices, Indices]:
    """Fisher-Yates with keyed draws: ``(permutation, inverse)``."""
    draws = mix_array(mix(key, n), np.arange(n, dtype=np.uint64)).tolist()
    order = list(range(n))
    for i in range(n - 1, 0, -1):
        j = (draws[i] * (i + 1)) >> 64
        order[i], order[j] = order[j], order[i]
    forward = np.array(order, dtype=np.int64)
    inverse = np.empty_like(forward)
    inverse[forward] = np.arange(n, dtype=np.int64)
    forward.flags.writeable = inverse.flags.writeable = False
    return forward, inverse
