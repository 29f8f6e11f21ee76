"""Shuffles: which sample stands at which position of an epoch.

An `Order` is a sequence that is computed, never stored: ``order[position] -> sample index``, for an int or an integer
array. `make_order` makes one by name:

==========  ==================================================================================================
``global``  a random permutation of all samples (`Permutation`)
``block``   the file is cut into blocks, the blocks are permuted, and samples are permuted within windows of
            consecutive permuted blocks: reads stay local on file systems where far jumps are slow
``none``    the order of the manifest
==========  ==================================================================================================

Invariant: every order is a bijection of ``range(n)`` in O(1) memory, and depends on (n, seed, epoch) alone.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

from penstock.errors import OrderError
from penstock.hashing import derive_key, mix
from penstock.order.permutation import Indices, Inverse, Permutation, normalise

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "DEFAULT_WINDOW",
    "SHUFFLES",
    "BlockShuffle",
    "Identity",
    "Order",
    "groups",
    "make_order",
    "window_order",
]

DEFAULT_BLOCK_SIZE = 1024
DEFAULT_WINDOW = 64
_FEW = 8  # windows of one look-up that are found by comparing; for more, sorting costs less


class Order(Protocol):
    """A computed bijection of ``range(len(order))``."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: npt.NDArray[Any] | Sequence[int]) -> Indices: ...


class Identity:
    """The order of the manifest: position i is sample i."""

    def __init__(self, n: int) -> None:
        if n < 0:
            raise OrderError(f"an order needs n >= 0, got {n}")
        self.n = operator.index(n)

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: npt.NDArray[Any] | Sequence[int]) -> Indices: ...
    def __getitem__(self, index: Any) -> Any:
        result = normalise(index, self.n)
        return int(result) if result.ndim == 0 else result

    @property
    def inverse(self) -> Identity:
        """Where a row stands: at its own number."""
        return self


class BlockShuffle:
    """Blocks permuted, then samples permuted within windows of blocks.

    Args:
        n: number of samples.
        key: 64-bit key, see `derive_key`.
        block_size: consecutive samples that stay together while blocks are permuted.
        window: blocks that are mixed with one another; samples move within ``block_size * window`` positions.

    Raises:
        OrderError: a negative n, or a size that is not positive or too large.

    While a job passes through one window it reads ``window`` runs of ``block_size`` consecutive rows. Positions are
    dealt to ranks in strides, so all ranks are in the same window at the same time, and each of them takes
    ``1 / world_size`` of the rows of every block: that is what a rank reads where rows are files of their own, or are
    fetched one by one. Where reads come in pages or with read-ahead, every node that holds a rank reads nearly all
    bytes of the window, once, in runs of a block.

    Cost: O(1) memory; an array of positions costs one `Permutation` lookup for each window it touches, and batches
    touch one or two. ``window=1`` shuffles within blocks only, ``block_size * window >= n`` is as good as global.
    ``order.inverse[row]`` says where a row stands, at the same cost.

    >>> order = BlockShuffle(100, key=1, block_size=10, window=2)
    >>> sorted(order[np.arange(100)].tolist()) == list(range(100))
    True
    >>> len(set((order[np.arange(20)] // 10).tolist()))  # the first window holds two whole blocks
    2
    """

    def __init__(self, n: int, key: int, *, block_size: int = DEFAULT_BLOCK_SIZE, window: int = DEFAULT_WINDOW) -> None:
        if n < 0:
            raise OrderError(f"an order needs n >= 0, got {n}")
        if block_size < 1 or window < 1:
            raise OrderError(f"block_size and window must be positive, got {block_size} and {window}")
        if block_size * window >= 1 << 63:
            raise OrderError(f"block_size * window must be less than 2**63, got {block_size} * {window}")
        self.n = n
        self.key = key
        self.block_size = block_size
        self.window = window
        self._blocks = Permutation(-(-n // block_size), mix(key, 0))
        # All blocks are full but the last one of the file, which lands in some slot of the permuted sequence. Padded
        # positions, in which that slot is as long as the others, make everything else plain division.
        self._missing = -n % block_size
        self._short_slot = self._blocks.inverse[len(self._blocks) - 1] if n else 0

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"BlockShuffle(n={self.n}, block_size={self.block_size}, window={self.window})"

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: npt.NDArray[Any] | Sequence[int]) -> Indices: ...
    def __getitem__(self, index: Any) -> Any:
        positions = normalise(index, self.n)
        flat = positions.reshape(-1)
        for inside, begin, order in self._windows(self._pad(flat)):
            flat[inside] = begin + order[flat[inside] - begin]
        self.permute_blocks(flat)
        return int(positions) if positions.ndim == 0 else positions

    @cached_property
    def inverse(self) -> Inverse:
        """The inverse bijection, indexed in the same way."""
        return Inverse(self.n, self._locate)

    def window_at(self, position: int) -> tuple[int, int]:
        """Begin and end of the window that a position is in: the positions whose rows are mixed with one another."""
        number = int(self._pad(np.array([position]))[0]) // (self.block_size * self.window)
        return self._window_bounds(number)

    def _locate(self, index: Any) -> Any:
        rows = normalise(index, self.n)
        self._find(rows.reshape(-1))
        return int(rows) if rows.ndim == 0 else rows

    def _find(self, rows: Indices) -> None:
        """Rows into their positions, in place."""
        padded = self._padded_place(rows)
        rows[:] = self._unpadded(padded)
        for inside, begin, order in self._windows(padded):
            rows[inside] = begin + order.inverse[rows[inside] - begin]

    def place_blocks(self, rows: Indices) -> None:
        """Rows into their places where blocks alone are permuted, in place."""
        rows[:] = self._unpadded(self._padded_place(rows))

    def _padded_place(self, rows: Indices) -> Indices:
        blocks, offsets = np.divmod(rows, self.block_size)
        return self._blocks.inverse[blocks] * self.block_size + offsets

    def _unpadded(self, padded: Indices) -> Indices:
        return padded - self._missing * (padded >= (self._short_slot + 1) * self.block_size)

    def permute_blocks(self, positions: Indices) -> None:
        """Positions, already permuted within windows or not at all, into rows, in place."""
        padded = self._pad(positions)
        slots = padded // self.block_size
        offsets = padded - slots * self.block_size
        low, high = (int(slots.min()), int(slots.max())) if slots.size else (0, 0)
        # Neighbouring positions share a few blocks, and looking up each of those once costs next to nothing.
        if high - low < slots.size:
            slots = self._blocks[np.arange(low, high + 1)].take(slots - low)
        else:
            slots = self._blocks[slots]
        slots *= self.block_size
        np.add(slots, offsets, out=positions)

    def _windows(self, padded: Indices) -> Iterator[tuple[Any, int, Permutation]]:
        """For each window that padded positions touch: which are inside, where it begins, how it is permuted."""
        windows = padded // (self.block_size * self.window)
        for number, inside in groups(windows):
            begin, end = self._window_bounds(number)
            yield inside, begin, window_order(end - begin, mix(self.key, 1, number))

    def _window_bounds(self, number: int) -> tuple[int, int]:
        span = self.block_size * self.window
        return self._unpad(number * span), min(self._unpad((number + 1) * span), self.n)

    def _pad(self, positions: Indices) -> Indices:
        behind = (self._short_slot + 1) * self.block_size - self._missing
        # Most look-ups are far from the short block, on one side of it.
        if not self._missing or not positions.size or int(positions.max()) < behind:
            return positions
        if int(positions.min()) >= behind:
            return positions + self._missing
        return positions + self._missing * (positions >= behind)

    def _unpad(self, position: int) -> int:
        return position - self._missing * (position >= (self._short_slot + 1) * self.block_size)


def groups(numbers: Indices) -> Iterator[tuple[int, Any]]:
    """Yield every number that occurs, and where: a slice, a mask, or an array of places."""
    steps = np.diff(numbers)
    if (steps >= 0).all():
        # Positions of an epoch in their order, as samplers ask for them.
        ends = [*(np.flatnonzero(steps) + 1).tolist(), len(numbers)] if len(numbers) else []
        for begin, end in itertools.pairwise([0, *ends]):
            yield int(numbers[begin]), slice(begin, end)
        return
    distinct = np.unique(numbers)
    if len(distinct) <= _FEW:
        for number in distinct.tolist():
            yield number, numbers == number
        return
    by_number = np.argsort(numbers, kind="stable")
    bounds = np.append(np.searchsorted(numbers[by_number], distinct), len(by_number)).tolist()
    for k, number in enumerate(distinct.tolist()):
        yield number, by_number[bounds[k] : bounds[k + 1]]


@lru_cache(maxsize=8)
def window_order(n: int, key: int) -> Permutation:
    """Return how a window of n samples is permuted. Those asked for last are kept."""
    return Permutation(n, key)


def _make_none(n: int, seed: int, epoch: int, block_size: int, window: int) -> Order:
    return Identity(n)


def _make_global(n: int, seed: int, epoch: int, block_size: int, window: int) -> Order:
    return Permutation(n, derive_key(seed, epoch))


def _make_block(n: int, seed: int, epoch: int, block_size: int, window: int) -> Order:
    return BlockShuffle(n, derive_key(seed, epoch, "block"), block_size=block_size, window=window)


SHUFFLES: dict[str, Callable[[int, int, int, int, int], Order]] = {
    "global": _make_global,
    "block": _make_block,
    "none": _make_none,
}
"""The registry of shuffles: a new one is a function ``(n, seed, epoch, block_size, window) -> Order`` and an entry."""


def make_order(
    kind: str,
    n: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    block_size: int = DEFAULT_BLOCK_SIZE,
    window: int = DEFAULT_WINDOW,
) -> Order:
    """The order of one epoch.

    Args:
        kind: ``"global"``, ``"block"`` or ``"none"``.
        n: number of samples.
        seed, epoch: together they choose the order; every pair gives an unrelated one.
        block_size, window: of the block shuffle; the others have no such sizes and take no notice of them.

    Raises:
        OrderError: an unknown kind, a negative size or epoch, or a seed of more than 64 bits.

    >>> make_order("global", 5, seed=0, epoch=0)[np.arange(5)].tolist()
    [2, 1, 0, 3, 4]
    """
    if kind not in SHUFFLES:
        raise OrderError(f"unknown shuffle {kind!r}: use one of {', '.join(map(repr, SHUFFLES))}")
    return SHUFFLES[kind](n, seed, epoch, block_size, window)
