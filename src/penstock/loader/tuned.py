"""`TunedBatches`: the batches of one epoch during auto-tuning, made with one setting after the other.

    requests (one iterator) -> window 1: inline -> window 2: 1 process -> ... -> the rest: the chosen setting
                              a window gets a view of the requests, which stops when enough is measured; it delivers
                              its batches in flight and ends; the next one's workers start meanwhile

Invariant: every batch is made once, with the current setting, and delivered in order. There are no separate
measurements and no discarded batches, so the data cannot change.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from penstock.errors import WorkerError, escaped
from penstock.loader.autotune import Autotuner
from penstock.loader.dataloader_iter import ResultIterator
from penstock.loader.engine import Engine, EpochRun
from penstock.loader.fetch import Fetcher
from penstock.loader.memory import available_memory, private_memory
from penstock.loader.messages import BatchRequest, BatchResult
from penstock.loader.setting import Setting
from penstock.loader.snapshots import Snapshot
from penstock.loader.statistics import size_of
from penstock.loader.throughput import Throughput, ThroughputMeter
from penstock.loader.window import CLOSED, INTERRUPTED

__all__ = ["Follow", "Segment", "TunedBatches"]


class Follow(Protocol):
    """Callback that switches a loader to the tuner's current setting.

    With ``start`` it also starts the workers, and raises if that fails.
    """

    def __call__(self, *, start: bool) -> Segment: ...


class Segment(NamedTuple):
    """A setting of the loader, with its engine and fetcher."""

    setting: Setting
    engine: Engine
    fetcher: Fetcher


class _StoppableRequests:
    """The requests of an epoch, up to a point that is chosen during iteration."""

    def __init__(self, requests: Iterator[BatchRequest]) -> None:
        self._requests = requests
        self.taken = 0
        self.stopped = False

    def __iter__(self) -> _StoppableRequests:
        return self

    def __next__(self) -> BatchRequest:
        if self.stopped:
            raise StopIteration
        request = next(self._requests)
        self.taken += 1
        return request


class TunedBatches:
    """Batches of an epoch while its loader is being tuned; a `penstock.loader.dataloader_iter.ResultIterator`.

    Args:
        run: the epoch iterator's work.
        first: makes the first batches; its workers have started.
        tuner: chooses the next setting, and when to stop.
        follow: switches the loader to the tuner's setting.
        length: number of batches of this iterator; None if unknown.

    A segment is the part of the epoch made with one setting. A setting that does not work, for example because no
    process can be started, counts as the worst.
    """

    def __init__(
        self,
        run: EpochRun,
        first: Segment,
        tuner: Autotuner,
        follow: Follow,
        length: int | None,
    ) -> None:
        # No object has a state.
        self._run = run._replace(resume=lambda worker: None)
        self._tuner = tuner
        self._follow = follow
        self._length = length
        self._segment = first
        self._next: Segment | None = None
        # Number of batches in earlier segments.
        self._before = 0
        self._closed = threading.Event()
        # Whether a signal handler raised where the state may be inconsistent.
        self._interrupted = False
        self._begin(first)

    def _begin(self, segment: Segment) -> None:
        self._segment = segment
        self._view = _StoppableRequests(self._run.requests)
        run = self._run._replace(requests=self._view, fetcher=segment.fetcher)
        self._meter: ThroughputMeter | None = None
        now = perf_counter()
        if not self._tuner.decided or self._tuner.search_again(now):
            self._measure(now)
        self._batches: ResultIterator = segment.engine.start(run)

    def _measure(self, now: float) -> None:
        """Start to measure the current setting."""
        self._meter = self._tuner.meter(self._segment.engine.config.depth)
        self._meter.begin(now)

    # The interface of a ResultIterator.

    @property
    def depth(self) -> int:
        """Maximum number of batches in flight at the moment."""
        return self._batches.depth

    @property
    def first_states(self) -> dict[int, Snapshot]:
        """Empty, since no object has a state."""
        return {}

    @property
    def ready_on_request(self) -> int:
        """Number of finished batches at the consumer's last request."""
        return self._batches.ready_on_request

    @property
    def processes(self) -> list[Any] | None:
        """The worker processes."""
        return self._batches.processes

    def next(self) -> BatchResult:
        """Return the next batch, or its error, numbered within the whole epoch."""
        while True:
            if self._interrupted:
                raise WorkerError(INTERRUPTED)
            batches, asked = self._batches, perf_counter()
            if self._meter is None and self._tuner.search_again(asked):
                self._measure(asked)
            result: BatchResult | None
            try:
                result = batches.next()
            except StopIteration:
                result = None
            # If a signal handler raises from here on, a batch may be lost, or a segment half started.
            try:
                if result is not None:
                    return self._note(result, asked)
                # Not in the except block above: the end of the segment would be in all tracebacks of workers forked
                # here.
                continues = self._next_segment()
            except BaseException as error:
                self._interrupted = True
                self.close()
                if isinstance(error, StopIteration):
                    raise escaped(error) from error
                raise
            if not continues:
                raise StopIteration

    def poll(self) -> bool:
        """Return whether `next` would return at once."""
        return not self._interrupted and self._batches.poll()

    def _note(self, result: BatchResult, asked: float) -> BatchResult:
        """Measure a batch and number it."""
        meter = self._meter
        if meter is not None and result.error is None and meter.add(result.metrics, asked, perf_counter()):
            self._measured(meter.found, size_of(result.batch))
        # `_replace` would take twice as long.
        before = self._before
        return BatchResult(
            result.batch, result.metrics, before + result.number, result.worker, result.state, result.way, result.error
        )

    def close(self) -> None:
        """Stop making batches. Idempotent."""
        self._closed.set()
        self._view.stopped = True
        self._save_measurement(ended=False)
        self._batches.close()
        self._drop_next()

    def end(self, patience: float) -> None:
        """End the workers within ``patience`` seconds, because the loader is closed."""
        self._closed.set()
        self._view.stopped = True
        self._batches.end(patience)
        self._drop_next()

    # The default argument stays valid when modules are already cleared at exit.
    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ending() and hasattr(self, "_batches") and not self._closed.is_set():
            self.close()

    def _drop_next(self) -> None:
        """End workers that have started without receiving a request."""
        following, self._next = self._next, None
        if following is not None:
            following.engine.dismiss()

    # Segments.

    def _measured(self, found: Throughput, nbytes: int) -> None:
        """Report a segment's measurement to the tuner, given the size of its last batch in bytes."""
        self._meter = None
        tuner, segment = self._tuner, self._segment
        if not tuner.decided and tuner.current == segment.setting:
            tuner.memory_for = self._room(nbytes)
            tuner.note(found)
        if tuner.current == segment.setting:
            # The setting and its workers stay.
            self._follow(start=False)
            return
        left = None if self._length is None else self._length - self._before - self._view.taken
        if left is not None and left <= max(2, segment.setting.workers):
            # Too few batches are left for other workers. They start the next epoch.
            return
        self._view.stopped = True
        if segment.engine.config.kind == "process":
            # Overlaps with this segment's last batches. Not with threads: a fork could inherit a lock held by one of
            # them.
            self._prepare()

    def _room(self, nbytes: int) -> int | None:
        """Return how many workers like these fit into memory, which is half of this rank's share."""
        free, config = available_memory(), self._segment.engine.config
        if free is None or config.kind == "inline":
            return self._tuner.memory_for
        pids = [process.pid for process in self._batches.processes or ()]
        each = private_memory(pids[0]) * len(pids) if pids else 0
        count = self._segment.setting.workers
        return count + int(free / self._tuner.ranks / 2 / (max(1, each + config.depth * nbytes) / count))

    def _prepare(self) -> None:
        """Start the workers of the next segment, skipping settings that do not work."""
        while True:
            try:
                self._next = self._follow(start=True)
                return
            except Exception as error:
                if self._tuner.decided:
                    # The error is raised when the workers are needed.
                    return
                self._tuner.note(Throughput(), f"{type(error).__name__}: {error}")

    def _next_segment(self) -> bool:
        """Start the next segment. Return False if there is none."""
        if self._closed.is_set():
            raise WorkerError(CLOSED)
        if not self._view.stopped:
            self._save_measurement(ended=True)
            return False
        segment = self._segment
        self._batches.close()
        if self._next is None:
            self._prepare()
        following, self._next = self._next, None
        if following is None:
            following = self._follow(start=True)
        if segment.engine is not following.engine:
            segment.engine.close()
            following.engine.restarts += segment.engine.restarts
        self._before += self._view.taken
        self._begin(following)
        # Another thread may have closed this meanwhile.
        if self._closed.is_set():
            self._batches.end(0.5)
        return True

    def _save_measurement(self, *, ended: bool) -> None:
        """Save the measurement for the next iterator, at the end of this one or when it is left."""
        meter, self._meter = self._meter, None
        if meter is None or self._tuner.decided or self._tuner.current != self._segment.setting:
            return
        if ended:
            meter.end()
            if meter.enough:
                self._tuner.note(meter.found)
