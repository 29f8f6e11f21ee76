"""`Lookahead`: the tasks of a pass, some of them planned before they can be handed out.

A sampler may draw from a generator that others draw from, too, so it can be seen how many batches were planned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from penstock.loader.interrupts import is_of_signal_handler
from penstock.loader.messages import Task

__all__ = ["Lookahead"]


class Lookahead:
    """The tasks of a pass, in their order.

    Args:
        tasks: pulled from in the consumer's thread.

    Attributes:
        error: that ended the tasks. It is raised behind the batches that were planned before it.
        over: whether there are no more tasks, as far as was looked.
    """

    def __init__(self, tasks: Iterator[Task]) -> None:
        self.error: Exception | None = None
        self.over = False
        self._tasks: Iterator[Task] | None = tasks
        self._planned: deque[Task] = deque()

    def plan(self, count: int) -> None:
        """Pull tasks until so many are planned."""
        while len(self._planned) < count and self._pull():
            pass

    def next(self) -> Task | None:
        """Return the next task; None behind the last."""
        if not self._planned and not self._pull():
            return None
        task = self._planned.popleft()
        self.over = self._tasks is None and not self._planned
        return task

    def end(self) -> None:
        """Drop all that is left."""
        self._tasks = None
        self._planned.clear()
        self.over = True

    def _pull(self) -> bool:
        if self._tasks is None:
            return False
        try:
            task = next(self._tasks, None)
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            self.error, task = error, None
        if task is None:
            self._tasks = None
            self.over = not self._planned
            return False
        self._planned.append(task)
        return True
