"""Batches of an iterable dataset that only the dataset can order: torch's rules, with one iterator per worker.

Invariant: a batch consists of the next ``batch_size`` items of *this worker's* iterator. The rest at its end is a
shorter batch, unless ``drop_last``. So the batches depend on the number of workers, as in torch: the dataset splits
itself with ``get_worker_info()``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from penstock.errors import StateError, escaped
from penstock.loader.messages import BatchMetrics, BatchRequest
from penstock.loader.user_state import (
    Snapshot,
    WorkerGenerators,
    WorkerState,
    preserved_generators,
    take_snapshot,
)
from penstock.plan.cursor import State
from penstock.plan.stream import EpochStart, Stream, StreamStart, is_opened
from penstock.plan.user_states import has_state, load_states, same_states
from penstock.stages import collect
from penstock.wording import counted

__all__ = ["StreamFetch"]

_AMORTISE = 1 << 16
"""A larger snapshot (bytes) is taken less often, so that each batch costs at most this on average.

Saving a buffer of samples then does not cost more than loading them.
"""


class StreamFetch:
    """Makes batches of an iterable dataset: ``fetch(request, metrics) -> batch``.

    Each call returns the next batch, whatever the request; StopIteration at the end.

    Args:
        dataset: an iterable dataset.
        collate_fn: takes the list of items, or a single item without batching.
        batch_size: items per batch; None passes each item to ``collate_fn`` by itself.
        drop_last: leave out the last batch if it is incomplete.
        generators: owner of the global generators. "worker": only this fetcher, in its own process; states contain the
            generators that were used. "trainer": the trainer, inline; batches made again do not change them. "shared":
            all threads.
        draws_base_seed: whether the loader draws its base seeds from torch's global generator.
        last: contains the Penstock stream that the loader's previous iterator read here, so the next may continue it.

    Picklable before `begin`, if the dataset and the collate function are. Errors of the dataset's iterator are raised,
    and the items of that batch are lost. The next call continues if the iterator can; a generator ends.
    """

    divisible = False
    has_states = True

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        *,
        batch_size: int | None,
        drop_last: bool,
        generators: str = "shared",
        draws_base_seed: bool = False,
        last: list[Stream] | None = None,
    ) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._generators = generators
        self._draws_base_seed = draws_base_seed and generators != "worker"
        self._last = [] if last is None else last
        self._own: WorkerGenerators | None = None
        # Number of batches before the next snapshot.
        self._wait = 0
        self._items: Iterator[Any] | None = None
        self._ended = False
        self._resume: WorkerState | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": []}

    def begin(self, epoch: EpochStart) -> Snapshot | None:
        """Start an iterator of the dataset, or resume it from a loaded state. Return its first snapshot.

        None if no object has a state yet, or after a resume: the loaded state is exact.

        Args:
            epoch: for a Penstock dataset its opening; otherwise its number is passed to ``set_epoch``, if the dataset
                has it. None leaves the epoch to the dataset.

        Raises:
            StateError: the loaded state belongs to another dataset.
            Exception: an error of the dataset, or of the batches that are made again.
        """
        if self._generators == "worker" and self._own is None:
            self._own = WorkerGenerators()
        resume, self._resume, self._wait = self._resume, None, 0
        if resume is not None:
            self._go_on(resume, epoch)
            return None
        self._open(epoch)
        return take_snapshot(self.dataset, self._items, self.collate_fn, self._own, first=True)

    def _go_on(self, resume: WorkerState, epoch: EpochStart) -> None:
        """Resume at the consumer's position: from the snapshot on, make the delivered batches again and drop them."""
        early, late = (resume.states, {}) if resume.places else ({}, resume.states)
        inline, before = self._generators == "trainer", WorkerGenerators()
        load_states(early, collate_fn=self.collate_fn, dataset=self.dataset)
        with preserved_generators() if inline else nullcontext():
            self._open(_earlier(epoch, resume.ended), early.get("stream"))
        load_states(early, iterator=self._items)
        if early and self._own is not None:
            self._own.restore(early)
        if {"dataset", "iterator"} <= early.keys() and not same_states(self.dataset.state_dict(), early["dataset"]):
            raise StateError(
                f"iter() changes the state of {type(self.dataset).__name__}, whose iterator has a state too, so this "
                "iterator is another one than in the first run: change it in set_epoch, or when the iterator ends"
            )
        # The state of a user's object may contain generators. The batches then draw from them as in the first run.
        moved = before.drawn()
        with preserved_generators() if inline and not moved else nullcontext():
            over = self._remake(resume, epoch)
        load_states(late, collate_fn=self.collate_fn)
        if late and self._own is not None:
            self._own.restore(late)
        if over:
            if moved and self._draws_base_seed:
                # The loader drew the base seed of the next iterator, which is in its state, after those batches.
                torch.empty((), dtype=torch.int64).random_()
            self._open(epoch)

    def _remake(self, resume: WorkerState, epoch: EpochStart) -> bool:
        """Make the requests since the snapshot again. Return whether the last one was the end of an iterator.

        Raises:
            StateError: the iterator has fewer batches now.
            Exception: an error that the consumer has not received.
        """
        failed, ended, over = resume.failed, resume.ended, False
        for number in range(resume.since):
            if over:
                self._open(_earlier(epoch, ended))
            over = False
            try:
                self(_NOTHING, BatchMetrics())
            except StopIteration:
                if not ended:
                    raise StateError(
                        f"{type(self.dataset).__name__} had yielded {counted(resume.since, 'batch')} when this state "
                        f"was saved, but now it yields {number}: resume with the same dataset, which must be repeatable"
                    ) from None
                ended, over = ended - 1, True
            except Exception:
                if not failed:
                    raise
                failed -= 1
        return over

    def _open(self, epoch: EpochStart, cursor: State | None = None) -> None:
        """Start an iterator of the dataset; for a Penstock dataset perhaps at a cursor."""
        # The old iterator is freed first, since both may need the same file.
        self._items, self._ended = None, False
        if not is_opened(self.dataset):
            if cursor is not None:
                self.dataset.load_state_dict(cursor)
            if epoch is not None and hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch.epoch)
            self._items = iter(self.dataset)
        elif epoch is None:
            # A measurement that does not belong to a loader's epoch.
            self._items = self.dataset.open()
        else:
            last = self._last.pop() if self._last else None
            stream = self.dataset.open_behind(last, epoch) if cursor is None else self.dataset.open(cursor)
            self._last.append(stream)
            self._items = stream

    def __call__(self, request: BatchRequest, metrics: BatchMetrics) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: there is none.
        """
        start, cpu = time.perf_counter(), time.thread_time()
        try:
            if self._items is None:
                self._open(None)
            assert self._items is not None
            if self.batch_size is None:
                items = next(self._items)
                metrics.samples += 1
            else:
                items = []
                # Only next() is used: torch requires no more of an iterator.
                for _ in range(0 if self._ended else self.batch_size):
                    try:
                        items.append(next(self._items))
                    except StopIteration:
                        self._ended = True
                        break
                if not items or (self._ended and self.drop_last):
                    raise StopIteration
                metrics.samples += len(items)
        finally:
            metrics.fetch += time.perf_counter() - start
            metrics.cpu += time.thread_time() - cpu
            metrics.add(BatchMetrics(stages=collect()))
        start = time.perf_counter()
        try:
            return self.collate_fn(items)
        except StopIteration as stop:
            raise escaped(stop) from stop
        finally:
            metrics.collate += time.perf_counter() - start

    def state_dict(self) -> Snapshot | None:
        """Return a snapshot of the user's dataset, its iterator and the collate function right after a batch.

        None if none of them has a state, or none is due. At the end of the iterator none is due, because a resume
        repeats the end. But if only the collate function has a state, the next iterator starts with its last one.
        """
        if (self._ended or self._wait > 0) and (has_state(self.dataset) or has_state(self._items)):
            self._wait -= 1
            return None
        snapshot = take_snapshot(self.dataset, self._items, self.collate_fn, self._own)
        self._wait = sum(map(len, (snapshot or {}).values())) // _AMORTISE
        return snapshot

    def load_state_dict(self, state: WorkerState) -> None:
        """Resume from a state at the next `begin`."""
        self._resume = state


_NOTHING = BatchRequest([], [])


def _earlier(epoch: EpochStart, ended: int) -> EpochStart:
    """Return the epoch of an iterator after which so many others have started."""
    if epoch is None or not ended:
        return epoch
    return StreamStart(epoch=max(0, epoch.epoch - ended), chosen=False)
