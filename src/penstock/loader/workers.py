"""`Workers`: the workers of one loader, which it keeps between epoch iterators if they are persistent.

    prepare   start an executor for the loader's settings      window   the batches of an epoch iterator

Which executor, and how it is used, follows from the settings and from what the data declare. An executor is imported on
first use: an inline loader needs a third less code.
"""

from __future__ import annotations

import multiprocessing
import os
import weakref
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, cast

from penstock.errors import ConfigError
from penstock.loader.config import LoaderConfig
from penstock.loader.executors.base import Executor
from penstock.loader.executors.inline import InlineExecutor
from penstock.loader.flow import Flow
from penstock.loader.make import Fetch, Fetcher
from penstock.loader.messages import BatchRequest
from penstock.loader.stream import StreamFetch
from penstock.loader.window import SHUTDOWN_TIMEOUT_S, DispatchPolicy, Window
from penstock.plan.stream import EpochStart
from penstock.samplers.identity import parts_of

if TYPE_CHECKING:
    from penstock.loader.executors.process.ring import Ring
    from penstock.loader.executors.ray.executor import RayExecutor

__all__ = ["Workers"]


class Workers:
    """The workers of one loader, and what it has learned of its batches. It knows nothing of order, epoch and state.

    Args:
        config: the loader's settings.
        make_fetcher: returns what makes a batch with a config, and is copied to each worker.

    Attributes:
        executor: the workers that are ready for the next epoch iterator, or serve the present one and stay.
        restarts: number of workers that were replaced after their death.
        base_seed: base seed of the last epoch iterator; None before the first one.

    Raises:
        ConfigError: the data do not support a setting.
    """

    def __init__(self, config: LoaderConfig, make_fetcher: Callable[[LoaderConfig], Fetcher]) -> None:
        self.executor: Executor | None = None
        self.restarts = 0
        self.base_seed: int | None = None
        self._make_fetcher = make_fetcher
        self._stats: dict[str, Any] = {"nodes": {}, "lost_workers": 0} if config.kind == "ray" else {}
        self._started: weakref.WeakSet[Executor] = weakref.WeakSet()
        self._rings: list[Ring] = []
        """Memory of earlier worker processes, to be used again."""
        self._use(config)

    def _use(self, config: LoaderConfig) -> None:
        """Decide what follows from a config and from what the data declare."""
        self.config = config
        self._fetcher = fetcher = self._make_fetcher(config)
        stream, restart = isinstance(fetcher, StreamFetch), config.on_worker_death == "restart"
        if restart and fetcher.has_states:
            raise ConfigError(
                "on_worker_death='restart' cannot restore a dataset or collate function that has a state: "
                "it is lost with the worker"
            )
        turns = {"process": fetcher.has_states or not config.pure, "ray": fetcher.has_states}.get(config.kind, stream)
        self._policy = DispatchPolicy(
            turns=turns,
            stream=stream,
            restart=restart or (config.kind == "ray" and not turns),
            persistent=config.persistent_workers or config.kind == "ray",
        )
        # Otherwise a worker's draws in the next epoch would depend on how far ahead it was when this epoch was left.
        draws_by_key = config.pure or (isinstance(fetcher, Fetch) and fetcher.seed_globals)
        ahead = not fetcher.has_states and (draws_by_key or not config.persistent_workers)
        self._flow = Flow(config, ahead=ahead)
        if config.kind == "process":
            self._context = _start_method(config.multiprocessing_context, fetcher.dataset)

    @property
    def kept(self) -> bool:
        """Whether worker processes exist whose copies of the dataset will serve the next iterator."""
        config, executor = self.config, self.executor
        if executor is None or executor.closed or executor.pid != os.getpid():
            return False
        return config.forks_workers and config.persistent_workers

    def prepare(self, base_seed: int, *, anew: bool = False) -> None:
        """Start the workers of the next epoch iterator, if there are none.

        Errors of starting workers are raised here, before the iterator starts and the loader's position moves.

        Args:
            base_seed: base seed of new workers.
            anew: replace persistent workers, whose objects have advanced beyond a loaded state.

        Raises:
            ClusterError: the Ray cluster is missing.
            Exception: an error of starting workers, such as a dataset that cannot be pickled for spawn.
        """
        config, fetcher = self.config, self._fetcher
        # Workers on a cluster start slowly, so they stay, with other objects.
        renews = config.kind == "ray" and (anew or not config.persistent_workers)
        if anew and not renews:
            self.close()
        executor = self.executor
        if executor is not None and (executor.closed or executor.pid != os.getpid()):
            executor = None
        if executor is not None and not renews:
            return
        if isinstance(fetcher, StreamFetch):
            # Each has the position of its stream.
            fetcher = self._make_fetcher(config)
        if executor is not None:
            cast("RayExecutor", executor).renew(fetcher, base_seed)
        elif config.kind == "inline":
            self.executor = InlineExecutor(fetcher)
        elif config.kind == "thread":
            from penstock.loader.executors.threads import ThreadExecutor

            self.executor = ThreadExecutor(fetcher, config.workers, config.worker_init_fn, base_seed)
        elif config.kind == "ray":
            from penstock.loader.executors.ray.executor import RayExecutor

            self.executor = RayExecutor(fetcher, config, base_seed)
        else:
            from penstock.loader.executors.process.executor import ProcessExecutor

            self.executor = ProcessExecutor(fetcher, config, self._context, base_seed, self._rings)
        assert self.executor is not None
        if config.kind != "inline":
            self._started.add(self.executor)
        if self.executor.max_bytes is not None:
            self._flow.limit_bytes(self.executor.max_bytes)

    def window(
        self, requests: Iterator[BatchRequest], epoch: EpochStart, resume: Callable[[int], Any], first: int
    ) -> Window:
        """Return the batches of an epoch iterator. Call `prepare` first. See `Window` for the arguments."""
        executor, policy = self.executor, self._policy
        assert executor is not None
        if not policy.persistent:
            self.executor = None
        restarted = self._count_restart
        if self.config.kind == "ray":
            # Fewer are submitted until the size of batches is known, but samplers draw as torch's loader asks them.
            requests = chain(list(islice(requests, self.config.depth)), requests)
        try:
            return Window(
                requests, executor, self._flow, policy, epoch=epoch, resume=resume, first=first, restarted=restarted
            )
        except BaseException:
            executor.close(SHUTDOWN_TIMEOUT_S)
            raise

    def _count_restart(self) -> None:
        self.restarts += 1

    def resize(self, config: LoaderConfig, window: Window) -> None:
        """Have the number of workers of a config, which may differ in nothing else. They may become none.

        Args:
            window: the batches of the running iterator, whose workers change at once.
        """
        window.resize(config, None if config.num_workers else InlineExecutor(self._make_fetcher(config)))
        if config.kind != self.config.kind:
            # The running iterator ends its workers itself.
            self.executor = None
            self._use(config)
        self.config = self._flow.config = config

    def stats(self) -> dict[str, Any]:
        """Return what the executor of several machines knows about them, also after its end; empty for others."""
        if self.config.kind == "ray" and self.executor is not None:
            self._stats = cast("RayExecutor", self.executor).stats()
        return self._stats

    # Private names of torch's: with persistent workers, programs end them through ``loader._iterator``.

    @property
    def _workers(self) -> list[Any]:
        return [] if self.executor is None else self.executor.processes or []

    def _shutdown_workers(self) -> None:
        self.close()

    def close(self, *, running: bool = False) -> None:
        """End the workers that wait for an iterator, or all that run, in bounded time. Idempotent."""
        self.stats()
        executor, self.executor = self.executor, None
        for one in list(self._started) if running else [executor]:
            if one is not None and one.pid == os.getpid():
                one.close(SHUTDOWN_TIMEOUT_S)


def _start_method(context: Any, dataset: Any) -> Any:
    """Return the multiprocessing context of the workers; never fork if the dataset would hang in a fork."""
    if all(bool(getattr(one, "fork_safe", True)) for one in (dataset, *parts_of(dataset))):
        return context
    if context is None:
        return multiprocessing.get_context("forkserver")
    if context.get_start_method() == "fork":
        raise ConfigError(
            f"{type(dataset).__name__} cannot be forked: it uses a library whose threads a fork loses, so workers "
            "would hang. Use multiprocessing_context='forkserver' or 'spawn', or omit it"
        )
    return context
