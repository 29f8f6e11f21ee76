"""Keys: 64-bit hashes of integers, the same on every machine and with every version of NumPy.

The mixer is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), applied
in a chain. So ``(seed 1, epoch 0)`` has nothing in common with ``(seed 0, epoch 1)``, unlike with sums of the two.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import OrderError

__all__ = [
    "GOLDEN",
    "M1",
    "M2",
    "MASK64",
    "SAMPLES",
    "checked_seed",
    "derive_key",
    "mix",
    "mix_array",
    "sample_key",
    "sample_keys",
    "splitmix64",
]

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
M1 = 0xBF58476D1CE4E5B9
M2 = 0x94D049BB133111EB
"""`GOLDEN`, `M1` and `M2` are the constants of SplitMix64."""
_START = 0x70656E73746F636B  # "penstock"

SAMPLES = "sample"
"""The random stream of the samples' keys: `mix_array` of its `derive_key` and of positions."""


def splitmix64(x: int) -> int:
    """Return one step of SplitMix64: a bijection on 64-bit integers with full avalanche."""
    x = (x + GOLDEN) & MASK64
    x = ((x ^ (x >> 30)) * M1) & MASK64
    x = ((x ^ (x >> 27)) * M2) & MASK64
    return x ^ (x >> 31)


def mix(*words: int) -> int:
    """Return a 64-bit hash of integers (modulo 2**64); their order matters."""
    state = _START
    for word in words:
        state = splitmix64(state ^ (word & MASK64))
    return state


def mix_array(key: int, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return ``splitmix64(key ^ w)`` for each ``w`` of a uint64 array."""
    x = words ^ np.uint64(key)
    x += np.uint64(GOLDEN)
    x ^= x >> np.uint64(30)
    x *= np.uint64(M1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(M2)
    x ^= x >> np.uint64(31)
    return x


def checked_seed(seed: Any) -> int:
    """Return a seed as a Python integer.

    Raises:
        OrderError: it is not an integer, or outside the range that torch accepts, -2**63 to 2**64 - 1.
    """
    try:
        found = operator.index(seed)
    except TypeError:
        raise OrderError(f"seed must be an integer, got {seed!r}") from None
    if not -(1 << 63) <= found < 1 << 64:
        raise OrderError(f"seed must be a 64-bit integer, got {found}")
    return found


def derive_key(seed: int, epoch: int = 0, stream: str = "order") -> int:
    """Return the 64-bit key of one random stream of one epoch.

    Args:
        seed: see `checked_seed`.
        epoch: 0 or more.
        stream: the name of the stream; streams with different names are independent.

    Raises:
        OrderError: the seed or the epoch is outside its range.

    >>> hex(derive_key(0, 0)), derive_key(0, 1) == derive_key(1, 0)
    ('0x3a6a9c6c7cc47df', False)
    """
    # NumPy's integers would overflow below.
    seed, epoch = checked_seed(seed), operator.index(epoch)
    if epoch < 0:
        raise OrderError(f"epoch must be 0 or more, got {epoch}")
    return mix(seed, epoch, xxhash.xxh3_64_intdigest(stream.encode()))


def sample_keys(seed: int, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return the 64-bit keys of the samples at these global positions of an epoch."""
    return mix_array(derive_key(seed, epoch, SAMPLES), positions.view(np.uint64))


def sample_key(seed: int, epoch: int, position: int) -> int:
    """Return the key of one sample, as `sample_keys` does."""
    return splitmix64(derive_key(seed, epoch, SAMPLES) ^ position)
