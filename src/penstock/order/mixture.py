"""The order of a mixture: the source at each position, and the number of its samples before that position.

Positions are cut into blocks of B, a power of 64. With cumulative shares ``C_j``, source j has ``round(k B C_j) -
round(k B C_(j-1))`` samples before block k. So its counts at the ends of blocks are exact, in integers. Inside a block,
a keyed permutation maps each place to a slot, and each source has a range of slots::

    position  ->  block k, place t  ->  permutation (`penstock.order.digits`)  ->  slot  ->  source

The ordinal is the number of the source's samples before block k, plus the number of places before t with slots of this
source, which the permutation counts without a loop. So each source is read in its own order, and no table of positions
is needed.

The permutation is stratified: each aligned run of ``2**i`` places has one slot in every ``B / 2**i`` slots. So the
counts of any prefix are off by at most about one sample for every two binary digits of B. Which of its slots a place
gets is random, so ranks that read every k-th position see each source by its weight, for any number of ranks.

A finite epoch has exact counts at its end as well. Its last block is longer than the others, because it takes the rest
that is too short for a block. Its slot ranges are chosen to give the exact counts of the epoch.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import OrderError
from penstock.hashing import MASK64
from penstock.order.digits import DIGIT_BITS, DigitShuffle, find_in, rank, ranks, slot_of, slots_of
from penstock.order.permutation import MAX_N, Indices

__all__ = ["MIXTURE_ORDER", "BlockMixture", "exact_counts"]

MIXTURE_ORDER = "mixture-blocks-1"
"""Name of the frozen order. States contain it."""

_MAX_TOTAL = 1 << 50
"""Up to this limit, quotients computed as floats are correct to within one."""
_SMALLEST = 2
"""Base-64 digits of the smallest block: 4,096 positions."""
_LARGEST = 9
"""Base-64 digits of the largest block, so that the slots of a block of nearly twice the size still fit 64 bits."""
_SAMPLES = 1000
"""Samples of the rarest source in a block, so that rounding changes its share by a thousandth at most."""
_CHUNK = 8192
"""Positions computed at once, which fit the L2 cache."""
_FEW = 8
"""Up to this many positions, computing them one by one is faster than as an array."""


def exact_counts(weights: Sequence[int], position: int) -> tuple[int, ...]:
    """Return the number of samples of each source in the first ``position`` positions: its share, rounded."""
    return _differences(_cumulative_counts(_cumulative(weights), position))


class BlockMixture:
    """The sources at the positions 0, 1, 2, ... of an epoch.

    An epoch may consist of stages with different weights. Each stage is its own `BlockMixture`, whose positions and
    ordinals count from the start of the stage.

    Args:
        weights: a positive integer for each source; only their proportions matter.
        key: 64-bit key, see `penstock.order.derive_key`.
        length: number of positions of the epoch, at whose end the counts are `exact_counts`. If the weights are counts
            that add up to the length, these are exactly the weights. None: an endless epoch.

    Raises:
        OrderError: weights are missing, not positive or too large, or the length is outside 0 to 2**62.

    The counts are exact at the end of each block. An epoch longer than a block ends with a block of one to two times
    ``block_size`` positions, so its counts are exact as well. Elsewhere the count of each source is off by less than
    `bound`. Within these limits the source at a position is random. The ordinals of a source are consecutive.

    Cost: O(1) memory; two to nine hashes per position, one for each base-64 digit of the block size.

    >>> mix = BlockMixture([3, 1], key=7, length=8)
    >>> mix.counts(8)
    (6, 2)
    >>> [mix.position(source, ordinal) for source, ordinal in zip(*mix.locate(np.arange(8)))]
    [0, 1, 2, 3, 4, 5, 6, 7]
    """

    def __init__(self, weights: Sequence[int], key: int = 0, *, length: int | None = None) -> None:
        if not weights or min(weights) < 1:
            raise OrderError(f"every source needs a weight of 1 or more, got {list(weights)}")
        divisor = math.gcd(*weights)
        self.weights = tuple(int(weight) // divisor for weight in weights)
        self.total = sum(self.weights)
        if self.total > _MAX_TOTAL:
            raise OrderError(f"the weights must add up to at most 2**50, got {list(weights)}")
        if length is not None and not 0 <= length <= MAX_N:
            raise OrderError(f"an epoch has 0 to 2**62 samples, got {length}")
        self.key = operator.index(key) & MASK64
        self.length = None if length is None else operator.index(length)
        self._cumulative = _cumulative(self.weights)
        self._digits = _block_digits(self.total, min(self.weights))
        self.block_size = 1 << (DIGIT_BITS * self._digits)
        """Positions in a block: the smallest power of 64, from 4,096 to 2**54, with 1,000 samples of the rarest source.
        """
        self._shuffle = DigitShuffle(self.key, _LARGEST + 1)
        self._whole = MAX_N if length is None else max(0, length // self.block_size - 1)
        self._last = None if length is None else self._make_last(length)
        self._kept: tuple[int, _Block] | None = None

    def __repr__(self) -> str:
        return f"BlockMixture({list(self.weights)}, key={self.key:#x}, length={self.length})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.weights, self.key, self.length)

    @property
    def bound(self) -> int:
        """Upper bound on the error of a source's count in any prefix of the epoch, in samples; never reached.

        A prefix of a block is a sum or difference of runs: at most one for every two binary digits, and one more. Each
        run is off by less than one sample, and the start of the block by at most one. In the last block, correcting the
        counts at its end adds as much again.
        """
        whole = DIGIT_BITS * self._digits // 2 + 2
        if self._last is None:
            return whole
        ragged = 2 * (self._last.size.bit_length() // 2 + 1) + 1
        return max(whole, ragged) if self._whole else ragged

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the source at each position, and the number of its samples before: two int64 arrays.

        Raises:
            OrderError: a position is negative or beyond the end.
        """
        positions = np.asarray(positions, dtype=np.int64)
        if not positions.size:
            return positions.copy(), positions.copy()
        if positions.size <= _FEW:
            places = positions.ravel().tolist()
            self._check(min(places), max(places))
            pairs = np.array([self.locate_one(place) for place in places])
            return pairs[:, 0].reshape(positions.shape), pairs[:, 1].reshape(positions.shape)
        self._check(int(positions.min()), int(positions.max()))
        sources, ordinals = np.empty_like(positions), np.empty_like(positions)
        given, found, before = positions.reshape(-1), sources.reshape(-1), ordinals.reshape(-1)
        for begin in range(0, given.size, _CHUNK):
            chunk = slice(begin, begin + _CHUNK)
            found[chunk], before[chunk] = self._locate_chunk(given[chunk])
        return sources, ordinals

    def locate_one(self, position: int) -> tuple[int, int]:
        """Return the source at one position of the epoch, and the number of its samples before."""
        block = self._block_of(position)
        path = self._shuffle.path(position - block.begin, block.begin, block.digits)
        source = bisect.bisect_right(block.bounds, slot_of(path)) - 1
        inside = rank(path, block.bounds[source + 1]) - rank(path, block.bounds[source])
        return source, block.count_before(source) + inside

    def counts(self, position: int) -> tuple[int, ...]:
        """Return the number of samples of each source before a position; the end of the epoch is allowed, too."""
        self._check(position, position, end=1)
        if position == self.length:
            return exact_counts(self.weights, position)
        block = self._block_of(position)
        path = self._shuffle.path(position - block.begin, block.begin, block.digits)
        had = [before + rank(path, bound) for before, bound in zip(block.before, block.bounds, strict=True)]
        return _differences(had)

    def position(self, source: int, ordinal: int) -> int:
        """Return the position of sample ``ordinal`` of a source: the inverse of `locate`.

        Raises:
            OrderError: the source has no such sample in this epoch.
        """
        block = self._block_with(operator.index(source), operator.index(ordinal))
        rest = operator.index(ordinal) - block.count_before(source)
        slots = block.bounds[source], block.bounds[source + 1]
        return block.begin + find_in(self._shuffle, rest, slots, block.begin, block.digits)

    # Blocks.

    def _make_last(self, length: int) -> _Block:
        begin = self._whole * self.block_size
        before = _cumulative_counts(self._cumulative, begin)
        after = _cumulative_counts(self._cumulative, length)
        size = length - begin
        digits = -(-max(1, (size - 1).bit_length()) // DIGIT_BITS)
        bounds = [0]
        for low, high in zip(before[1:-1], after[1:-1], strict=True):
            bounds.append(self._bound_with(high - low, begin, size, digits))
        bounds.append(1 << (DIGIT_BITS * digits))
        return _Block(begin, size, digits, bounds, before)

    def _bound_with(self, count: int, begin: int, size: int, digits: int) -> int:
        """Return the smallest bound such that ``count`` of the first ``size`` places have slots below it."""
        slots = 1 << (DIGIT_BITS * digits)
        if size == slots:
            return count
        path = self._shuffle.path(size, begin, digits)
        low, high = 0, slots
        while low < high:
            middle = (low + high) // 2
            if rank(path, middle) < count:
                low = middle + 1
            else:
                high = middle
        return low

    def _block_of(self, position: int) -> _Block:
        number = position >> (DIGIT_BITS * self._digits)
        if self._last is not None and number >= self._whole:
            return self._last
        kept = self._kept
        if kept is None or kept[0] != number:
            kept = self._kept = (number, self._make_whole(number))
        return kept[1]

    def _make_whole(self, number: int) -> _Block:
        begin = number * self.block_size
        before = _cumulative_counts(self._cumulative, begin)
        after = _cumulative_counts(self._cumulative, begin + self.block_size)
        bounds = [high - low for low, high in zip(before, after, strict=True)]
        return _Block(begin, self.block_size, self._digits, bounds, before)

    def _block_with(self, source: int, ordinal: int) -> _Block:
        """Return the block with a sample of a source."""
        has = MAX_N if self.length is None else exact_counts(self.weights, self.length)[source]
        if not 0 <= ordinal < has:
            raise OrderError(f"source {source} has {has} samples in the epoch, so it has no sample {ordinal}")
        number = ordinal * self.total // self.weights[source] >> (DIGIT_BITS * self._digits)
        # The source's share before a bound is off by one sample at most, and a block has more than one of its samples.
        for near in (number + 1, number):
            block = self._block_of(min(near, self._whole) * self.block_size)
            if block.count_before(source) <= ordinal:
                return block
        return self._block_of((number - 1) * self.block_size)

    def _check(self, low: int, high: int, end: int = 0) -> None:
        stop = (MAX_N if self.length is None else self.length - 1) + end
        if low < 0 or high > stop:
            raise OrderError(f"positions must be from 0 to {stop}, got {low} to {high}")

    # Many positions.

    def _locate_chunk(self, positions: Indices) -> tuple[Indices, Indices]:
        numbers: Indices = positions >> (DIGIT_BITS * self._digits)
        low, high = int(numbers.min()), int(numbers.max())
        if self._last is None or high < self._whole:
            return self._locate_in(positions, _Blocks.whole(self, numbers, low, high))
        if low >= self._whole:
            return self._locate_in(positions, _Blocks.one(self._last))
        sources, ordinals = np.empty_like(positions), np.empty_like(positions)
        for inside in (numbers < self._whole, numbers >= self._whole):
            sources[inside], ordinals[inside] = self._locate_chunk(positions[inside])
        return sources, ordinals

    def _locate_in(self, positions: Indices, blocks: _Blocks) -> tuple[Indices, Indices]:
        begins = blocks.begins if blocks.at is None else blocks.begins[blocks.at]
        places = (positions - begins).view(np.uint64)
        path = [step.view(np.int64) for step in self._shuffle.path(places, begins.view(np.uint64), blocks.digits)]
        sources = blocks.sources(slots_of(path))
        low, high, before = blocks.of_sources(sources)
        ordinals = ranks(path, high)
        ordinals -= ranks(path, low)
        ordinals += before
        return sources, ordinals


class _Block(NamedTuple):
    """A block of positions. Source j has the slots from ``bounds[j]`` to ``bounds[j + 1]``. The sources before j have
    ``before[j]`` samples before the block.
    """

    begin: int
    size: int
    digits: int
    bounds: list[int]
    before: list[int]

    def count_before(self, source: int) -> int:
        """Return the number of samples of a source before the block."""
        return self.before[source + 1] - self.before[source]


class _Blocks(NamedTuple):
    """The blocks of many positions, and the block of each position (None: a single block)."""

    begins: Indices
    digits: int
    bounds: Indices
    before: Indices
    at: Indices | None

    @classmethod
    def one(cls, block: _Block) -> _Blocks:
        """Return a single block, of any size."""
        return cls(np.array([block.begin]), block.digits, np.array([block.bounds]), np.diff([block.before]), None)

    @classmethod
    def whole(cls, mixture: BlockMixture, numbers: Indices, low: int, high: int) -> _Blocks:
        """Return blocks of the usual size, by number."""
        at: Indices | None = None
        if high - low < numbers.size:
            distinct, at = np.arange(low, high + 1), numbers - low if high > low else None
        else:
            distinct, at = np.unique(numbers, return_inverse=True)
        begins = distinct * mixture.block_size
        before = _cumulative_array(mixture._cumulative, begins)
        bounds = _cumulative_array(mixture._cumulative, begins + mixture.block_size) - before
        return cls(begins, mixture._digits, bounds, np.diff(before, axis=1), at)

    def sources(self, slots: Indices) -> Indices:
        """Return the source of each slot."""
        inner = self.bounds[:, 1:-1]
        if self.at is None:
            return np.searchsorted(inner[0], slots, side="right")
        found = np.zeros_like(slots)
        for bounds in np.ascontiguousarray(inner.T):
            found += slots >= bounds.take(self.at)
        return found

    def of_sources(self, sources: Indices) -> tuple[Indices, Indices, Indices]:
        """Return, for the source of each position, its first slot, the end of its slots, and its samples before."""
        if self.at is None:
            return self.bounds[0].take(sources), self.bounds[0, 1:].take(sources), self.before[0].take(sources)
        here = sources + self.at * self.bounds.shape[1]
        return self.bounds.take(here), self.bounds.take(here + 1), self.before.take(here - self.at)


def _restored(weights: tuple[int, ...], key: int, length: int | None) -> BlockMixture:
    return BlockMixture(weights, key, length=length)


# Counts at the bounds of blocks.


def _block_digits(total: int, rarest: int) -> int:
    digits = _SMALLEST
    while digits < _LARGEST and rarest << (DIGIT_BITS * digits) < _SAMPLES * total:
        digits += 1
    return digits


def _cumulative(weights: Sequence[int]) -> list[int]:
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    return sums


def _cumulative_counts(cumulative: list[int], position: int) -> list[int]:
    """Return the number of samples of the first j sources before a position, for all j, rounded."""
    total, twice = cumulative[-1], 2 * position
    whole = 2 * total
    return [(twice * part + total) // whole for part in cumulative]


def _cumulative_array(cumulative: list[int], positions: Indices) -> Indices:
    """Return `_cumulative_counts` for an array: one row per position.

    The products may exceed 64 bits. But a quotient computed as a float is right to within one. So the remainder is
    small, and exact in arithmetic modulo 2**64.
    """
    total = cumulative[-1]
    parts = np.array(cumulative, dtype=np.int64)
    periods = positions // np.int64(total)
    rest = (positions - periods * np.int64(total))[:, None]
    product = rest.astype(np.uint64) * (2 * parts).astype(np.uint64) + np.uint64(total)
    quotient = np.floor(rest * (parts / total) + 0.5).astype(np.int64)
    left = (product - quotient.astype(np.uint64) * np.uint64(2 * total)).view(np.int64)
    quotient += left // np.int64(2 * total)
    quotient += periods[:, None] * parts
    return quotient


def _differences(sums: list[int]) -> tuple[int, ...]:
    return tuple(high - low for low, high in itertools.pairwise(sums))
