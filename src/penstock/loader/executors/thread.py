"""The thread executor: all threads work on the *next* batch first, each on a chunk of its samples.

    batches ->  [chunk|chunk|chunk] [chunk|chunk|chunk] ...
                  |      |     |
               thread thread thread                         the last thread of a batch collates it

Threads receive chunks, not samples, so that many samples share the cost of a hand-over. Streams are not split: each
thread has its own lane, with its own iterator.

All threads share one dataset, and each is a worker: ``get_worker_info()`` returns its number.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from penstock.errors import WorkerError, escaped
from penstock.loader.arena import Shared, collating_into
from penstock.loader.executors.base import Began, Done, Event, Executor, PendingBatch
from penstock.loader.executors.thread_pool import Failure, ThreadPool, thread_number
from penstock.loader.fetch import Fetcher
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult
from penstock.loader.sizes import RecentSizes
from penstock.loader.snapshots import Snapshot
from penstock.loader.statistics import size_of
from penstock.loader.workerinfo import worker_scope
from penstock.plan.stream_plan import EpochStart

__all__ = ["ThreadExecutor"]

_LOOK = 5.0
"""Seconds between checks that the threads are alive."""


class _News:
    """Events that threads report and the consumer waits for.

    A signal may arrive anywhere, so waiting takes no event out, and no lock implemented in Python is held.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self, event: Event) -> None:
        self._events.append(event)
        self.wake()

    def wake(self) -> None:
        self._bell.put(None)

    def wait(self, seconds: float) -> None:
        if not self._events:
            with suppress(queue.Empty):
                self._bell.get(timeout=max(0.0, seconds))

    def take(self) -> list[Event]:
        """Return and remove the new events."""
        while not self._bell.empty():
            self._bell.get_nowait()
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events


class _Lane:
    """The fetcher of a thread; a stream starts in its own thread."""

    def __init__(self, number: int, fetcher: Fetcher) -> None:
        self.number = number
        self.fetcher = fetcher
        self._error: BaseException | None = None
        self._broken = False

    def begin(self, epoch: EpochStart, crew: _Crew, failure: Failure | None) -> None:
        """Start the stream; an error is raised in place of its first batch."""
        first: Snapshot | None = None
        try:
            crew.check(failure)
            with worker_scope(crew.infos[self.number]):
                first = self.fetcher.begin(epoch)
        except StopIteration as stop:
            self._broken, self._error = True, escaped(stop)
        except BaseException as error:
            self._broken, self._error = True, error
        crew.news.put(Began(self.number, first))

    def make(self, request: BatchRequest, metrics: BatchMetrics, crew: _Crew, failure: Failure | None) -> Any:
        """Return a batch.

        Raises:
            StopIteration: the stream has ended, or has raised the error of its start before.
        """
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        if self._broken:
            raise StopIteration
        crew.check(failure)
        return self.fetcher(request, metrics)


class _Crew:
    """The view of the threads that jobs hold. Jobs do not refer to the pool, so that it ends when it is dropped."""

    def __init__(self, pool: ThreadPool) -> None:
        self.infos = pool.infos
        self.news = _News()
        self._failures = pool.failures

    def check(self, failure: Failure | None) -> None:
        """Raise the error of this thread's ``worker_init_fn``, or an error if the threads have ended."""
        failure = failure or self._failures.get(thread_number())
        if failure is not None:
            raise failure[0].with_traceback(failure[1])


class _Batch(PendingBatch):
    """A batch in progress."""

    __slots__ = ("_cancelled", "_crew", "_errors", "_lane", "_left", "_lock", "_memory", "_metrics", "_parts", "result")

    def __init__(self, number: int, request: BatchRequest, crew: _Crew) -> None:
        super().__init__(number, request)
        self.result: BatchResult | None = None
        self._crew = crew
        self._lock = threading.Lock()
        self._cancelled = False
        self._errors: dict[int, BaseException] = {}

    def begin(self, lane: _Lane, chunks: int, pool: ThreadPool) -> None:
        """Submit the batch to the pool in ``chunks`` chunks."""
        size = len(self.request.indices)
        self._lane = lane
        self._memory = Shared(size)
        self._parts: list[Any] = [None] * chunks
        self._metrics = [BatchMetrics() for _ in range(chunks)]
        self._left = chunks
        for chunk in range(chunks):
            begin, end = chunk * size // chunks, (chunk + 1) * size // chunks
            pool.submit(partial(self._make, chunk, begin, end), self.worker)

    def cancel(self) -> None:
        """Cancel the batch and drop its parts: an error's traceback refers to the batch."""
        self._cancelled = True
        self.result = None

    def _make(self, chunk: int, begin: int, end: int, failure: Failure | None) -> None:
        """Make one chunk; the thread of the last chunk collates."""
        number = thread_number()
        with worker_scope(None if number < 0 else self._crew.infos[number]):
            if not self._cancelled:
                try:
                    self._parts[chunk] = self._make_chunk(chunk, begin, end, failure)
                except BaseException as error:  # raised again in the consumer, in place of this batch
                    self._errors[chunk] = error
            with self._lock:
                self._left -= 1
                last = self._left == 0
            if last:
                self.result = self._finish()
                if self._cancelled:  # meanwhile
                    self.result = None
                self._crew.news.put(Done(self))

    def _make_chunk(self, chunk: int, begin: int, end: int, failure: Failure | None) -> Any:
        """Return the samples of a chunk, or the batch if it is the only one."""
        if len(self._parts) == 1:
            return self._lane.make(self.request, self._metrics[0], self._crew, failure)
        self._crew.check(failure)
        fetcher: Any = self._lane.fetcher
        with collating_into(self._memory.rows(begin, end)):
            return fetcher.samples(self.request.part(begin, end), self._metrics[chunk])

    def _finish(self) -> BatchResult | None:
        """Return the batch, or the error of its first failed sample; None if it was cancelled."""
        errors, self._errors = self._errors, {}
        error: BaseException | None = None
        fetcher, metrics = self._lane.fetcher, self._metrics[0]
        try:
            if self._cancelled:
                return None
            if not errors:
                try:
                    return BatchResult(self._joined(fetcher, metrics), metrics, 0, self.worker, fetcher.state_dict())
                except BaseException as caught:  # as above
                    errors[0] = caught
            error = errors[min(errors)]
            self.ended = isinstance(error, StopIteration)
            try:
                return BatchResult(
                    None, metrics, 0, self.worker, None if self.ended else fetcher.state_after_error(), error=error
                )
            except BaseException as caught:
                return BatchResult(None, metrics, 0, self.worker, error=caught)
        finally:
            self._parts.clear()
            del self._memory
            errors.clear()
            error = None  # its traceback may refer to this frame

    def _joined(self, fetcher: Any, metrics: BatchMetrics) -> Any:
        """Return the batch of all chunks."""
        if len(self._parts) == 1:
            return self._parts[0]
        for other in self._metrics[1:]:
            metrics.add(other)
        return fetcher.collate([sample for part in self._parts for sample in part], self.request, metrics)


class ThreadExecutor(Executor):
    """Makes batches in the threads of a pool.

    Args:
        fetcher: for a map-style dataset; for streams, one for each thread of a pool with lanes.
        pool: the threads.
        depth: maximum number of batches in flight.
        epoch: passed to the fetchers when they start their epoch.
        max_bytes: limits the batches in flight by bytes, using the largest recent batch (one batch until it is known).
    """

    def __init__(
        self,
        fetcher: Fetcher | Sequence[Fetcher],
        pool: ThreadPool,
        *,
        depth: int,
        epoch: EpochStart = None,
        max_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self._pool = pool
        self._crew = _Crew(pool)
        self._most = depth
        self._depth = depth if max_bytes is None else 1
        self._max_bytes = max_bytes
        self._sizes = RecentSizes()
        self._begins = False
        if isinstance(fetcher, Sequence):
            self._lanes = [_Lane(number, one) for number, one in enumerate(fetcher)]
            for lane in self._lanes:
                pool.submit(partial(lane.begin, epoch, self._crew), lane.number)
        else:
            self._lanes = [_Lane(0, fetcher)] * (pool.count if pool.lanes else 1)
            self._begins = True
        self.workers = len(self._lanes)
        self._load = [0] * self.workers

    @property
    def depth(self) -> int:
        """Return how many batches may be in flight now."""
        return self._depth

    def pending(self, number: int, request: BatchRequest) -> PendingBatch:
        """Return a batch to submit."""
        return _Batch(number, request, self._crew)

    def choose(self, workers: Sequence[int], share: int | None) -> int | None:
        """Return the least busy worker."""
        worker = min(workers, key=self._load.__getitem__)
        return worker if share is None or self._load[worker] < share else None

    def submit(self, batches: Sequence[_Batch], worker: int) -> list[Event]:
        """Submit batches: in chunks to all threads, or to the thread of their lane."""
        lane = self._lanes[worker]
        begun: list[Event] = []
        if self._begins:
            # The sampler has drawn its order by now. The first state of a dataset may contain that generator.
            self._begins = False
            begun = [Began(number, None if number else lane.fetcher.begin(None)) for number in range(self.workers)]
        divide = not self._pool.lanes and getattr(lane.fetcher, "divisible", False)
        for batch in batches:
            self._load[worker] += 1
            batch.begin(lane, max(1, min(self._pool.count, len(batch.request.indices))) if divide else 1, self._pool)
        return begun

    def arrived(self) -> list[Event]:
        """Return new events of the threads."""
        events = self._crew.news.take()
        for event in events:
            if isinstance(event, Done):
                self._load[event.batch.worker] -= 1
        return events

    def wait(self, deadline: float | None) -> None:
        """Wait for an event, some seconds at most."""
        self.waiting = True
        self._crew.news.wait(_LOOK if deadline is None else min(_LOOK, deadline - time.monotonic()))
        self.waiting = False

    def receive(self, news: None) -> list[Event]:
        """Return new events of the threads.

        Raises:
            WorkerError: a thread has ended unexpectedly.
        """
        events = self.arrived()
        if not events and any(self._load) and not self._pool.alive:
            raise WorkerError(
                "the threads of this DataLoader are gone: this is a fork of the process that has them, or the "
                "interpreter is about to exit"
            )
        return events

    def collect(self, batch: PendingBatch, number: int) -> BatchResult:
        """Return a batch, or its error."""
        assert isinstance(batch, _Batch)
        result, batch.result = batch.result, None
        assert result is not None
        if self._max_bytes is not None and result.error is None:
            self._sizes.add(size_of(result.batch))
            self._depth = min(self._most, max(1, self._max_bytes // max(1, self._sizes.largest)))
        return BatchResult(result.batch, result.metrics, number, result.worker, result.state, result.way, result.error)

    def culprit(self, first: PendingBatch | None, pending: Sequence[PendingBatch]) -> str:
        """Return the samples that the threads are loading."""
        index_of: dict[int, Any] = {}
        for batch in pending:
            index_of.update(zip(batch.request.keys, batch.request.indices, strict=True))
        at = {number: index_of[board[0]] for number, board in enumerate(self._pool.boards) if board[0] in index_of}
        if at:
            return ": " + ", ".join(f"thread {number} was last at sample {index!r}" for number, index in at.items())
        return "" if first is None else f": waiting for batch {first.number} of worker {first.worker}"

    def drop(self, pending: Sequence[PendingBatch]) -> None:
        """Cancel the batches; running chunks end by themselves."""
        for batch in pending:
            assert isinstance(batch, _Batch)
            batch.cancel()
        self._crew.news.wake()

    def close(self, patience: float) -> None:
        """Ask the threads to end; they end by themselves."""
        self._pool.close()
        self._crew.news.wake()
