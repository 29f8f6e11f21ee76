"""Choose few cases of a product of axes, such that any two values that can meet do meet.

Most faults need one value or two that meet. A product of five axes has thousands of cases, and a few dozen hold every
pair::

    @pytest.mark.parametrize(("kind", "method", "workers"), pairwise(KINDS, ["fork", "spawn"], [1, 2, 5]))

Where even those are too many, `each_value` takes few in which each value stands at least once. All cases are run with
``PENSTOCK_TEST_FULL=1``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from interpreter_support import FULL

Values = tuple[tuple[int, int], ...]
"""Values of different axes, each as (axis, place on it)."""


def pairwise(*axes: Iterable[Any], allowed: Callable[..., bool] | None = None) -> list[tuple[Any, ...]]:
    """Return the cases to run: those of `covering`, or all that are allowed with ``PENSTOCK_TEST_FULL=1``."""
    cases = product(*axes, allowed=allowed)
    return cases if FULL else covering(*axes, allowed=allowed)


def each_value(*axes: Iterable[Any], allowed: Callable[..., bool] | None = None) -> list[tuple[Any, ...]]:
    """Return few cases in which each value of each axis stands at least once, or all with ``PENSTOCK_TEST_FULL=1``."""
    cases = product(*axes, allowed=allowed)
    return cases if FULL else covering(*axes, allowed=allowed, meet=1)


def product(*axes: Iterable[Any], allowed: Callable[..., bool] | None = None) -> list[tuple[Any, ...]]:
    """Return every combination of values that is allowed."""
    return [case for case in itertools.product(*axes) if allowed is None or allowed(*case)]


def covering(*axes: Iterable[Any], allowed: Callable[..., bool] | None = None, meet: int = 2) -> list[tuple[Any, ...]]:
    """Return cases in which any `meet` values stand together that do in any allowed case. The same ones each time.

    Take the case with the most combinations that are missing, until none is missing: the first of several, or of those
    with single values (`meet` is 1) one whose pairs have stood together least, so that short axes go round.
    """
    columns = [list(axis) for axis in axes]
    places = itertools.product(*(range(len(column)) for column in columns))
    cases = {place: tuple(column[at] for column, at in zip(columns, place, strict=True)) for place in places}
    if allowed is not None:
        cases = {place: case for place, case in cases.items() if allowed(*case)}
    found = {place: frozenset(itertools.combinations(enumerate(place), meet)) for place in cases}
    missing: set[Values] = set().union(*found.values())
    chosen: list[tuple[int, ...]] = []
    stood: Counter[Values] = Counter()
    while missing:
        new = {place: len(values & missing) for place, values in found.items()}
        best = max(new.values())
        place = min((place for place in new if new[place] == best), key=lambda place: _often(place, stood))
        chosen.append(place)
        missing -= found.pop(place)
        if meet == 1:
            stood.update(itertools.chain.from_iterable(itertools.combinations(enumerate(place), n) for n in (1, 2)))
    return [cases[place] for place in sorted(chosen)]


def _often(place: tuple[int, ...], stood: Counter[Values]) -> int:
    """Return how often the values and pairs of a case have stood."""
    return sum(stood[values] for n in (1, 2) for values in itertools.combinations(enumerate(place), n))
