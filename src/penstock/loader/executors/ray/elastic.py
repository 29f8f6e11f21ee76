"""When a loader's workers become more or fewer, within the limits that the user set."""

from __future__ import annotations

import time

from penstock.loader.throughput import ENOUGH

__all__ = ["Elastic"]

_WINDOW = 20  # batches that are looked at together
_PAUSE = 2.0  # seconds from one change to the next


class Elastic:
    """Looks at how long the consumer waits, and how many batches are ready when it asks.

    Args:
        least, most: workers.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._waited = 0.0
        self._batches = 0
        self._full = True
        self._since = self._changed = time.monotonic()

    def observe(self, waited: float, full: bool, workers: int, pending: int) -> int:
        """The consumer got a batch; by how many the workers should change: 1, 0 or -1.

        Args:
            waited: seconds that it waited for the batch.
            full: whether all that may be begun was ready when it asked.
            workers: there are, those included that are starting.
            pending: starting.
        """
        if self._least == self._most:
            return 0
        self._waited += waited
        self._batches += 1
        self._full = self._full and full
        now = time.monotonic()
        if self._batches < _WINDOW or now - self._changed < _PAUSE:
            return 0
        share, full = self._waited / max(now - self._since, 1e-9), self._full
        self._waited, self._batches, self._full, self._since = 0.0, 0, True, now
        change = 0
        if share > ENOUGH and workers < self._most and not pending:
            change = 1
        elif full and workers > self._least:
            change = -1
        if change:
            self._changed = now
        return change
