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
from penstock.loader.executors.ray.cluster import attach, load_ray, nodes, session
from penstock.loader.executors.ray.options import RayOptions
from penstock.loader.fetch import Fetcher
from penstock.loader.stream import StreamFetch
from penstock.plan.user_states import has_state

__all__ = ["RayBackend"]

_LARGE = 10 << 20
"""Pickles larger than this many bytes give a warning."""


class RayBackend:
    """Makes batches for one loader.

    Args:
        config: the loader's settings.
    """

    def __init__(self, config: LoaderConfig) -> None:
        self._options = config.ray_options or RayOptions()
        self._config = config
        self._state: Any = None
        self._digest = b""
        self._run = 0
        self._anew = False

    @property
    def keeps_workers(self) -> bool:
        """Whether the next epoch iterator uses the existing copies of the dataset."""
        return self._config.persistent_workers and self._alive

    @property
    def _alive(self) -> bool:
        if self._state is None or self._state.actors.closed:
            return False
        return bool(self._state.actors.session == session())  # they ended with their connection

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
        setup, manifests = self._pickled(fetcher)
        digest = hashlib.blake2b(setup).digest()
        if not self._alive:
            self._state = self._make_state(setup, fetcher)
        elif digest != self._digest:
            self._state.actors.renew(setup)
        self._digest = digest
        self._state.manifests = manifests

    def _pickled(self, fetcher: Fetcher) -> tuple[bytes, dict[str, Any]]:
        from penstock.loader.executors.ray.remote_manifest import pickle_with_handles

        name = type(fetcher.dataset).__name__
        try:
            setup, manifests = pickle_with_handles((fetcher, self._config.worker_init_fn))
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
        return setup, manifests

    def _make_state(self, setup: bytes, fetcher: Fetcher) -> Any:
        from penstock.loader.executors.ray.actors import Actors
        from penstock.loader.executors.ray.budget import Budget
        from penstock.loader.executors.ray.elastic import Elastic
        from penstock.loader.executors.ray.jobs import RayRunState

        config, options = self._config, self._options
        turns = _takes_turns(fetcher)
        limits = options.limits(config.workers)
        if turns and limits != (config.workers, config.workers):
            raise ConfigError(
                f"min_workers and max_workers are not supported for {type(fetcher.dataset).__name__}: an iterable "
                "dataset, or one with its own state, is split among a fixed number of workers"
            )
        here = load_ray().get_runtime_context().get_node_id()
        budget = Budget(nodes()[here].store, config.max_bytes_in_flight)
        actors = Actors(setup, options, count=config.workers, threads=config.threads, turns=turns)
        self._run = 0
        return RayRunState(actors, budget, Elastic(*limits))

    def start(self, run: Any) -> tuple[Any, bool]:
        """Return the executor of an epoch iterator (`penstock.loader.engine.Run`), and whether its workers take turns.

        `prepare` must be called first.
        """
        from penstock.loader.executors.ray.executor import RayExecutor
        from penstock.loader.executors.ray.member import Pass

        config, actors = self._config, self._state.actors
        turns = _takes_turns(run.fetcher)
        states = {number: state for number in range(config.workers) if (state := run.resume(number)) is not None}
        self._run += 1
        fresh = turns and (self._anew or not config.persistent_workers)
        actors.begin(Pass(self._run, run.epoch, states, run.base_seed, fresh))
        prefetch, light = (max(1, most // config.workers) for most in (config.depth, config.small_batch_depth))
        return RayExecutor(run.fetcher, self._state, turns=turns, prefetch=prefetch, light=light), turns

    def stats(self) -> dict[str, Any]:
        """Return counts by node, lost and replaced workers, and batches that were made twice."""
        if self._state is None:
            return {"nodes": {}, "lost_workers": 0, "hedged_batches": 0}
        actors = self._state.actors
        return {"nodes": actors.stats(), "lost_workers": actors.lost, "hedged_batches": self._state.hedged}

    def close(self) -> None:
        """End the workers, but not the cluster. Idempotent."""
        if self._state is not None:
            self._state.actors.close()


def _takes_turns(fetcher: Fetcher) -> bool:
    """Return whether it matters which worker makes a batch."""
    return isinstance(fetcher, StreamFetch) or has_state(fetcher.dataset) or has_state(fetcher.collate_fn)
