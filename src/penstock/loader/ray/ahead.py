"""`Ahead`: tasks, planned before they are dealt; as many as torch's loader plans, however many workers have started.

A sampler may draw from a generator that others draw from, too, so how many batches were planned can be seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from penstock.loader.work import Task

__all__ = ["Ahead"]


class Ahead:
    """The tasks of a pass, in their order.

    Args:
        tasks: pulled from in the consumer's thread.

    Attributes:
        error: that ended them, to be raised behind the batches that were planned before it.
    """

    def __init__(self, tasks: Iterator[Task]) -> None:
        self.error: Exception | None = None
        self._tasks: Iterator[Task] | None = tasks
        self._planned: deque[Task] = deque()

    @property
    def over(self) -> bool:
        """Whether there are no more, as far as was looked."""
        return self._tasks is None and not self._planned

    def plan(self, count: int) -> None:
        """Have so many ready to be dealt, if there are."""
        while len(self._planned) < count and self._pull():
            pass

    def next(self) -> Task | None:
        """The next one; None behind the last."""
        return self._planned.popleft() if self._planned or self._pull() else None

    def end(self) -> None:
        """No more are wanted."""
        self._tasks = None
        self._planned.clear()

    def _pull(self) -> bool:
        if self._tasks is None:
            return False
        try:
            task = next(self._tasks, None)
        except Exception as error:
            self.error, task = error, None
        if task is None:
            self._tasks = None
            return False
        self._planned.append(task)
        return True
