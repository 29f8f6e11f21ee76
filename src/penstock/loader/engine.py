"""`Engine`: how a loader makes its batches, and what it keeps from pass to pass for that: workers, threads, the ring.

It is what is left of a loader when order, epoch and state are taken away. Each executor is imported when a loader uses
it: the inline one needs a third less.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import ConcatDataset, StackDataset, Subset

from penstock.errors import ConfigError
from penstock.loader.collate import Collate, is_default
from penstock.loader.delivery import Batches
from penstock.loader.fetch import Fetch, Maker
from penstock.loader.inline import InlineBatches
from penstock.loader.stateful import has_state
from penstock.loader.stream import StreamFetch
from penstock.loader.work import Task

if TYPE_CHECKING:
    from penstock.loader.assembly import Plan
    from penstock.loader.process import Pool
    from penstock.loader.ray.executor import RayExecutor
    from penstock.loader.ray.options import RayOptions
    from penstock.loader.ring import Ring
    from penstock.loader.thread import ThreadPool

__all__ = ["Engine", "How", "Run"]


class How(NamedTuple):
    """Which executor, of what size.

    Attributes:
        name: "inline", "thread", "process" or "ray".
        workers: how many workers users see: processes, threads of the thread executor, actors; 0 inline.
        threads: in each process or actor.
        depth: batches in flight at most.
        light: the same for small batches that are made quickly, where handing over costs more than making.
    """

    name: str
    workers: int
    threads: int
    depth: int
    light: int


class Run(NamedTuple):
    """A pass, for the engine.

    Attributes:
        tasks: what is to be made.
        maker: makes it.
        epoch: told to streams; None for none.
        base_seed: of the workers.
        resume: by worker, what its objects go on from; None for a worker that begins as it is.
        first: the worker that makes the first batch, where they take turns.
    """

    tasks: Iterator[Task]
    maker: Maker
    epoch: int | None
    base_seed: int
    resume: Callable[[int], Any]
    first: int


class Engine:
    """Makes batches for one loader.

    Args:
        how: which executor.
        dispatch: "auto", "batch" or "chunk", see `DataLoader`.
        pure: whether samples depend on index and key alone.
        persistent: whether workers outlive a pass.
        in_order, timeout, restart, max_bytes, init, context: as the loader's arguments.
        ray_options: of the Ray executor.
    """

    def __init__(
        self,
        how: How,
        *,
        dispatch: str,
        pure: bool,
        persistent: bool,
        in_order: bool,
        timeout: float,
        restart: bool,
        max_bytes: int | None,
        init: Callable[[int], object] | None,
        context: Any,
        ray_options: RayOptions | None,
    ) -> None:
        self.how = how
        self.persistent = persistent
        self._dispatch = dispatch
        self._pure = pure
        self._in_order = in_order
        self._timeout = timeout
        self._restart = restart
        self._max_bytes = max_bytes
        self._init = init
        self._context = context
        self._threads: ThreadPool | None = None
        self._pool: Pool | None = None
        self._next: Pool | None = None  # prepared, for the pass that begins
        self._ring: Ring | None = None
        self._plan: Plan | None = None
        self.restarts = 0
        self.ray: RayExecutor | None = None
        if how.name == "ray":
            from penstock.loader.ray.executor import RayExecutor, Settings
            from penstock.loader.ray.options import RayOptions

            prefetch, light = how.depth // how.workers, how.light // how.workers
            settings = Settings(
                *(how.workers, how.threads, max(1, prefetch), max(1, light), persistent),
                *(in_order, timeout, max_bytes, init),
            )
            self.ray = RayExecutor(ray_options or RayOptions(), settings)

    def prepare(self, maker: Maker, base_seed: int) -> None:
        """Have the worker processes of the next pass. What goes wrong with starting them goes wrong here, before the
        pass begins and the loader's position moves.

        Raises:
            ConfigError: the maker cannot do what is asked of it.
            ClusterError: there is no cluster.
        """
        if self.ray is not None:
            self.ray.prepare(maker)
        if self.how.name != "process":
            return
        self._plan = self._plan or self.plan(maker)
        if not self.keeps_workers and (self._next is None or self._next.closed):
            self._next = self._new_pool(maker, base_seed)

    def dismiss(self) -> None:
        """Nothing comes of the pass that was prepared."""
        pool, self._next = self._next, None
        if pool is not None:
            pool.close()

    def start(self, run: Run) -> Batches:
        """The batches of a pass, for which `prepare` was called."""
        if self.how.name == "inline":
            return self._inline(run)
        if self.ray is not None:
            batches: Batches = self.ray.start(run)
            return batches
        return self._in_threads(run) if self.how.name == "thread" else self._in_processes(run)

    @property
    def keeps_workers(self) -> bool:
        """Whether the next pass is made by workers that there are already."""
        if self.ray is not None:
            return self.ray.keeps_workers
        return self._pool is not None and not self._pool.closed and not self._pool.broken

    @property
    def pool(self) -> Pool | None:
        """The worker processes that outlive a pass."""
        return self._pool

    def _inline(self, run: Run) -> Batches:
        if (state := run.resume(0)) is not None:
            run.maker.load_state_dict(state)
        return InlineBatches(run.tasks, run.maker, epoch=run.epoch)

    def _in_threads(self, run: Run) -> Batches:
        from penstock.loader.thread import ThreadBatches, ThreadPool

        makers: Maker | list[Maker] = run.maker
        stream = isinstance(run.maker, StreamFetch)
        if isinstance(run.maker, StreamFetch):
            makers = [run.maker.copy() for _ in range(self.how.workers)]
            for number, maker in enumerate(makers):
                if (state := run.resume(number)) is not None:
                    maker.load_state_dict(state)
        elif (state := run.resume(0)) is not None:
            run.maker.load_state_dict(state)
        pool = self._threads
        if pool is None or pool.pid != os.getpid() or pool.lanes != stream or not pool.close.alive:
            dataset = run.maker.dataset
            pool = ThreadPool(self.how.workers, self._init, seed=run.base_seed, dataset=dataset, lanes=stream)
            self._threads = pool if self.persistent else None
        return ThreadBatches(
            run.tasks,
            makers,
            pool,
            depth=self.how.depth,
            timeout=self._timeout,
            in_order=self._in_order,
            epoch=run.epoch,
            max_bytes=self._max_bytes,
            first=run.first,
        )

    def _in_processes(self, run: Run) -> Batches:
        from penstock.loader.dispatch import ProcessBatches

        plan, pool = self._plan, self._pool if self.keeps_workers else None
        assert plan is not None
        if pool is None:
            pool, self._next = self._next, None
            assert pool is not None
            self._pool = pool if self.persistent else None
        states = {number: run.resume(number) for number in range(self.how.workers)}
        return ProcessBatches(
            run.tasks,
            pool,
            plan,
            epoch=run.epoch,
            states={number: state for number, state in states.items() if state is not None},
            first=run.first,
            timeout=self._timeout,
            persistent=self.persistent,
            release=_Release(self, pool),
        )

    def _new_pool(self, maker: Maker, base_seed: int) -> Pool:
        from penstock.loader.process import Pool, WorkerOptions

        how = self.how
        options = WorkerOptions(
            *(how.workers, how.threads, self._start_method(maker.dataset), self._init, base_seed),
            *(how.depth, how.light, self._max_bytes),
        )
        ring, self._ring = self._ring, None
        if ring is not None and ring.pid != os.getpid():
            ring = None  # a fork has it in common with its parent
        return Pool(maker, options, ring)

    def _start_method(self, dataset: Any) -> Any:
        """The context that workers are started in; not a fork if that would hang them."""
        if _fork_safe(dataset):
            return self._context
        if self._context is None:
            return multiprocessing.get_context("forkserver")
        if self._context.get_start_method() == "fork":
            raise ConfigError(
                f"{type(dataset).__name__} cannot be forked: it uses a library whose threads a fork loses, so workers "
                "would hang. Use multiprocessing_context='forkserver' or 'spawn', or leave it out"
            )
        return self._context

    def plan(self, maker: Maker) -> Plan:
        """How batches are handed out.

        Raises:
            ConfigError: the maker cannot do what is asked of it.
        """
        from penstock.loader.assembly import Plan

        stream = isinstance(maker, StreamFetch)
        known = self._pure or self._dispatch == "chunk"
        own_state = has_state(maker.dataset) or has_state(maker.collate_fn)
        default = isinstance(maker.collate_fn, Collate) and is_default()
        divisible = isinstance(maker, Fetch) and maker.divisible and default
        if self._dispatch == "chunk" and not divisible:
            raise ConfigError(
                "dispatch='chunk' needs a map-style data set without __getitems__, which does not make whole batches "
                "itself, batches, the default collate_fn and no types registered with torch's: use dispatch='auto'"
            )
        if self._restart and own_state:
            raise ConfigError(
                "on_worker_death='restart' cannot bring back a data set or collate function with a state of its own: "
                "what a worker's copy has seen is gone with it"
            )
        free = known and not stream and not own_state and self._dispatch != "batch"
        return Plan(
            chunks=free and divisible,
            free=free,
            stream=stream,
            in_order=self._in_order,
            restart=self._restart,
            eager=self._dispatch == "chunk",
        )

    def released(self, pool: Pool) -> None:
        """An iterator is done with its workers."""
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
        """End threads and workers. Idempotent, and bounded in time."""
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
    """Whether a data set may be forked; torch's wrappers say nothing of those that they hold."""
    inner: list[Any] = []
    if isinstance(dataset, Subset):
        inner = [dataset.dataset]
    elif isinstance(dataset, ConcatDataset | StackDataset):
        held = dataset.datasets
        inner = list(held.values() if isinstance(held, dict) else held)
    return bool(getattr(dataset, "fork_safe", True)) and all(map(_fork_safe, inner))


class _Release:
    """Tells the engine that an iterator is done with a pool."""

    def __init__(self, engine: Engine, pool: Pool) -> None:
        self._engine = engine
        self._pool = pool

    def __call__(self) -> None:
        self._engine.released(self._pool)
