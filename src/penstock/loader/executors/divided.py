"""`DividedBatch`: a batch whose samples are loaded by several threads."""

from __future__ import annotations

import threading
from typing import Any

from penstock.loader.arena import Arena, Shared, collating_into
from penstock.loader.fetch import Fetch
from penstock.loader.messages import BatchMetrics, BatchRequest

__all__ = ["DividedBatch"]


class DividedBatch:
    """A batch in ``parts`` parts of about equally many samples, each loaded by one thread.

    ::

        for part in range(batch.parts):
            pool.submit(...)  # batch.load(part), then batch.finished(); the last one calls batch.collate(metrics)

    Args:
        fetcher: loads the samples; it must be divisible.
        request: the batch to make.
        threads: number of threads.
        arena: memory of the batch; None for ordinary memory.
    """

    def __init__(self, fetcher: Fetch, request: BatchRequest, threads: int, arena: Arena | None = None) -> None:
        self.parts = min(threads, len(request.indices))
        self._fetcher = fetcher
        self._request = request
        self._memory = Shared(len(request.indices), arena)
        self._metrics = [BatchMetrics() for _ in range(self.parts)]
        self._loaded: list[list[Any] | Exception] = [[] for _ in range(self.parts)]
        self._left = self.parts
        self._lock = threading.Lock()

    def load(self, part: int) -> None:
        """Load the samples of a part. `collate` raises the error of the first part that fails."""
        size = len(self._request.indices)
        begin, end = part * size // self.parts, (part + 1) * size // self.parts
        try:
            with collating_into(self._memory.rows(begin, end)):
                self._loaded[part] = self._fetcher.samples(self._request.part(begin, end), self._metrics[part])
        except Exception as error:
            self._loaded[part] = error

    def finished(self) -> bool:
        """Count a part as finished; return whether it is the last one."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def collate(self, metrics: BatchMetrics) -> Any:
        """Return the batch of all parts, and add their costs to ``metrics``."""
        loaded, self._loaded = self._loaded, []
        for part in self._metrics:
            metrics.add(part)
        samples: list[Any] = []
        for one in loaded:
            if isinstance(one, Exception):
                raise one
            samples += one
        return self._fetcher.collate(samples, self._request, metrics)
