"""The sample's own random generator: a function of (seed, epoch, position) and of nothing else.

Inside a transform, `generator()` gives a `numpy.random.Generator` that belongs to the sample being made. It does not
depend on the executor, the worker, the number of ranks or on what was drawn for other samples, so augmentation repeats
bit for bit. It is made on the first call of a sample and costs about a microsecond.

The 256-bit seed of its PCG64 is SplitMix64 in counter mode over the sample's key. NumPy may change the *methods* of
Generator between versions, so augmentation is identical for one NumPy version; the order of samples always is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from numpy.random.bit_generator import ISeedSequence

from penstock.order.hashing import derive_key, mix_array, splitmix64

__all__ = ["generator", "generator_from_key", "in_sample", "sample_keys", "sample_scope"]

_WORDS = np.arange(1, 5, dtype=np.uint64)


class _Scope(threading.local):
    """The sample that this thread is making."""

    key: int | None = None
    generator: np.random.Generator | None = None


_scope = _Scope()


class _Words(ISeedSequence):
    """Hands PCG64 its 256 bits as they are: ten times cheaper than NumPy's SeedSequence."""

    def __init__(self, key: int) -> None:
        self.words = mix_array(key, _WORDS)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> npt.NDArray[Any]:
        return self.words if dtype == np.uint64 else self.words.view(np.uint32)[:n_words]


def sample_keys(seed: int, epoch: int, positions: npt.NDArray[np.int64]) -> list[int]:
    """The 64-bit keys of the samples at these global positions of an epoch."""
    keys: list[int] = mix_array(derive_key(seed, epoch, "sample"), positions.astype(np.uint64)).tolist()
    return keys


def generator_from_key(key: int) -> np.random.Generator:
    """A new generator, a pure function of a 64-bit key."""
    return np.random.Generator(np.random.PCG64(cast(np.random.SeedSequence, _Words(key))))


@contextmanager
def sample_scope(key: int) -> Iterator[None]:
    """While it lasts, `generator()` in this thread belongs to the sample with this key."""
    before = _scope.key, _scope.generator
    _scope.key, _scope.generator = key, None
    try:
        yield
    finally:
        _scope.key, _scope.generator = before


def in_sample() -> bool:
    """Whether a loader or data set has said which sample this thread is making."""
    return _scope.key is not None


def generator() -> np.random.Generator:
    """The generator of the sample being made.

    Inside a Penstock loader or data set it depends on (seed, epoch, position) only, and calling it twice within one
    sample gives the same object. Anywhere else (under a foreign loader, or by hand) it is a new generator seeded by one
    draw from torch's global generator, which repeats as torch's own transforms do.

    >>> with sample_scope(7):
    ...     a = generator().integers(100)
    >>> with sample_scope(7):
    ...     b = generator().integers(100)
    >>> a == b
    np.True_
    """
    if _scope.key is None:
        draw = int(torch.empty((), dtype=torch.int64).random_().item())
        return generator_from_key(splitmix64(draw))
    if _scope.generator is None:
        _scope.generator = generator_from_key(_scope.key)
    return _scope.generator
