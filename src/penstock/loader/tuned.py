"""`TunedBatches`: the batches of one pass, made by one setting after the other while settings are tried.

    requests (one iterator) -> window 1: inline -> window 2: 1 process -> ... -> the rest: the setting that was chosen
                              a window gets a view of the requests that stops when enough was measured; it hands out
                              what it has begun, and ends by itself; the next one's workers start meanwhile

Invariant: every batch is made once, by whoever's turn it is, and handed out in its order. Nothing is measured beside
the run and nothing is thrown away, so the data cannot change.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from penstock.errors import WorkerError
from penstock.loader.autotune import Autotuner
from penstock.loader.dataloader_iter import ResultIterator
from penstock.loader.engine import Engine, Run
from penstock.loader.fetch import Fetcher
from penstock.loader.interrupts import is_of_signal_handler
from penstock.loader.memory import available_memory, private_memory
from penstock.loader.messages import BatchRequest, BatchResult
from penstock.loader.setting import Setting
from penstock.loader.snapshots import Snapshot
from penstock.loader.statistics import size_of
from penstock.loader.throughput import Throughput, ThroughputMeter
from penstock.loader.window import CLOSED, INTERRUPTED

__all__ = ["Follow", "Segment", "TunedBatches"]


class Follow(Protocol):
    """Has a loader make its batches by the tuner's current setting; with ``start`` its workers are there afterwards,
    and what goes wrong with starting them is raised.
    """

    def __call__(self, *, start: bool) -> Segment: ...


class Segment(NamedTuple):
    """A setting of the loader: who makes its batches, and from what."""

    setting: Setting
    engine: Engine
    fetcher: Fetcher


class _View:
    """The requests of a pass, up to a point that is chosen while they are taken."""

    def __init__(self, requests: Iterator[BatchRequest]) -> None:
        self._requests = requests
        self.taken = 0
        self.stopped = False

    def __iter__(self) -> _View:
        return self

    def __next__(self) -> BatchRequest:
        if self.stopped:
            raise StopIteration
        request = next(self._requests)
        self.taken += 1
        return request


class TunedBatches:
    """Batches of a pass while its loader is being tuned; see `penstock.loader.dataloader_iter.ResultIterator`.

    Args:
        run: the pass.
        first: makes the first batches; its workers are there.
        tuner: says which setting to try, and when to stay.
        follow: has the loader follow the tuner.
        length: batches of this pass; None where nobody knows.

    A part of the pass that one setting makes is a segment. A setting that cannot be had (no process can be
    started, say) counts as one that is no good.
    """

    def __init__(
        self,
        run: Run,
        first: Segment,
        tuner: Autotuner,
        follow: Follow,
        length: int | None,
    ) -> None:
        self._run = run._replace(resume=lambda worker: None)  # nobody has a state of its own
        self._tuner = tuner
        self._follow = follow
        self._length = length
        self._segment = first
        self._next: Segment | None = None
        self._before = 0  # batches of earlier segments
        self._closed = threading.Event()
        self._broken = False  # a handler of a signal has struck where something may be half done
        self._begin(first)

    def _begin(self, segment: Segment) -> None:
        self._segment = segment
        self._view = _View(self._run.requests)
        run = self._run._replace(requests=self._view, fetcher=segment.fetcher)
        self._meter: ThroughputMeter | None = None
        now = perf_counter()
        if not self._tuner.decided or self._tuner.look_again(now):
            self._measure(now)
        self._batches: ResultIterator = segment.engine.start(run)

    def _measure(self, now: float) -> None:
        """Measure the current setting from now on."""
        self._meter = self._tuner.meter(self._segment.engine.config.depth)
        self._meter.begin(now)

    # What an executor is.

    @property
    def depth(self) -> int:
        """Batches that may be begun at the moment."""
        return self._batches.depth

    @property
    def first_states(self) -> dict[int, Snapshot]:
        """None: nobody has a state of its own."""
        return {}

    @property
    def ready_when_asked(self) -> int:
        """Batches that were made and not handed out when the consumer asked last."""
        return self._batches.ready_when_asked

    @property
    def processes(self) -> list[Any] | None:
        """The worker processes."""
        return self._batches.processes

    def next(self) -> BatchResult:
        """Return the next batch, or its error; the segments' numbers become those of the pass."""
        while True:
            if self._broken:
                raise WorkerError(INTERRUPTED)
            batches, asked = self._batches, perf_counter()
            if self._meter is None and self._tuner.look_again(asked):
                self._measure(asked)
            result: BatchResult | None
            try:
                result = batches.next()
            except StopIteration:
                result = None
            # What a handler of a signal raises from here on may leave a batch out, or a segment half begun.
            try:
                if result is not None:
                    return self._note(result, asked)
                # Not above: workers that are forked here would have the end of the segment in all of their tracebacks.
                if not self._go_on():
                    raise StopIteration
            except StopIteration:
                raise
            except BaseException:
                self._broken = True
                self.close()
                raise

    def poll(self) -> bool:
        """Return whether `next` would not wait."""
        return not self._broken and self._batches.poll()

    def _note(self, result: BatchResult, asked: float) -> BatchResult:
        """Measure a batch, and number it."""
        meter = self._meter
        if meter is not None and result.error is None and meter.add(result.metrics, asked, perf_counter()):
            self._measured(meter.found, size_of(result.batch))
        before = self._before  # below, what `_replace` does takes twice as long
        return BatchResult(
            result.batch, result.metrics, before + result.number, result.worker, result.state, result.way, result.error
        )

    def close(self) -> None:
        """Nothing more is wanted. Idempotent."""
        self._closed.set()
        self._view.stopped = True
        self._keep(ended=False)
        self._batches.close()
        self._drop_next()

    def end(self, patience: float) -> None:
        """The loader is closed: the workers end."""
        self._closed.set()
        self._view.stopped = True
        self._batches.end(patience)
        self._drop_next()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:  # modules may be empty by then
        if not _ending() and hasattr(self, "_batches") and not self._closed.is_set():
            self.close()

    def _drop_next(self) -> None:
        """Workers that have started and were given nothing."""
        following, self._next = self._next, None
        if following is not None:
            following.engine.dismiss()

    # From segment to segment.

    def _measured(self, found: Throughput, nbytes: int) -> None:
        """Enough is known of this segment's setting; its last batch had so many bytes."""
        self._meter = None
        tuner, segment = self._tuner, self._segment
        if not tuner.decided and tuner.current == segment.setting:
            tuner.memory_for = self._room(nbytes)
            tuner.note(found)
        if tuner.current == segment.setting:
            self._follow(start=False)  # it stays, and its workers with it
            return
        left = None if self._length is None else self._length - self._before - self._view.taken
        if left is not None and left <= max(2, segment.setting.workers):
            return  # not worth other workers: they begin the next pass
        self._view.stopped = True
        if segment.engine.config.kind == "process":
            # While this segment's last batches are made. Not beside threads: a fork could lose one that holds a lock.
            self._prepare()

    def _room(self, nbytes: int) -> int | None:
        """Return how many workers like these there is memory for: half of this rank's share of it is theirs."""
        free, config = available_memory(), self._segment.engine.config
        if free is None or config.kind == "inline":
            return self._tuner.memory_for
        pids = [process.pid for process in self._batches.processes or ()]
        each = private_memory(pids[0]) * len(pids) if pids else 0
        count = self._segment.setting.workers
        return count + int(free / self._tuner.ranks / 2 / (max(1, each + config.depth * nbytes) / count))

    def _prepare(self) -> None:
        """Have the workers of the next segment; of one that can be had."""
        while True:
            try:
                self._next = self._follow(start=True)
                return
            except Exception as error:
                if is_of_signal_handler(error):
                    raise
                if self._tuner.decided:
                    return  # raised when they are needed
                self._tuner.note(Throughput(), f"{type(error).__name__}: {error}")

    def _go_on(self) -> bool:
        """This segment has ended; whether there is another one."""
        if self._closed.is_set():
            raise WorkerError(CLOSED)
        if not self._view.stopped:
            self._keep(ended=True)
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
        if self._closed.is_set():  # by another thread meanwhile
            self._batches.end(0.5)
        return True

    def _keep(self, *, ended: bool) -> None:
        """The pass is over, or given up: what was measured is for the next one."""
        meter, self._meter = self._meter, None
        if meter is None or self._tuner.decided or self._tuner.current != self._segment.setting:
            return
        if ended:
            meter.end()
            if meter.enough:
                self._tuner.note(meter.found)
