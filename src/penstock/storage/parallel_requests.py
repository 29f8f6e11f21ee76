"""Concurrent requests for many small objects or ranges, such as the images of a batch.

`ObjectsAhead` reads bytes in order; `in_threads` runs any other function of a store for many objects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

from penstock.storage.backend import Cancel
from penstock.storage.blocks import Waiting

__all__ = ["LOOKS", "ObjectsAhead", "in_threads"]

T = TypeVar("T")
R = TypeVar("R")

_PARALLEL = 16
LOOKS = 48
"""The maximum number of concurrent small requests."""


def in_threads(function: Callable[[T], R], items: Sequence[T], *, count: int = LOOKS) -> list[R]:
    """Return the results of a function for each item, ``count`` calls at a time; for functions that wait for a store.

    Raises: the first exception of the function, in the order of the items. Calls that have not started are skipped.
    """
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(count, "penstock-looks") as pool:
        return list(pool.map(function, items))


class ObjectsAhead(Generic[T]):
    """Reads whole objects, or ranges of objects, ahead of use, in order.

        with ObjectsAhead(urls, storage.read, deadline=storage.deadline) as ahead:
            first, second = ahead.next(), ahead.next()

    Args:
        urls: the objects to read.
        read: reads one of them completely.
        deadline: seconds within which ``read`` ends.
        parallel: maximum number of concurrent requests.

    An error is raised at its position in the order. Leaving the block cancels the requests. Memory: ``parallel``
    objects.
    """

    def __init__(
        self,
        urls: Sequence[T],
        read: Callable[[T, Cancel], bytes],
        *,
        deadline: float,
        parallel: int = _PARALLEL,
    ) -> None:
        self._urls, self._read, self._deadline, self._parallel = urls, read, deadline, parallel
        self._ahead: deque[Waiting[bytes]] = deque()
        self._asked = 0

    def __enter__(self) -> ObjectsAhead[T]:
        return self

    def __exit__(self, *_: object) -> None:
        for waiting in self._ahead:
            waiting.cancel()
        self._ahead.clear()

    def next(self) -> bytes:
        """Return the bytes of the next object; IndexError if none is left."""
        while len(self._ahead) < self._parallel and self._asked < len(self._urls):
            self._ahead.append(Waiting(partial(self._read, self._urls[self._asked]), self._deadline))
            self._asked += 1
        return self._ahead.popleft().result()
