"""Batches of an iterable dataset that only it can order: torch's rules, one iterator for each worker.

Invariant: a batch holds the next ``batch_size`` items of *this worker's* iterator; what is left at its end makes a
shorter one, unless ``drop_last``. So what comes out depends on the number of workers, as in torch: the dataset shards
itself by ``get_worker_info()``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from penstock.errors import StateError
from penstock.loader.fetch import preserved_generators
from penstock.loader.generators import WorkerGenerators
from penstock.loader.messages import BatchMetrics, BatchRequest
from penstock.loader.snapshots import (
    Snapshot,
    SnapshotInterval,
    cursor_of,
    reopen,
    restore,
    state_before,
    take_first_snapshot,
    take_snapshot,
)
from penstock.loader.stateful import WorkerState
from penstock.plan.stream import ResumableDataset, Stream, is_opened
from penstock.plan.stream_plan import EpochStart, StreamStart
from penstock.plan.user_states import Frozen, has_state
from penstock.stages import collect
from penstock.wording import counted

__all__ = ["StreamFetch"]


class StreamFetch:
    """``fetch(request, metrics) -> batch``, the next one, whatever the request says; StopIteration at the end.

    Args:
        dataset: iterable-style.
        collate_fn: takes the list of items, or the one item where batching is off.
        batch_size: items of a batch; None hands every item to ``collate_fn`` by itself.
        drop_last: leave out the last batch if it is not full.
        generators: whose the global generators are. "worker": this fetcher's alone, in a process of its own; states
            hold those that were drawn from. "trainer": the trainer's, inline; what is made again leaves them as they
            are. "shared": of all threads.
        last: holds the stream of ours that a loader's pass before has read here, behind which the next may go on.

    Picklable before `begin`, if the dataset and the collate function are. An error of the dataset's iterator passes
    through, and the items of its batch are lost; the next call goes on, with generators to the end, with iterators that
    can go on behind the error.
    """

    divisible = False
    tells_states = True

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        *,
        batch_size: int | None,
        drop_last: bool,
        generators: str = "shared",
        last: list[Stream] | None = None,
    ) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.batched = batch_size is not None
        self._generators = generators
        self._last = [] if last is None else last
        self._own: WorkerGenerators | None = None
        self._interval = SnapshotInterval()
        self._items: Iterator[Any] | None = None
        self._ended = False
        self._before: Frozen | None = None
        self._resume: WorkerState | None = None

    def copy(self) -> StreamFetch:
        """Another one over the same dataset, for another thread: it has an iterator of its own, and no state."""
        return StreamFetch(
            self.dataset,
            self.collate_fn,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            generators=self._generators,
            last=self._last,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": []}

    def begin(self, epoch: EpochStart) -> Snapshot | None:
        """Begin an iterator of the dataset, or go on where a loaded state left off, and return its first snapshot.

        None if nobody has a state yet; or if the loaded state says more, with the batches since its snapshot.

        Args:
            epoch: of a dataset of ours, its opening; else told to datasets that have ``set_epoch``; None leaves it to
                them.

        Raises:
            StateError: the loaded state is of another dataset.
            Exception: of the dataset, or of the batches that are made again.
        """
        if self._generators == "worker" and self._own is None:
            self._own = WorkerGenerators()
        resume, self._resume = self._resume, None
        self._interval.reset()
        if resume is None:
            self._open(epoch)
        else:
            self._go_on(resume, epoch)
            if resume.in_iterator:
                return None
        return take_first_snapshot(self.dataset, self._items, self.collate_fn, self._own, self._before)

    def _go_on(self, resume: WorkerState, epoch: EpochStart) -> None:
        """Go to where the consumer was: from the snapshot on, make what it has had again, and drop it."""
        snapshot, since = resume.snapshot, resume.since
        again = since if resume.in_iterator else since[:-1]
        with preserved_generators() if self._generators == "trainer" and again else nullcontext():
            restore(snapshot, collate_fn=self.collate_fn)
            first = 0  # question of this iterator
            for number, asked in enumerate(again):
                later = len(since) - 1 - number
                failed = {question - first for question in resume.failed}
                told = _before(epoch, later)
                self._reopen(None if number else snapshot, told, failed=0 in failed)
                self._make_again(asked, failed, over=later > 0)
                first += asked
        if not resume.in_iterator:
            self._reopen(None if again else snapshot, epoch)

    def _reopen(self, snapshot: Snapshot | None, epoch: EpochStart, *, failed: bool = False) -> None:
        """Begin an iterator at a snapshot.

        Args:
            snapshot: to go on from; None begins as the dataset is.
            epoch: told to the dataset.
            failed: the consumer has had an error in the place of the first batch, of ``iter()`` maybe.
        """
        try:
            if isinstance(epoch, StreamStart):
                cursor = cursor_of(snapshot)
                self._open(epoch if cursor is None else StreamStart(epoch=int(cursor["epoch"]), stream=cursor))
            else:
                reopen(snapshot, self.dataset, lambda: self._open(epoch))
        except Exception:
            if not failed:
                raise
            self._items, self._ended = iter(()), True  # it was over with that error
        restore(snapshot, self._own)

    def _make_again(self, count: int, failed: set[int], *, over: bool) -> None:
        """Make batches that the consumer has had, and drop them.

        Args:
            count: how many.
            failed: numbers of those in whose place the consumer had an error.
            over: the iterator was left, or came to its end, which is asked for again: code behind a last ``yield`` has
                run then.

        Raises:
            StateError: there are fewer now.
            Exception: one that the consumer has not had.
        """
        for number in range(count):
            try:
                self(_NOTHING, BatchMetrics())
            except StopIteration:
                if over or number in failed:
                    continue
                raise StateError(
                    f"{type(self.dataset).__name__} had given {counted(count, 'batch')} when this state was taken, and "
                    f"now it has {number}: it is another one, or does not repeat itself"
                ) from None
            except Exception:
                if number not in failed:
                    raise

    def _open(self, epoch: EpochStart) -> Iterator[Any]:
        self._items, self._ended = None, False  # the old iterator goes first: both may want the same file
        if is_opened(self.dataset):
            self._items = self._open_stream(self.dataset, epoch)
            return self._items
        if epoch is not None and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._before = state_before(self.dataset)
        items: Iterator[Any] = iter(self.dataset)
        self._items = items
        return items

    def _open_stream(self, dataset: ResumableDataset, epoch: EpochStart) -> Stream:
        if not isinstance(epoch, StreamStart):
            return dataset.open(epoch=epoch)  # somebody only looks
        stream = dataset.open_behind(self._last.pop() if self._last else None, epoch)
        self._last.append(stream)
        return stream

    def __call__(self, request: BatchRequest, metrics: BatchMetrics) -> Any:
        """The next batch.

        Raises:
            StopIteration: there is none.
        """
        start, cpu = time.perf_counter(), time.thread_time()
        try:
            items = self._next()
            metrics.samples += len(items) if self.batch_size is not None else 1
        finally:
            metrics.fetch += time.perf_counter() - start
            metrics.cpu += time.thread_time() - cpu
            for name, seconds in collect().items():
                metrics.stages[name] = metrics.stages.get(name, 0.0) + seconds
        start = time.perf_counter()
        try:
            return self.collate_fn(items)
        finally:
            metrics.collate += time.perf_counter() - start

    def _next(self) -> Any:
        if self._items is None:
            self.begin(None)
        assert self._items is not None
        if self._ended:
            raise StopIteration
        if self.batch_size is None:
            return next(self._items)
        items = []
        for _ in range(self.batch_size):  # by next() alone: torch asks no more of an iterator
            try:
                items.append(next(self._items))
            except StopIteration:
                self._ended = True
                if self.drop_last or not items:
                    raise
                break
        return items

    def state_dict(self) -> Snapshot | None:
        """Return a snapshot of the user's dataset, its iterator and the collate function right after a batch; None if
        none of them has a state, or none is due.

        None is due where the iterator is over: what an object does there is done again on a resume. But if the collate
        function alone has a state, that of the last batch is where the next iterator begins.
        """
        places = has_state(self.dataset) or has_state(self._items)
        if places and self._ended:
            self._interval.reset()
            return None
        if places and not self._interval.is_due():
            return None
        snapshot = take_snapshot(self.dataset, self._items, self.collate_fn, self._own, self._before)
        self._interval.taken(snapshot)
        return snapshot

    def state_after_error(self) -> None:
        """Return None: a batch that failed is asked for again on a resume, and fails again."""

    def load_state_dict(self, state: WorkerState | None) -> None:
        """Go on from there at the next `begin`; None begins anew."""
        self._resume = state


def _before(epoch: EpochStart, passes: int) -> EpochStart:
    """Return what an iterator so many passes before is told."""
    if epoch is None or not passes:
        return epoch
    if isinstance(epoch, StreamStart):
        return StreamStart(epoch=max(0, epoch.epoch - passes), chosen=False)
    return max(0, epoch - passes)


_NOTHING = BatchRequest([], [])
