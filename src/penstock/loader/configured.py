"""`Configured`: what a loader is made of: source, position, executor, from its arguments. `DataLoader` is what it does.

Attributes that torch lets programs assign (``num_workers``, ``timeout``, ``worker_init_fn``, ...) are looked at anew at
each ``iter()``.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, Sampler, Subset, default_collate

from penstock.datasets.base import StreamDataset
from penstock.integrations import lightning
from penstock.integrations.accelerate import WhenPrepared
from penstock.loader.auto import AutoWorkers, as_workers, ladder_of
from penstock.loader.collate import Collate
from penstock.loader.delivery import Delivery
from penstock.loader.engine import Engine, How
from penstock.loader.failure_log import FailureLog
from penstock.loader.failures import Failure, OnError
from penstock.loader.fetch import Fetch, Maker
from penstock.loader.options import Options, check_options, check_stream, default_sampler, how_of, warn_threads
from penstock.loader.position import Position
from penstock.loader.source import batch_source, refuse_double_split, stream_source
from penstock.loader.stateful import WorkerStates, capture
from penstock.loader.statistics import Statistics
from penstock.loader.stream import StreamFetch
from penstock.samplers.base import EpochBatchSampler

if TYPE_CHECKING:
    from penstock.loader.ladder import Ladder
    from penstock.loader.ray.options import RayOptions
    from penstock.loader.tally import Setting

__all__ = ["Configured"]

T_co = TypeVar("T_co", covariant=True)

_SETTINGS = (
    *("executor", "num_workers", "threads_per_worker", "dispatch", "multiprocessing_context", "prefetch_factor"),
    *("worker_init_fn", "timeout", "in_order", "on_worker_death", "max_bytes_in_flight", "collate_fn"),
    "ray_options",
)


class Configured(TorchDataLoader[T_co]):
    """The arguments of `DataLoader`, and what stands behind them."""

    _is_accelerate_prepared = WhenPrepared()
    _dealt = False
    """Whether a framework deals the batches to the ranks, once they are made."""

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
        on_error: str | Callable[[Failure], str] | OnError = "raise",
        on_worker_death: str = "raise",
        max_bytes_in_flight: int | None = None,
        ray_options: RayOptions | None = None,
        progress: bool = False,
    ) -> None:
        workers: int = as_workers(num_workers, executor)
        check_options(
            Options(
                *(
                    executor,
                    workers,
                    threads_per_worker,
                    dispatch,
                    multiprocessing_context,
                    shuffle,
                    seed,
                    generator,
                ),
                *(on_worker_death, max_bytes_in_flight, ray_options),
            )
        )
        self._shuffle = shuffle
        if sampler is None and batch_sampler is None and not isinstance(dataset, IterableDataset):
            sampler = default_sampler(dataset, shuffle, seed, generator)
            shuffle = None
        refuse_double_split(dataset, sampler if sampler is not None else batch_sampler)
        self.executor = executor
        self.threads_per_worker = threads_per_worker
        self.dispatch = dispatch
        self.seed = None if seed is None else operator.index(seed)
        self.on_error = on_error
        self.on_worker_death = on_worker_death
        self.max_bytes_in_flight = max_bytes_in_flight
        self.ray_options = ray_options
        self.progress = progress
        self._chosen = prefetch_factor is not None
        self._ladder: Ladder | None = None
        self._setting: Setting | None = None
        lightning.keep_ours()
        lightning.unrecorded(TorchDataLoader)(
            self,
            dataset=dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self._collate = Collate(channels_last=_channels_last(dataset))
        self._set_up()

    __init__.__qualname__ = "DataLoader.__init__"  # the name in Python's words about arguments that there are not

    def _set_up(self) -> None:
        """What stands behind the arguments."""
        policy = OnError.of(self.on_error)
        self._policy = policy if policy.tolerant else None
        self._log = None if self._policy is None else FailureLog(self._policy)
        self._statistics = Statistics()
        source = self._make_source()
        samples = self.dataset.samples if isinstance(self.dataset, StreamDataset) else self.dataset
        self._pure = bool(getattr(samples, "pure", False))
        self._how = self._choose(source)
        states = self._worker_states(samples, stream=source is None)
        layout = {"batch_size": self.batch_size, "drop_last": self.drop_last}
        sampler = getattr(self.batch_sampler, "sampler", self.sampler)
        self._position = Position(self.dataset, source, sampler, self.seed, layout, states)
        self._begin_tuning()
        self._engine = self._make_engine()
        if self._how.name == "process":
            self._engine.plan(self._maker())  # what cannot be done is said now
        self._base_seed: int | None = None
        self._passes: list[weakref.ref[Delivery]] = []
        self._settings = self._present_settings()

    def _options(self) -> Options:
        """The arguments, as the attributes of the same names are now."""
        return Options(
            *(self.executor, self.num_workers, self.threads_per_worker, self.dispatch, self.multiprocessing_context),
            *(None, self.seed, None),
            *(self.on_worker_death, self.max_bytes_in_flight, self.ray_options),
        )

    def _choose(self, source: EpochBatchSampler | None) -> How:
        """The executor that they mean."""
        releases_gil = source is not None and _releases_gil(self.dataset)
        chosen = self._chosen or (source is not None and source.draws_late)
        options = self._options()
        if self._tuning and self._setting is not None:
            options = options._replace(executor=self._setting.executor, num_workers=self._setting.workers)
        return how_of(options, self.prefetch_factor, chosen=chosen, releases_gil=releases_gil)

    @property
    def _tuning(self) -> bool:
        """Whether executor and number of workers are still to be chosen."""
        return isinstance(self.num_workers, AutoWorkers)

    def _begin_tuning(self) -> None:
        """If the number of workers is "auto", have what is tried first."""
        if self._tuning:
            self._ladder = ladder_of(self, releases_gil=_releases_gil(self.dataset))
            self._setting = self._ladder.current
            self._how = self._choose(self._position.plan)
        elif self._ladder is not None and self._ladder.current.workers != self.num_workers:
            self._ladder = self._setting = None

    def _follow_ladder(self) -> None:
        """Make batches by the setting that is to be tried now, or that was chosen."""
        ladder = self._ladder
        if ladder is None or not self._tuning:
            return
        if ladder.current != self._setting:
            self._setting = ladder.current
            self._how = self._choose(self._position.plan)
            self._engine = self._make_engine()
            self._statistics.runs(**self._what_runs())
        if ladder.decided:
            position, chosen = self._position, ladder.current
            position.states = self._worker_states(position.samples, stream=False)
            self.num_workers = chosen.workers
            if self._choose(self._position.plan) != self._how:
                self.executor = chosen.executor
            if not chosen.workers and not self._chosen:
                self.prefetch_factor = None  # which torch does not take without workers
            self._settings = self._present_settings()

    def _what_runs(self) -> dict[str, Any]:
        """What `Statistics.runs` is told."""
        how = self._how
        workers = self._setting.workers if self._tuning and self._setting is not None else self.num_workers
        return {
            "executor": how.name,
            "workers": workers if how.workers else 0,
            "threads": how.threads if how.name == "ray" else self.threads_per_worker,
            "processes": how.workers if how.name in ("process", "ray") else 0,
            "depth": how.depth,
            "persistent": self.persistent_workers,
        }

    def _worker_states(self, samples: Any, *, stream: bool) -> WorkerStates:
        how = self._how
        workers = 0 if how.name == "inline" or (how.name == "thread" and not stream) else how.workers
        return WorkerStates(workers, stream=stream, initial=partial(capture, samples, None, self.collate_fn))

    def _present_settings(self) -> tuple[Any, ...]:
        return self._tuning, *(getattr(self, name) for name in _SETTINGS)

    def _follow_settings(self) -> None:
        """Some attributes may be assigned: torch looks at them at each ``iter()``, and so do we."""
        if self._settings == self._present_settings():
            return
        self.num_workers: int = as_workers(self.num_workers, self.executor)
        check_options(self._options())
        self._engine.close()
        before, self._how = self._how, self._choose(self._position.plan)
        self._begin_tuning()
        if (self._how.name, self._how.workers) != (before.name, before.workers):
            position = self._position
            position.states = self._worker_states(position.samples, stream=position.plan is None)
        self._engine, self._settings = self._make_engine(), self._present_settings()

    def _make_engine(self) -> Engine:
        return Engine(
            self._how,
            dispatch=self.dispatch,
            pure=self._pure,
            persistent=self.persistent_workers,
            in_order=self.in_order,
            timeout=self.timeout,
            restart=self.on_worker_death == "restart",
            max_bytes=self.max_bytes_in_flight,
            init=self.worker_init_fn,
            context=self.multiprocessing_context,
            ray_options=self.ray_options,
        )

    def _make_source(self) -> EpochBatchSampler | None:
        """Our batches; None for an iterable data set that only it can order."""
        if isinstance(self.dataset, IterableDataset):
            if not isinstance(self.dataset, StreamDataset):
                check_stream(self.dataset, self.seed, self._policy is not None, self._options())
                return None
            return stream_source(self.dataset, self.batch_size, self.drop_last)
        return batch_source(self.sampler, self.batch_sampler)

    def _maker(self) -> Maker:
        """What makes batches: torch's default collate function means ours, which gives the same."""
        position = self._position
        collate_fn = self.collate_fn
        if self._auto_collation and collate_fn is default_collate:
            collate_fn = self._collate
        if position.plan is None:
            return StreamFetch(
                self.dataset,
                collate_fn,
                batch_size=self.batch_size,
                drop_last=self.drop_last,
                generators=self._how.name in ("process", "ray"),
            )
        fetch = Fetch(
            position.samples,
            collate_fn,
            batched=self._auto_collation,
            # Any Ray worker may make any batch, twice too: so there what is drawn never depends on the worker.
            seed_globals=(position.seeded or self._how.name == "ray") and not self._pure,
            on_error=self._policy,
        )
        if fetch.seed_globals and (self._how.name == "thread" or self._how.threads > 1):
            fetch.seed_globals = False
            warn_threads(position.samples)
        return fetch

    def check_worker_number_rationality(self) -> None:
        """torch's warning when there are more worker processes than cores; threads are none."""
        one_child = self.executor == "auto" and self.threads_per_worker == 1 and _releases_gil(self.dataset)
        if self.executor not in ("thread", "ray") and not one_child and self._ladder is None:
            super().check_worker_number_rationality()

    def __copy__(self) -> Self:
        copy: Self = object.__new__(type(self))
        copy.__dict__.update(self.__getstate__())
        copy._set_up()  # what runs and what it counts are its own
        copy._position.follow(self._position)
        return copy

    def __getstate__(self) -> dict[str, Any]:
        # What runs stays here: threads, workers and a pass that is under way belong to this process.
        return {**self.__dict__, "_engine": None, "_iterator": None, "_passes": [], "_ladder": None, "_base_seed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        lightning.keep_ours()
        self._begin_tuning()
        self.__dict__["_engine"] = self._make_engine()


def _channels_last(dataset: Any) -> bool:
    """Whether a data set's images are to stay channels_last in memory."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return bool(getattr(dataset, "channels_last", False))


def _releases_gil(dataset: Any) -> bool:
    """Whether a data set spends its time outside of Python's lock, and may be asked by several threads."""
    samples = dataset.samples if isinstance(dataset, StreamDataset) else dataset
    return bool(getattr(samples, "pure", False) and getattr(samples, "releases_gil", False))
