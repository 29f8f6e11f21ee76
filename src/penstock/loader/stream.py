"""Batches of an iterable data set that only it can order: torch's rules, one iterator for each worker.

Invariant: a batch holds the next ``batch_size`` items of *this worker's* iterator; what is left at its end makes a
shorter one, unless ``drop_last``. So what comes out depends on the number of workers, as in torch: the data set shards
itself by ``get_worker_info()``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from penstock.loader.snapshots import Frozen, Resume, Snapshots, reopen
from penstock.loader.work import Task, Work
from penstock.stages import collect

__all__ = ["StreamFetch"]


class StreamFetch:
    """``fetch(task, work) -> batch``, the next one, whatever the task says; StopIteration at the end.

    Args:
        dataset: iterable-style.
        collate_fn: takes the list of items, or the one item where batching is off.
        batch_size: items of a batch; None hands every item to ``collate_fn`` by itself.
        drop_last: leave out the last batch if it is not full.
        generators: states hold the global generators too; for worker processes, whose generators are theirs alone.

    Picklable before `begin`, if the data set and the collate function are. An error of the data set's iterator passes
    through, and the items of its batch are lost; the next call goes on, with generators to the end, with iterators that
    can go on behind the error.
    """

    divisible = False

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        *,
        batch_size: int | None,
        drop_last: bool,
        generators: bool = False,
    ) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.batched = batch_size is not None
        self._generators = generators
        self._snapshots = Snapshots(generators=generators)
        self._items: Iterator[Any] | None = None
        self._ended = False
        self._resume: Resume | None = None

    def copy(self) -> StreamFetch:
        """Another one over the same data set, for another thread: it has an iterator of its own, and no state."""
        return StreamFetch(
            self.dataset,
            self.collate_fn,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            generators=self._generators,
        )

    def begin(self, epoch: int | None) -> None:
        """Begin anew, or where a loaded state left off. ``iter(dataset)`` is called here; what was had since the
        snapshot is made again.

        Args:
            epoch: told to data sets that have ``set_epoch``; None leaves it to them.
        """
        resume, self._resume = self._resume, None
        if resume is None:
            self._open(epoch)
        else:
            reopen(
                resume,
                self.dataset,
                self.collate_fn,
                lambda earlier: self._open(None if epoch is None else max(0, epoch - earlier)),
                lambda: self(_NOTHING, Work()),
            )

    def _open(self, epoch: int | None) -> Iterator[Any]:
        self._items, self._ended = None, False  # the old iterator goes first: both may want the same file
        if epoch is not None and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._items = iter(self.dataset)
        return self._items

    def __call__(self, task: Task, work: Work) -> Any:
        """The next batch.

        Raises:
            StopIteration: there is none.
        """
        start, cpu = time.perf_counter(), time.thread_time()
        try:
            items = self._next()
            work.samples += len(items) if self.batch_size is not None else 1
        finally:
            work.fetch += time.perf_counter() - start
            work.cpu += time.thread_time() - cpu
            for name, seconds in collect().items():
                work.stages[name] = work.stages.get(name, 0.0) + seconds
        start = time.perf_counter()
        try:
            return self.collate_fn(items)
        finally:
            work.collate += time.perf_counter() - start

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

    def state_dict(self) -> Frozen | None:
        """Snapshot of the user's data set, its iterator and the collate function right after a batch; None if none of
        them has a state, or none is due.
        """
        return self._snapshots.take(self.dataset, self._items, self.collate_fn, ended=self._ended)

    def load_state_dict(self, state: Resume | None) -> None:
        """Go on from there at the next `begin`; None begins anew."""
        self._resume = state


_NOTHING = Task([], [])
