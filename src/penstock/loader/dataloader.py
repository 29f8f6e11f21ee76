"""`DataLoader`: torch's, with executors that give the same batches, and a state that resumes at any of them.

    sampler -> passes -> tasks (indices, keys) -> executor -> batches
                 |                                              |
                 `------------- state(batches delivered) -------'

Invariant: batches are planned before any worker is thought of, and the state is a function of the batches that the
consumer has received, never of what was prefetched.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import IterableDataset

from penstock.loader.configured import Configured
from penstock.loader.delivery import PATIENCE, Batches, Delivery, Progress, pins
from penstock.loader.engine import Engine, Run
from penstock.loader.position import Position, base_seed_after
from penstock.loader.ranks import warn_of_same_batches
from penstock.loader.statistics import Statistics
from penstock.plan.cursor import State
from penstock.plan.epoch import BatchEpochPlan

if TYPE_CHECKING:
    from penstock.loader.bar import Bar
    from penstock.loader.tuned import Segment

__all__ = ["DataLoader"]

T_co = TypeVar("T_co", covariant=True)


class DataLoader(Configured[T_co]):
    """A ``torch.utils.data.DataLoader`` whose batches do not depend on what makes them, and that resumes exactly.

    All arguments of torch's, with torch's meaning, defaults and errors, and:

    Args:
        shuffle: besides True and False, ``"global"`` or ``"block"``: our orders, in O(1) memory (with seed 0 if none
            is given).
        num_workers: besides a number, ``"auto"``: executor and number are chosen in the first seconds of the run, by
            trying a few of them on its own batches, which stay what they are. ``loader.num_workers`` is the number
            then, and `report` says what was tried. It needs a seed or a ``pure`` data set.
        executor: ``"inline"`` makes batches in the caller's thread; ``"thread"`` in ``num_workers`` threads that share
            the data set, one if it is 0; ``"process"`` in ``num_workers`` processes, from which they come in reused
            shared memory.
            ``"ray"`` in ``num_workers`` workers on a Ray cluster, see ``ray_options``.
            ``"auto"`` is inline without workers; one process with ``num_workers`` threads for data sets that set
            ``pure`` and ``releases_gil``; else processes.
        threads_per_worker: threads in each worker process; they share its copy of the data set.
        dispatch: how processes share the work. ``"auto"``: data sets that declare themselves ``pure`` are made in
            chunks, all workers on the next batch first, where that is worth it; others by torch's rule, batch k whole
            by worker k mod n. ``"batch"``: always that rule. ``"chunk"``: always chunks; the data set is taken to be
            pure.
        seed: one truth: order and every sample's `penstock.generator` are functions of (seed, epoch, position), in
            every executor. Where a data set does not declare itself ``pure``, inline and process workers also seed
            Python's, NumPy's and torch's global generators for each sample; the caller's are left as they were. By
            default the seed of a Penstock sampler or data set; without one, torch's own rules.
        on_error: ``"raise"``, ``"skip"``, ``"replace"``, a callable, or an `OnError` with limits and a report: what
            becomes of a sample that cannot be loaded.
        on_worker_death: ``"raise"``, or ``"restart"``: a new worker makes again what a dead one had not finished.
        max_bytes_in_flight: bytes of batches that are finished or being made, beside those that the consumer holds; at
            least one batch. None: as ``prefetch_factor`` says.
        ray_options: where the workers of ``executor="ray"`` run, a `RayOptions`.
        progress: show a progress bar on standard error.

    Raises:
        ValueError: whatever torch refuses, in its words, and options that make no sense for an executor.
        PartitionError: both the data set and the sampler deal samples to ranks.

    With a seed, ``epoch`` moves on by itself at each new ``iter()`` unless `set_epoch` was called; it is readable, so a
    resumed loop starts there::

        loader.load_state_dict(state)                     # before or after iter(), in any process
        for epoch in range(loader.epoch, 90):
            loader.set_epoch(epoch)                       # keeps the position of the epoch just loaded
            for images, labels in loader:
                state = loader.state_dict()               # a few hundred bytes, at any batch

    Batches that come from processes are writable views of shared memory that is used again when the last tensor over
    it is gone. Whoever keeps more than three of them alive gets copies, and a warning. A fork of the program should not
    read batches of its parent's loader.
    """

    # Epoch and state.

    @property
    def epoch(self) -> int:
        """The epoch that runs, or will run next."""
        return self._position.epoch

    def __len__(self) -> int:
        """Batches of a whole epoch, wherever the consumer is in it."""
        if self._position.plan is None or isinstance(self.dataset, IterableDataset):
            return super().__len__()
        return len(self._position.whole())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next ``iter()``. The epoch of a state just loaded keeps its position."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> State:
        """Where the consumer is: JSON-serialisable, a few hundred bytes with Penstock's samplers and data sets, in a
        few microseconds and without asking any worker. Objects of yours with a ``state_dict`` (data set, iterator,
        sampler, collate function) are in it, and make it as large as theirs are.

        With ``in_order=False`` it is that of this rank alone while batches have overtaken others.
        """
        if not self._position.running and not self._position.seeded:
            self._position.base_seed(self._draw_base_seed)  # as the next iter() would, so that asking changes nothing
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, allow_growth: bool = False) -> None:
        """Go on from a state at the next ``iter()``; an iterator that runs is detached.

        Args:
            state: from `state_dict`, of any rank: all save at the same step.
            allow_growth: accept a manifest to which rows were appended since, see `RankDataset.load_state_dict`; for
                loaders over such a data set.

        Raises:
            StateError: the state belongs to other data, another order or another seed; it says what differs. It is an
                AssertionError, too, if the data set has a state for each worker, and their number was another.
            ConfigError: allow_growth where the order is not the data set's own.
        """
        if allow_growth:
            self._position.load_grown(state)
        else:
            self._position.load_state_dict(state)

    # Iteration.

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]
        return self._begin()

    def _begin(self) -> Delivery:
        """A pass begins."""
        self._follow_settings()
        before = self._engine
        self._follow_ladder()
        if before is not self._engine:
            before.close()
        engine, position = self._engine, self._position
        if self._how.name == "inline" and self.timeout:
            raise AssertionError(f"timeout={self.timeout} is for loaders with workers: leave it out")  # as torch
        kept = engine.keeps_workers
        maker, base_seed = self._maker(), position.base_seed(self._draw_base_seed)
        engine.prepare(maker, base_seed)
        progress = position.start(base_seed)
        self._base_seed = progress.base_seed
        position.states.begin(fresh=self._how.name in ("process", "ray") and not kept)
        resumed = position.states.dropped
        if resumed:
            warnings.warn(
                f"{type(self.dataset).__name__} has no state_dict: its first {resumed} batches are made again and "
                "dropped",
                stacklevel=2,
            )
        if not self._dealt:
            warn_of_same_batches(self, position.plan)
        how, statistics = self._how, self._statistics
        statistics.begin(**self._what_runs())
        if self._log is not None:
            self._log.begin()
        if how.name == "process" and not kept:
            self.check_worker_number_rationality()
        states = position.states
        run = Run(
            position.tasks(progress),
            maker,
            position.stream_epoch if position.plan is None else None,
            progress.base_seed,
            states.resume,
            states.next,
        )
        batches = self._tuned(run, engine, progress.run) if self._tuning else engine.start(run)
        if engine.pool is not None:
            self._iterator = _Kept(engine)  # type: ignore[assignment]
        delivery = Delivery(
            batches,
            progress,
            states.consumer(),
            statistics,
            self._log,
            self._finished,
            rank=0 if self._log is None else position.rank,
            pinned=pins(self.pin_memory, self.pin_memory_device),
            lying=self._IterableDataset_len_called if position.plan is None else None,
            workers=how.workers,
            bar=_bar(statistics, position, progress) if self.progress else None,
            length=self.__len__,
        )
        progress.held_by = weakref.ref(delivery)
        delivery.renewed = lambda: None if position.goes_on(progress) else self._begin()
        self._passes = [*(held for held in self._passes if held() is not None), weakref.ref(delivery)]
        return delivery

    def _tuned(self, run: Run, engine: Engine, batches: BatchEpochPlan | None) -> Batches:
        """The batches of a pass that tries settings."""
        from penstock.loader.tuned import Segment, TunedBatches  # only where settings are tried

        ladder, setting = self._ladder, self._setting
        assert ladder is not None
        assert setting is not None
        length = _length(batches)
        ladder.length = None if length is None else length + (0 if batches is None else batches.first_batch)

        def follow(*, start: bool) -> Segment:
            self._follow_ladder()
            maker = self._maker()
            if start:
                self._engine.prepare(maker, run.base_seed)
            assert self._setting is not None
            return Segment(self._setting, self._engine, maker)

        return TunedBatches(run, Segment(setting, engine, run.maker), ladder, follow, length)

    def _draw_base_seed(self) -> int:
        """torch draws one for each iterator, before its sampler draws anything; for persistent workers, only once."""
        kept = self._engine.keeps_workers or (self._ladder is not None and self.persistent_workers)
        if self._base_seed is not None and kept:
            return base_seed_after(self._base_seed)
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())

    def _finished(self, progress: Progress) -> None:
        engine = self._engine
        self._position.finished(
            progress, fresh=lambda: self._how.name in ("process", "ray") and not engine.keeps_workers
        )

    # Statistics and the end.

    def stats(self) -> dict[str, Any]:
        """What happened so far, as plain numbers: samples/s, bytes/s, how long the consumer waited, seconds of work by
        stage, how full the queue was, errors, restarts. See the guide for each entry.
        """
        self._statistics.restarts = self._engine.restarts
        stats = self._statistics.stats(None if self._log is None else self._log.counts())
        if self._ladder is not None:
            stats["tuning"] = self._ladder.stats()
        return stats if self._engine.ray is None else {**stats, **self._engine.ray.stats()}

    def report(self, file: IO[str] | None = None) -> None:
        """Print `stats` as a table, and one sentence: what limits this run, and what to change.

        Args:
            file: where to; standard output by default.
        """
        from penstock.loader.report import print_report  # it needs rich, which workers do not

        print_report(self.stats(), file)

    def reset_stats(self) -> None:
        """Count from zero."""
        self._statistics.reset()
        self._engine.restarts = 0

    def close(self) -> None:
        """End all iterators of this loader, and all threads and workers. A loop that is not over, in whatever thread
        and with whatever executor, gets a `WorkerError` in place of its next batch; one that is over stays so.
        Idempotent, and done in a few seconds at most, whatever workers are at. The next ``iter()`` begins anew.
        """
        deadline = time.monotonic() + PATIENCE
        passes, self._passes = self._passes, []
        for held in passes:
            if (delivery := held()) is not None:
                delivery.end(max(0.5, deadline - time.monotonic()))
        self._engine.close()
        self._iterator = None

    def __enter__(self) -> DataLoader[T_co]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Kept:
    """``loader._iterator`` with persistent workers: private in torch, but programs end workers through it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def _workers(self) -> list[Any]:
        pool = self._engine.pool
        return [] if pool is None else [member.process for member in pool.members]

    def _shutdown_workers(self) -> None:
        self._engine.close()


def _bar(statistics: Statistics, position: Position, progress: Progress) -> Bar:
    """Over the whole epoch, from where the pass begins in it."""
    from penstock.loader.bar import Bar  # only for progress=True

    left = _length(progress.run)
    if position.plan is None or left is None:
        return Bar(statistics, None)
    before = max(0, (_length(position.whole()) or 0) - left)
    return Bar(statistics, before + left, before + len(progress.ahead))


def _length(run: Any) -> int | None:
    """Batches of a pass; None where nobody knows."""
    try:
        return None if run is None else len(run)
    except TypeError:
        return None
