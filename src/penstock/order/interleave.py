"""Interleaving: which of several sources stands at a position, so that every prefix holds them in their proportions.

Of weights ``3, 1`` the sequence is 0 0 0 1 | 0 0 0 1 | ...: after p positions source i has had its share of p, ``p *
weight_i / total``, to within less than one. Source and ordinal of any position are computed, never looked up in a list
of the whole, so a position is the only state there is.

Two ways lead there. Sources are the leaves of a binary tree, and each node deals what it gets to its two sides by
rounding, ``left(n) = round(n * w_left / w)``. A leaf is then off by half a sample of its own and its part of what the
nodes above it are off: below one always for up to four sources, for more it depends on the weights. Where it is not,
and where the weights, as coprime integers, have a small sum, positions are dealt by deadlines, a block at a time (see
`penstock.order.deadlines`), which is below one for any weights.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from penstock.errors import OrderError
from penstock.order.deadlines import block_size, counts_before, make_block
from penstock.order.permutation import MAX_N, Indices

__all__ = ["Interleave"]

_SMALL = 4096  # periods up to this are one block by deadlines, which is faster than a tree
_MAX_TOTAL = 1 << 50  # quotients of such numbers are right to within one as floats
_EXACT = 8  # the best tree of so many leaves is found by trying all, 3 ** n of them


class Interleave:
    """The sources of all positions 0, 1, 2, ... without end.

    Args:
        weights: a positive integer for each source; only their proportions matter, and of counts that add up to N the
            first N positions hold exactly so many of each.

    Raises:
        OrderError: no weights, or weights that are not positive or too large.

    Cost: O(1) memory in the number of positions. By the tree, some vectorised operations a position and level; by
    deadlines, a microsecond for each position of the blocks (4096 to 262144 positions) that are touched, the last few
    of which are kept.

    >>> mix = Interleave([3, 1])
    >>> [source.tolist() for source in mix.locate(np.arange(8))]
    [[0, 0, 0, 1, 0, 0, 0, 1], [0, 1, 2, 0, 3, 4, 5, 1]]
    >>> mix.counts(6)
    (5, 1)
    """

    def __init__(self, weights: Sequence[int]) -> None:
        if not weights or min(weights) < 1:
            raise OrderError(f"every source needs a weight of 1 or more, got {list(weights)}")
        divisor = math.gcd(*weights)
        self.weights = tuple(int(weight) // divisor for weight in weights)
        self.total = sum(self.weights)
        """Length of the period: after so many positions every source has had its weight exactly."""
        if self.total > _MAX_TOTAL:
            raise OrderError(f"weights that add up to more than 2**50 cannot be interleaved, got {list(weights)}")
        self._tree: _Node | None = None
        self.bound = Fraction(1)
        """No source is ever off by this much."""
        self._size = block_size(self.weights)
        if self.total > _SMALL:
            tree, excess = _best_tree(self.weights)  # it is off by (1 + excess) / 2 at most
            if excess < 1:
                self._tree = tree

    def __repr__(self) -> str:
        return f"Interleave({list(self.weights)})"

    def __reduce__(self) -> tuple[type[Interleave], tuple[list[int]]]:
        return Interleave, (list(self.weights),)

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        """The source at each position, and how many of its samples come before: two int64 arrays.

        Raises:
            OrderError: a negative position, or one beyond 2**62.
        """
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) <= MAX_N:
            raise OrderError(f"positions have to be from 0 to 2**62, got {positions.min()} to {positions.max()}")
        periods: Indices = positions // np.int64(self.total)
        rest: Indices = positions - periods * np.int64(self.total)
        found, local = np.empty_like(rest), np.empty_like(rest)
        if self._tree is None:
            self._look_up(rest, found, local)
        else:
            _descend(self._tree, np.arange(rest.size).reshape(rest.shape), rest, found, local)
        weights: Indices = np.array(self.weights, dtype=np.int64)
        before: Indices = local + periods * weights[found]
        return found, before

    def counts(self, position: int) -> tuple[int, ...]:
        """How many samples of each source come before a position."""
        periods, rest = divmod(position, self.total)
        inside = [0] * len(self.weights)
        if self._tree is not None:
            _count(self._tree, rest, inside)
        elif rest % self._size == 0:
            inside = list(counts_before(self.weights, rest // self._size))
        else:
            block = make_block(self.weights, rest // self._size)
            more = np.bincount(block.sources[: rest - block.begin], minlength=len(self.weights)).tolist()
            inside = [before + count for before, count in zip(block.before, more, strict=True)]
        return tuple(periods * weight + count for weight, count in zip(self.weights, inside, strict=True))

    def position(self, source: int, ordinal: int) -> int:
        """Where the sample of a source stands that has ``ordinal`` of them before it. O(log) calls of `counts`."""
        weight = self.weights[source]
        low = max(0, (ordinal - 2) * self.total // weight)
        high = (ordinal + 3) * self.total // weight + 1
        if self._tree is None:  # first the block: counts at its bounds need not fill it
            periods, ordinal = divmod(ordinal, weight)
            bounds = range(-(-self.total // self._size))
            number = bisect.bisect_right(bounds, ordinal, key=lambda k: counts_before(self.weights, k)[source]) - 1
            low = periods * self.total + number * self._size
            high, ordinal = low + self._size, periods * weight + ordinal
        return low + bisect.bisect_left(range(low, high), ordinal + 1, key=lambda p: self.counts(p + 1)[source])

    def _look_up(self, places: Indices, found: Indices, local: Indices) -> None:
        numbers = places // np.int64(self._size)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            block = make_block(self.weights, number)
            inside = places[here] - block.begin
            found[here] = block.sources[inside]
            local[here] = block.ordinals[inside] + np.array(block.before, dtype=np.int64)[found[here]]


# The tree.


class _Node(NamedTuple):
    """A leaf has a source and no sides."""

    weight: int
    source: int = -1
    sides: tuple[_Node, _Node] | None = None


def _left(node: _Node, count: int) -> int:
    """How many of the first ``count`` samples of a node are its left side's."""
    assert node.sides is not None
    return (2 * count * node.sides[0].weight + node.weight) // (2 * node.weight)


def _left_array(node: _Node, counts: Indices) -> Indices:
    """The same for an array of counts up to the node's weight.

    The product may pass 64 bits. Its quotient as a float is right to within one, and the remainder that this leaves is
    small, so it is right in arithmetic modulo 2**64.
    """
    assert node.sides is not None
    left, double = np.uint64(2 * node.sides[0].weight), np.uint64(2 * node.weight)
    product = counts.astype(np.uint64) * left + np.uint64(node.weight)
    quotient = np.floor(counts * (node.sides[0].weight / node.weight) + 0.5).astype(np.int64)
    rest = (product - quotient.astype(np.uint64) * double).view(np.int64)
    result: Indices = quotient + rest // np.int64(2 * node.weight)
    return result


def _descend(node: _Node, places: Indices, counts: Indices, found: Indices, local: Indices) -> None:
    """Write source and ordinal of the samples of a node that have ``counts`` of its samples before them."""
    if node.sides is None:
        found.flat[places] = node.source
        local.flat[places] = counts
        return
    before = _left_array(node, counts)
    is_left = _left_array(node, counts + 1) > before
    for side, chosen, ordinals in ((0, is_left, before), (1, ~is_left, counts - before)):
        if chosen.any():
            _descend(node.sides[side], places[chosen], ordinals[chosen], found, local)


def _count(node: _Node, count: int, inside: list[int]) -> None:
    if node.sides is None:
        inside[node.source] = count
        return
    left = _left(node, count)
    _count(node.sides[0], left, inside)
    _count(node.sides[1], count - left, inside)


class _Part(NamedTuple):
    """A subtree, and how far its worst leaf is below its limit: the least ``1 / leaf - sum(1 / nodes above)``."""

    slack: Fraction
    node: _Node


def _joined(one: _Part, other: _Part) -> _Part:
    weight = one.node.weight + other.node.weight
    return _Part(min(one.slack, other.slack) - Fraction(1, weight), _Node(weight, sides=(one.node, other.node)))


@lru_cache(maxsize=64)
def _best_tree(weights: tuple[int, ...]) -> tuple[_Node, Fraction]:
    """A tree whose leaves have light ancestors, and the most that a leaf has: ``max(leaf * sum(1 / nodes above))``, in
    which the root, whose count is exact, does not take part. A leaf is off by at most half of one more than that."""
    leaves = [_Part(Fraction(1, weight), _Node(weight, source)) for source, weight in enumerate(weights)]
    if len(leaves) == 1:
        return leaves[0].node, Fraction(0)
    if len(leaves) <= _EXACT:
        trees = [_try_all(leaves)]
    else:
        trees = [_pair_up(leaves, choices) for choices in (2, 4, 6)]
    return min(((tree, _excess(tree, Fraction(0), True)) for tree in trees), key=lambda found: found[1])


def _try_all(leaves: list[_Part]) -> _Node:
    best: dict[int, _Part] = {1 << i: leaf for i, leaf in enumerate(leaves)}
    for chosen in range(1, 1 << len(leaves)):
        if chosen in best:
            continue
        lowest = chosen & -chosen
        rest = part = chosen ^ lowest
        pairs = []
        while part:
            part = (part - 1) & rest
            pairs.append((best[part | lowest], best[rest ^ part]))
        best[chosen] = _joined(*max(pairs, key=lambda pair: min(pair[0].slack, pair[1].slack)))
    return best[(1 << len(leaves)) - 1].node


def _pair_up(leaves: list[_Part], choices: int) -> _Node:
    """Join two of the lightest again and again, those that leave most room for their weight."""
    parts = list(leaves)
    while len(parts) > 1:
        parts.sort(key=lambda part: part.node.weight)
        light = parts[:choices]
        pairs = [_joined(a, b) for i, a in enumerate(light) for b in light[i + 1 :]]
        best = max(pairs, key=lambda part: part.slack * part.node.weight)
        parts = [part for part in parts if part.node not in (best.node.sides or ())] + [best]
    return parts[0].node


def _excess(node: _Node, above: Fraction, root: bool) -> Fraction:
    if node.sides is None:
        return node.weight * above
    own = above if root else above + Fraction(1, node.weight)
    return max(_excess(side, own, False) for side in node.sides)
