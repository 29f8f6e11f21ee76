"""`Maker`: the program of a worker. Every executor runs it: inline, threads, processes and Ray.

    begin(start)    start a run: restore states of users' objects, open a stream
    make(request)   the batch, the error in its place, or the end of a stream

Nothing in it knows of threads, pipes and memory. Errors of user code become answers, so a worker goes on after them.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, NamedTuple

from penstock.errors import escaped
from penstock.loader.arena import Arena, collating_into
from penstock.loader.executors.base import Began, Start
from penstock.loader.fetch import Fetch, Fetcher
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult

__all__ = ["Maker", "Part"]


class Part(NamedTuple):
    """Samples of a part of a batch, or the error in their place, and what they cost."""

    samples: list[Any]
    metrics: BatchMetrics
    error: BaseException | None = None


class Maker:
    """Makes the batches of one worker.

    Args:
        fetcher: loads samples and collates them.
        worker: number of the worker.
        catches: what user code may raise without an end of the worker.
    """

    def __init__(self, fetcher: Fetcher, worker: int = 0, *, catches: type[BaseException] = Exception) -> None:
        self.fetcher = fetcher
        self.worker = worker
        self._catches = catches
        self._stream = not isinstance(fetcher, Fetch)
        self._unusable: BaseException | None = None
        self._broken: BaseException | None = None
        self._traceback: TracebackType | None = None  # of that error: each time it is raised, it grows
        self._ended = False

    def fail(self, error: BaseException) -> None:
        """Answer this error to each request of every run, since the worker could not be set up."""
        self._broken = self._unusable = error
        self._traceback = error.__traceback__

    def begin(self, start: Start) -> Began:
        """Start a run. An error answers each request of it; of a stream the first, which has then ended."""
        self._broken, self._ended, first = self._unusable, False, None
        if self._broken is None:
            try:
                if start.state is not None:
                    self.fetcher.load_state_dict(start.state)
                first = self.fetcher.begin(start.epoch)
            except self._catches as error:
                self._broken = escaped(error) if isinstance(error, StopIteration) else error
                self._traceback = self._broken.__traceback__
        return Began(start.run, self.worker, first)

    def check(self) -> None:
        """Raise the error of `begin`, if there was one."""
        if self._broken is not None:
            raise self._broken

    def make(self, request: BatchRequest, arena: Arena | None = None, parts: list[Part] | None = None) -> BatchResult:
        """Make a batch.

        Args:
            request: the batch.
            arena: memory for its tensors.
            parts: its samples, if threads have loaded them by `load`. The list is cleared.
        """
        run, number, worker, metrics = request.run, request.number, self.worker, BatchMetrics()
        if self._broken is not None and not self._ended:
            self._ended = self._stream
            error = self._broken.with_traceback(self._traceback)
            return BatchResult(None, metrics, number, worker, error=error, run=run)
        if self._ended:
            return BatchResult(None, metrics, number, worker, run=run, ended=True)
        try:
            with collating_into(arena):
                batch = self._joined(request, metrics, parts) if parts else self.fetcher(request, metrics)
            return BatchResult(batch, metrics, number, worker, self.fetcher.state_dict(), run=run)
        except StopIteration:
            return BatchResult(None, metrics, number, worker, run=run, ended=True)
        except self._catches as error:
            try:
                return BatchResult(None, metrics, number, worker, self.fetcher.state_after_error(), "local", error, run)
            except Exception as another:
                return BatchResult(None, metrics, number, worker, error=another, run=run)

    def load(self, part: BatchRequest) -> Part:
        """Load the samples of a part of a batch. Several threads may do so at once."""
        metrics = BatchMetrics()
        assert isinstance(self.fetcher, Fetch)
        try:
            return Part(self.fetcher.samples(part, metrics), metrics)
        except self._catches as error:
            return Part([], metrics, error)

    def _joined(self, request: BatchRequest, metrics: BatchMetrics, parts: list[Part]) -> Any:
        """Return the batch of all parts. The error of the first part that failed is raised."""
        samples: list[Any] = []
        error: BaseException | None = None
        while parts:
            part = parts.pop(0)
            metrics.add(part.metrics)
            samples += part.samples
            error = error or part.error
            del part
        if error is None:
            assert isinstance(self.fetcher, Fetch)
            return self.fetcher.collate(samples, request, metrics)
        try:
            raise error
        finally:
            # The traceback of the exception refers to this frame.
            del error
