"""`Engine`: runs a loader's batches by its config, and keeps workers, threads and shared memory between epochs.

It knows nothing of order, epoch and state. Each executor is imported on first use: an inline loader needs a third less
code.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError
from penstock.loader.config import LoaderConfig
from penstock.loader.executors.base import Executor
from penstock.loader.executors.inline import InlineExecutor
from penstock.loader.fetch import Fetch, Fetcher
from penstock.loader.messages import BatchRequest
from penstock.loader.stream import StreamFetch
from penstock.loader.window import DispatchPolicy, Window
from penstock.plan.stream_plan import EpochStart
from penstock.plan.user_states import has_state
from penstock.samplers.identity import parts_of

if TYPE_CHECKING:
    from penstock.loader.executors.process.assembly import Workload
    from penstock.loader.executors.process.pool import Pool
    from penstock.loader.executors.process.ring import Ring
    from penstock.loader.executors.ray.backend import RayBackend
    from penstock.loader.executors.thread_pool import ThreadPool

__all__ = ["Engine", "EpochRun"]


class EpochRun(NamedTuple):
    """The work of one epoch iterator.

    Attributes:
        requests: the batches to make.
        fetcher: makes a batch.
        epoch: epoch passed to streams; None for other datasets.
        base_seed: base seed of the workers.
        resume: returns the state that a worker's objects resume from; None if they start fresh.
        first: worker of the first batch, where workers take turns.
    """

    requests: Iterator[BatchRequest]
    fetcher: Fetcher
    epoch: EpochStart
    base_seed: int
    resume: Callable[[int], Any]
    first: int


class Engine:
    """Makes batches for one loader.

    Args:
        config: the loader's settings.
    """

    def __init__(self, config: LoaderConfig) -> None:
        self.config = config
        self._threads: ThreadPool | None = None
        self._pool: Pool | None = None
        # Prepared for the iterator that starts next.
        self._next: Pool | None = None
        self._ring: Ring | None = None
        self._work: Workload | None = None
        self.restarts = 0
        self.ray: RayBackend | None = None
        if config.kind == "ray":
            from penstock.loader.executors.ray.backend import RayBackend

            self.ray = RayBackend(config)

    def prepare(self, fetcher: Fetcher, base_seed: int, *, anew: bool = False) -> None:
        """Start the worker processes of the next epoch iterator.

        Errors of starting workers are raised here, before the iterator starts and the loader's position moves.

        Args:
            anew: replace persistent workers, whose objects have advanced beyond a loaded state.

        Raises:
            ConfigError: the fetcher does not support a setting.
            ClusterError: the Ray cluster is missing.
        """
        if anew:
            self._end_persistent()
        if self.ray is not None:
            self.ray.prepare(fetcher, anew=anew)
        if self.config.kind != "process":
            return
        self._work = self._work or self.workload(fetcher)
        if not self.keeps_workers and (self._next is None or self._next.closed):
            self._next = self._new_pool(fetcher, base_seed)

    def _end_persistent(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            # Older iterators then report that a newer one has taken over the workers.
            pool.run += 1
            # An older iterator may release the pool much later. Its ring must not be reused then.
            pool.broken = True
            pool.close()

    def dismiss(self) -> None:
        """Close the workers that were prepared for an iterator that does not start."""
        pool, self._next = self._next, None
        if pool is not None:
            pool.close()

    def start(self, run: EpochRun) -> Window:
        """Return the batches of an epoch. Call `prepare` first."""
        if self.config.kind == "inline":
            return self._inline(run)
        if self.ray is not None:
            executor, turns = self.ray.start(run)
            return self._window(run, executor, turns=turns, restart=not turns)
        return self._in_threads(run) if self.config.kind == "thread" else self._in_processes(run)

    @property
    def keeps_workers(self) -> bool:
        """Whether workers exist that will serve the next iterator."""
        if self.ray is not None:
            return self.ray.keeps_workers
        return self._pool is not None and not self._pool.closed and not self._pool.broken

    @property
    def pool(self) -> Pool | None:
        """The persistent worker processes."""
        return self._pool

    def _inline(self, run: EpochRun) -> Window:
        if (state := run.resume(0)) is not None:
            run.fetcher.load_state_dict(state)
        return self._window(run, InlineExecutor(run.fetcher, run.epoch), turns=isinstance(run.fetcher, StreamFetch))

    def _window(self, run: EpochRun, executor: Executor, *, turns: bool, restart: bool = False) -> Window:
        policy = DispatchPolicy(
            turns=turns,
            stream=isinstance(run.fetcher, StreamFetch),
            in_order=self.config.in_order,
            timeout=self.config.timeout,
            restart=restart,
        )
        return Window(run.requests, executor, policy, first=run.first)

    def _in_threads(self, run: EpochRun) -> Window:
        from penstock.loader.executors.thread import ThreadExecutor
        from penstock.loader.executors.thread_pool import ThreadPool

        fetchers: Fetcher | list[Fetcher] = run.fetcher
        stream = isinstance(run.fetcher, StreamFetch)
        if isinstance(run.fetcher, StreamFetch):
            fetchers = [run.fetcher.copy() for _ in range(self.config.workers)]
            for number, fetcher in enumerate(fetchers):
                if (state := run.resume(number)) is not None:
                    fetcher.load_state_dict(state)
        elif (state := run.resume(0)) is not None:
            run.fetcher.load_state_dict(state)
        pool = self._threads
        if pool is None or pool.pid != os.getpid() or pool.lanes != stream or not pool.close.alive:
            dataset = run.fetcher.dataset
            pool = ThreadPool(
                self.config.workers, self.config.worker_init_fn, seed=run.base_seed, dataset=dataset, lanes=stream
            )
            self._threads = pool if self.config.persistent_workers else None
        executor = ThreadExecutor(
            fetchers, pool, depth=self.config.depth, epoch=run.epoch, max_bytes=self.config.max_bytes_in_flight
        )
        return self._window(run, executor, turns=stream)

    def _in_processes(self, run: EpochRun) -> Window:
        from penstock.loader.executors.process.executor import ProcessExecutor

        work, pool = self._work, self._pool if self.keeps_workers else None
        assert work is not None
        if pool is None:
            pool, self._next = self._next, None
            assert pool is not None
            self._pool = pool if self.config.persistent_workers else None
        states = {number: run.resume(number) for number in range(self.config.workers)}
        executor = ProcessExecutor(
            pool,
            work,
            epoch=run.epoch,
            states={number: state for number, state in states.items() if state is not None},
            has_states=run.fetcher.has_states,
            persistent=self.config.persistent_workers,
            release=_Release(self, pool),
        )
        return self._window(run, executor, turns=not work.free, restart=work.restart)

    def _new_pool(self, fetcher: Fetcher, base_seed: int) -> Pool:
        from penstock.loader.executors.process.pool import Pool

        ring, self._ring = self._ring, None
        if ring is not None and ring.pid != os.getpid():
            # A forked process shares it with its parent.
            ring = None
        context = self._start_method(fetcher.dataset)
        return Pool(fetcher, self.config, context, base_seed, ring)

    def _start_method(self, dataset: Any) -> Any:
        """Return the multiprocessing context of the workers; never fork if the dataset would hang in a fork."""
        context = self.config.multiprocessing_context
        if _fork_safe(dataset):
            return context
        if context is None:
            return multiprocessing.get_context("forkserver")
        if context.get_start_method() == "fork":
            raise ConfigError(
                f"{type(dataset).__name__} cannot be forked: it uses a library whose threads a fork loses, so workers "
                "would hang. Use multiprocessing_context='forkserver' or 'spawn', or omit it"
            )
        return context

    def workload(self, fetcher: Fetcher) -> Workload:
        """Return who may make the batches of worker processes.

        Raises:
            ConfigError: the fetcher does not support a setting.
        """
        from penstock.loader.executors.process.assembly import Workload

        config, restarts = self.config, self.config.on_worker_death == "restart"
        stream = isinstance(fetcher, StreamFetch)
        own_state = has_state(fetcher.dataset) or has_state(fetcher.collate_fn)
        if restarts and own_state:
            raise ConfigError(
                "on_worker_death='restart' cannot restore a dataset or collate function that has a state: "
                "it is lost with the worker"
            )
        # Otherwise a worker's draws in the next epoch would depend on how far ahead it was when this epoch was left.
        draws_by_key = config.pure or (isinstance(fetcher, Fetch) and fetcher.seed_globals)
        return Workload(
            free=config.pure and not stream and not own_state,
            stream=stream,
            in_order=config.in_order,
            restart=restarts,
            ahead=not stream and not own_state and (draws_by_key or not config.persistent_workers),
        )

    def released(self, pool: Pool) -> None:
        """Close or keep the workers of a finished iterator."""
        self.restarts += pool.restarts
        pool.restarts = 0
        if pool is self._pool and not pool.broken:
            return
        pool.close()
        if pool is self._pool:
            self._pool = None
        if self._ring is None and not pool.broken:
            self._ring = pool.ring

    def close(self) -> None:
        """End threads and workers, in bounded time. Idempotent."""
        if self.ray is not None:
            self.ray.close()
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.close()
        for pool in (self._pool, self._next):
            if pool is not None:
                pool.close()
        self._pool = self._next = self._ring = None


def _fork_safe(dataset: Any) -> bool:
    """Return whether a dataset and the datasets that it wraps may be forked."""
    return all(bool(getattr(one, "fork_safe", True)) for one in (dataset, *parts_of(dataset)))


class _Release:
    """Callback that returns an iterator's pool to the engine."""

    def __init__(self, engine: Engine, pool: Pool) -> None:
        self._engine = engine
        self._pool = pool

    def __call__(self) -> None:
        self._engine.released(self._pool)
