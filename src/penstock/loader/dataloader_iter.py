"""What the consumer holds: an iterator that counts what it hands out, and knows where every worker was then."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data._utils.pin_memory import pin_memory as pin

from penstock.errors import WorkerError
from penstock.loader.failure_log import FailureLog
from penstock.loader.interrupts import is_of_signal_handler
from penstock.loader.messages import BatchResult
from penstock.loader.snapshots import Snapshot
from penstock.loader.stateful import Consumer
from penstock.loader.statistics import Statistics, size_of
from penstock.loader.window import CLOSED, INTERRUPTED, is_timeout
from penstock.plan.epoch import BatchEpochPlan

if TYPE_CHECKING:
    from penstock.loader.bar import Bar
    from penstock.loader.config import LoaderConfig

__all__ = ["SHUTDOWN_TIMEOUT_S", "WORKER_NAMES", "DataLoaderIter", "Progress", "ResultIterator", "finisher"]

SHUTDOWN_TIMEOUT_S = 5.0
"""Seconds that all workers together are given to end by themselves."""

WORKER_NAMES = ("_workers", "_shutdown_workers")
"""Of torch's iterator over worker processes: private, but programs read them."""


class ResultIterator(Protocol):
    """The batches of a pass: a `Window`, or several of them one after the other."""

    @property
    def depth(self) -> int:
        """Batches that may be in flight at the moment."""

    @property
    def processes(self) -> list[Any] | None:
        """The worker processes; None if there are none on this machine."""

    @property
    def first_states(self) -> dict[int, Snapshot]:
        """Snapshots of users' objects right after their beginning, see `Window`."""

    @property
    def ready_when_asked(self) -> int:
        """Batches that were made and not handed out when the consumer asked last."""

    def next(self) -> BatchResult:
        """Return the next batch, or as `BatchResult.error` what was raised in its place."""

    def poll(self) -> bool:
        """Return whether `next` would not wait, as the next batch is there."""

    def close(self) -> None:
        """Want nothing more, as the consumer says."""

    def end(self, patience: float) -> None:
        """End whatever makes batches in so many seconds, workers that would stay for another pass included: the loader
        is closed. Called in any thread. A consumer that waits for a batch, or asks for another one, gets a
        `WorkerError`: StopIteration would say that it had the whole epoch.
        """


class Progress:
    """How far the consumer of one pass has got. The loader keeps this, not the iterator, so that an iterator that the
    caller drops can go at once.

    Args:
        run: the pass; None for streams that only the data set can order.
        base_seed: of the iterator.
        ahead: numbers of batches that were had before, behind ones that were not (``in_order=False``).

    Attributes:
        count: batches had without a gap, failed ones included.
        ahead: numbers of those had behind the first gap.
        had_before: numbers of those that this pass is not asked for.
    """

    def __init__(self, run: BatchEpochPlan | None, base_seed: int, ahead: frozenset[int] = frozenset()) -> None:
        self.run = run
        self.base_seed = base_seed
        self.count = 0
        self.ahead = set(ahead)
        self.had = 0  # in this iterator, in whatever order
        self.held_by: weakref.ref[Any] | None = None
        """The iterator of the pass, which the loader itself does not keep."""
        self.had_before = ahead
        self._skipped = sorted(ahead)
        self._close_gap()

    def is_held(self) -> bool:
        """Return whether the iterator is still there, so that its consumer may go on."""
        return self.held_by is not None and self.held_by() is not None

    def delivered(self, number: int) -> None:
        """The batch with this number among those that were asked for has been had."""
        self.had += 1
        if number == self.count and not self._skipped and not self.ahead:
            self.count += 1
        else:
            for skipped in self._skipped:
                number += skipped <= number
            self.ahead.add(number)
            self._close_gap()

    def tell(self) -> None:
        """Tell the pass how many batches were had."""
        if self.run is not None:
            self.run.delivered(self.count)

    def _close_gap(self) -> None:
        while self.count in self.ahead:
            self.ahead.remove(self.count)
            self.count += 1


class DataLoaderIter:
    """The iterator of a loader.

    Args:
        batches: what an executor makes.
        progress: told of every batch, and of every one that failed, since the next call goes on behind it.
        states: of users' objects, told the same.
        statistics: told how long the consumer waited.
        log: of samples that ``on_error`` dealt with.
        finished: called once, at the end of the pass.
        rank: whose batches they are, for the log.
        finish: makes of a batch the form that the consumer asked for; None if it has it already.
        lying: length that an iterable data set claims, beyond which torch warns; None if it was not asked.
        workers: how many make the batches, for that warning.
        bar: a progress bar.
        length: tells the loader's.
    """

    def __init__(
        self,
        batches: ResultIterator,
        progress: Progress,
        states: Consumer,
        statistics: Statistics,
        log: FailureLog | None,
        finished: Callable[[Progress], None],
        *,
        rank: int,
        finish: Callable[[Any], Any] | None,
        lying: int | None,
        workers: int,
        bar: Bar | None,
        length: Callable[[], int],
    ) -> None:
        self._batches = batches
        self.progress = progress
        self.renewed: Callable[[], DataLoaderIter | None] | None = None
        """Another iterator in the place of this one, if its epoch is not the one any more that was chosen."""
        self._states = states
        self._statistics = statistics
        self._log = log
        self._finished: Callable[[Progress], None] | None = finished
        self._rank = rank
        self._finish = finish
        self._lying = lying
        self._num_workers = workers
        self._bar = bar
        self._length = length
        self._in_hand = False  # a batch is out of the window and not handed over yet
        self._turn = threading.Lock()
        self._closed = False
        states.begun(batches.first_states)

    def __iter__(self) -> DataLoaderIter:
        return self

    def __getattr__(self, name: str) -> Any:
        if name in WORKER_NAMES and (processes := self._batches.processes) is not None:
            return processes if name == "_workers" else partial(self._batches.end, SHUTDOWN_TIMEOUT_S)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __len__(self) -> int:
        """Batches of a whole epoch, as torch's iterators say it."""
        return self._length()

    def __next__(self) -> Any:
        with self._turn:  # threads that share an iterator take turns
            return self._next()

    def end(self, patience: float) -> None:
        """The loader is closed: its workers end, and whoever asks for another batch is told so. A pass that is over
        stays over.

        Args:
            patience: seconds that workers are given to end by themselves.
        """
        self._closed = True
        self._batches.end(patience)

    def _next(self) -> Any:
        if self._closed:
            raise StopIteration if self._finished is None else WorkerError(CLOSED)
        if self._in_hand:
            raise WorkerError(INTERRUPTED)
        if self.renewed is not None and (other := self.renewed()) is not None:
            self._become(other)
        # Before the next batch is taken: what is counted afterwards, and what is not, could not be told apart.
        self.progress.tell()
        start = perf_counter()
        try:
            result = self._batches.next()
        except StopIteration:
            self._end(perf_counter() - start)
            raise
        except Exception as error:
            if isinstance(error, WorkerError):
                _wait_for_exit()
            self._nothing_came(error, perf_counter() - start)
            raise
        # An exception of a signal handler may strike from here on. Then the batch was not had, and no other may follow.
        self._in_hand = True
        if self._finish is not None and result.error is None:
            result = _finished(result, self._finish)
        if result.error is not None:
            # Where Ctrl-C has struck, the batch was not had: a state says that it is missing.
            failure, result = result.error, result._replace(error=None)
            if isinstance(failure, Exception):
                self._failed(result, failure, perf_counter() - start)
            self._in_hand = False
            try:
                raise failure
            finally:
                del failure  # its traceback holds this frame
        batches, wait = self._batches, perf_counter() - start
        self._statistics.delivered(result, size_of(result.batch), wait, batches.ready_when_asked, batches.depth)
        if batches.first_states:
            self._states.begun(batches.first_states)
        self._states.delivered(result)
        self.progress.delivered(result.number)
        self._in_hand = False
        self._tell(result)
        return result.batch

    def _tell(self, result: BatchResult) -> None:
        """Tell the log, the user and the progress bar of a batch that was had."""
        progress, log = self.progress, self._log
        if log is not None:
            epoch = None if progress.run is None else progress.run.epoch
            log.add(result.metrics.failures, result.metrics.samples, epoch=epoch, rank=self._rank, number=result.number)
        if self._lying is not None and progress.had > self._lying:
            self._warn_of_length(progress.had, self._lying)
        if self._bar is not None:
            self._bar.update()

    def _become(self, other: DataLoaderIter) -> None:
        """Go on as another iterator of the same loader."""
        own = ("_closed", "_turn")
        self.__dict__.update((name, value) for name, value in other.__dict__.items() if name not in own)
        self.progress.held_by = weakref.ref(self)
        if self._closed:  # by another thread, perhaps before these batches were there
            self._batches.end(0.0)

    def _end(self, wait: float) -> None:
        finished, self._finished = self._finished, None
        if finished is not None:
            self._statistics.ended(wait)
            if self._bar is not None:
                self._bar.close()
            finished(self.progress)

    def _nothing_came(self, error: Exception, wait: float) -> None:
        """Count an error that is no batch's: a worker died, a sampler failed, or time is up."""
        if self._closed:
            self._statistics.ended(wait)
        elif is_timeout(error):
            self._statistics.waited(wait)
        else:
            self._statistics.failed(wait)

    def _failed(self, result: BatchResult, error: Exception, wait: float) -> None:
        """Count an error in the place of a batch: the next call goes on behind it."""
        if isinstance(error, StopIteration):  # out of a data set; a loop takes it for the end
            self._end(wait)
            return
        self._statistics.failed(wait)
        self._states.begun(self._batches.first_states)
        self._states.failed(result.worker, result.state)
        self.progress.delivered(result.number)

    def _warn_of_length(self, had: int, claimed: int) -> None:
        text = (
            f"Length of IterableDataset was reported to be {claimed} (when accessing len(dataloader)), but {had} "
            "samples have been fetched. "
        )
        if self._num_workers:
            text += (
                "For multiprocessing data-loading, this is so where the data set does not yield a share of its own in "
                "each worker: see get_worker_info()"
            )
        warnings.warn(text, stacklevel=5)


def _wait_for_exit() -> None:
    """Never return, in a daemon thread while the interpreter exits: workers have ended by then, which is no error.

    The interpreter stops such threads a moment later. A traceback of one would be noise.
    """
    if threading.current_thread().daemon and not threading.main_thread().is_alive():
        threading.Event().wait()


def _finished(result: BatchResult, finish: Callable[[Any], Any]) -> BatchResult:
    """Return a batch in the form that the consumer asked for; or, if it cannot have it, the error in its place."""
    begin = perf_counter()
    try:
        batch = finish(result.batch)
    except Exception as error:
        if is_of_signal_handler(error):
            raise
        return result._replace(batch=None, error=error)
    result.metrics.hand_over += perf_counter() - begin
    return result._replace(batch=batch)


def finisher(config: LoaderConfig) -> Callable[[Any], Any] | None:
    """Return what makes of each batch the form that the consumer asked for; None where it has it already."""
    if config.output == "numpy":
        from penstock.loader.batches import as_arrays  # only where it is asked for

        return as_arrays
    if config.to_device:  # by pinned memory in any case
        return None
    return pin if _pins(config.pin_memory, config.pin_memory_device) else None


def _pins(pin_memory: bool, device: str) -> bool:
    """Whether batches go to pinned memory; where that is asked for in vain, torch's warnings are given."""
    if pin_memory and device:
        warnings.warn(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device='{device}'.",
            stacklevel=5,
        )
    if pin_memory and not torch.accelerator.is_available():
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, "
            "then device pinned memory won't be used.",
            stacklevel=5,
        )
        return False
    return pin_memory
