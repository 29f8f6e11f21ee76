"""Shuffles: the sample at each position of an epoch.

An `Order` is a sequence that is computed, never stored: ``order[position] -> sample index``, for an int or an integer
array. `make_order` returns one by name:

==========  ==================================================================================================
``global``  a random permutation of all samples (`Permutation`)
``block``   blocks of consecutive samples are permuted, then samples within windows of permuted blocks: reads
            stay local where random access is slow
``none``    the order of the manifest
==========  ==================================================================================================

Invariant: every order is a bijection of ``range(n)`` in O(1) memory, and depends only on (n, seed, epoch) and the sizes
of the block shuffle.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, OrderError
from penstock.hashing import derive_key, mix
from penstock.order.permutation import Bijection, Indices, Permutation

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "DEFAULT_WINDOW",
    "SHUFFLES",
    "BlockShuffle",
    "Identity",
    "Order",
    "block_options",
    "cached_permutation",
    "groups",
    "make_order",
]

DEFAULT_BLOCK_SIZE = 1024
DEFAULT_WINDOW = 64


class Order(Protocol):
    """A computed bijection of ``range(len(order))``."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: npt.NDArray[Any] | Sequence[int]) -> Indices: ...


class Identity(Bijection):
    """The order of the manifest: position i is sample i."""

    def __init__(self, n: int) -> None:
        if n < 0:
            raise OrderError(f"an order needs n >= 0, got {n}")
        self.n = operator.index(n)

    def _rows(self, positions: Indices) -> Indices:
        return positions

    def _find(self, rows: Indices) -> Indices:
        return rows


class BlockShuffle(Bijection):
    """A block shuffle: permutes blocks, then samples within windows of blocks.

    Args:
        n: number of samples.
        key: 64-bit key, see `derive_key`.
        block_size: number of consecutive samples that stay together while blocks are permuted.
        window: number of blocks that are mixed; samples move within ``block_size * window`` positions.

    Raises:
        OrderError: n is negative, or a size is not a positive integer or too large.

    In one window a job reads ``window`` runs of ``block_size`` consecutive rows. Positions are split among ranks in
    strides, so all ranks are in the same window at the same time, and each reads ``1 / world_size`` of the rows of
    every block. If rows are separate files, or are fetched one by one, a rank reads no more than that. If storage reads
    pages or reads ahead, every node reads nearly all bytes of the window, once, in runs of a block.

    Cost: O(1) memory; one `Permutation` look-up for each window in an array of positions, of which batches have one or
    two. ``window=1`` shuffles only within blocks. ``block_size * window >= n`` mixes as well as the global shuffle.

    >>> order = BlockShuffle(100, key=1, block_size=10, window=2)
    >>> sorted(order[np.arange(100)].tolist()) == list(range(100))
    True
    >>> len(set((order[np.arange(20)] // 10).tolist()))  # the first window holds two whole blocks
    2
    """

    def __init__(self, n: int, key: int, *, block_size: int = DEFAULT_BLOCK_SIZE, window: int = DEFAULT_WINDOW) -> None:
        if n < 0:
            raise OrderError(f"an order needs n >= 0, got {n}")
        try:
            self.block_size, self.window = operator.index(block_size), operator.index(window)
        except TypeError:
            raise OrderError(f"block_size and window must be integers, got {block_size!r} and {window!r}") from None
        if self.block_size < 1 or self.window < 1:
            raise OrderError(f"block_size and window must be positive, got {block_size} and {window}")
        if self.block_size * self.window >= 1 << 63:
            raise OrderError(f"block_size * window must be less than 2**63, got {block_size} * {window}")
        self.n = n
        self.key = key
        self._blocks = Permutation(-(-n // self.block_size), mix(key, 0))
        # All blocks are full except the last one of the file, which gets some slot of the permuted sequence. In padded
        # positions this slot is as long as the others, so plain division finds blocks and windows.
        self._missing = -n % self.block_size
        self._short_slot = self._blocks.inverse[len(self._blocks) - 1] if n else 0

    def __repr__(self) -> str:
        return f"BlockShuffle(n={self.n}, block_size={self.block_size}, window={self.window})"

    def window_at(self, position: int) -> tuple[int, int]:
        """Return the first position of a position's window, and the first after it."""
        number = int(self._pad(np.array([position]))[0]) // (self.block_size * self.window)
        return self._window_bounds(number)

    def _rows(self, positions: Indices) -> Indices:
        for inside, begin, order in self._windows(self._pad(positions)):
            positions[inside] = begin + order[positions[inside] - begin]
        padded = self._pad(positions)
        slots: Indices = padded // self.block_size
        offsets = padded - slots * self.block_size
        low, high = int(slots.min(initial=len(self._blocks))), int(slots.max(initial=0))
        # Neighbouring positions share a few blocks, so each of these is looked up only once.
        if high - low < slots.size:
            slots = self._blocks[np.arange(low, high + 1)].take(slots - low)
        else:
            slots = self._blocks[slots]
        slots *= self.block_size
        slots += offsets
        return slots

    def _find(self, rows: Indices) -> Indices:
        blocks, offsets = np.divmod(rows, self.block_size)
        padded = self._blocks.inverse[blocks] * self.block_size + offsets
        places: Indices = padded - self._missing * (padded >= (self._short_slot + 1) * self.block_size)
        for inside, begin, order in self._windows(padded):
            places[inside] = begin + order.inverse[places[inside] - begin]
        return places

    def _windows(self, padded: Indices) -> Iterator[tuple[Indices, int, Permutation]]:
        """Yield, for each window of padded positions, the positions inside, its start, and its permutation."""
        windows = padded // (self.block_size * self.window)
        for number, inside in groups(windows):
            begin, end = self._window_bounds(number)
            yield inside, begin, cached_permutation(end - begin, mix(self.key, 1, number))

    def _window_bounds(self, number: int) -> tuple[int, int]:
        span = self.block_size * self.window
        return self._unpad(number * span), min(self._unpad((number + 1) * span), self.n)

    def _pad(self, positions: Indices) -> Indices:
        return positions + self._missing * (positions >= (self._short_slot + 1) * self.block_size - self._missing)

    def _unpad(self, position: int) -> int:
        return position - self._missing * (position >= (self._short_slot + 1) * self.block_size)


def groups(numbers: Indices) -> Iterator[tuple[int, Indices]]:
    """Yield every distinct number, ascending, and its places, ascending: int64.

    Not by `numpy.unique`: its first call in a process imports ``numpy.ma``, which takes longer than computing a batch.

    >>> [(number, places.tolist()) for number, places in groups(np.array([5, 3, 5]))]
    [(3, [1]), (5, [0, 2])]
    """
    if not len(numbers):
        return
    places = np.arange(len(numbers))
    if (numbers[1:] < numbers[:-1]).any():
        places = np.argsort(numbers, kind="stable")
        numbers = numbers[places]
    cuts = (np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()
    for begin, end in itertools.pairwise([0, *cuts, len(numbers)]):
        yield int(numbers[begin]), places[begin:end]


cached_permutation = lru_cache(maxsize=8)(Permutation)
"""Return a `Permutation`, for example of a window; the last ones are cached."""


SHUFFLES: dict[str, Callable[[int, int, int, int, int], Order]] = {
    "global": lambda n, seed, epoch, block_size, window: Permutation(n, derive_key(seed, epoch)),
    "block": lambda n, seed, epoch, block_size, window: BlockShuffle(
        n, derive_key(seed, epoch, "block"), block_size=block_size, window=window
    ),
    "none": lambda n, seed, epoch, block_size, window: Identity(n),
}
"""The registry of shuffles. To add one, add a function ``(n, seed, epoch, block_size, window) -> Order``."""


def make_order(
    kind: str,
    n: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    block_size: int = DEFAULT_BLOCK_SIZE,
    window: int = DEFAULT_WINDOW,
) -> Order:
    """Return the order of one epoch.

    Args:
        kind: ``"global"``, ``"block"`` or ``"none"``.
        n: number of samples.
        seed, epoch: choose the order together; every pair yields an unrelated order.
        block_size, window: of the block shuffle; the other shuffles do not use them.

    Raises:
        OrderError: the kind is unknown, a size or epoch is negative, or the seed has more than 64 bits.

    >>> make_order("global", 5, seed=0, epoch=0)[np.arange(5)].tolist()
    [2, 1, 0, 3, 4]
    """
    if kind not in SHUFFLES:
        raise OrderError(f"unknown shuffle {kind!r}: use one of {', '.join(map(repr, SHUFFLES))}")
    return SHUFFLES[kind](n, seed, epoch, block_size, window)


def block_options(kind: str, block_size: int | None, window: int | None) -> dict[str, int]:
    """Return the sizes of the block shuffle as options of `make_order`; an empty dict for the other kinds.

    Raises:
        ConfigError: sizes were passed for another kind, or are not positive integers, or too large.
    """
    given = {name: size for name, size in (("block_size", block_size), ("window", window)) if size is not None}
    if kind != "block":
        if given:
            raise ConfigError(f"block_size and window belong to shuffle='block', not to shuffle={kind!r}")
        return {}
    try:
        order = BlockShuffle(0, 0, **given)
    except OrderError as error:
        raise ConfigError(str(error)) from None
    return {"block_size": order.block_size, "window": order.window}
