"""``num_workers="auto"``: which loaders it is for, and what may be tried."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.loader.cores import cores
from penstock.loader.fetch import preserved_generators
from penstock.loader.options import PROCESSES
from penstock.loader.stateful import has_state

if TYPE_CHECKING:
    from penstock.loader.configured import Configured
    from penstock.loader.ladder import Ladder

__all__ = ["AUTO", "AutoWorkers", "as_workers", "ladder_of"]

AUTO = "auto"


class AutoWorkers(int):
    """``loader.num_workers`` until a number is chosen: as many as there are cores, for those who want a number. A
    loader that is made from this one's attributes is tuned, too.
    """

    def __new__(cls, value: int | None = None) -> AutoWorkers:
        return super().__new__(cls, cores() if value is None else value)

    def __repr__(self) -> str:
        return repr(AUTO)


def as_workers(num_workers: Any, executor: str) -> Any:
    """Return the argument, with a number for "auto".

    0, torch's default, is one thread for ``executor="thread"``: a thread costs next to nothing. Whoever wants
    processes or Ray's workers says how many, since each has a copy of the data set.

    Raises:
        ConfigError: another word.
    """
    if isinstance(num_workers, str):
        if num_workers != AUTO:
            raise ConfigError(f"num_workers={num_workers!r} is neither a number nor {AUTO!r}")
        return AutoWorkers()
    return 1 if executor == "thread" and num_workers == 0 else num_workers


def ladder_of(loader: Configured[Any], *, releases_gil: bool) -> Ladder:
    """What is to be tried for a loader.

    Raises:
        ConfigError: its batches would depend on what makes them, or it has no workers to choose.
    """
    from penstock.loader.ladder import Ladder  # only where settings are tried

    _check(loader)
    executor = loader.executor
    processes = loader.threads_per_worker > 1 or loader.on_worker_death != "raise" or loader.dispatch != "auto"
    processes = processes or loader.multiprocessing_context is not None
    kinds, inline = [executor], "never"
    if executor == AUTO:
        kinds = ["process"] if PROCESSES else ["thread"]
        if PROCESSES and not processes:
            kinds = [AUTO, *kinds] if releases_gil else kinds
            here = loader.worker_init_fn is None  # it may be meant for a process of its own
            kinds = [*kinds, "thread"] if loader._pure and here else kinds
            if here and not loader.timeout and loader.max_bytes_in_flight is None:
                inline = "try" if loader._pure else "trust"
    overhead = _put_back() if inline == "trust" else 0.0
    return Ladder(kinds, inline=inline, cores=cores(), persistent=loader.persistent_workers, overhead=overhead)


def _put_back() -> float:
    """Seconds that it takes to put the global generators back after a batch that was made inline."""
    took = []
    for _ in range(3):
        start = perf_counter()
        with preserved_generators():
            pass
        took.append(perf_counter() - start)
    return min(took)


def _check(loader: Configured[Any]) -> None:
    position, name = loader._position, type(loader.dataset).__name__
    auto = "num_workers='auto'"
    if loader.executor == "ray":
        raise ConfigError(
            f"{auto} tries what this machine has: for executor='ray' give RayOptions(min_workers=, max_workers=)"
        )
    if position.plan is None:
        raise ConfigError(
            f"{auto} cannot be had for {name}: what comes from an iterable data set depends on the number of workers, "
            "so give it, or make the data set map-style"
        )
    if has_state(position.samples) or has_state(loader.collate_fn):
        raise ConfigError(
            f"{auto} cannot be had for {name}: a data set or collate function with a state of its own has one in each "
            "worker. Give the number of workers"
        )
    if not loader._pure and not position.seeded:
        raise ConfigError(
            f"{auto} needs seed=, or a data set that declares itself pure: else what {name} draws from Python's, "
            "NumPy's or torch's global generators depends on the number of workers, as in torch"
        )
    if position.plan.draws_late:
        raise ConfigError(
            f"{auto} needs a sampler that draws its order at the beginning, or from a seed: this one draws as it goes, "
            "from a generator that others see, so how far workers are ahead shows. Give seed= or a number of workers"
        )
