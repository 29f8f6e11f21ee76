"""The inline executor: makes batches on demand, in the consumer's thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from penstock.loader.executors.base import Began, Event, Executor, Start
from penstock.loader.make import Fetcher, Maker
from penstock.loader.messages import BatchRequest
from penstock.loader.stream import StreamFetch
from penstock.random import call_in_scope

__all__ = ["InlineExecutor"]


class InlineExecutor(Executor):
    """Makes each batch when it is submitted.

    Args:
        fetcher: makes the batches.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        self.workers, self.lock, self.pid = 1, threading.RLock(), os.getpid()
        self._maker = Maker(fetcher, catches=BaseException)
        self._events: list[Event] = []

    def submit(self, requests: Sequence[Start | BatchRequest], worker: int) -> None:
        """See `Executor`. A start calls an iterable dataset's ``__iter__``, and raises its errors at once."""
        for request in requests:
            if isinstance(request, Start):
                began = self._maker.begin(request)
                if self._maker.broken is not None:
                    raise self._maker.broken
                # A map-style dataset is asked again when a state is, since the sampler may have drawn by then.
                stream = isinstance(self._maker.fetcher, StreamFetch)
                self._events.append(Began(began.run, 0, began.snapshot if stream else None))
            else:
                # No sample's scope stays open, whatever is raised.
                self._events.append(call_in_scope(None, self._maker.make, request))

    def wait(self, run: int, deadline: float | None) -> list[Event]:
        """See `Executor`. There is nothing to wait for."""
        events, self._events = self._events, []
        return events

    def resize(self, workers: int) -> None:
        """See `Executor`. There is always one."""

    def close(self, patience: float) -> None:
        """See `Executor`."""
        self.closed = True
