"""`RayBackend`: the workers of a loader in the cluster, which stay between epoch iterators.

Workers stay until the loader is closed or garbage-collected. Without ``persistent_workers``, an epoch iterator starts
with the current dataset, as in torch: a changed dataset is sent again, and streams get a new copy.
"""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

from penstock.errors import ConfigError
from penstock.loader.config import LoaderConfig
from penstock.loader.executors.ray.cluster import attach, session, store_bytes
from penstock.loader.executors.ray.options import RayOptions
from penstock.loader.fetch import Fetcher
from penstock.loader.stream import StreamFetch
from penstock.plan.user_states import has_state

__all__ = ["RayBackend"]

_LARGE = 10 << 20
"""Pickles larger than this many bytes give a warning."""

_STORE_SHARE = 0.3
"""Share of the program's object store for the batches in flight, so that nothing is spilled to disk. Half of a store is
left to other users, and some to objects that Ray frees a little later.
"""


class RayBackend:
    """Makes batches for one loader.

    Args:
        config: the loader's settings.
    """

    def __init__(self, config: LoaderConfig) -> None:
        self._options = config.ray_options or RayOptions()
        self._config = config
        self._actors: Any = None
        self._memory: Any = None
        self._measured: Any = None
        self._digest = b""
        self._run = 0
        self._anew = False

    @property
    def keeps_workers(self) -> bool:
        """Whether the next epoch iterator uses the existing copies of the dataset."""
        return self._config.persistent_workers and self._alive

    @property
    def _alive(self) -> bool:
        if self._actors is None or self._actors.closed:
            return False
        return bool(self._actors.session == session())  # they ended with their connection

    def prepare(self, fetcher: Fetcher, *, anew: bool = False) -> None:
        """Prepare workers with this fetcher. They may still be starting.

        Args:
            anew: send new copies of the dataset in any case.

        Raises:
            ClusterError: no cluster.
            ConfigError: Ray is not installed, or the dataset cannot be pickled.
        """
        attach(self._options.address)
        self._anew = anew
        if self.keeps_workers and not anew:
            return
        setup = self._pickled(fetcher)
        digest = hashlib.blake2b(setup).digest()
        if not self._alive:
            self._start_actors(setup, fetcher)
        elif digest != self._digest:
            self._actors.renew(setup)
        self._digest = digest

    def _pickled(self, fetcher: Fetcher) -> bytes:
        from penstock.loader.executors.ray.manifests import pickle_with_handles

        name = type(fetcher.dataset).__name__
        try:
            setup = pickle_with_handles((fetcher, self._config.worker_init_fn))
        except Exception as error:
            raise ConfigError(
                f"{name}, the collate function or worker_init_fn cannot be pickled to be sent to other machines: "
                f"{error}"
            ) from error
        if len(setup) > _LARGE and len(self._digest) == 0:
            warnings.warn(
                f"{name} pickles to {len(setup) / 1e6:.0f} MB, which each of {self._config.workers} workers holds a "
                "copy of: keep the data in files and open them by path (a Manifest travels as a handle of a few "
                "hundred bytes), or use fewer workers with more threads_per_worker",
                stacklevel=6,
            )
        return setup

    def _start_actors(self, setup: bytes, fetcher: Fetcher) -> None:
        from penstock.loader.executors.ray.actors import Actors
        from penstock.loader.executors.ray.executor import Measured
        from penstock.loader.executors.ray.receive_buffer import ReceiveBuffer

        config, turns = self._config, _takes_turns(fetcher)
        self._actors = Actors(setup, self._options, count=config.workers, threads=config.threads, turns=turns)
        self._memory, self._measured, self._run = ReceiveBuffer(), Measured(), 0
        self._max_bytes = int(store_bytes() * _STORE_SHARE)
        if config.max_bytes_in_flight is not None:
            self._max_bytes = min(self._max_bytes, config.max_bytes_in_flight)

    def start(self, run: Any) -> tuple[Any, bool]:
        """Return the executor of an epoch iterator (`penstock.loader.engine.EpochRun`), and whether its workers take
        turns.

        `prepare` must be called first.
        """
        from penstock.loader.executors.ray.actors import Start
        from penstock.loader.executors.ray.executor import RayExecutor

        config = self._config
        turns = _takes_turns(run.fetcher)
        states = {number: state for number in range(config.workers) if (state := run.resume(number)) is not None}
        self._run += 1
        fresh = turns and (self._anew or not config.persistent_workers)
        self._actors.begin(Start(self._run, run.epoch, states, run.base_seed, fresh))
        prefetch, light = (max(1, most // config.workers) for most in (config.depth, config.small_batch_depth))
        executor = RayExecutor(
            self._actors,
            self._memory,
            self._measured,
            turns=turns,
            prefetch=prefetch,
            light=light,
            max_bytes=self._max_bytes,
        )
        return executor, turns

    def stats(self) -> dict[str, Any]:
        """Return counts by node, and the number of lost workers."""
        if self._actors is None:
            return {"nodes": {}, "lost_workers": 0}
        return {"nodes": self._actors.stats(), "lost_workers": self._actors.lost}

    def close(self) -> None:
        """End the workers, but not the cluster. Idempotent."""
        if self._actors is not None:
            self._actors.close()


def _takes_turns(fetcher: Fetcher) -> bool:
    """Return whether it matters which worker makes a batch."""
    return isinstance(fetcher, StreamFetch) or has_state(fetcher.dataset) or has_state(fetcher.collate_fn)
