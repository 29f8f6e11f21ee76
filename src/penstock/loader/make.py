"""`Maker`: the program of a worker, which makes batches from indices and keys. Every executor runs it.

    begin(start)    start a run: restore states of users' objects, open a stream
    make(request)   the batch, the error in its place, or the end of a stream

Invariant: a sample depends only on its index and its key, never on the worker or on the other samples of its batch.
Collation depends on the batch's first key. A `Fetch` does both; a stream has a `StreamFetch` instead.

Nothing in it knows of threads, pipes and memory. Errors of user code become answers, so a worker goes on after them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset, default_collate

from penstock.errors import escaped
from penstock.loader.collate import Arena, Collate, batch_memory, batch_rows, is_default, thread
from penstock.loader.executors.base import Began, Start
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult
from penstock.loader.on_error import SKIP, LoadOne, OnError, is_tolerable
from penstock.loader.seeding import Seeding
from penstock.loader.stream import StreamFetch
from penstock.loader.user_state import (
    Snapshot,
    WorkerGenerators,
    WorkerState,
    take_snapshot,
)
from penstock.plan.stream import EpochStart
from penstock.plan.user_states import has_state, load_states
from penstock.random import Scope, loading
from penstock.sources.batched import BatchedDataset
from penstock.stages import account, collect

if TYPE_CHECKING:
    from penstock.loader.config import LoaderConfig
    from penstock.loader.consumer import Consumer

__all__ = ["Fetch", "Fetcher", "Maker", "fetcher_of"]

# The CPU time of a dataset is measured in one of this many quick calls, since the system call is slow on some machines.
# After a call of at least _LONG seconds the next one is measured, too: auto-tuning sees only a few of those.
_CPU_EVERY = 16
_LONG = 1e-3

# Turns the first sample's key into the key of the collation. Keys are well mixed, so a fixed difference is enough.
_COLLATION = 0xD1B54A32D192ED03


class Fetch:
    """Makes batches of a map-style dataset: ``fetch(request, metrics) -> batch``.

    Picklable if the dataset and the collate function are.

    Args:
        dataset: a map-style dataset.
        collate_fn: takes the list of samples, or the single sample without batching.
        batched: if False, each request has one index, whose sample goes to ``collate_fn``.
        seed_globals: seed the global generators of Python, NumPy and torch for each sample from its key, for
            transforms that use them.
        keeps_globals: restore the global generators after each batch, because the trainer uses them too.
        on_error: policy for samples that cannot be loaded; None raises.
        owns_generators: this fetcher alone uses the global generators of its process and does not seed them. Snapshots
            then contain the generators that were used.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        *,
        batched: bool,
        seed_globals: bool,
        keeps_globals: bool = False,
        on_error: OnError | None = None,
        owns_generators: bool = False,
    ) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.batched = batched
        self.seed_globals = seed_globals
        self._keeps_globals = keeps_globals
        self.on_error = on_error
        self._owns_generators = owns_generators
        self._calls = 0
        self._last_was_long = True

    def __getstate__(self) -> dict[str, Any]:
        # Seeding refers to the generators of one process.
        return {name: value for name, value in self.__dict__.items() if name not in ("_seeding", "_seeds")}

    @cached_property
    def _seeding(self) -> Seeding | None:
        return Seeding(always=self.has_states, keeps=self._keeps_globals) if self.seed_globals else None

    @cached_property
    def _seeds(self) -> list[Callable[[int], object]]:
        """Functions to call with the key of each sample."""
        return [] if self._seeding is None else self._seeding.seeds

    @cached_property
    def _batched_dataset(self) -> bool:
        """Whether the dataset loads whole batches by our protocol. A method of the same name does not count."""
        return isinstance(self.dataset, BatchedDataset) and self.dataset.load_samples is not None  # type: ignore[attr-defined]

    @cached_property
    def divisible(self) -> bool:
        """Whether the samples of a batch may be loaded in several calls."""
        return self.batched and not self._whole and not self._in_bulk

    @cached_property
    def _in_bulk(self) -> bool:
        """Whether the dataset loads many samples in one call of ``__getitems__``."""
        return self.batched and not self._batched_dataset and _bulk(self.dataset) is not None

    @cached_property
    def _stacks(self) -> bool:
        """Whether the dataset may write into the memory of a batch: it can, and no other collation is configured."""
        own = isinstance(self.collate_fn, Collate) and is_default()
        return self.batched and self._batched_dataset and own

    @cached_property
    def _whole(self) -> bool:
        """Whether the dataset makes whole batches."""
        return self._stacks and getattr(self.dataset, "makes_batches", False) and not self.seed_globals

    @cached_property
    def has_states(self) -> bool:
        """Whether dataset or collate function has a state."""
        return has_state(self.dataset) or has_state(self.collate_fn)

    def begin(self, epoch: EpochStart) -> Snapshot | None:
        """Return a snapshot of users' objects. The position of a Penstock dataset is part of each request."""
        if not self.has_states:
            return None
        return take_snapshot(self.dataset, None, self.collate_fn, self._generators, first=True)

    def state_dict(self) -> Snapshot | None:
        """Return a snapshot of the user's dataset and collate function; None if neither has a state."""
        return take_snapshot(self.dataset, None, self.collate_fn, self._generators) if self.has_states else None

    def load_state_dict(self, state: WorkerState) -> None:
        """Resume from a state."""
        states = state.states
        load_states(states, collate_fn=self.collate_fn, dataset=self.dataset)
        if self._generators is not None:
            self._generators.restore(states)

    @cached_property
    def _generators(self) -> WorkerGenerators | None:
        """The initial seeds of this process's generators, first read before a batch draws from them."""
        return WorkerGenerators() if self._owns_generators else None

    def __call__(
        self, request: BatchRequest, metrics: BatchMetrics, samples: list[Any] | None = None, *, collate: bool = True
    ) -> Any:
        """Load the samples of a request or of a part of one, unless they are given, and collate them.

        With ``seed_globals`` this is done again if samples drew from a generator that was not seeded for them. Then the
        samples and failures of the metrics are those of the last time.
        """
        request.unpack()
        seeding = self._seeding if request.indices else None
        whole = samples is None and self._whole and request.indices
        counted, failed = metrics.samples, len(metrics.failures)
        # As `sample_scope`, for the whole batch: the scope ends without a call, which a signal handler could interrupt.
        scope = loading.scope
        before = scope.inside, scope.generator, scope.of, scope.board[0]
        while True:
            try:
                if seeding is not None:
                    seeding.start(request.keys[0])
                made: Any = self._load(request, metrics, scope) if samples is None else samples
                if collate and not whole:
                    made = self._collate(made, request, metrics, scope)
                if seeding is None or not seeding.moved():
                    return made
            except Exception:
                if seeding is None or not seeding.moved():
                    raise
            finally:
                scope.inside, scope.generator, scope.of, scope.board[0] = before
                if seeding is not None and self._keeps_globals:
                    seeding.restore()
            metrics.samples = counted
            del metrics.failures[failed:]

    def _load(self, request: BatchRequest, metrics: BatchMetrics, scope: Scope) -> Any:
        """Return the samples of a request, or its whole batch, and add the costs of the dataset to the metrics."""
        if not request.indices:
            return []
        if account.seconds:
            # Discard the time of stages outside of loaders.
            collect()
        # Threads may lose a count, which only moves the next measurement.
        self._calls = calls = self._calls + 1
        each = self._last_was_long
        cpu = time.thread_time() if each or calls % _CPU_EVERY == 2 else None
        start = time.perf_counter()
        try:
            try:
                if self._whole:
                    scope.move(request.keys[0])
                    return self.dataset.fetch_batch(request.indices, request.keys, batch_memory, **_at(request))
                if self._batched_dataset and not self._seeds:
                    fills = self._stacks and getattr(self.dataset, "fills_rows", False)
                    into: dict[str, Any] = {"into": batch_rows} if fills else {}
                    return self.dataset.load_samples(request.indices, request.keys, **_at(request), **into)
                if self._in_bulk:
                    scope.move(request.keys[0])
                    for seed in self._seeds:
                        seed(request.keys[0])
                    return self.dataset.__getitems__(request.indices)
            except Exception as error:
                if self.on_error is None or not is_tolerable(error):
                    raise
                # The dataset does not say which sample failed, so each is loaded alone.
            samples = self._load_each(request, metrics, scope)
            return self._collate(samples, request, metrics, scope) if self._whole else samples
        except StopIteration as stop:
            raise escaped(stop) from stop
        finally:
            seconds = time.perf_counter() - start
            metrics.fetch += seconds
            self._last_was_long = seconds >= _LONG
            if cpu is not None:
                metrics.cpu += (time.thread_time() - cpu) * (1 if each else _CPU_EVERY)
            metrics.samples += len(request.indices)
            if account.seconds:
                metrics.add(BatchMetrics(stages=collect()))

    def _load_each(self, request: BatchRequest, metrics: BatchMetrics, scope: Scope) -> list[Any]:
        """Load one sample after the other."""
        dataset, indices, keys, board = self.dataset, request.indices, request.keys, scope.board
        scope.inside, scope.generator, board[0] = True, None, 0
        if self.on_error is None and not (self._seeds or self._batched_dataset) and hasattr(dataset, "__getitem__"):
            try:
                # Nothing more: for small samples, this line takes most of the time.
                return [dataset[index] for index, board[0] in zip(indices, keys, strict=True)]
            except Exception as error:
                _name_sample(error, indices[keys.index(board[0])] if board[0] in keys else None, dataset)
                raise
        load = self._load_one(request, scope.move)
        if self.on_error is not None:
            load = partial(self.on_error.load, load, length=_length(dataset), metrics=metrics)
        loaded = [load(index, key) for index, key in zip(indices, keys, strict=True)]
        return [sample for sample in loaded if sample is not SKIP]

    def _load_one(self, request: BatchRequest, move: Callable[[int], None]) -> LoadOne:
        """Return a function that loads a sample or its replacement."""
        dataset, at = self.dataset, _at(request)
        getitems = None if hasattr(dataset, "__getitem__") else _bulk(dataset)

        def load(index: Any, key: int) -> Any:
            # A replacement draws the same numbers whatever failed before.
            move(key)
            for seed in self._seeds:
                seed(key)
            try:
                if self._batched_dataset:
                    return dataset.load_samples([index], [key], **at)[0]
                return dataset[index] if getitems is None else getitems([index])[0]
            except Exception as error:
                _name_sample(error, index, dataset)
                raise

        return load

    def _collate(self, samples: list[Any], request: BatchRequest, metrics: BatchMetrics, scope: Scope) -> Any:
        start = time.perf_counter()
        key = request.keys[0] ^ _COLLATION if request.indices else 0
        try:
            if not samples and request.indices and self.on_error is not None:
                # All were skipped, and the number of batches must not change.
                load, length = self._load_one(request, scope.move), _length(self.dataset)
                samples = [self.on_error.fill(load, request.indices, request.keys[0], length, metrics)]
            scope.inside, scope.generator, scope.board[0] = True, None, key
            if request.indices:
                for seed in self._seeds:
                    seed(key)
            return self.collate_fn(samples if self.batched else samples[0])
        except StopIteration as stop:
            raise escaped(stop) from stop
        finally:
            metrics.collate += time.perf_counter() - start


Fetcher = Fetch | StreamFetch
"""Makes the batches of one worker, from a map-style dataset or a stream."""


def fetcher_of(consumer: Consumer, config: LoaderConfig) -> Fetcher:
    """Return a fetcher for a config. torch's default collate function is replaced by ours, which has the same results.

    Args:
        consumer: has dataset and plan of the loader.
        config: the loader's settings, or others for a measurement.
    """
    collate_fn = config.collate_fn
    if consumer.batched and collate_fn is default_collate:
        images = consumer.dataset
        while isinstance(images, Subset):
            images = images.dataset
        # The dataset's images keep their strides.
        channels_last = bool(getattr(images, "channels_last", False))
        collate_fn = Collate(channels_last=channels_last, arrays=config.output == "numpy")
    assert collate_fn is not None
    if consumer.plan is None:
        return StreamFetch(
            consumer.dataset,
            collate_fn,
            batch_size=config.batch_size,
            drop_last=config.drop_last,
            generators={"inline": "trainer", "thread": "shared"}.get(config.kind, "worker"),
            draws_base_seed=config.generator is None,
            last=consumer.last,
        )
    # Any Ray worker may make any batch, even twice, so draws must not depend on the worker.
    seeds = (consumer.seed is not None or config.kind == "ray") and not config.pure
    if seeds and (config.kind == "thread" or config.threads > 1):
        seeds = False
        warnings.warn(
            f"{type(consumer.samples).__name__} does not declare itself pure: in threads only penstock.generator() is "
            "repeatable, while all threads share the global generators of Python, NumPy and torch. Draw from "
            "penstock.generator() and set `pure = True` on the dataset, or use executor='process'",
            stacklevel=7,
        )
    return Fetch(
        consumer.samples,
        collate_fn,
        batched=consumer.batched,
        seed_globals=seeds,
        keeps_globals=config.kind == "inline",
        on_error=config.policy,
        owns_generators=config.kind == "process" and config.threads == 1 and not seeds,
    )


class Maker:
    """Makes the batches of one worker.

    Args:
        fetcher: loads samples and collates them.
        worker: number of the worker.
        catches: what user code may raise without an end of the worker.

    Attributes:
        broken: the error of the last `begin`.
    """

    def __init__(self, fetcher: Fetcher, worker: int = 0, *, catches: type[BaseException] = Exception) -> None:
        self.fetcher = fetcher
        self.worker = worker
        self._catches = catches
        self._stream = not isinstance(fetcher, Fetch)
        # State of an error: a resumed stream makes a failed batch again, which fails again.
        self._unmoved: Snapshot | None = {} if self._stream else None
        self._unusable: BaseException | None = None
        self.broken: BaseException | None = None
        self._traceback: TracebackType | None = None  # of that error: each time it is raised, it grows
        self._ended = False

    def init(self, function: Callable[[int], object] | None, number: int) -> None:
        """Call ``worker_init_fn``. Its error answers each request of every run."""
        try:
            if function is not None:
                function(number)
        except self._catches as error:
            self.broken = self._unusable = error
            self._traceback = error.__traceback__

    def begin(self, start: Start) -> Began:
        """Start a run. An error answers each request of it; of a stream the first, which has then ended."""
        self.broken, self._ended, first = self._unusable, False, None
        if self.broken is None:
            try:
                if start.state is not None:
                    self.fetcher.load_state_dict(start.state)
                first = self.fetcher.begin(start.epoch)
            except self._catches as error:
                self.broken = escaped(error) if isinstance(error, StopIteration) else error
                self._traceback = self.broken.__traceback__
        return Began(start.run, self.worker, first)

    def make(
        self, request: BatchRequest, arena: Arena | None = None, parts: list[BatchResult] | None = None
    ) -> BatchResult:
        """Make a batch.

        Args:
            request: the batch.
            arena: memory for its tensors.
            parts: its samples, if threads have loaded them by `load`. The list is cleared.
        """
        run, number, worker, metrics = request.run, request.number, self.worker, BatchMetrics()
        if self.broken is not None and not self._ended:
            self._ended = self._stream
            error = self.broken.with_traceback(self._traceback)
            return BatchResult(None, metrics, number, worker, self._unmoved, error=error, run=run)
        if self._ended:
            return BatchResult(None, metrics, number, worker, run=run, ended=True)
        before, thread.arena = thread.arena, arena
        try:
            batch = self._joined(request, metrics, parts) if parts else self.fetcher(request, metrics)
            state = self.fetcher.state_dict() if self.fetcher.has_states else None
            return BatchResult(batch, metrics, number, worker, state, run=run)
        except StopIteration:
            return BatchResult(None, metrics, number, worker, run=run, ended=True)
        except self._catches as error:
            try:
                state = self._unmoved if self._stream else self.fetcher.state_dict()
                return BatchResult(None, metrics, number, worker, state, error=error, run=run)
            except Exception as another:
                return BatchResult(None, metrics, number, worker, self._unmoved, error=another, run=run)
        finally:
            thread.arena = before

    def load(self, part: BatchRequest, arena: Arena) -> BatchResult:
        """Return the samples of a part of a batch, instead of a batch. Several threads may call this at once."""
        metrics = BatchMetrics()
        assert isinstance(self.fetcher, Fetch)
        before, thread.arena = thread.arena, arena
        try:
            return BatchResult(self.fetcher(part, metrics, collate=False), metrics, part.number)
        except self._catches as error:
            return BatchResult([], metrics, part.number, error=error)
        finally:
            thread.arena = before

    def _joined(self, request: BatchRequest, metrics: BatchMetrics, parts: list[BatchResult]) -> Any:
        """Return the batch of all parts. The error of the first part that failed is raised."""
        samples: list[Any] = []
        error: BaseException | None = None
        while parts:
            part = parts.pop(0)
            metrics.add(part.metrics)
            metrics.failures += part.metrics.failures
            samples += part.batch
            error = error or part.error
            del part
        if error is None:
            assert isinstance(self.fetcher, Fetch)
            return self.fetcher(request, metrics, samples)
        try:
            raise error
        finally:
            # The traceback of the exception refers to this frame.
            del error


def _name_sample(error: Exception, index: Any, dataset: Any) -> None:
    """Add a note with the sample's index to an error, once. Errors that refuse notes are raised without."""
    with suppress(Exception):
        note = f"while loading sample {index!r} of {type(dataset).__name__}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _length(dataset: Any) -> int | None:
    """Return the dataset's length; None if only the sampler knows the indices."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _at(request: BatchRequest) -> dict[str, Any]:
    return {} if request.place is None else {"place": request.place}


def _bulk(dataset: Any) -> Callable[[Sequence[Any]], list[Any]] | None:
    """Return the dataset's ``__getitems__`` if it is more than a loop; otherwise None.

    With it, the samples of a batch share one key.
    """
    if type(dataset) is Subset and _bulk(dataset.dataset) is None:
        return None
    return getattr(dataset, "__getitems__", None)
