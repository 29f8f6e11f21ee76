"""The inline executor: a batch is made where it is asked for, in the consumer's thread."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.loader.executors.base import Began, Event, Executor, PendingBatch
from penstock.loader.fetch import Fetcher
from penstock.loader.interrupts import is_of_signal_handler
from penstock.loader.messages import BatchMetrics, BatchResult
from penstock.loader.stream import StreamFetch
from penstock.plan.stream_plan import EpochStart
from penstock.random import call_in_scope

__all__ = ["InlineExecutor"]


class InlineExecutor(Executor):
    """Makes one batch at a time.

    Args:
        fetcher: makes it.
        epoch: given to the fetcher, which begins a pass here: an iterable data set's ``__iter__`` is called now.
    """

    depth = 0

    def __init__(self, fetcher: Fetcher, epoch: EpochStart = None) -> None:
        super().__init__()
        self._fetcher = fetcher
        self._stream = isinstance(fetcher, StreamFetch)
        self._result: BatchResult | None = None
        self._events: list[Event] = [Began(0, fetcher.begin(epoch))]

    def choose(self, workers: Sequence[int], share: int | None) -> int:
        """Return the only worker there is."""
        return 0

    def submit(self, batches: Sequence[PendingBatch], worker: int) -> list[Event]:
        """Make the batch."""
        (batch,) = batches
        self._result = self._make(batch)
        return []

    def wait(self, deadline: float | None) -> None:
        """Return at once: the next batch is made by whoever asks for it."""

    def arrived(self) -> list[Event]:
        """Return that the pass has begun, once."""
        events, self._events = self._events, []
        return events

    def receive(self, news: None) -> list[Event]:
        """Return nothing: there is nobody to hear from."""
        return []

    def _make(self, batch: PendingBatch) -> BatchResult:
        """Return the batch, or what was raised in its place; no scope of its samples is left.

        Raises:
            Exception: of a signal handler that struck meanwhile.
        """
        return call_in_scope(None, self._made, batch)

    def _made(self, batch: PendingBatch) -> BatchResult:
        metrics = BatchMetrics()
        try:
            return BatchResult(self._fetcher(batch.request, metrics), metrics, 0, state=self._fetcher.state_dict())
        except StopIteration as error:
            batch.ended = self._stream
            return BatchResult(None, metrics, 0, error=error)
        except BaseException as error:  # Ctrl-C too: the batch is missing then, and the next call goes on behind it
            if isinstance(error, Exception) and is_of_signal_handler(error):
                raise
            try:
                return BatchResult(None, metrics, 0, state=self._fetcher.state_after_error(), error=error)
            except Exception as another:
                return BatchResult(None, metrics, 0, error=another)

    def collect(self, batch: PendingBatch, number: int) -> BatchResult:
        """Return the batch that was made last."""
        result, self._result = self._result, None
        assert result is not None
        return BatchResult(
            result.batch, result.metrics, number, 0, result.state, result.way, result.error
        )  # quicker than `_replace`

    def drop(self, pending: Sequence[PendingBatch]) -> None:
        """Make nothing more."""
        self._result = None
