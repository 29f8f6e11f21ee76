"""Interleaving by deadlines, block by block: no prefix off by one sample, whatever the weights.

With shares ``weight_i / total``, the sample of source i that has j of its own before it may stand from position
``floor(j / share)`` to ``ceil((j + 1) / share) - 1``: earlier its source would be one or more ahead, later one or more
behind. Giving each position to the sample with the earliest deadline among those that may stand there meets all
deadlines (Liu and Layland, "Scheduling algorithms for multiprogramming in a hard-real-time environment", JACM 1973),
but only one after the other. So positions are cut into blocks, and the counts at the bounds of blocks are computed on
their own: each source has the floor or the ceiling of its share there. Which of them have the ceiling is a rounding of
the fractions, in which every prefix of the sources by their next deadline, and every prefix by their last release, is
rounded as well.

Why that is enough: of the sources that have no deadline before t as many are ahead as their fractions add up to,
rounded, and at t at least so many have to be. So from the bound on no interval is asked for more samples than it has
positions, and going back likewise, by the releases. By Hall's theorem a block between two such bounds can be filled,
and then the earliest deadline first fills it.

That needs counts that never go down, which rounding by itself gives where each source has a sample in each block. For
rarer ones, bounds that far apart (spans) are rounded so, and what is between them is halved again and again: see
`_halved`.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Block", "block_size", "counts_before", "make_block"]

_SMALLEST = 4096
_LARGEST = 1 << 18  # a span up to this is one block
_HALVED = 1 << 14  # positions in the blocks of longer spans


class Block(NamedTuple):
    """Consecutive positions: source and ordinal of each, the ordinals beginning with ``before``."""

    begin: int
    before: tuple[int, ...]
    sources: npt.NDArray[np.int32]
    ordinals: npt.NDArray[np.int32]


def block_size(weights: tuple[int, ...]) -> int:
    """Positions in a block: a power of two, in which each source has a sample at least unless one is very rare."""
    span = _span(weights)
    return span if span <= _LARGEST else _HALVED


def counts_before(weights: tuple[int, ...], number: int) -> tuple[int, ...]:
    """How many samples of each source come before a block of the period."""
    return _bound(weights, min(number * block_size(weights), sum(weights)))


def _span(weights: tuple[int, ...]) -> int:
    """A power of two in which each source has a sample at least."""
    rarest = -(-sum(weights) // min(weights))
    return max(_SMALLEST, 1 << (rarest - 1).bit_length())


@lru_cache(maxsize=4)
def make_block(weights: tuple[int, ...], number: int) -> Block:
    """A block of the period, about a microsecond a position; the last one may be shorter."""
    total, size = sum(weights), block_size(weights)
    begin = number * size
    end = min(begin + size, total)
    before, after = _bound(weights, begin), _bound(weights, end)
    had = list(before)
    sources = np.empty(end - begin, np.int32)
    ordinals = np.empty(end - begin, np.int32)
    waiting: list[tuple[int, int]] = []  # (release, source) of the next sample of each source
    ready: list[tuple[int, int]] = []  # (deadline, source)
    for source, weight in enumerate(weights):
        if had[source] < after[source]:
            waiting.append((had[source] * total // weight, source))
    heapq.heapify(waiting)
    for place in range(end - begin):
        while waiting and waiting[0][0] <= begin + place:
            source = heapq.heappop(waiting)[1]
            deadline = min(end, -(-(had[source] + 1) * total // weights[source]))
            heapq.heappush(ready, (deadline, source))
        source = heapq.heappop(ready)[1]
        sources[place], ordinals[place] = source, had[source] - before[source]
        had[source] += 1
        if had[source] < after[source]:
            heapq.heappush(waiting, (had[source] * total // weights[source], source))
    return Block(begin, before, sources, ordinals)


@lru_cache(maxsize=256)
def _bound(weights: tuple[int, ...], position: int) -> tuple[int, ...]:
    """How many samples of each source come before a bound of blocks."""
    total = sum(weights)
    if position < total and position % _span(weights):
        half = position & -position  # it is in the middle between two bounds that are multiples of twice as much
        begin, end = position - half, min(position + half, total)
        return _halved(weights, begin, position, _bound(weights, begin), _bound(weights, end))
    counts = [position * weight // total for weight in weights]
    fractions = {i: position * weight % total for i, weight in enumerate(weights) if position * weight % total}
    # Times are fractions over the weights, which are below 2**50: with 128 bits behind the point different ones differ.
    by_deadline = sorted(fractions, key=lambda i: (((counts[i] + 1) << 128) // weights[i], i))
    by_release = sorted(fractions, key=lambda i: ((counts[i] << 128) // weights[i], i))
    for source in _rounded_up(fractions, by_deadline, by_release, total):
        counts[source] += 1
    return tuple(counts)


def _halved(
    weights: tuple[int, ...], begin: int, middle: int, before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[int, ...]:
    """The counts at a position between two bounds: floors and ceilings that are between theirs and join them.

    Of all sources the fractions add up to how many are ahead, with the ceiling. Two promises are kept at each bound:
    of the sources that have no deadline for some time no more are ahead than their fractions add up to, rounded up;
    and of those that have had no release for some time no more are behind than what their fractions lack of one, added
    and rounded up. Both of the last bounds keep theirs, and what they say of a source here (it cannot go back, nor get
    ahead of what comes) concerns sources that have neither release nor deadline between, so there is always an answer:
    for any such two sets of sources, what both have in common fits into the sum of the two numbers. It is found by
    making those ahead first whose deadlines are next, as few as the releases ask for.
    """
    total = sum(weights)
    counts = [middle * weight // total for weight in weights]
    fractions = {i: middle * weight % total for i, weight in enumerate(weights) if middle * weight % total}
    releases = {i: counts[i] * total // weights[i] for i in fractions}
    ahead = [i for i in fractions if before[i] > counts[i]]  # none of them is released after ``begin``
    ready: list[tuple[int, int]] = []  # (deadline, source)
    members = lacking = 0
    order = sorted(fractions, key=lambda i: releases[i])
    for place, i in enumerate(order):
        members, lacking = members + 1, lacking + total - fractions[i]
        if before[i] <= counts[i] < after[i]:
            heapq.heappush(ready, (((counts[i] + 1) << 128) // weights[i], i))
        following = releases[order[place + 1]] if place + 1 < len(order) else middle
        if following > max(begin, releases[i]):  # all that had no release since some time are here
            while len(ahead) < members - -(-lacking // total):
                ahead.append(heapq.heappop(ready)[1])
    for i in ahead:
        counts[i] += 1
    return tuple(counts)


def _rounded_up(fractions: dict[int, int], first: list[int], second: list[int], one: int) -> list[int]:
    """Which of the fractions (of ``one``, adding up to a whole number) become 1 if the others become 0, such that all
    prefixes of both orders add up to what they did before, rounded up or down.

    Fractions and prefix sums are flows in a network: what flows into a place of an order is the prefix before it and
    its fraction, what flows out is the prefix behind it. While any of them is no whole number there is a cycle of such,
    and along it flow is moved until one more is whole.
    """
    flows = {("x", i): value for i, value in fractions.items()}
    at = [{i: place for place, i in enumerate(order)} for order in (first, second)]
    for side, order in enumerate((first, second)):
        sum_ = 0
        for place, i in enumerate(order[:-1]):
            sum_ += fractions[i]
            flows[(str(side), place)] = sum_
    # Each edge runs from one node to another: of order 0 to its fraction's place in order 1, and along the orders.
    ends: dict[tuple[str, int], tuple[tuple[int, int], tuple[int, int]]] = {}
    for i in fractions:
        ends[("x", i)] = ((0, at[0][i]), (1, at[1][i]))
    for place in range(len(first) - 1):
        ends[("0", place)] = ((0, place + 1), (0, place))
        ends[("1", place)] = ((1, place), (1, place + 1))
    at_node: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for edge, nodes in ends.items():
        for node in nodes:
            at_node.setdefault(node, []).append(edge)
    while True:
        start = next((edge for edge in flows if flows[edge] % one), None)
        if start is None:
            return [i for i in fractions if flows[("x", i)] == one]
        _move_along_a_cycle(start, flows, ends, at_node, one)


def _move_along_a_cycle(
    start: tuple[str, int],
    flows: dict[tuple[str, int], int],
    ends: dict[tuple[str, int], tuple[tuple[int, int], tuple[int, int]]],
    at_node: dict[tuple[int, int], list[tuple[str, int]]],
    one: int,
) -> None:
    path: list[tuple[tuple[str, int], int]] = []  # edges, and +1 where they are gone along, -1 against
    seen: dict[tuple[int, int], int] = {}
    edge, node = start, ends[start][0]
    while node not in seen:
        seen[node] = len(path)
        forward = ends[edge][0] == node
        path.append((edge, 1 if forward else -1))
        node = ends[edge][1 if forward else 0]
        edge = next(other for other in at_node[node] if other != edge and flows[other] % one)
    cycle = path[seen[node] :]
    amount = min(one - flows[edge] % one if sign > 0 else flows[edge] % one for edge, sign in cycle)
    for edge, sign in cycle:
        flows[edge] += sign * amount
