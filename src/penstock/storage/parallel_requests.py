"""Many small objects, or parts, such as the images of a batch: several requests under way at a time.

`ObjectsAhead` for bytes in order, `in_threads` for what else a store is asked about many objects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from penstock.storage.backend import Cancel
from penstock.storage.blocks import Waiting

__all__ = ["ObjectsAhead", "in_threads"]

T = TypeVar("T")
R = TypeVar("R")

_PARALLEL = 16
_LOOKS = 48  # requests for a few bytes each under way at most


def in_threads(function: Callable[[T], R], items: Sequence[T], *, count: int = _LOOKS) -> list[R]:
    """Return what a function that waits for a store returns for each item; ``count`` of them at a time.

    Raises: what the function raises for the first item for which it does. Those that have not begun are left out.
    """
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(count, "penstock-looks") as pool:
        return list(pool.map(function, items))


class ObjectsAhead(Generic[T]):
    """Whole objects in the order of their addresses, or parts of objects, read ahead.

        with ObjectsAhead(urls, storage.read, deadline=storage.deadline) as ahead:
            first, second = ahead.next(), ahead.next()

    Args:
        urls: what to read.
        read: gets one of them, all of it.
        deadline: seconds in which ``read`` promises to end.
        parallel: requests under way at most.

    An error is raised in its turn. Leaving gives up what is under way. Memory: ``parallel`` objects.
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
        self._ahead: deque[Waiting] = deque()
        self._asked = 0

    def __enter__(self) -> ObjectsAhead[T]:
        return self

    def __exit__(self, *_: object) -> None:
        for waiting in self._ahead:
            waiting.cancel()
        self._ahead.clear()

    def next(self) -> bytes:
        """The next object's bytes. IndexError when there was none left."""
        while len(self._ahead) < self._parallel and self._asked < len(self._urls):
            self._ahead.append(
                Waiting(lambda number, _, c: self._read(self._urls[number], c), self._asked, 0, self._deadline)
            )
            self._asked += 1
        data = self._ahead.popleft().result().obj
        assert isinstance(data, bytes)
        return data
