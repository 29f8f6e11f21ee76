"""`FilePool`: the open files of a data set; all sets of the process together stay within one limit of descriptors.

    opened = FilePool()
    shard = opened.find(7) or opened.add(7, open_shard(7))

The files that were opened first are closed first, of whatever set: at most half of the descriptors that the process may
open (RLIMIT_NOFILE) are taken. A file that is in use lives until it is not. Thread-safe, and safe after a fork. A
pickle is an empty pool.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import count
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

from penstock.storage.files import File

__all__ = ["FilePool"]

_FEWEST, _MOST = 128, 8192  # descriptors


class _Open(Protocol):
    @property
    def file(self) -> File | None:
        """The open file; None for an object that is read by ranges."""


T = TypeVar("T", bound=_Open)


class FilePool(Generic[T]):
    """Open files by number.

    Args:
        descriptors: that one of them takes; a map takes another one.
        copies: they may be copies in the cache, which are closed soon after the cache has evicted them.
    """

    def __init__(self, descriptors: int = 2, *, copies: bool = False) -> None:
        self._descriptors, self._copies = descriptors, copies
        self._open: dict[int, tuple[T, int]] = {}
        with _locks.setdefault(os.getpid(), Lock()):
            _sets.add(self)

    @property
    def most(self) -> int:
        """The number of these files that may be open if no others are."""
        return _limit() // self._descriptors

    def find(self, number: int) -> T | None:
        """Return a file if it is open."""
        found = self._open.get(number)
        return None if found is None else found[0]

    def add(self, number: int, file: T) -> T:
        """Hold a file open, and close others as needed; return it. Two threads may add a file at once."""
        with _locks.setdefault(os.getpid(), Lock()):
            if self._copies:
                for other, (one, _) in [*self._open.items()]:
                    if one.file is not None and one.file.is_evicted:
                        del self._open[other]
            self._open.pop(number, None)
            self._open[number] = file, next(_ticks)
            taken = sum(len(some._open) * some._descriptors for some in _sets)
            limit = max(_limit(), self._descriptors)
            while taken > limit:
                first = {next(iter(some._open.values()))[1]: some for some in _sets if some._open}
                oldest = first[min(first)]
                del oldest._open[next(iter(oldest._open))]
                taken -= oldest._descriptors
        return file

    def __iter__(self) -> Iterator[T]:
        """Iterate over the files that are open now."""
        return iter([file for file, _ in list(self._open.values())])

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(FilePool, self._descriptors, copies=self._copies), ()


_sets: weakref.WeakSet[FilePool[Any]] = weakref.WeakSet()
_ticks = count()
_locks: dict[int, Lock] = {}  # of this process, and of its parents, whose threads may have held theirs


def _limit() -> int:
    """Return how many descriptors open files may take."""
    try:
        import resource
    except ImportError:  # Windows
        return _FEWEST
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else min(max(soft // 2, _FEWEST), _MOST)
