"""Iteration of an epoch plan, index by index or batch by batch.

The loops run in C: the plan returns blocks of indices, each block becomes lists of Python ints, and ``itertools.chain``
yields their items. No Python code runs per item, not even a counter: the count is computed from the rest of the current
list (`operator.length_hint`), so it is always exact.

The first block is small, so that the first item is ready soon. Later blocks grow until NumPy's cost per call is
negligible. Memory is constant.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from penstock.order.permutation import MAX_N, Indices

__all__ = ["BatchIterator", "IndexIterator", "batch_blocks", "batches"]

IndexRange = Callable[[int, int], Indices]
"""A function that returns the values ``start`` to ``stop`` of an epoch plan: int64 of shape (stop - start,)."""

_FIRST_BLOCK = 256
_LARGEST_BLOCK = 32768
_LIST = 1024
"""Lists of this many ints stay in the CPU's cache until they are yielded."""
_LARGEST_BATCH_BLOCK = 8192
"""Samples in a block of batches with positions: enough to hide NumPy's cost per call."""
_MOST_BATCHES = 256
"""More lists at a time would trigger Python's garbage collector repeatedly."""

T = TypeVar("T")


class _CountedIterator(Generic[T]):
    """Yields the items of one list after another, and counts them."""

    def __init__(self, lists: Iterable[list[T]]) -> None:
        self._progress: _Progress[T] = _Progress()
        self._items = itertools.chain.from_iterable(self._progress.follow(lists))

    def __iter__(self) -> Iterator[T]:
        """Return the iterator. Every call returns the same one."""
        return self._items

    @property
    def yielded(self) -> int:
        """Number of items yielded so far."""
        return self._progress.count()


class _Progress(Generic[T]):
    """The current list of a `_CountedIterator`. A separate object, so that the iterator is in no reference cycle."""

    def __init__(self) -> None:
        # One attribute for both values, so that another thread always reads a consistent pair.
        self._current: tuple[Iterator[T], int] = iter(()), 0

    def follow(self, lists: Iterable[list[T]]) -> Iterator[Iterator[T]]:
        end = 0
        for items in lists:
            end += len(items)
            iterator = iter(items)
            self._current = iterator, end
            yield iterator

    def count(self) -> int:
        iterator, end = self._current
        return end - operator.length_hint(iterator)


class IndexIterator(_CountedIterator[int]):
    """Iterates the indices of an epoch plan as Python ints.

    Args:
        indices: of the plan.
        length: number of indices; None for an endless plan.
        at_end: called once, at the ``next`` after the last index.

    ``iter()`` returns an iterator whose ``next`` is C code. ``yielded`` is the number of indices yielded so far.

    >>> import numpy as np
    >>> run = IndexIterator(lambda start, stop: np.arange(start, stop), 1000)
    >>> indices = iter(run)
    >>> next(indices), next(indices), run.yielded
    (0, 1, 2)
    """

    def __init__(self, indices: IndexRange, length: int | None, *, at_end: Callable[[], object] | None = None) -> None:
        super().__init__(_index_lists(indices, MAX_N if length is None else length, at_end))


class BatchIterator(_CountedIterator[list[int]]):
    """Iterates an epoch plan in batches: lists of Python ints.

    Args:
        indices, length: as for `IndexIterator`.
        batch_size: of every batch except the last.
        drop_last: leave out the last batch if it is not full.
        at_end: called once: at the ``next`` for a last batch that is not full, or else after the last batch.
        one_by_one: read the plan only as far as the batch that is yielded.

    ``iter()`` returns an iterator whose ``next`` is C code. ``yielded`` is the number of batches yielded so far.
    """

    def __init__(
        self,
        indices: IndexRange,
        length: int | None,
        *,
        batch_size: int,
        drop_last: bool,
        at_end: Callable[[], object] | None = None,
        one_by_one: bool = False,
    ) -> None:
        spans = _batch_spans(length, batch_size, drop_last, at_end, one_by_one=one_by_one)
        super().__init__(_batch_lists(indices, spans, _per_list(_LIST, batch_size)))


def batch_blocks(
    indices: IndexRange,
    positions: IndexRange,
    length: int | None,
    *,
    batch_size: int,
    drop_last: bool,
    at_end: Callable[[], object] | None = None,
    one_by_one: bool = False,
) -> Iterator[tuple[list[list[int]], Indices]]:
    """Yield blocks of batches: a list of lists of indices, and their positions, int64 of shape (batches, batch size).

    Arguments are as for `BatchIterator`, with the plan's ``positions``. The first block has one batch. Computing the
    keys of samples from the positions is cheapest for a whole block.
    """
    step = _per_list(_LARGEST_BATCH_BLOCK, batch_size)
    for begin, stop, width in _batch_spans(length, batch_size, drop_last, at_end, one_by_one=one_by_one):
        rows, places = indices(begin, stop).reshape(-1, width), positions(begin, stop).reshape(-1, width)
        for first in range(0, len(rows), step):
            yield rows[first : first + step].tolist(), places[first : first + step]


def batches(
    indices: IndexRange,
    positions: IndexRange,
    length: int | None,
    *,
    batch_size: int,
    drop_last: bool,
    at_end: Callable[[], object] | None = None,
    one_by_one: bool = False,
) -> Iterator[tuple[list[int], Indices]]:
    """Yield batches one by one: a list of indices, and the int64 array of their positions.

    Arguments are as for `batch_blocks`.
    """
    blocks = batch_blocks(
        indices,
        positions,
        length,
        batch_size=batch_size,
        drop_last=drop_last,
        at_end=at_end,
        one_by_one=one_by_one,
    )
    return itertools.chain.from_iterable(itertools.starmap(zip, blocks))


def _index_lists(indices: IndexRange, length: int, at_end: Callable[[], object] | None) -> Iterator[list[int]]:
    begin, size = 0, _FIRST_BLOCK
    while begin < length:
        stop = min(begin + size, length)
        block = indices(begin, stop)
        for first in range(0, stop - begin, _LIST):
            yield block[first : first + _LIST].tolist()
        begin, size = stop, min(size * 4, _LARGEST_BLOCK)
    if at_end is not None:
        at_end()


def _batch_lists(
    indices: IndexRange, spans: Iterable[tuple[int, int, int]], batches_per_list: int
) -> Iterator[list[list[int]]]:
    for begin, stop, width in spans:
        block = indices(begin, stop).reshape(-1, width)
        for first in range(0, len(block), batches_per_list):
            yield block[first : first + batches_per_list].tolist()


def _per_list(samples: int, batch_size: int) -> int:
    return max(1, min(samples // batch_size, _MOST_BATCHES))


def _batch_spans(
    length: int | None,
    batch_size: int,
    drop_last: bool,
    at_end: Callable[[], object] | None,
    *,
    one_by_one: bool,
) -> Iterator[tuple[int, int, int]]:
    """Yield start, stop and batch size of blocks of batches. A last batch that is not full is a separate block."""
    samples = MAX_N if length is None else length
    full = samples - samples % batch_size
    begin, size = 0, batch_size
    largest = batch_size if one_by_one else max(1, _LARGEST_BLOCK // batch_size) * batch_size
    while begin < full:
        stop = min(begin + size, full)
        yield begin, stop, batch_size
        begin, size = stop, min(size * 4, largest)
    # Like torch's sampler, which reaches the end of its indices while it fills the last batch.
    if at_end is not None:
        at_end()
    if full < samples and not drop_last:
        yield full, samples, samples - full
