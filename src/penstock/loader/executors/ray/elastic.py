"""Decide when to add or remove workers of a loader, within the user's limits."""

from __future__ import annotations

import time

from penstock.loader.throughput import ENOUGH

__all__ = ["Elastic"]

_WINDOW = 20  # batches per decision
_PAUSE = 2.0  # minimum seconds between changes


class Elastic:
    """Decides from how long the consumer waits, and whether all batches are ready when it asks for one.

    Args:
        least, most: limits of the number of workers.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._waited = 0.0
        self._batches = 0
        self._full = True
        self._since = self._changed = time.monotonic()

    def observe(self, waited: float, full: bool, workers: int, pending: int) -> int:
        """Record a delivered batch; return the change in the number of workers: 1, 0 or -1.

        Args:
            waited: seconds that the consumer waited for the batch.
            full: whether all batches allowed in flight were ready when the consumer asked.
            workers: number of workers, including those that are starting.
            pending: number of workers that are starting.
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
