"""Iteration of an epoch plan, index by index.

The loops run in C: the plan returns blocks of indices, each block becomes lists of Python ints, and a `CountedIterator`
yields their items. No Python code runs per item, not even a counter.

The first block is small, so that the first item is ready soon. Later blocks grow until NumPy's cost per call is
negligible. Memory is constant.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from penstock.plan.epoch import EpochPlan, length_of

__all__ = ["CountedIterator", "index_lists"]

_FIRST_BLOCK = 256
_LARGEST_BLOCK = 32768
_LIST = 1024
"""Lists of this many ints stay in the CPU's cache until they are yielded."""

T = TypeVar("T")


class CountedIterator(Generic[T]):
    """Yields the items of one list after another, once, and counts them.

    The count is computed from the rest of the current list (`operator.length_hint`), so it is always exact.

    >>> run = CountedIterator([[0, 1], [2]])
    >>> items = iter(run)
    >>> next(items), next(items), run.yielded
    (0, 1, 2)
    """

    def __init__(self, lists: Iterable[list[T]]) -> None:
        self._lists = lists
        # One attribute for both values, so that another thread always reads a consistent pair.
        self._current: tuple[Iterator[T], int] = iter(()), 0

    def __iter__(self) -> Iterator[T]:
        # Not stored here: the iterator would be in a reference cycle, which keeps its plan in memory.
        return itertools.chain.from_iterable(self._follow())

    def _follow(self) -> Iterator[Iterator[T]]:
        end = 0
        for items in self._lists:
            end += len(items)
            iterator = iter(items)
            self._current = iterator, end
            yield iterator

    @property
    def yielded(self) -> int:
        """Number of items yielded so far."""
        iterator, end = self._current
        return end - operator.length_hint(iterator)


def index_lists(run: EpochPlan) -> Iterator[list[int]]:
    """Yield the indices of an epoch plan in lists of Python ints. The plan is exhausted after the last one."""
    begin, size, length = 0, _FIRST_BLOCK, length_of(run)
    while begin < length:
        stop = min(begin + size, length)
        block, _ = run.block(begin, stop)
        for first in range(0, stop - begin, _LIST):
            yield block[first : first + _LIST].tolist()
        begin, size = stop, min(size * 4, _LARGEST_BLOCK)
    run.exhaust()
