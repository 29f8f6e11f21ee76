"""`DataLoader`: torch's data loader with deterministic executors and an exact state.

    sampler -> epoch plan -> requests (indices, keys) -> executor -> batches
                 |                                                      |
                 `------------ state(batches delivered) ----------------'

Invariants: the plan fixes the batches before any worker is involved. The state depends only on the batches that the
consumer has received, never on prefetched ones.

torch lets programs assign attributes (``num_workers``, ``timeout``, ``worker_init_fn``, ...). The next ``iter()`` reads
them into a new `LoaderConfig`. They stay in ``vars(loader)``, where Lightning looks for a loader's arguments.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import reprlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, Sampler, Subset

from penstock import distributed
from penstock.errors import ConfigError
from penstock.hashing import checked_seed
from penstock.integrations.recreated import (
    AccelerateGuard,
    assignments,
    convert_record,
    drop_record,
    keep_assignments,
)
from penstock.loader.config import (
    FIELDS,
    REMOVED,
    SETTINGS,
    LoaderConfig,
    check,
    check_assigned,
    check_dataset,
    declarations,
    resolve_num_workers,
)
from penstock.loader.consumer import Consumer, base_seed_after, draws_as_it_is_read, plan_of_batches
from penstock.loader.dataloader_iter import DataLoaderIter
from penstock.loader.make import fetcher_of
from penstock.loader.on_error import Failure, FailureLog, OnError
from penstock.loader.statistics import Statistics
from penstock.loader.who_splits import Splitter, check_split, choose_data, splits_by_rank
from penstock.loader.window import SHUTDOWN_TIMEOUT_S
from penstock.loader.workers import Workers
from penstock.plan.cursor import State, pack, unpack
from penstock.samplers.batch import has_rank
from penstock.samplers.identity import holds_a_share, own_order
from penstock.samplers.sequential import SequentialSamplerOfShare
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.loader.autotune import Autotuner
    from penstock.loader.device import DeviceCopier
    from penstock.loader.executors.ray.options import RayOptions
    from penstock.loader.window import Window

__all__ = ["DataLoader"]

T_co = TypeVar("T_co", covariant=True)

_TORCHS = tuple(name for name in inspect.signature(TorchDataLoader.__init__).parameters if name in FIELDS)
"""Settings that are arguments of torch's loader."""


class _TorchsPrefetch(int):
    """The value of ``loader.prefetch_factor`` where torch replaced None by 2, which is not the user's choice."""


class DataLoader(TorchDataLoader[T_co]):
    """A ``torch.utils.data.DataLoader`` with the same batches in every executor, and with exact resume.

    Takes all arguments of torch's DataLoader, with torch's meaning, defaults and errors, and these:

    Args:
        shuffle: True or False as in torch; ``"global"`` or ``"block"`` for Penstock's orders, which need O(1) memory
            (seed 0 unless ``seed`` is set). None, the default, is False, but leaves a dataset with its own order
            (`RankDataset`, ...) that order. There False reads a copy of the dataset in order, with no row repeated on
            any rank, and True accepts the dataset's order.
        num_workers: a number, or ``"auto"``: the loader tries a few numbers of workers on the first batches of the run
            and keeps the best, which may be 0 (inline). The batches stay the same. Afterwards ``loader.num_workers`` is
            the number chosen, and `report` lists those tried. Needs a seed or a ``pure`` dataset.
        executor: where batches are made. ``"inline"``: in the caller's thread. ``"thread"``: in ``num_workers`` threads
            (at least one) that share the dataset. ``"process"``: in ``num_workers`` processes, which return batches in
            reused shared memory. ``"ray"``: in ``num_workers`` workers on a Ray cluster, see ``ray_options``.
            ``"auto"``: inline without workers; one process with ``num_workers`` threads for datasets that set ``pure``
            and ``releases_gil``; otherwise processes.
        prefetch_factor: as in torch. None is 2; with processes and Ray up to 16 for small batches that take almost no
            work, or while a batch is late.
        threads_per_worker: threads in each worker, a process or on Ray. They share its copy of the dataset, and the
            samples of each batch.
        seed: fixes the order and each sample's `penstock.generator`: both are functions of (seed, epoch, position), in
            every executor. If the dataset does not declare itself ``pure``, inline and process workers also seed the
            global generators of Python, NumPy and torch for each sample, and restore the caller's. Defaults to the
            seed of a Penstock sampler or dataset; without one, torch's rules hold. The order of a dataset with its own
            shuffled order follows from the dataset's seed, so another one is refused.
        split: whether the loader splits the dataset among the ranks (of ``torch.distributed``, else RANK and
            WORLD_SIZE) if no sampler does. True: any map-style dataset; without shuffle no sample is repeated, and
            ranks may differ by one sample unless ``drop_last``. False: each rank reads all.
            None: one rank's share, such as a `RankDataset`, keeps its order and is never split again. The loader splits
            every other Penstock dataset like `DistributedSampler` if ``shuffle`` is set; otherwise each rank reads all
            of it, and the loader warns. For your own datasets torch's meaning holds: each rank reads all. See `splits`.
        rank, world_size, process_group, mesh: the ranks among which the loader splits the dataset, if they are not
            those of the job, see `penstock.distributed.current`. They imply ``split=True``. Pass them to the dataset or
            the sampler instead if one of these splits.
        on_error: what to do with a sample that cannot be loaded: ``"raise"``, ``"skip"``, ``"replace"``, a callable, or
            an `OnError` with limits and a report.
        on_worker_death: ``"raise"``, or ``"restart"``: a new worker repeats the unfinished work of the dead one.
        max_bytes_in_flight: limit on the bytes of batches that are being made or are finished, without those that the
            consumer holds. At least one batch is always allowed. None: only ``prefetch_factor`` limits them.
        ray_options: a `RayOptions` for ``executor="ray"``: the cluster and the resources of its workers.
        output: ``"torch"``, or ``"numpy"`` for NumPy arrays over the same memory, without a copy. Tensors that
            ``collate_fn`` returns become arrays too.
        device: the device of the batches, such as ``"cuda"``. Each batch is copied from pinned memory on a separate
            stream while the training uses the one before. ``"cpu"`` copies nothing. Or a `DeviceCopier`.
        progress: show a progress bar on standard error.

    Raises:
        ValueError: an argument that torch refuses, with torch's message, or an option that the executor does not have.
        ConfigError: ``shuffle``, ``seed``, ``generator`` or a sampler over a dataset whose own order is another one.
        PartitionError: both the dataset and the sampler split the samples among ranks; or, at ``iter()``, the process
            group was created after a loader that would have split its dataset.

    With a seed, each new ``iter()`` advances ``epoch`` unless `set_epoch` was called. A resumed loop starts at
    ``loader.epoch``::

        loader.load_state_dict(state)                     # before or after iter(), in any process
        for epoch in range(loader.epoch, 90):
            loader.set_epoch(epoch)                       # keeps the position of the epoch just loaded
            for images, labels in loader:
                state = loader.state_dict()               # a few hundred bytes, at any batch

    The arguments after ``sampler`` are also attributes. An assigned value takes effect at the next ``iter()``, except
    those that torch does not let change. Assigning ``seed`` makes the next ``iter()`` raise ConfigError, because
    samplers and states already use the first one.

    Batches from processes are writable views of shared memory, which is reused once no tensor refers to it. A fork of
    the program must not read batches of its parent's loader.
    """

    _is_accelerate_prepared: Any = AccelerateGuard()

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
        dispatch: None = None,
        seed: int | None = None,
        split: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        mesh: dist.device_mesh.DeviceMesh | None = None,
        skip: None = None,
        on_error: str | Callable[[Failure], str] | OnError = "raise",
        on_worker_death: str = "raise",
        max_bytes_in_flight: int | None = None,
        ray_options: RayOptions | None = None,
        output: str = "torch",
        device: str | int | torch.device | DeviceCopier | None = None,
        progress: bool = False,
    ) -> None:
        for name, value in {"dispatch": dispatch, "skip": skip}.items():
            if value is not None:
                raise ConfigError(REMOVED[name])
        arguments = {name: value for name, value in locals().items() if name in FIELDS} | declarations(dataset)
        arguments["shuffle"] = bool(shuffle) if isinstance(shuffle, int | np.bool_) and shuffle in (0, 1) else shuffle
        arguments["seed"] = None if seed is None else checked_seed(seed)
        arguments["num_workers"] = resolve_num_workers(num_workers, executor)
        world = distributed.LateWorld(rank, world_size, process_group=process_group, mesh=mesh, of="DataLoader")
        arguments["split"] = True if world.given and split is None else split
        self._config = config = LoaderConfig(**arguments)
        check(config)
        data, chosen = choose_data(dataset, config, batch_sampler if sampler is None else sampler, world)
        self._has_chosen_sampler = chosen is not None
        self._given_dataset = dataset
        self._tuner: Autotuner | None = None
        self.executor = config.executor
        self.threads_per_worker = config.threads_per_worker
        self.seed = config.seed
        self.on_error = config.on_error
        self.on_worker_death = config.on_worker_death
        self.max_bytes_in_flight = config.max_bytes_in_flight
        self.ray_options = config.ray_options
        self.output = config.output
        self.device = config.device
        self.progress = config.progress
        torchs: dict[str, Any] = {name: getattr(config, name) for name in _TORCHS}
        # torch's errors show the shuffle that the program passed.
        torchs |= {"dataset": data, "sampler": sampler, "batch_sampler": batch_sampler, "shuffle": shuffle}
        if chosen is not None:
            torchs |= {"sampler": chosen, "shuffle": None}
        # Lightning records the arguments of a loader that it will recreate: of this class, or else of torch's.
        recorded = "__pl_saved_args" in vars(self)
        super().__init__(**torchs)
        if config.prefetch_factor is None and self.prefetch_factor is not None:
            self.prefetch_factor = _TorchsPrefetch(self.prefetch_factor)
        if "__pl_saved_args" in vars(self):
            convert_record(self, data) if recorded else drop_record(self)
        if batch_sampler is not None and has_rank(batch_sampler):
            # Nothing reads it here, but Lightning asks for it.
            vars(self)["sampler"] = SequentialSamplerOfShare(data)
        self._set_up()

    def _set_up(self) -> None:
        """Create the consumer and the workers that the arguments describe."""
        config = self.config
        check_dataset(self.dataset, config)
        plan = plan_of_batches(self)
        self._config = config = replace(config, exact_depth=draws_as_it_is_read(plan))
        self._log = None if config.policy is None else FailureLog(config.policy)
        self._statistics = Statistics()
        sampler = getattr(self.batch_sampler, "sampler", self.sampler)
        self.consumer = Consumer(self.dataset, plan, sampler, config, batched=self._auto_collation)
        self._workers = self._new_workers(config)
        self._iterators: weakref.WeakSet[DataLoaderIter] = weakref.WeakSet()
        self._starts = threading.RLock()
        self._assigned = False
        """Whether a setting was assigned since the last `iter()`."""

    # Settings.

    def __setattr__(self, name: str, value: Any) -> None:
        if name in REMOVED:
            raise ConfigError(REMOVED[name])
        super().__setattr__(name, value)
        if name in SETTINGS:
            self._assigned = True

    @property
    def config(self) -> LoaderConfig:
        """The current settings, including assigned attributes."""
        values = {name: getattr(self, name) for name in SETTINGS}
        if isinstance(values["prefetch_factor"], _TorchsPrefetch):
            values["prefetch_factor"] = None
        return replace(self._config, **values)

    @property
    def running_config(self) -> LoaderConfig:
        """`config`, but with the setting that ``num_workers="auto"`` is trying now."""
        config = self.config
        return replace(config, num_workers=self._tuner.workers) if config.auto_tunes and self._tuner else config

    def _follow_settings(self) -> None:
        """Apply attributes that were assigned since the last ``iter()``. The next one refuses a refused value again."""
        self.num_workers = resolve_num_workers(self.num_workers, self.executor)
        before, config = self._config, self.config
        if config.seed != before.seed:
            raise ConfigError(
                f"seed={config.seed!r} was assigned, but samplers and states use seed={before.seed!r} since this "
                "DataLoader was created: create another one with the new seed"
            )
        check_assigned(config)
        check(config)
        check_dataset(self.dataset, config)
        # "auto" compares equal to its number.
        if config != before or config.auto_tunes != before.auto_tunes:
            if config.on_error != before.on_error:
                self._log = None if config.policy is None else FailureLog(config.policy)
            if before.auto_tunes or (config.executor, config.num_workers) != (before.executor, before.num_workers):
                self._tuner = None
            was, workers = self._workers, self._new_workers(config)
            if (workers.config.kind, workers.config.workers) != (was.config.kind, was.config.workers):
                self.consumer.change_workers(workers.config)
            was.close()
            self._workers, self._config = workers, config
            self.check_worker_number_rationality()
        self._assigned = False

    def _new_workers(self, config: LoaderConfig) -> Workers:
        """Return the workers for a config; for "auto", those of the first setting to try."""
        if config.auto_tunes:
            # Imported only for num_workers="auto".
            from penstock.loader.autotune import autotuner_of

            self._tuner = autotuner_of(self.consumer, config)
            config = replace(config, num_workers=self._tuner.workers)
        return Workers(config, partial(fetcher_of, self.consumer))

    def follow_tuner(self, tuner: Autotuner, window: Window) -> None:
        """Use the number of workers that auto-tuning tries or has chosen, from the next batches of a window on."""
        config = replace(self._workers.config, num_workers=tuner.workers)
        try:
            self._workers.resize(config, window)
        except Exception as error:
            tuner.fail(error)
            config = replace(config, num_workers=tuner.workers)
            self._workers.resize(config, window)
        self._statistics.runs(config)
        if tuner.chosen is None:
            return
        # Programs read the number in the loader's attributes. This is no assignment of theirs.
        vars(self)["num_workers"] = config.num_workers
        if not config.num_workers and self._config.prefetch_factor is None:
            # torch refuses a prefetch_factor without workers.
            vars(self)["prefetch_factor"] = None
        self._config = replace(self._config, num_workers=config.num_workers)

    def check_worker_number_rationality(self) -> None:
        """Emit torch's warning if worker processes outnumber the cores. Threads do not count."""
        config = self._config
        if config.executor not in ("thread", "ray") and not config.single_process and self._tuner is None:
            super().check_worker_number_rationality()

    def __getstate__(self) -> dict[str, Any]:
        # Threads, workers and a running iterator stay with this loader, and so do its statistics.
        names = ("_workers", "_starts", "_iterator", "_iterators", "_tuner", "_statistics", "_log")
        return {**self.__dict__, **dict.fromkeys(names)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        original = self.consumer
        self._set_up()
        self.consumer.follow(original)

    def __repr__(self) -> str:
        """Return the loader in three lines: its data, its executor and its position. Moves no generator."""
        config = self.running_config
        batches = "from the sampler"
        if config.batch_size is not None:
            batches = f"of {counted(config.batch_size, 'sample')}{', full ones only' if config.drop_last else ''}"
        makers = "the caller's thread"
        if config.kind != "inline":
            name = {"thread": "thread", "process": "process", "ray": "Ray worker"}[config.kind]
            threads = f" of {counted(config.threads, 'thread')}" if config.threads > 1 else ""
            makers = counted(config.workers, name) + threads
        delivered = counted(self.consumer.num_delivered, "batch")
        seed = "" if config.seed is None else f", seed {config.seed}"
        return (
            f"{type(self).__name__} of {_one_line(self.dataset)}\n"
            f"  batches: {batches}, made in {makers}\n"
            f"  state: epoch {self.epoch}, {delivered} delivered{seed}; split by {self.splits}"
        )

    # Epoch and state.

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one if no iterator runs."""
        return self.consumer.epoch

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, wherever the consumer is in it."""
        if self.consumer.plan is None or isinstance(self.dataset, IterableDataset):
            return super().__len__()
        return len(self.consumer.whole())

    @property
    def splits(self) -> Splitter:
        """What splits the dataset among the ranks; "nobody" if every rank reads all of it."""
        if holds_a_share(self.dataset) or isinstance(self.dataset, IterableDataset):
            return "the dataset"
        if splits_by_rank(self, ranks=distributed.ranks()):
            return "the loader" if self._has_chosen_sampler else "a sampler"
        return "a framework" if self.consumer.is_split else "nobody"

    def is_over(self, dataset: Any) -> bool:
        """Return whether this loader was created over a dataset. For ``shuffle=False`` it may read a copy of it."""
        return dataset is self.dataset or dataset is self._given_dataset

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter()``. If it is the epoch of a state just loaded, the position is kept."""
        self.consumer.set_epoch(epoch)

    def skip(self, batches: int) -> None:
        """Leave out the next batches, such as those with a loss spike.

        Args:
            batches: number of batches of this rank, from the current position or from that of a loaded state. All
                ranks must skip equally many. Batches already delivered ahead of earlier ones do not count.

        The samples of skipped batches are not read, and later batches do not change. A running iterator is detached, as
        by `load_state_dict`.

        Raises:
            ConfigError: the epoch has fewer batches left, or the dataset is a stream.
            LengthUnknownError: the number of batches is unknown: shards without indexes, in the first epoch.

        >>> loader = DataLoader(range(10), batch_size=2)
        >>> loader.skip(3)
        >>> [batch.tolist() for batch in loader]
        [[6, 7], [8, 9]]
        """
        self.consumer.skip_batches(operator.index(batches))

    def state_dict(self) -> State:
        """Return the consumer's position, as text under one key: a dict that any checkpoint can hold.

        With Penstock's samplers and datasets it takes a few microseconds and a few hundred bytes, and no worker is
        contacted. It includes the states of your own objects with a ``state_dict`` (dataset, iterator, sampler, collate
        function), whatever their size.

        With ``in_order=False``, while some batches were delivered ahead of earlier ones, the state is valid for this
        rank only.
        """
        if self.consumer.seed is None and not self.consumer.running:
            # The next iter() would draw the same seed, so asking for a state changes nothing.
            self.consumer.base_seed(self._draw_base_seed)
        return pack(self.consumer.state_dict())

    def load_state_dict(self, state: Mapping[str, Any], *, allow_growth: bool = False) -> None:
        """Resume from a state at the next ``iter()``. A running iterator is detached.

        Args:
            state: from `state_dict` of any rank. All ranks must save at the same step.
            allow_growth: accept a manifest to which rows were appended since, see `RankDataset.load_state_dict`. Only
                for loaders over such a dataset.

        Raises:
            StateError: the state belongs to other data, another order or another seed; the message names the
                difference. Also without a seed, if the loader splits the dataset among several ranks and did not, or
                the reverse: the order is torch's on one rank. It is an AssertionError too if the dataset has a state
                for each worker and the number of workers has changed.
            ConfigError: ``allow_growth=True``, but the order is not the dataset's own.
        """
        self.consumer.load_state_dict(unpack(state, of="DataLoader"), allow_growth=allow_growth)

    # Iteration.

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]
        # Threads that start iterators take turns.
        with self._starts:
            if self._assigned:
                self._follow_settings()
            workers, consumer = self._workers, self.consumer
            config, states = workers.config, consumer.states
            if config.split is None and not consumer.is_split and (ranks := distributed.current().world_size) > 1:
                check_split(self, consumer.plan, ranks=ranks, chosen=self._has_chosen_sampler)
            # AssertionError is torch's type here and below.
            if config.kind == "inline" and self.timeout:
                raise AssertionError(f"timeout={self.timeout} is for loaders with workers: omit it")
            if config.num_workers and config.prefetch_factor is not None and config.prefetch_factor < 1:
                raise AssertionError(f"prefetch_factor={config.prefetch_factor} prefetches no batch: pass 1 or more")
            copier: DeviceCopier | None = None
            if config.device is not None and config.to_device:
                # Imported only for device=.
                from penstock.loader.device import copier_of

                copier = copier_of(config.device)
            # Nothing has moved yet when the workers start, which may fail.
            kept, began = workers.kept and not states.resumes, time.perf_counter()
            base_seed = consumer.base_seed(self._draw_base_seed, workers=self.num_workers > 0)
            worker_seed = base_seed if states.base_seed is None or not (kept or states.resumes) else states.base_seed
            workers.prepare(worker_seed, anew=states.resumes)

            # A dataset's __iter__, or the state of a user's object, may fail.
            with consumer.start(base_seed) as progress:
                workers.base_seed = base_seed
                if states.stateful or states.resumes:
                    states = consumer.states = consumer.states.begin(fresh=config.forks_workers and not kept)
                    states.base_seed = worker_seed if config.persistent_workers or worker_seed != base_seed else None
                if states.resumed and consumer.plan is None and (resumed := states.repeated):
                    warnings.warn(
                        f"{type(self.dataset).__name__} has no state_dict: its first {resumed} batches are repeated "
                        "and dropped",
                        stacklevel=2,
                    )
                # Workers need the epoch only for streams.
                epoch = progress.reader.run if progress.run is None and progress.reader is not None else None
                requests = itertools.chain.from_iterable(consumer.requests(progress))
                window = workers.window(requests, epoch, states.resumed.get, states.next)
                if workers.kept and window.executor.processes is not None:
                    self._iterator = workers  # type: ignore[assignment]
                iterator = DataLoaderIter(self, window, progress, copier, began)
                self._iterators.add(iterator)
                return iterator

    start_iterator = __iter__
    """Starts an epoch iterator, where a subclass has another ``__iter__``."""

    def _draw_base_seed(self) -> int:
        """Draw torch's base seed: one per iterator, before the sampler draws; only one for persistent workers."""
        last = self._workers.base_seed
        if last is not None and (self._workers.kept or (self._tuner is not None and self.persistent_workers)):
            return base_seed_after(last)
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())

    # Statistics and the end.

    def stats(self) -> dict[str, Any]:
        """Return statistics as plain numbers.

        They include samples/s, bytes/s, the time the consumer waited, seconds of work by stage, the fill of the queue,
        errors and restarts. `docs/loader.md` describes each entry.
        """
        self._statistics.runs(self._workers.config)
        self._statistics.restarts = self._workers.restarts
        stats = self._statistics.stats(None if self._log is None else self._log.counts())
        stats["split_by"] = self.splits
        stats |= self._workers.stats()
        if self._tuner is not None:
            stats["tuning"] = self._tuner.stats()
        return stats

    def report(self, file: IO[str] | None = None) -> None:
        """Print `stats` as a table, with one sentence: what limits this run, and what to change.

        Args:
            file: output file; standard output by default.
        """
        # Imported here because it needs rich, which workers do not.
        from penstock.tools.report import print_report

        print_report(self.stats(), file)

    def summary(self) -> str:
        """Return the report as one short line for progress bars.

        It shows samples/s, the share of time spent waiting and, after 20 batches and one second, what limits the run.
        It counts from the first batch or from `reset_stats`, and costs about 0.2 ms.

        >>> DataLoader(range(10), batch_size=2).summary()
        '0.00 samples/s · waiting 0%'
        """
        # Imported here because it needs rich, which workers do not.
        from penstock.tools.report import summarize

        return summarize(self.stats())

    def reset_stats(self) -> None:
        """Reset all statistics to zero."""
        self._statistics.reset()
        self._workers.restarts = 0

    def close(self) -> None:
        """End all iterators, threads and workers of this loader.

        A running loop gets a `WorkerError` instead of its next batch, in any thread and with any executor. A finished
        iterator stays finished. Takes a few seconds at most, even if workers hang. Idempotent. The next ``iter()``
        starts new ones.
        """
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
        iterators, self._iterators = self._iterators, weakref.WeakSet()
        for iterator in list(iterators):
            iterator.end(max(0.5, deadline - time.monotonic()))
        # Also those of an iterator that another thread is about to start.
        self._workers.close(running=True)
        self._iterator = None
        if (order := own_order(self.dataset)) is not None and order.ahead is not None:
            order.ahead.close()

    def __enter__(self) -> DataLoader[T_co]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# What Lightning repeats on a loader that it recreates. Inside the class body Python would mangle the name.
setattr(DataLoader, "__pl_attrs_record", property(assignments, keep_assignments))


def _one_line(dataset: Any) -> str:
    """Return a dataset in one line, which stays short for a list of a million samples."""
    if isinstance(dataset, Subset):
        return f"{type(dataset).__name__} of {_one_line(dataset.dataset)}"
    if isinstance(dataset, list | tuple | dict):
        return reprlib.repr(dataset)
    if repr(dataset) == object.__repr__(dataset):
        return type(dataset).__name__
    return repr(dataset).partition("\n")[0]
