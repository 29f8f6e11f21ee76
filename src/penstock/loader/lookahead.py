"""`Lookahead`: the requests of an epoch, some of them planned before they can be sent to workers.

A sampler may share its generator with other code, so the number of batches planned ahead is observable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from penstock.loader.messages import BatchRequest

__all__ = ["Lookahead"]


class Lookahead:
    """The requests of an epoch in order.

    Args:
        requests: iterator, advanced in the consumer's thread.

    Attributes:
        error: exception that ended the requests. It is raised after the batches planned before it.
        over: whether no more requests are known to follow.
    """

    def __init__(self, requests: Iterator[BatchRequest]) -> None:
        self.error: Exception | None = None
        self.over = False
        self._requests: Iterator[BatchRequest] | None = requests
        self._planned: deque[BatchRequest] = deque()

    def plan(self, count: int) -> None:
        """Advance until ``count`` requests are planned."""
        while len(self._planned) < count and self._pull():
            pass

    def next(self) -> BatchRequest | None:
        """Return the next request; None at the end."""
        if not self._planned and not self._pull():
            return None
        request = self._planned.popleft()
        self.over = self._requests is None and not self._planned
        return request

    def end(self) -> None:
        """Drop all remaining requests."""
        self._requests = None
        self._planned.clear()
        self.over = True

    def _pull(self) -> bool:
        if self._requests is None:
            return False
        try:
            request = next(self._requests, None)
        except Exception as error:
            self.error, request = error, None
        if request is None:
            self._requests = None
            self.over = not self._planned
            return False
        self._planned.append(request)
        return True
