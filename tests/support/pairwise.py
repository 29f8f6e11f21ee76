"""Choose few cases of a product of axes, such that any two values that can meet do meet.

Most faults need one value or two that meet. A product of five axes has thousands of cases, and a few dozen hold every
pair::

    @pytest.mark.parametrize(("kind", "method", "workers"), pairwise(KINDS, ["fork", "spawn"], [1, 2, 5]))

With ``PENSTOCK_TEST_FULL=1`` all cases are run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from interpreter_support import FULL

Pair = tuple[tuple[int, int], tuple[int, int]]
"""Two values of different axes, each as (axis, place on it)."""


def pairwise(*axes: Iterable[Any], allowed: Callable[..., bool] | None = None) -> list[tuple[Any, ...]]:
    """Return the cases to run: those of `covering`, or all that are allowed with ``PENSTOCK_TEST_FULL=1``."""
    cases = product(*axes, allowed=allowed)
    return cases if FULL else covering(*axes, allowed=allowed)


def product(*axes: Iterable[Any], allowed: Callable[..., bool] | None = None) -> list[tuple[Any, ...]]:
    """Return every combination of values that is allowed."""
    return [case for case in itertools.product(*axes) if allowed is None or allowed(*case)]


def covering(*axes: Iterable[Any], allowed: Callable[..., bool] | None = None) -> list[tuple[Any, ...]]:
    """Return cases in which each pair of values stands that stands in any allowed case. The same ones each time.

    Take the case with the most pairs that are missing, until none is missing.
    """
    columns = [list(axis) for axis in axes]
    places = itertools.product(*(range(len(column)) for column in columns))
    cases = {place: tuple(column[at] for column, at in zip(columns, place, strict=True)) for place in places}
    if allowed is not None:
        cases = {place: case for place, case in cases.items() if allowed(*case)}
    pairs = {place: pairs_of(place) for place in cases}
    missing: set[Pair] = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(pairs, key=lambda place: len(pairs[place] & missing))  # the first of several
        chosen.append(best)
        missing -= pairs.pop(best)
    return [cases[place] for place in sorted(chosen)]


def pairs_of(place: tuple[int, ...]) -> frozenset[Pair]:
    """Return the pairs that stand in a case, which is given by the place of each value on its axis."""
    return frozenset(itertools.combinations(enumerate(place), 2))
