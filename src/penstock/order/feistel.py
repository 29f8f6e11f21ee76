"""A keyed Feistel network over a mixed radix: a bijection on ``[0, a * b)``.

An index is split into the halves ``(i // b, i % b)``. In turn, each half adds a keyed hash of the other, modulo its own
size (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).

In small domains a half has a few thousand values, so a table can hold the hash of every half. `encrypt_by_table`
returns the same as `encrypt`, in half the time for many indices and a fifth of the time for few.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ROUNDS", "Feistel", "Indices"]

ROUNDS = 8
"""4 rounds leave structure between neighbours. 6 pass our tests, and 2 more are a margin."""

# The multipliers of MurmurHash3's 32-bit finaliser.
_C1 = 0x85EBCA6B
_C2 = 0xC2B2AE35
_MASK32 = 0xFFFFFFFF

Indices = npt.NDArray[np.int64]


class Feistel:
    """The network for one key.

    Args:
        a, b: sizes of the halves, at most 2**31.
        round_keys: 32 bits for each of the `ROUNDS` rounds.

    For indices of many domains at once, each argument may be a uint32 array with one value per index. Such a network
    has no tables.
    """

    def __init__(self, a: Any, b: Any, round_keys: Sequence[Any] | npt.NDArray[np.uint32]) -> None:
        self.a = a
        self.b = b
        self._round_keys = round_keys

    # These take a Python int or a uint64 array. The sum of two halves fits 32 bits, and a 32-bit hash times a half fits
    # 64.

    def encrypt(self, i: Any) -> Any:
        """Return the image of an int, or of a uint64 array."""
        a, b, keys = self.a, self.b, self._round_keys
        high = i // b
        low = i - high * b
        if isinstance(i, int):
            for r in range(0, ROUNDS, 2):
                high = (high + _hash_int(low, keys[r], a)) % a
                low = (low + _hash_int(high, keys[r + 1], b)) % b
            return high * b + low
        high, low = high.astype(np.uint32), low.astype(np.uint32)
        for r in range(0, ROUNDS, 2):
            high = _add(high, _hash_array(low, keys[r], a), a)
            low = _add(low, _hash_array(high, keys[r + 1], b), b)
        return high.astype(np.uint64) * np.uint64(b) + low

    def decrypt(self, i: Any) -> Any:
        """Return the inverse image: the inverse of `encrypt`."""
        a, b, keys = self.a, self.b, self._round_keys
        high = i // b
        low = i - high * b
        if isinstance(i, int):
            for r in range(ROUNDS - 2, -1, -2):
                low = (low - _hash_int(high, keys[r + 1], b)) % b
                high = (high - _hash_int(low, keys[r], a)) % a
            return high * b + low
        high, low = high.astype(np.uint32), low.astype(np.uint32)
        for r in range(ROUNDS - 2, -1, -2):
            low = _add(low, b - _hash_array(high, keys[r + 1], b), b)
            high = _add(high, a - _hash_array(low, keys[r], a), a)
        return high.astype(np.uint64) * np.uint64(b) + low

    def encrypt_by_table(self, i: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Return the same as `encrypt`. The first call builds tables of 272 * a bytes."""
        rounds, highs, lows = self._tables
        high = np.floor_divide(i, np.uint64(self.b)).view(np.int64)
        low = np.multiply(high, -self.b)
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

    @cached_property
    def _tables(self) -> tuple[list[Indices], Indices, Indices]:
        """Tables over unreduced halves: the hash of a half by round, ``high % a * b``, and ``low % b``.

        Each table repeats itself, which reduces the half.
        """
        keys = np.array(self._round_keys, dtype=np.uint32)[:, None]
        moduli = np.array([self.a, self.b] * (ROUNDS // 2), dtype=np.uint64)[:, None]
        halves = np.arange(self.a, dtype=np.uint32)  # b is a or a - 1
        hashes = _hash_array(halves, keys, moduli).astype(np.int64)
        rounds = []
        for r in range(ROUNDS):
            size = self.a if r % 2 else self.b
            # Halves are sums that are reduced only at the end. By round r, a half has added about r / 2 hashes, so its
            # table repeats that many times.
            rounds.append(_repeat(hashes[r, :size], (r + 1) // 2 + 1))
        sums = ROUNDS // 2 + 1
        high, low = np.arange(self.a, dtype=np.int64), np.arange(self.b, dtype=np.int64)
        return rounds, _repeat(high * self.b, sums), _repeat(low, sums)


def _repeat(table: Indices, times: int) -> Indices:
    return np.concatenate([table] * times)


def _add(x: npt.NDArray[np.uint32], y: npt.NDArray[np.uint32], modulus: Any) -> npt.NDArray[np.uint32]:
    """Return ``(x + y) % modulus`` for ``0 <= x < modulus`` and ``0 <= y <= modulus``, in place."""
    x += y
    # If x < modulus, the unsigned x - modulus wraps around to a huge number, so the minimum is the remainder.
    return np.minimum(x, np.subtract(x, np.uint32(modulus), out=y), out=x)


def _hash_int(x: int, key: int, modulus: int) -> int:
    x = ((x ^ key) * _C1) & _MASK32
    x ^= x >> 15
    return (((x * _C2) & _MASK32) * modulus) >> 32


def _hash_array(x: npt.NDArray[np.uint32], key: Any, modulus: Any) -> npt.NDArray[np.uint32]:
    """Return the hashes of halves, for one key and modulus or for arrays that broadcast."""
    h: npt.NDArray[np.uint32] = x ^ np.uint32(key)
    h *= np.uint32(_C1)
    h ^= h >> np.uint32(15)
    h *= np.uint32(_C2)
    # The multiplication by the modulus uses mostly the high bits, which depend on every bit of the half.
    wide = h.astype(np.uint64)
    wide *= np.uint64(modulus)
    wide >>= np.uint64(32)
    return wide.astype(np.uint32)
