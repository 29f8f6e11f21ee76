"""`DataLoader`: torch's, with executors that give the same batches, and a state that resumes at any of them.

    sampler -> passes -> requests (indices, keys) -> executor -> batches
                 |                                              |
                 `------------- state(batches delivered) -------'

Invariant: batches are planned before any worker is thought of, and the state is a function of the batches that the
consumer has received, never of what was prefetched.

Attributes that torch lets programs assign (``num_workers``, ``timeout``, ``worker_init_fn``, ...) are read at each
``iter()``, into a `LoaderConfig`; an assigned ``seed`` is refused there. They stay in ``vars(loader)``, where Lightning
looks for a loader's arguments.
"""

from __future__ import annotations

import copy
import operator
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import IO, TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, Sampler

from penstock.errors import ConfigError
from penstock.hashing import checked_seed
from penstock.loader.config import LoaderConfig, as_workers, check, check_assigned, check_stream, ranges_of
from penstock.loader.dataloader_iter import SHUTDOWN_TIMEOUT_S, DataLoaderIter, Progress, ResultIterator, finisher
from penstock.loader.describe import describe
from penstock.loader.engine import Engine, Run
from penstock.loader.failure_log import FailureLog
from penstock.loader.failures import Failure, OnError
from penstock.loader.fetch import Fetcher
from penstock.loader.pipeline import Pipeline, declarations, plan_of_batches
from penstock.loader.position import Position, base_seed_after
from penstock.loader.ranks import says_rank
from penstock.loader.remaking import (
    RECORD,
    AskedByAccelerate,
    Assignments,
    name_arguments,
    own_record,
    sampler_in_place_of,
)
from penstock.loader.splits import Asked, Splitter, check_pass, choose_sampler, epoch_of_other_world, splitter_of
from penstock.loader.statistics import Statistics
from penstock.plan.cursor import State
from penstock.plan.epoch import BatchEpochPlan
from penstock.samplers.identity import own_order
from penstock.samplers.share_sampler import SequentialSamplerOfShare

if TYPE_CHECKING:
    from penstock.loader.autotune import Autotuner
    from penstock.loader.bar import Bar
    from penstock.loader.device import DeviceCopier
    from penstock.loader.executors.ray.options import RayOptions
    from penstock.loader.tuned import Segment

__all__ = ["DataLoader"]

T_co = TypeVar("T_co", covariant=True)

_ATTRIBUTES = (
    *("batch_size", "drop_last", "num_workers", "collate_fn", "pin_memory", "pin_memory_device", "timeout"),
    *("worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "in_order"),
    *("executor", "threads_per_worker", "dispatch", "seed", "on_error", "on_worker_death", "max_bytes_in_flight"),
    *("ray_options", "output", "device", "progress"),
)
"""Settings that are attributes of a loader, by the same names."""
_values_of = attrgetter(*_ATTRIBUTES)
_TORCHS_PREFETCH = 2  # what torch makes of None where there are workers


class DataLoader(TorchDataLoader[T_co]):
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
        split: who splits the data among the ranks of a job (``torch.distributed``, else RANK and WORLD_SIZE), where
            neither ``sampler`` nor ``batch_sampler`` does. A `RankDataset` and its like hold a share already, and
            nothing else splits them; ``shuffle=True`` accepts their own order. None: with ``shuffle=`` the loader
            shares out any other data set of ours (a `Manifest`, `ImageDataset`, ...), like `DistributedSampler`; a
            loader in order lets every rank read all of it, and warns; over a data set of yours torch's meaning holds:
            every rank reads all. True: the loader shares out any map-style data set; in order no sample comes twice,
            and ranks may differ by one sample unless ``drop_last``. False: every rank reads all. `splits` says who
            does.
        skip: steps to pass over, such as those at which the loss went wrong: ``(a, b)`` for the steps ``a`` to
            ``b - 1``, or several such pairs. A step is a batch of all ranks together, counted from the beginning of
            epoch 0, as in a `Ledger`; those that are passed over count, too. Nothing of them is read. A job that goes
            on from a state may pass over other steps.
        on_error: ``"raise"``, ``"skip"``, ``"replace"``, a callable, or an `OnError` with limits and a report: what
            becomes of a sample that cannot be loaded.
        on_worker_death: ``"raise"``, or ``"restart"``: a new worker makes again what a dead one had not finished.
        max_bytes_in_flight: bytes of batches that are finished or being made, beside those that the consumer holds; at
            least one batch. None: as ``prefetch_factor`` says.
        ray_options: where the workers of ``executor="ray"`` run, a `RayOptions`.
        output: ``"torch"``, or ``"numpy"``: batches of NumPy arrays instead of tensors, over the same memory, without a
            copy. Tensors of a ``collate_fn`` become arrays, too.
        device: where batches go, such as ``"cuda"``: each is copied from pinned memory on a stream of its own while the
            training works on the batch before. On ``"cpu"`` they stay as they are. Or a `DeviceCopier`.
        progress: show a progress bar on standard error.

    Raises:
        ValueError: whatever torch refuses, in its words, and options that make no sense for an executor.
        ConfigError: ``skip=`` with an order that no `Ledger` knows, here or at ``iter()``.
        PartitionError: both the data set and the sampler deal samples to ranks; (at ``iter()``) the process group was
            made after a loader that would have shared out its data.

    With a seed, ``epoch`` moves on by itself at each new ``iter()`` unless `set_epoch` was called; it is readable, so a
    resumed loop starts there::

        loader.load_state_dict(state)                     # before or after iter(), in any process
        for epoch in range(loader.epoch, 90):
            loader.set_epoch(epoch)                       # keeps the position of the epoch just loaded
            for images, labels in loader:
                state = loader.state_dict()               # a few hundred bytes, at any batch

    Attributes named like the arguments below ``sampler`` may be assigned and count from the next ``iter()``, but for
    those that torch does not let change, and ``seed``: samplers and states have it since the loader was made, so the
    next ``iter()`` raises a ConfigError.

    Batches that come from processes are writable views of shared memory that is used again when the last tensor over
    it is gone. Whoever keeps more than three of them alive gets copies, and a warning. A fork of the program should not
    read batches of its parent's loader.
    """

    _is_accelerate_prepared = AskedByAccelerate()

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | str | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        executor: str = "auto",
        threads_per_worker: int = 1,
        dispatch: str = "auto",
        seed: int | None = None,
        split: bool | None = None,
        skip: tuple[int, int] | Iterable[tuple[int, int]] = (),
        on_error: str | Callable[[Failure], str] | OnError = "raise",
        on_worker_death: str = "raise",
        max_bytes_in_flight: int | None = None,
        ray_options: RayOptions | None = None,
        output: str = "torch",
        device: str | int | torch.device | DeviceCopier | None = None,
        progress: bool = False,
    ) -> None:
        config = LoaderConfig(
            batch_size=batch_size,
            drop_last=drop_last,
            shuffle=shuffle,
            seed=None if seed is None else checked_seed(seed),
            generator=generator,
            split=split,
            skip=ranges_of(skip),
            collate_fn=collate_fn,
            executor=executor,
            num_workers=as_workers(num_workers, executor),
            threads_per_worker=threads_per_worker,
            dispatch=dispatch,
            multiprocessing_context=multiprocessing_context,
            worker_init_fn=worker_init_fn,
            persistent_workers=persistent_workers,
            prefetch_factor=prefetch_factor,
            max_bytes_in_flight=max_bytes_in_flight,
            in_order=in_order,
            timeout=timeout,
            on_error=on_error,
            on_worker_death=on_worker_death,
            ray_options=ray_options,
            pin_memory=pin_memory,
            pin_memory_device=pin_memory_device,
            output=output,
            device=device,
            progress=progress,
            **declarations(dataset),
        )
        check(config)
        name_arguments(self)
        self._config = config
        self._tuner: Autotuner | None = None
        self.executor = config.executor
        self.threads_per_worker = config.threads_per_worker
        self.dispatch = config.dispatch
        self.seed = config.seed
        self.on_error = config.on_error
        self.on_worker_death = config.on_worker_death
        self.max_bytes_in_flight = config.max_bytes_in_flight
        self.ray_options = config.ray_options
        self.output = config.output
        self.device = config.device
        self.progress = config.progress
        self._begin_as_torch(dataset, sampler, batch_sampler)
        self._set_up()

    def _begin_as_torch(self, dataset: Any, sampler: Any, batch_sampler: Any) -> None:
        """Call torch's constructor, with our sampler where the user gives none."""
        config, shuffle = self._config, self._config.shuffle
        orders = config.seed, config.generator, config.drop_last, config.split
        found = choose_sampler(dataset, Asked(shuffle, sampler, batch_sampler, *orders))
        self._chose_sampler = found is not sampler
        if self._chose_sampler:
            sampler, shuffle = found, None
        with own_record(self):
            super().__init__(
                dataset=dataset,
                batch_size=config.batch_size,
                shuffle=shuffle,  # type: ignore[arg-type]
                sampler=sampler,
                batch_sampler=batch_sampler,
                num_workers=config.num_workers,
                collate_fn=config.collate_fn,
                pin_memory=config.pin_memory,
                drop_last=config.drop_last,
                timeout=config.timeout,
                worker_init_fn=config.worker_init_fn,
                multiprocessing_context=config.multiprocessing_context,
                generator=config.generator,
                prefetch_factor=config.prefetch_factor,
                persistent_workers=config.persistent_workers,
                pin_memory_device=config.pin_memory_device,
                in_order=config.in_order,
            )
        if batch_sampler is not None and says_rank(batch_sampler):
            vars(self)["sampler"] = SequentialSamplerOfShare(dataset)  # nobody reads it, but Lightning asks for it

    def _set_up(self) -> None:
        """Make what stands behind the arguments."""
        policy = OnError.of(self.on_error)
        plan = plan_of_batches(self, self.config, tolerant=policy.tolerant)
        self._config = config = replace(self.config, exact_depth=plan is not None and plan.draws_late)
        self._values = _values_of(self)
        self._log = FailureLog(policy) if policy.tolerant else None
        self._policy = policy if policy.tolerant else None
        self._statistics = Statistics()
        sampler = getattr(self.batch_sampler, "sampler", self.sampler)
        self.pipeline = Pipeline(self.dataset, plan, sampler, config, batched=self._auto_collation)
        self._engine = self._make_engine()
        if self._engine.config.kind == "process":
            self._engine.plan(self._fetcher())  # what cannot be done is said now
        self._base_seed: int | None = None
        self._passes: list[weakref.ref[DataLoaderIter]] = []

    # Settings.

    @property
    def config(self) -> LoaderConfig:
        """The settings, as the attributes of the same names are now."""
        values = dict(zip(_ATTRIBUTES, _values_of(self), strict=True))
        if self._config.prefetch_factor is None and values["prefetch_factor"] == _TORCHS_PREFETCH:
            values["prefetch_factor"] = None  # nobody has chosen it
        return replace(self._config, **values)

    @property
    def running_config(self) -> LoaderConfig:
        """`config`; where ``num_workers="auto"`` is still to choose, with the executor and number that it tries now."""
        return self._tried(self.config)

    def _follow_settings(self) -> None:
        """Take on what was assigned to attributes since the last pass."""
        same = self._values == _values_of(self) and type(self.num_workers) is type(self._config.num_workers)
        if same:  # a number may be assigned in place of "auto", which is equal to one
            return
        before, self.num_workers = self._config, as_workers(self.num_workers, self.executor)
        config = self.config
        if config.seed != before.seed:
            raise ConfigError(
                f"seed={config.seed!r} was assigned, but samplers and states have seed={before.seed!r} since this "
                "DataLoader was made: make another one with that seed"
            )
        check_assigned(config)
        check(config)
        if self.pipeline.stream:
            check_stream(self.dataset, config, tolerant=OnError.of(config.on_error).tolerant)
        if config.on_error != before.on_error:
            policy = OnError.of(config.on_error)
            self._policy = policy if policy.tolerant else None
            self._log = FailureLog(policy) if policy.tolerant else None
        if before.tunes or (config.executor, config.num_workers) != (before.executor, before.num_workers):
            self._tuner = None
        was, self._config = self._engine, config
        engine = self._make_engine()
        if (engine.config.kind, engine.config.workers) != (was.config.kind, was.config.workers):
            self._renew_states(engine.config)
        was.close()
        self._engine = engine
        self._values = _values_of(self)  # last: what is refused is refused again at the next iter()

    def _make_engine(self) -> Engine:
        """Return what makes batches by the config; if "auto" is to choose one, by the first that is tried."""
        config = self._config
        if config.tunes:
            from penstock.loader.autotune import autotuner_of  # only where settings are tried

            self._tuner = autotuner_of(self.pipeline, config)
            config = self._tried(config)
        return Engine(config)

    def _tried(self, config: LoaderConfig) -> LoaderConfig:
        """Return a config with the setting that "auto" tries now, if it does."""
        return config if self._tuner is None or self._tuner.decided else self._tuner.current.of(config)

    def _renew_states(self, config: LoaderConfig) -> None:
        """Keep the states of users' objects for the workers of a config, and go on from a state that was loaded."""
        pipeline = self.pipeline
        states = pipeline.worker_states(config, stream=pipeline.stream)
        states.follow(pipeline.position.states)
        pipeline.position.states = states

    def _follow_tuner(self) -> None:
        """Make batches by the setting that is to be tried now, or that was chosen."""
        tuner = self._tuner
        if tuner is None or tuner.settled:
            return
        wanted = tuner.current.of(self._config)
        if wanted != self._engine.config:
            self._engine = Engine(wanted)
            self._statistics.runs(**_what_runs(wanted))
        if tuner.decided:
            self._renew_states(self._engine.config)
            self._settle(wanted)
            tuner.settled = True

    def _settle(self, chosen: LoaderConfig) -> None:
        """Let the attributes say what "auto" has chosen."""
        self.num_workers: int = chosen.num_workers
        plain = replace(self._config, num_workers=chosen.num_workers)
        if _what_runs(plain) != _what_runs(chosen) or plain.light != chosen.light:
            self.executor = chosen.executor
        if not chosen.num_workers and self._config.prefetch_factor is None:
            self.prefetch_factor = None  # which torch does not take without workers
        self._config, self._values = self.config, _values_of(self)

    def _fetcher(self) -> Fetcher:
        return self.pipeline.fetcher(self._engine.config, self._policy)

    def check_worker_number_rationality(self) -> None:
        """Give torch's warning when there are more worker processes than cores; threads are none."""
        config = self._config
        if config.executor not in ("thread", "ray") and not config.one_child and self._tuner is None:
            super().check_worker_number_rationality()

    def _take_place_of(self, other: DataLoader[Any]) -> None:
        """Read the order and the share of a loader of which Lightning has made this one."""
        sampler, skip = sampler_in_place_of(self, other), other._config.skip
        if sampler is None and not skip:
            return
        self._config = replace(self._config, skip=skip)
        if sampler is not None:
            # torch refuses assignments to these two.
            vars(self)["sampler"] = sampler
            if self.batch_sampler is not None:
                batches: Any = copy.copy(self.batch_sampler)
                batches.sampler = sampler
                vars(self)["batch_sampler"] = batches
        self._set_up()

    def __copy__(self) -> Self:
        other: Self = object.__new__(type(self))
        other.__dict__.update(self.__getstate__())
        other._set_up()  # what runs and what it counts are its own
        other.pipeline.position.follow(self.pipeline.position)
        other.pipeline.position.states.follow(self.pipeline.position.states)
        other.pipeline.dealt = self.pipeline.dealt
        return other

    def __getstate__(self) -> dict[str, Any]:
        # What runs stays here: threads, workers and a pass that is under way belong to this process.
        return {**self.__dict__, "_engine": None, "_iterator": None, "_passes": [], "_tuner": None, "_base_seed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__dict__["_engine"] = self._make_engine()

    def __repr__(self) -> str:
        return describe(self)

    # Epoch and state.

    @property
    def epoch(self) -> int:
        """The epoch that runs, or will run next."""
        return self.pipeline.position.epoch

    def __len__(self) -> int:
        """Batches of a whole epoch, wherever the consumer is in it."""
        stream = isinstance(self.dataset, IterableDataset) and not self._config.skip
        if self.pipeline.position.plan is None or stream:
            return super().__len__()
        return len(self.pipeline.position.whole())

    @property
    def splits(self) -> Splitter:
        """Who splits the data among the ranks; "nobody": every rank reads all."""
        return splitter_of(self, chosen=self._chose_sampler, dealt=self.pipeline.dealt)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next ``iter()``. The epoch of a state just loaded keeps its position."""
        self.pipeline.position.set_epoch(epoch)

    def skip(self, batches: int) -> None:
        """Pass over batches, such as those at which the loss went wrong: the next ``iter()`` begins behind them.

        Args:
            batches: of this rank, counted from where the consumer is, or where a loaded state stands. All ranks skip
                as many.

        Nothing of them is read or made. Everything behind them is what it would have been. An iterator that runs is
        detached, as by `load_state_dict`.

        Raises:
            ConfigError: more than the epoch has left, or the batches of a stream.

        >>> loader = DataLoader(range(10), batch_size=2)
        >>> loader.skip(3)
        >>> [batch.tolist() for batch in loader]
        [[6, 7], [8, 9]]
        """
        self.pipeline.position.pass_over(operator.index(batches))

    def state_dict(self) -> State:
        """Where the consumer is: JSON-serialisable, a few hundred bytes with Penstock's samplers and data sets, in a
        few microseconds and without asking any worker. Objects of yours with a ``state_dict`` (data set, iterator,
        sampler, collate function) are in it, and make it as large as theirs are.

        With ``in_order=False`` it is that of this rank alone while batches have overtaken others.
        """
        if not self.pipeline.position.running and not self.pipeline.position.seeded:
            # As the next iter() would, so that asking changes nothing.
            self.pipeline.position.base_seed(self._draw_base_seed)
        return self.pipeline.position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, allow_growth: bool = False) -> None:
        """Go on from a state at the next ``iter()``; an iterator that runs is detached.

        Args:
            state: from `state_dict`, of any rank: all save at the same step.
            allow_growth: accept a manifest to which rows were appended since, see `RankDataset.load_state_dict`; for
                loaders over such a data set.

        Raises:
            StateError: the state belongs to other data, another order or another seed; it says what differs. Without a
                seed, that is so in the middle of an epoch that began on one rank, now on several, and back. It is an
                AssertionError, too, if the data set has a state for each worker, and their number was another.
            ConfigError: allow_growth where the order is not the data set's own.
        """
        unseeded = self._chose_sampler and self.seed is None and self._config.shuffle is True
        epoch = epoch_of_other_world(self.sampler, state) if unseeded and own_order(self.dataset) is None else None
        if epoch is not None:
            self.pipeline.position.set_epoch(epoch)
        elif allow_growth:
            self.pipeline.position.load_grown(state)
        else:
            self.pipeline.position.load_state_dict(state)

    # Iteration.

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]
        return self._begin()

    def _begin(self) -> DataLoaderIter:
        """Begin a pass."""
        self._follow_settings()
        before = self._engine
        self._follow_tuner()
        if before is not self._engine:
            before.close()
        engine, position = self._engine, self.pipeline.position
        config, states = engine.config, position.states
        if config.split is None and not self.pipeline.dealt:
            check_pass(self, position.plan, chosen=self._chose_sampler)
        if config.kind == "inline" and self.timeout:
            raise AssertionError(f"timeout={self.timeout} is for loaders with workers: leave it out")  # as torch
        if config.num_workers and config.prefetch_factor is not None and config.prefetch_factor < 1:
            raise AssertionError(
                f"prefetch_factor={config.prefetch_factor} begins no batch: give 1 or more"
            )  # as torch
        copier = _copier_of(config)
        kept = engine.keeps_workers and not states.resumes
        fetcher, base_seed = self._fetcher(), position.base_seed(self._draw_base_seed)
        worker_seed = base_seed if states.base_seed is None or not (kept or states.resumes) else states.base_seed
        engine.prepare(fetcher, worker_seed, anew=states.resumes)
        progress = position.start(base_seed)
        self._base_seed = progress.base_seed
        states.begin(fresh=config.forks_workers and not kept)
        states.base_seed = worker_seed if config.persistent_workers or worker_seed != base_seed else None
        if resumed := states.dropped:
            warnings.warn(
                f"{type(self.dataset).__name__} has no state_dict: its first {resumed} batches are made again and "
                "dropped",
                stacklevel=2,
            )
        self._statistics.begin(**_what_runs(config))
        if self._log is not None:
            self._log.begin()
        if config.kind == "process" and not kept:
            self.check_worker_number_rationality()
        run = Run(
            position.requests(progress),
            fetcher,
            position.told,
            worker_seed,
            states.resume,
            states.next,
        )
        tuner = self._tuner
        if tuner is None or tuner.finished:
            batches: ResultIterator = engine.start(run)
        else:
            if not kept:
                tuner.started(config)
            batches = self._tuned(run, tuner, progress.run)
        if engine.pool is not None:
            self._iterator = _Kept(engine)  # type: ignore[assignment]
        return self._deliver(batches, progress, config, copier)

    def _deliver(
        self, batches: ResultIterator, progress: Progress, config: LoaderConfig, copier: DeviceCopier | None
    ) -> DataLoaderIter:
        """Return the iterator that the consumer of a pass holds."""
        position, statistics = self.pipeline.position, self._statistics
        if copier is not None:
            from penstock.loader.device import DevicePrefetcher  # only for device=

            batches = DevicePrefetcher(batches, copier, statistics)
        iterator = DataLoaderIter(
            batches,
            progress,
            position.states.consumer(),
            statistics,
            self._log,
            self._finished,
            rank=0 if self._log is None else position.rank,
            finish=finisher(config),
            lying=self._IterableDataset_len_called if position.plan is None else None,
            workers=config.workers,
            bar=_bar(statistics, position, progress) if self.progress else None,
            length=self.__len__,
        )
        progress.held_by = weakref.ref(iterator)
        iterator.renewed = lambda: None if position.continues(progress) else self._begin()
        self._passes = [*(held for held in self._passes if held() is not None), weakref.ref(iterator)]
        return iterator

    def _tuned(self, run: Run, tuner: Autotuner, batches: BatchEpochPlan | None) -> ResultIterator:
        """The batches of a pass that tries settings."""
        from penstock.loader.tuned import Segment, TunedBatches  # only where settings are tried

        length = _length(batches)
        tuner.length = None if length is None else length + (0 if batches is None else batches.first_batch)

        def follow(*, start: bool) -> Segment:
            self._follow_tuner()
            fetcher = self._fetcher()
            if start:
                self._engine.prepare(fetcher, run.base_seed)
                tuner.started(self._engine.config)
            return Segment(tuner.current, self._engine, fetcher)

        return TunedBatches(run, Segment(tuner.current, self._engine, run.fetcher), tuner, follow, length)

    def _draw_base_seed(self) -> int:
        """torch draws one for each iterator, before its sampler draws anything; for persistent workers, only once."""
        kept = self._engine.keeps_workers or (self._tuner is not None and self.persistent_workers)
        if self._base_seed is not None and kept:
            return base_seed_after(self._base_seed)
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())

    def _finished(self, progress: Progress) -> None:
        engine = self._engine
        self.pipeline.position.finished(
            progress, fresh=lambda: engine.config.forks_workers and not engine.keeps_workers
        )

    # Statistics and the end.

    def stats(self) -> dict[str, Any]:
        """What happened so far, as plain numbers: samples/s, bytes/s, how long the consumer waited, seconds of work by
        stage, how full the queue was, errors, restarts. See the guide for each entry.
        """
        self._statistics.restarts = self._engine.restarts
        stats = self._statistics.stats(None if self._log is None else self._log.counts())
        stats["split_by"] = self.splits
        if self._tuner is not None:
            stats["tuning"] = self._tuner.stats()
        return stats if self._engine.ray is None else {**stats, **self._engine.ray.stats()}

    def report(self, file: IO[str] | None = None) -> None:
        """Print `stats` as a table, and one sentence: what limits this run, and what to change.

        Args:
            file: where to; standard output by default.
        """
        from penstock.loader.report import print_report  # it needs rich, which workers do not

        print_report(self.stats(), file)

    def summary(self) -> str:
        """Return the report in one short line, for progress bars: samples/s, the share of the time spent waiting, and
        what limits the run, once 20 batches and a second have shown that. It counts from the first batch, or from
        `reset_stats`, and costs a fifth of a millisecond.

        >>> DataLoader(range(10), batch_size=2).summary()
        '0.00 samples/s · waiting 0%'
        """
        from penstock.loader.report import summarize  # it needs rich, which workers do not

        return summarize(self.stats())

    def reset_stats(self) -> None:
        """Count from zero."""
        self._statistics.reset()
        self._engine.restarts = 0

    def close(self) -> None:
        """End all iterators of this loader, and all threads and workers. A loop that is not over, in whatever thread
        and with whatever executor, gets a `WorkerError` in place of its next batch; one that is over stays so.
        Idempotent, and done in a few seconds at most, whatever workers are at. The next ``iter()`` begins anew.
        """
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
        passes, self._passes = self._passes, []
        for held in passes:
            if (iterator := held()) is not None:
                iterator.end(max(0.5, deadline - time.monotonic()))
        self._engine.close()
        self._iterator = None
        if (order := own_order(self.dataset)) is not None:
            order.close()

    def __enter__(self) -> DataLoader[T_co]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# In the body of the class Python would mangle the name.
setattr(DataLoader, RECORD, Assignments(DataLoader._take_place_of))


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


def _what_runs(config: LoaderConfig) -> dict[str, Any]:
    """Return what `Statistics.runs` is told."""
    return {
        "executor": config.kind,
        "workers": config.num_workers,
        "threads": config.threads if config.kind == "ray" else config.threads_per_worker,
        "processes": config.workers if config.forks_workers else 0,
        "depth": config.depth,
        "persistent": config.persistent_workers,
    }


def _copier_of(config: LoaderConfig) -> DeviceCopier | None:
    """Return what copies batches to the device that was asked for; None where they stay.

    Raises:
        ConfigError: there is no such device.
    """
    if not config.to_device:
        return None
    from penstock.loader.device import copier_of  # only for device=

    assert config.device is not None
    return copier_of(config.device)


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
