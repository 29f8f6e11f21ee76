"""`Lookahead`: the requests of a pass, some of them planned before they can be handed out.

A sampler may draw from a generator that others draw from, too, so it can be seen how many batches were planned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from penstock.loader.interrupts import is_of_signal_handler
from penstock.loader.messages import BatchRequest

__all__ = ["Lookahead"]


class Lookahead:
    """The requests of a pass, in their order.

    Args:
        requests: pulled from in the consumer's thread.

    Attributes:
        error: that ended the requests. It is raised behind the batches that were planned before it.
        over: whether there are no more requests, as far as was looked.
    """

    def __init__(self, requests: Iterator[BatchRequest]) -> None:
        self.error: Exception | None = None
        self.over = False
        self._requests: Iterator[BatchRequest] | None = requests
        self._planned: deque[BatchRequest] = deque()

    def plan(self, count: int) -> None:
        """Pull requests until so many are planned."""
        while len(self._planned) < count and self._pull():
            pass

    def next(self) -> BatchRequest | None:
        """Return the next request; None behind the last."""
        if not self._planned and not self._pull():
            return None
        request = self._planned.popleft()
        self.over = self._requests is None and not self._planned
        return request

    def end(self) -> None:
        """Drop all that is left."""
        self._requests = None
        self._planned.clear()
        self.over = True

    def _pull(self) -> bool:
        if self._requests is None:
            return False
        try:
            request = next(self._requests, None)
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            self.error, request = error, None
        if request is None:
            self._requests = None
            self.over = not self._planned
            return False
        self._planned.append(request)
        return True
