"""The inline executor: makes batches on demand, in the consumer's thread."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.loader.executors.base import Began, Event, Executor, PendingBatch
from penstock.loader.fetch import Fetcher
from penstock.loader.messages import BatchMetrics, BatchResult
from penstock.loader.stream import StreamFetch
from penstock.plan.stream_plan import EpochStart
from penstock.random import call_in_scope

__all__ = ["InlineExecutor"]


class InlineExecutor(Executor):
    """Makes one batch at a time.

    Args:
        fetcher: makes the batches.
        epoch: passed to the fetcher, which starts its epoch here: an iterable dataset's ``__iter__`` is called now. A
            map-style dataset has its own state until the first batch.
    """

    depth = 0

    def __init__(self, fetcher: Fetcher, epoch: EpochStart = None) -> None:
        super().__init__()
        self._fetcher = fetcher
        self._result: BatchResult | None = None
        first = fetcher.begin(epoch)
        # A map-style dataset is asked again when a state is, since the sampler may have drawn by then.
        self._events: list[Event] = [Began(0, first if isinstance(fetcher, StreamFetch) else None)]

    def choose(self, workers: Sequence[int], share: int | None) -> int:
        """Return the only worker."""
        return 0

    def submit(self, batches: Sequence[PendingBatch], worker: int) -> list[Event]:
        """Make the batch."""
        (batch,) = batches
        self._result = self._make(batch)
        return []

    def wait(self, deadline: float | None) -> None:
        """Return at once: batches are made on demand."""

    def arrived(self) -> list[Event]:
        """Return the event that the epoch has started, once."""
        events, self._events = self._events, []
        return events

    def receive(self, news: None) -> list[Event]:
        """Return no events: there are no workers."""
        return []

    def _make(self, batch: PendingBatch) -> BatchResult:
        """Return the batch or its exception, and leave no sample scope open."""
        return call_in_scope(None, self._made, batch)

    def _made(self, batch: PendingBatch) -> BatchResult:
        metrics = BatchMetrics()
        try:
            return BatchResult(self._fetcher(batch.request, metrics), metrics, 0, state=self._fetcher.state_dict())
        except StopIteration as error:
            batch.ended = True
            return BatchResult(None, metrics, 0, error=error)
        except BaseException as error:  # also Ctrl-C: then the batch is missing, and the next call continues after it
            try:
                return BatchResult(None, metrics, 0, state=self._fetcher.state_after_error(), error=error)
            except Exception as another:
                return BatchResult(None, metrics, 0, error=another)

    def collect(self, batch: PendingBatch, number: int) -> BatchResult:
        """Return the last batch."""
        result, self._result = self._result, None
        assert result is not None
        return BatchResult(
            result.batch, result.metrics, number, 0, result.state, result.way, result.error
        )  # faster than `_replace`

    def drop(self, pending: Sequence[PendingBatch]) -> None:
        """Make no more batches."""
        self._result = None
