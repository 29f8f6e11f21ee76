"""``num_workers="auto"``: which loaders it is for, and what may be tried."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from penstock.distributed import local_ranks
from penstock.errors import ConfigError
from penstock.loader.config import AUTO, PROCESSES, LoaderConfig
from penstock.loader.cores import cores
from penstock.loader.fetch import preserved_generators
from penstock.plan.user_states import has_state
from penstock.samplers.base import PlanSampler
from penstock.samplers.identity import parts_of
from penstock.samplers.shares import layers

if TYPE_CHECKING:
    from penstock.loader.ladder import Ladder
    from penstock.loader.pipeline import Pipeline

__all__ = ["ladder_of"]


def ladder_of(pipeline: Pipeline, config: LoaderConfig) -> Ladder:
    """Return what is to be tried for a pipeline.

    Raises:
        ConfigError: its batches would depend on what makes them, or it has no workers to choose.
    """
    from penstock.loader.ladder import Ladder  # only where settings are tried

    _check(pipeline, config)
    processes = config.threads_per_worker > 1 or config.on_worker_death != "raise" or config.dispatch != AUTO
    processes = processes or config.multiprocessing_context is not None
    kinds, inline = [config.executor], "never"
    if config.executor == AUTO:
        kinds = ["process"] if PROCESSES else ["thread"]
        if PROCESSES and not processes:
            kinds = [AUTO, *kinds] if config.releases_gil else kinds
            here = config.worker_init_fn is None  # it may be meant for a process of its own
            kinds = [*kinds, "thread"] if config.pure and here else kinds
            if here and not config.timeout and config.max_bytes_in_flight is None:
                inline = "try" if config.pure else "trust"
    overhead = _put_back() if inline == "trust" else 0.0
    ranks, persistent = local_ranks(), config.persistent_workers
    return Ladder(kinds, inline=inline, cores=cores(), ranks=ranks, persistent=persistent, overhead=overhead)


def _put_back() -> float:
    """Seconds that it takes to put the global generators back after a batch that was made inline."""
    took = []
    for _ in range(3):
        start = perf_counter()
        with preserved_generators():
            pass
        took.append(perf_counter() - start)
    return min(took)


def _check(pipeline: Pipeline, config: LoaderConfig) -> None:
    position, name = pipeline.position, type(pipeline.dataset).__name__
    auto = "num_workers='auto'"
    if config.executor == "ray":
        raise ConfigError(
            f"{auto} tries what this machine has: for executor='ray' give RayOptions(min_workers=, max_workers=)"
        )
    if position.plan is None:
        raise ConfigError(
            f"{auto} cannot be had for {name}: what comes from an iterable data set depends on the number of workers, "
            "so give it, or make the data set map-style"
        )
    _refuse_states(pipeline, config)
    if not config.pure and not position.seeded:
        raise ConfigError(
            f"{auto} needs seed=, or a data set that declares itself pure: else what {name} draws from Python's, "
            "NumPy's or torch's global generators depends on the number of workers, as in torch"
        )
    if position.plan.draws_late:
        raise ConfigError(
            f"{auto} needs a sampler that draws its order at the beginning, or from a seed: this one draws as it goes, "
            "from a generator that others see, so how far workers are ahead shows. Give seed= or a number of workers"
        )


def _refuse_states(pipeline: Pipeline, config: LoaderConfig) -> None:
    """Raise if an object of the user's has a state: each worker would have its own, and a new number new ones."""
    assert pipeline.position.plan is not None
    items = [("data set", one) for one in (pipeline.samples, *parts_of(pipeline.samples))]
    items += [("sampler", one) for one in layers(pipeline.position.plan.source) if not isinstance(one, PlanSampler)]
    for role, item in [*items, ("collate function", config.collate_fn)]:
        if has_state(item):
            raise ConfigError(
                f"num_workers='auto' cannot be had: the {role} {type(item).__name__} has a state of its own "
                "(state_dict and load_state_dict), which depends on the number of workers. Give a number: "
                "num_workers=4, or 0 to make batches in this process"
            )
