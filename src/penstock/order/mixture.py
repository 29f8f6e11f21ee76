"""The order of a mixture: the source at each position, and the number of its samples before that position.

Positions are cut into blocks of B, a power of 64, so that each source has a sample or more in each block. Inside a
block, a keyed permutation maps each place to a slot, and each source has a range of slots::

    position  ->  block k, place t  ->  permutation  ->  slot  ->  source

**From block to block**, the number of samples of the first j sources before a position is their share of it, rounded.
The rounding error does not accumulate, so each source is within one sample of its share at the end of each block.

**Inside a block**, the binary digits of a place are reversed, so that its last digit chooses one half of the slots (van
der Corput), and shuffled: for each aligned run of ``2**i`` places, a hash of (key, run) decides whether its halves
swap. So a run has one slot in each of ``2**i`` equal parts of the slots, and the counts of any prefix are off by at
most about one sample for every two binary digits of B. Which slot of a part a place has is random, so ranks that read
every k-th position see each source by its weight. A division counts the slots of a run below a bound. So the ordinal of
a sample, the number of samples of its source before it, needs no loop over places. Each source is read in its order.

**At the end** of an epoch, the last block also takes the rest that is too short for a block. Its ranges of slots are
chosen to give exact counts at the end as well.

**Weights that change.** Positions of the job count through all epochs: position p of epoch e is ``e * length + p``. A
stage is the range of positions with the same weights. The part of a stage in one epoch is a segment, with its own
`BlockMixture`. Its blocks count from its origin, and only its last block depends on its end. So if a stage begins at
the end of a block, no position before it changes. The counts before an epoch are a sum over stages::

    epoch 0           epoch 1            epoch 2
    |-- stage 0 --|-- stage 1 ------------------------ ...
    | segment | seg |    segment       |    segment
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import OrderError
from penstock.hashing import MASK64, derive_key, mix, mix_array, splitmix64
from penstock.order.permutation import MAX_N, Indices
from penstock.order.shuffle import groups

__all__ = [
    "MIXTURE_ORDER",
    "MIXTURE_VERSION",
    "BlockMixture",
    "StagedMixture",
    "WeightStage",
    "WeightStages",
    "boundary",
    "counts_before",
    "exact_counts",
]

MIXTURE_VERSION = 2
"""Version of the frozen order. States contain it."""
MIXTURE_ORDER = f"mixture-blocks-{MIXTURE_VERSION}"

_DIGIT = 6
"""Binary digits that one hash shuffles."""
_CHUNK = 8192
"""Positions computed at once, which fit the L2 cache."""
_FEW = 8
"""Up to this many positions, computing them one by one is faster than as an array."""


def exact_counts(weights: Sequence[int], position: int) -> tuple[int, ...]:
    """Return the number of samples of each source in the first ``position`` positions: its share, rounded."""
    ends = list(itertools.accumulate(weights, initial=0))
    had = [_share(position, end, ends[-1]) for end in ends]
    return tuple(high - low for low, high in itertools.pairwise(had))


def _share(position: int, part: int, total: int) -> int:
    return (2 * position * part + total) // (2 * total)


# The permutation of a block. The path of a place has a step for each octal digit, from the highest: the tree that
# shuffles it (seven bits, one for each run) and the digit itself, as ``tree << 3 | digit``.


def _make_tables() -> tuple[Indices, Indices]:
    """Return the slot's digit by step, and the number of smaller digits with one below b by ``step << 3 | b``."""
    tree, digit = np.arange(128)[:, None], np.arange(8)[None, :]
    first = digit >> 2 ^ tree & 1
    second = digit >> 1 & 1 ^ tree >> (1 + (digit >> 2)) & 1
    third = digit & 1 ^ tree >> (3 + (digit >> 1)) & 1
    slot = first | second << 1 | third << 2
    below = (slot[:, :, None] < np.arange(8)).astype(np.int64)
    return slot.ravel(), (np.cumsum(below, axis=1) - below).ravel()


_SLOTS, _BELOWS = _make_tables()
# Reading single integers is faster from lists than from arrays.
_SLOT, _BELOW = _SLOTS.tolist(), _BELOWS.tolist()


def _slot(path: list[Any]) -> Any:
    """Return the slot at the end of a path; slots for a path of arrays."""
    slots = _SLOT.__getitem__ if isinstance(path[0], int) else _SLOTS.take
    return sum(slots(step) << 3 * digit for digit, step in enumerate(path))


def _rank(path: list[Any], bound: Any) -> Any:
    """Return the number of places before the path's place whose slots are below a bound; both may be arrays.

    If a run has ``bound`` slots below the bound, each of its eight parts has an eighth of them. The remainder of the
    division goes to the parts whose slots come first.
    """
    one = isinstance(path[0], int)
    slots, belows = (_SLOT.__getitem__, _BELOW.__getitem__) if one else (_SLOTS.take, _BELOWS.take)
    found: Any = 0
    for step in path:
        eighth, rest = bound >> 3, bound & 7
        found += (step & 7) * eighth + belows(step << 3 | rest)
        bound = eighth + (slots(step) < rest)
    return found


def _descend(tree: int, before: int, low: int, high: int) -> tuple[int, int, int, int]:
    """Return the part (one of eight) of a run with the place, and ``before``, ``low``, ``high`` in that part."""
    for digit in range(8):
        slot = _SLOT[tree << 3 | digit]
        begin, end = (low >> 3) + (slot < low & 7), (high >> 3) + (slot < high & 7)
        if before < end - begin:
            return digit, before, begin, end
        before -= end - begin
    raise AssertionError("a run has fewer places than its block counted")


class BlockMixture:
    """The sources at the positions 0, 1, 2, ... of an epoch.

    Args:
        weights: an integer of 0 or more for each source; only their proportions matter.
        key: 64-bit key, see `penstock.order.derive_key`.
        length: number of positions of the epoch, at whose end the counts are `exact_counts`. If the weights are counts
            that add up to the length, these are exactly the weights. None: an endless epoch.

    Raises:
        OrderError: weights are missing, negative, all zero or too large, or the length is outside 0 to 2**62.

    At the end of each block and of the epoch, each source is within one sample of its share, and elsewhere within
    `bound`. Within these limits the source at a position is random. The ordinals of a source are consecutive.

    Cost: a few integers per source; two to nine hashes per position, one for each base-64 digit of the block size.

    >>> mixture = BlockMixture([3, 1], key=7, length=8)
    >>> mixture.counts(8)
    (6, 2)
    >>> [mixture.position(source, ordinal) for source, ordinal in zip(*mixture.locate(np.arange(8)))]
    [0, 1, 2, 3, 4, 5, 6, 7]
    """

    def __init__(self, weights: Sequence[int], key: int = 0, *, length: int | None = None) -> None:
        if not weights or min(weights) < 0 or not any(weights):
            raise OrderError(f"weights must be 0 or more, and at least one positive: got {list(weights)}")
        divisor = math.gcd(*weights)
        self.weights = tuple(int(weight) // divisor for weight in weights)
        self.total = sum(self.weights)
        # Up to this limit, quotients computed as floats are correct to within one.
        if self.total > 1 << 50:
            raise OrderError(f"the weights must add up to at most 2**50, got {list(weights)}")
        if length is not None and not 0 <= length <= MAX_N:
            raise OrderError(f"an epoch has 0 to 2**62 samples, got {length}")
        self.key = operator.index(key) & MASK64
        self.length = None if length is None else operator.index(length)
        present = [weight for weight in self.weights if weight]
        self._bits = 2 * _DIGIT
        while min(present) << self._bits < self.total:
            self._bits += _DIGIT
        self.block_size = 1 << self._bits
        """Positions in a block: the smallest power of 64, from 4,096 on, with a sample of the rarest source."""
        self._keys = [mix(self.key, level) for level in range(self._bits // _DIGIT)]
        self._end = MAX_N if self.length is None else self.length
        self._whole = MAX_N if self.length is None else max(0, self.length // self.block_size - 1)
        self.last_begin = min(self._whole << self._bits, MAX_N + 1)
        """Begin of the last block, which alone depends on the length."""
        self._sources = np.flatnonzero(self.weights)
        # Edges lie between these sources. Before edge j are the samples of the first j of them.
        self._edges = list(itertools.accumulate(present, initial=0))
        quotients, rests = zip(*(divmod(edge << self._bits, self.total) for edge in self._edges), strict=True)
        self._quotients, self._rests = np.array(quotients), np.array(rests)
        self._parts = self._rests / self.total

    def __repr__(self) -> str:
        return f"BlockMixture({list(self.weights)}, key={self.key:#x}, length={self.length})"

    @property
    def bound(self) -> int:
        """Upper bound on the error of a source's count in any prefix of the epoch, in samples; never reached.

        A prefix of a block is a sum or difference of runs: at most one for every two binary digits, and one more. Each
        run is off by less than one, and the start of the block by at most one; as much again in the last block.
        """
        whole = self._bits // 2 + 2
        if self.length is None:
            return whole
        ragged = 2 * ((self.length - self.last_begin).bit_length() // 2 + 1) + 1
        return max(whole, ragged) if self._whole else ragged

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the source at each position, and the number of its samples before: two int64 arrays.

        Raises:
            OrderError: a position is negative or beyond the end.
        """
        positions = np.asarray(positions, dtype=np.int64)
        given = positions.reshape(-1)
        if given.size:
            self._check(int(given.min()), int(given.max()), self._end - 1)
        found = np.empty((2, given.size), dtype=np.int64)
        if given.size <= _FEW:
            for at, position in enumerate(given.tolist()):
                found[:, at] = self._locate(position, last=position >= self.last_begin)
            return found[0].reshape(positions.shape), found[1].reshape(positions.shape)
        for begin in range(0, given.size, _CHUNK):
            chunk = given[begin : begin + _CHUNK]
            for last, here in groups((chunk >= self.last_begin).astype(np.int8)):
                found[:, begin : begin + _CHUNK][:, here] = self._locate(chunk[here], last=bool(last))
        return found[0].reshape(positions.shape), found[1].reshape(positions.shape)

    def counts(self, position: int) -> tuple[int, ...]:
        """Return the number of samples of each source before a position; the end of the epoch is allowed, too."""
        self._check(position, position, self._end)
        place, last = np.array([position]), position >= self.last_begin
        before, bounds = self._edges_at(np.arange(len(self._edges)), place >> self._bits, last=last)
        counts = np.zeros(len(self.weights), dtype=np.int64)
        counts[self._sources] = np.diff(before + _rank(self._path(place, last=last), bounds))
        return tuple(counts.tolist())

    def position(self, source: int, ordinal: int) -> int:
        """Return the position of sample ``ordinal`` of a source: the inverse of `locate`.

        Raises:
            OrderError: the source has no such sample in this epoch.
        """
        source, ordinal = operator.index(source), operator.index(ordinal)
        has = exact_counts(self.weights, self._end)[source]
        if not 0 <= ordinal < has:
            raise OrderError(f"source {source} has {has} samples here, so it has no sample {ordinal}")
        edge = int(self._sources.searchsorted(source))
        # The source's share before a block is off by less than one sample, and a block has one or more of its samples.
        guess = ordinal * self.total // self.weights[source] >> self._bits
        for run in (min(guess + 1, self._whole), min(guess, self._whole)):
            last = run == self._whole
            (begin, low), (end, high) = (self._edges_at(each, run, last=last) for each in (edge, edge + 1))
            rest = ordinal - int(end - begin)
            if rest >= 0:
                break
        if last:
            digit, rest, low, high = _descend(0, rest, int(low), int(high))
            run += digit
        for key in reversed(self._keys):
            word = splitmix64(key ^ run)
            upper, rest, low, high = _descend(word & 127, rest, low, high)
            lower, rest, low, high = _descend(word >> 7 * upper + 7 & 127, rest, low, high)
            run = run << _DIGIT | upper << 3 | lower
        return run

    def _check(self, low: int, high: int, stop: int) -> None:
        if low < 0 or high > stop:
            raise OrderError(f"positions must be from 0 to {stop}, got {low} to {high}")

    # These take a position, or an array of positions that all lie in the last block, or none of them.

    def _locate(self, positions: Any, *, last: bool) -> tuple[Any, Any]:
        """Return sources and ordinals at positions."""
        path, blocks = self._path(positions, last=last), positions >> self._bits
        slots = _slot(path)
        firsts = self._last[1] if last else self._quotients
        edges = (bisect.bisect(firsts, slots) if isinstance(slots, int) else firsts.searchsorted(slots, "right")) - 1
        before, bounds = self._edges_at(edges, blocks, last=last)
        # Rounding moves the first slot behind an edge by less than one slot.
        wrong = bounds > slots
        more, ends = self._edges_at(edges + 1 - 2 * wrong, blocks, last=last)
        return self._sources.take(edges - wrong), abs(more - before + _rank(path, ends) - _rank(path, bounds))

    def _path(self, positions: Any, *, last: bool) -> list[Any]:
        """Return the path of each position; in the last block, its first digit is 0 in the first B places, else 1."""
        path = [(positions >> self._bits) - self._whole] if last else []
        for level in reversed(range(len(self._keys))):
            key, run = self._keys[level], positions >> _DIGIT * (level + 1)
            one = isinstance(run, int)
            word: Any = splitmix64(key ^ run) if one else mix_array(key, run.view(np.uint64)).view(np.int64)
            upper = positions >> _DIGIT * level + 3 & 7
            path.append((word & 127) << 3 | upper)
            path.append((word >> 7 * upper + 7 & 127) << 3 | positions >> _DIGIT * level & 7)
        return path

    def _edges_at(self, edges: Any, blocks: Any, *, last: bool) -> tuple[Any, Any]:
        """Return the number of samples before edges in all earlier blocks, and the first slots behind the edges."""
        if last:
            return self._last[0].take(edges), self._last[1].take(edges)
        if isinstance(blocks, int):
            before = _share(blocks << self._bits, self._edges[edges], self.total)
            return before, _share((blocks + 1) << self._bits, self._edges[edges], self.total) - before
        rests, quotients, turn = 2 * self._rests.take(edges), self._quotients.take(edges), 2 * self.total
        # The products may exceed 64 bits. But the quotient computed as a float is never too large, and too small by one
        # at most. So the remainder is small, and exact in arithmetic modulo 2**64.
        before = (blocks * self._parts.take(edges) + 0.1).astype(np.int64)
        left = blocks * rests - before * turn + self.total
        more = left >= turn
        return before + more + blocks * quotients, quotients + (left - more * turn + rests >= turn)

    @cached_property
    def _last(self) -> tuple[Indices, Indices]:
        """The results of `_edges_at` for all edges in the last block."""
        path = self._path(np.array([self._end]), last=True)
        before = np.array([_share(self.last_begin, edge, self.total) for edge in self._edges])
        wanted = np.array([_share(self._end, edge, self.total) for edge in self._edges]) - before
        low, high = np.zeros_like(before), np.full_like(before, 8 << self._bits)
        while (low < high).any():
            middle = (low + high) >> 1
            fewer = _rank(path, middle) < wanted
            low, high = np.where(fewer, middle + 1, low), np.where(fewer, high, middle)
        return before, low


class WeightStage(NamedTuple):
    """The weights of all sources from a position of the job on; weight 0 leaves a source out."""

    begin: int
    weights: tuple[int, ...]


WeightStages = tuple[WeightStage, ...]
"""Stages in ascending order; the first begins at 0, and all have as many weights."""


def counts_before(stages: WeightStages, epoch: int, length: int) -> tuple[int, ...]:
    """Return the number of samples of each source in all epochs before one, as Python integers. Costs O(stages)."""
    had, stop = [0] * len(stages[0].weights), epoch * length
    ends = [*(stage.begin for stage in stages[1:]), stop]
    for (begin, weights), end in zip(stages, ends, strict=True):
        if begin >= stop:
            break
        positions = min(end, stop) - begin
        # Up to the end of the first epoch, in whole epochs, and in the last one.
        head = min(-begin % length, positions)
        whole, tail = divmod(positions - head, length)
        for times, part in ((1, head), (whole, length), (1, tail)):
            had = [before + times * count for before, count in zip(had, exact_counts(weights, part), strict=True)]
    return tuple(had)


class _Segment(NamedTuple):
    """The part of an epoch in one stage, from ``origin`` to ``end``; ``before`` it are these samples of each source."""

    origin: int
    end: int
    before: Indices
    mixture: BlockMixture


class StagedMixture:
    """The sources at the positions of one epoch. Each segment has the guarantees of `BlockMixture`.

    Args:
        stages: the weights of all epochs.
        length: number of positions of each epoch.
        epoch: number of the epoch.
        seed: seed of the order.

    Cost: O(stages) memory.
    """

    def __init__(self, stages: WeightStages, length: int, epoch: int = 0, seed: int = 0) -> None:
        self.length = length
        begin, end = epoch * length, (epoch + 1) * length
        first = max(0, bisect.bisect_right([stage.begin for stage in stages], begin) - 1)
        bounds = [begin, *(stage.begin for stage in stages[first + 1 :] if stage.begin < end), end]
        had = np.zeros(len(stages[0].weights), dtype=np.int64)
        self.segments: list[_Segment] = []
        for stage, (low, high) in zip(stages[first:], itertools.pairwise(bounds), strict=False):
            stream = MIXTURE_ORDER if low == begin else f"{MIXTURE_ORDER} at {low - begin}"
            mixture = BlockMixture(stage.weights, derive_key(seed, epoch, stream), length=high - low)
            self.segments.append(_Segment(low - begin, high - begin, had, mixture))
            had = had + exact_counts(stage.weights, high - low)
        self._later = [segment.origin for segment in self.segments[1:]]

    @property
    def bound(self) -> int:
        """Upper bound on the error of a source's count in any prefix of a segment, in samples; never reached."""
        return max(segment.mixture.bound for segment in self.segments)

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the source at each position of the epoch, and the number of its samples before: int64 arrays."""
        if len(self.segments) == 1 or not len(positions):
            return self.segments[0].mixture.locate(positions)
        first, last = (self.segment_at(int(end)) for end in (positions.min(), positions.max()))
        if first is last:
            sources, ordinals = first.mixture.locate(positions - first.origin)
            return sources, ordinals + first.before.take(sources)
        sources, ordinals = np.empty_like(positions), np.empty_like(positions)
        for number, here in groups(np.searchsorted(self._later, positions, "right")):
            origin, _, before, mixture = self.segments[number]
            sources[here], inside = mixture.locate(positions[here] - origin)
            ordinals[here] = inside + before.take(sources[here])
        return sources, ordinals

    def segment_at(self, position: int) -> _Segment:
        """Return the segment of a position; the last one for the end of the epoch."""
        return self.segments[bisect.bisect_right(self._later, position)]

    def counts(self, position: int) -> tuple[int, ...]:
        """Return the number of samples of each source before a position; the end of the epoch is allowed, too."""
        origin, _, before, mixture = self.segment_at(position)
        return tuple((before + mixture.counts(position - origin)).tolist())

    def position(self, source: int, ordinal: int) -> int:
        """Return the position of a source's sample with ``ordinal`` samples of that source before it in the epoch.

        Raises:
            OrderError: the source has no such sample in this epoch.
        """
        later = [int(segment.before[source]) for segment in self.segments[1:]]
        origin, _, before, mixture = self.segments[bisect.bisect_right(later, ordinal)]
        return origin + mixture.position(source, ordinal - int(before[source]))


def boundary(stages: WeightStages, length: int, at: int) -> int:
    """Return the first position of the job, from ``at`` on, at which new weights change nothing before it.

    This is the end of a block (not of the last block of a segment), or the end of the segment.
    """
    epoch, place = divmod(at, length)
    origin, end, _, mixture = StagedMixture(stages, length, epoch).segment_at(place)
    block_end = -((origin - place) // mixture.block_size) * mixture.block_size
    return epoch * length + (origin + block_end if block_end <= mixture.last_begin else end)
