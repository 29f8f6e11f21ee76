"""`DataLoaderIter`: the iterator that a consumer holds. It records the batches delivered and each worker's state."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from penstock.errors import WorkerError, escaped
from penstock.loader.messages import BatchResult
from penstock.loader.statistics import size_of
from penstock.loader.window import CLOSED, INTERRUPTED, SHUTDOWN_TIMEOUT_S, Window, is_timeout
from penstock.plan.epoch import BatchEpochPlan

if TYPE_CHECKING:
    from penstock.loader.bar import Bar
    from penstock.loader.dataloader import DataLoader
    from penstock.loader.device import CopiesAhead, DeviceCopier
    from penstock.plan.reader import PlanReader

__all__ = ["WORKER_NAMES", "DataLoaderIter", "Progress"]

WORKER_NAMES = ("_workers", "_shutdown_workers")
"""Attributes of torch's multi-process iterator: private, but programs read them."""


class Progress:
    """How many batches the consumer of one epoch iterator has received.

    The loader keeps this object instead of the iterator, so an iterator that the caller drops is freed at once.

    Args:
        run: the epoch plan; None for streams that only the dataset can order.
        base_seed: base seed of the iterator.
        ahead: numbers of batches already delivered ahead of missing ones (``in_order=False``).

    Attributes:
        count: number of batches delivered without a gap, including failed ones.
        ahead: numbers of the batches delivered after the first gap.
        delivered_before: numbers of the batches that were skipped, or delivered before this iterator: it does not
            request them.
        advance: called with `count` after each delivery; for a dataset that fetches ahead.
    """

    def __init__(self, run: BatchEpochPlan | None, base_seed: int, ahead: frozenset[int] = frozenset()) -> None:
        self.run = run
        self.base_seed = base_seed
        self.count = 0
        self.ahead = set(ahead)
        # Batches delivered by this iterator, in any order.
        self.num_delivered = 0
        self.reader: PlanReader[Any] | None = None
        """The reader of the epoch plan, or of the stream's epochs; None if nobody counts epochs."""
        self.held_by: weakref.ref[Any] | None = None
        """The iterator. The loader itself does not keep it alive."""
        self.delivered_before = ahead
        if ahead:
            self._close_gap()
        # The number of the first requested batch, and those after it that are not requested.
        self._first, self._left_out = self.count, sorted(self.ahead)
        self.advance: Callable[[int], object] | None = None

    def is_held(self) -> bool:
        """Return whether the iterator still exists, so that its consumer may continue."""
        return self.held_by is not None and self.held_by() is not None

    def delivered(self, number: int) -> None:
        """Record the delivery of a batch, by its number among the requested ones."""
        self.num_delivered += 1
        number += self._first
        if number == self.count and not self._left_out and not self.ahead:
            self.count += 1
        else:
            for other in self._left_out:
                number += other <= number
            self.ahead.add(number)
            self._close_gap()
        if self.advance is not None:
            self.advance(self.count)

    def _close_gap(self) -> None:
        while self.count in self.ahead:
            self.ahead.remove(self.count)
            self.count += 1


class DataLoaderIter:
    """The iterator of a `DataLoader`.

    Args:
        loader: the loader.
        window: the batches.
        progress: records every delivered or failed batch; the next call continues after it.
        copier: copies batches to a device; None leaves them where they are.
        began: time before the workers were started.
    """

    def __init__(
        self, loader: DataLoader[Any], window: Window, progress: Progress, copier: DeviceCopier | None, began: float
    ) -> None:
        config, consumer, tuner = loader._workers.config, loader.consumer, loader._tuner
        statistics, log = loader._statistics, loader._log
        self.progress = progress
        self._loader = loader
        self._batches = window
        self._copies: CopiesAhead | None = None
        if copier is not None:
            # Imported only for device=.
            from penstock.loader.device import CopiesAhead

            self._copies = CopiesAhead(window, copier, statistics)
        self._states = consumer.states if consumer.states.stateful else None
        self._statistics = statistics
        self._log = log
        self._rank = 0
        self._tuner = tuner
        # The length of an iterable dataset, if the program asked for it: torch warns if there are more batches.
        self._claimed_length: int | None = loader._IterableDataset_len_called if consumer.plan is None else None
        self._finish: Callable[[Any], Any] | None = None
        if config.output == "numpy":
            # Imported only for output="numpy".
            from penstock.loader.batches import as_arrays

            self._finish = as_arrays
        # The device copier uses pinned memory in any case.
        elif config.pin_memory and not config.to_device:
            self._finish = _pinning(config.pin_memory_device)
        self._bar: Bar | None = None
        self._asked = self._over = False
        # Whether a batch has left the window without being delivered.
        self._in_hand = False
        # A batch in whose report a warning was raised as an error. The next call delivers it.
        self._held: BatchResult | None = None
        self._turn = threading.Lock()
        self._closed = False
        if log is not None:
            log.begin()
            self._rank = consumer.rank
        # Batches of the whole epoch, and of these the ones before this iterator's first one.
        length, done = None, 0
        if progress.run is not None and (loader.progress or tuner is not None):
            # Endless samplers have no length, nor have shards that are not counted yet.
            with suppress(TypeError):
                length = len(consumer.whole())
                done = length - len(progress.run) + progress.count + len(progress.ahead)
        if tuner is not None and tuner.chosen is None:
            tuner.begin(window, began, length)
        if loader.progress:
            # Imported only for progress=True.
            from penstock.loader.bar import Bar

            self._bar = Bar(statistics, length, done)
        if window.first_states:
            consumer.states.begun(window.first_states)
        progress.held_by = weakref.ref(self)

    def __iter__(self) -> DataLoaderIter:
        return self

    def __getattr__(self, name: str) -> Any:
        if name in WORKER_NAMES and (processes := self._batches.executor.processes) is not None:
            return processes if name == "_workers" else partial(self._end_workers, SHUTDOWN_TIMEOUT_S)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, as torch's iterators do."""
        return len(self._loader)

    def __next__(self) -> Any:
        # Threads that share an iterator take turns.
        with self._turn:
            return self._next()

    def end(self, patience: float) -> None:
        """End the workers because the loader is closed. Later requests raise `WorkerError`.

        An iterator that has reached its end stays finished.

        Args:
            patience: seconds that workers have to end by themselves.
        """
        self._closed = True
        self._end_workers(patience)

    def _end_workers(self, patience: float) -> None:
        if self._copies is not None:
            self._copies.drop()
        self._batches.end(patience)

    def _next(self) -> Any:
        if self._closed:
            raise StopIteration if self._over else WorkerError(CLOSED)
        if self._in_hand:
            raise WorkerError(INTERRUPTED)
        progress = self.progress
        # Asked for the first batch, and after another start was chosen at the loader. One that a sampler's bookmark
        # requests counts at the end of the pass, whether a property of the loader was read since or not.
        reader = progress.reader
        asks = not progress.num_delivered or not (reader is None or reader.attached or reader.requested)
        if asks and not self._loader.consumer.continues(progress):
            # Another epoch was set, and nothing is delivered yet.
            self._become(self._loader.start_iterator())
        if not self._asked:
            self._asked = True
            self._statistics.begin(self._loader._workers.config)
        if self._held is not None:
            held, self._held = self._held, None
            return self._deliver(held)
        window, copies, start = self._batches, self._copies, perf_counter()
        try:
            result = window.next() if copies is None else copies.next()
        except Exception as error:
            self._end_without_batch(error, perf_counter() - start)
            raise
        # From here on a signal handler may raise. The batch then counts as undelivered, and no other may follow it.
        self._in_hand = True
        if copies is not None:
            result = copies.deliver(result)
        elif self._finish is not None and result.error is None:
            begin = perf_counter()
            try:
                result = result._replace(batch=self._finish(result.batch))
                result.metrics.hand_over += perf_counter() - begin
            except Exception as error:
                result = result._replace(batch=None, error=error)
        if result.error is not None:
            # After Ctrl-C the batch counts as undelivered, and a state says so.
            failure, result = result.error, result._replace(error=None)
            if isinstance(failure, StopIteration):
                failure = escaped(failure)
            if isinstance(failure, Exception):
                # The next call continues after the error.
                self._statistics.failed(perf_counter() - start)
                self._deliver(result)
            self._in_hand = False
            try:
                raise failure
            finally:
                # The traceback of the exception refers to this frame.
                del failure
        now, ready, depth = perf_counter(), window.ready_on_request, window.depth
        if copies is not None:
            ready, depth = copies.ready, depth and depth + 1
        self._statistics.delivered(result, size_of(result.batch), now - start, ready, depth)
        tuner = self._tuner
        if tuner is not None and tuner.add(window, result, start, now):
            self._loader.follow_tuner(tuner, window)
        if self._log is not None or self._claimed_length is not None:
            try:
                self._report(result)
            except Warning:
                self._held, self._in_hand = result, False
                raise
            except Exception:
                # Raised in the place of the batch, and counts as received, as other errors do.
                self._deliver(result)
                raise
        return self._deliver(result)

    def _deliver(self, result: BatchResult) -> Any:
        """Record a batch, or the error in its place, as received by the consumer, and return the batch."""
        if self._states is not None:
            self._states.begun(self._batches.first_states)
            self._states.delivered(result.worker, result.state)
        self.progress.delivered(result.number)
        self._in_hand = False
        if self._bar is not None:
            self._bar.update()
        return result.batch

    def _report(self, result: BatchResult) -> None:
        """Report the failed samples of a batch, and a dataset that is longer than it says."""
        progress, log = self.progress, self._log
        if log is not None:
            epoch = None if progress.run is None else progress.run.epoch
            log.add(result.metrics.failures, result.metrics.samples, epoch=epoch, rank=self._rank, batch=result.number)
        claimed, delivered = self._claimed_length, progress.num_delivered + 1
        if claimed is not None and delivered > claimed:
            text = (
                f"Length of IterableDataset was reported to be {claimed} (when accessing len(dataloader)), but "
                f"{delivered} samples have been fetched. "
            )
            if self._loader.num_workers:
                text += (
                    "With several workers this happens if the dataset does not yield a separate share in "
                    "each worker: see get_worker_info()"
                )
            warnings.warn(text, stacklevel=4)

    def _become(self, other: Any) -> None:
        """Continue as another iterator of the same loader."""
        own = ("_closed", "_turn")
        self.__dict__.update((name, value) for name, value in other.__dict__.items() if name not in own)
        self.progress.held_by = weakref.ref(self)
        # Another thread closed this iterator, perhaps before the new batches existed.
        if self._closed:
            self._end_workers(0.0)

    def _end_without_batch(self, error: Exception, wait: float) -> None:
        """Record the end of the epoch, or an error of no batch: a lost worker, a failed sampler or a timeout.

        In a daemon thread an error blocks forever while the interpreter exits. Workers have ended by then, which is no
        error. The interpreter stops such threads a moment later, and a traceback would be noise.
        """
        if isinstance(error, StopIteration):
            if not self._over:
                self._over = True
                self._statistics.ended(wait)
                if self._bar is not None:
                    self._bar.close()
                self._loader.consumer.finished(self.progress)
            return
        exits = threading.current_thread().daemon and not threading.main_thread().is_alive()
        if exits and isinstance(error, WorkerError):
            threading.Event().wait()
        if self._closed:
            self._statistics.ended(wait)
        elif is_timeout(error):
            self._statistics.waited(wait)
        else:
            self._statistics.failed(wait)


def _pinning(device: str) -> Callable[[Any], Any] | None:
    """Return torch's function that copies a batch into pinned memory; None without an accelerator."""
    if device:
        warnings.warn(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device='{device}'.",
            stacklevel=4,
        )
    if torch.accelerator.is_available():
        pin: Callable[[Any], Any] = pin_memory
        return pin
    warnings.warn(
        "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used.",
        stacklevel=4,
    )
    return None
