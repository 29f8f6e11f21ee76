"""What a loader's arguments mean: checks, which executor they ask for, and the sampler where none is given."""

from __future__ import annotations

import operator
import select
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import IterDataPipe, Sampler

from penstock.errors import ConfigError
from penstock.loader.engine import How
from penstock.loader.snapshots import has_state
from penstock.order import SHUFFLES
from penstock.order.hashing import derive_key
from penstock.samplers.identity import own_order
from penstock.samplers.random import RandomSampler
from penstock.samplers.sequential import SequentialSampler

if TYPE_CHECKING:
    from penstock.loader.ray.options import RayOptions

__all__ = ["EXECUTORS", "Options", "check_options", "check_stream", "default_sampler", "how_of", "warn_threads"]

PROCESSES = hasattr(select, "poll")
"""Whether there are worker processes: not on Windows, where ``"auto"`` means threads."""

EXECUTORS = ("auto", "inline", "thread", "process", "ray")
_LIGHT = 8  # times as many batches are made ahead if they are small and quickly made, and the user did not say
_DISPATCHES = ("auto", "batch", "chunk")


class Options(NamedTuple):
    """Arguments of a loader that have to fit together."""

    executor: str
    num_workers: int
    threads_per_worker: int
    dispatch: str
    multiprocessing_context: Any
    shuffle: bool | str | None
    seed: int | None
    generator: torch.Generator | None
    on_worker_death: str
    max_bytes_in_flight: int | None
    ray_options: RayOptions | None


def check_options(options: Options) -> None:
    """Refuse what makes no sense.

    Raises:
        ConfigError: an unknown name, or a combination of which one part would be ignored.
    """
    _check_executor(options)
    shuffle, generator = options.shuffle, options.generator
    if generator is not None and (options.seed is not None or isinstance(shuffle, str)):
        raise ConfigError("generator= is torch's way to choose an order, seed= and a named shuffle are ours: give one")
    if options.seed is not None:
        derive_key(options.seed)  # a seed outside 64 bits is refused here, not at the first batch
    if isinstance(shuffle, str) and shuffle not in SHUFFLES:
        raise ConfigError(f"unknown shuffle {shuffle!r}: use True, False, or one of {', '.join(map(repr, SHUFFLES))}")
    if options.dispatch not in _DISPATCHES:
        raise ConfigError(f"unknown dispatch {options.dispatch!r}: use one of {', '.join(map(repr, _DISPATCHES))}")
    if options.on_worker_death not in ("raise", "restart"):
        raise ConfigError(f"unknown on_worker_death {options.on_worker_death!r}: use 'raise' or 'restart'")


def _check_executor(options: Options) -> None:
    executor, num_workers = options.executor, options.num_workers
    if executor not in EXECUTORS:
        raise ConfigError(f"unknown executor {executor!r}: use one of {', '.join(map(repr, EXECUTORS))}")
    if executor in ("process", "ray") and num_workers == 0:
        raise ConfigError(
            f"executor={executor!r} needs num_workers of 1 or more: give it, or leave executor out for inline"
        )
    if executor == "inline" and num_workers:
        raise ConfigError(f"executor='inline' has no workers: leave num_workers={num_workers} out")
    if executor in ("thread", "ray") and options.multiprocessing_context is not None:
        raise ConfigError(f"multiprocessing_context makes no sense for executor={executor!r}")
    if executor == "ray":
        _check_ray(options)
    elif options.ray_options is not None:
        raise ConfigError(f"ray_options is for executor='ray', not {executor!r}")
    if executor == "process" and not PROCESSES:
        raise ConfigError("there are no worker processes on this platform in this version: use executor='thread'")
    processes = num_workers > 0 and executor not in ("thread", "ray") and PROCESSES
    if operator.index(options.threads_per_worker) < 1:
        raise ConfigError(f"threads_per_worker must be 1 or more, got {options.threads_per_worker}")
    needs_processes = {
        f"threads_per_worker={options.threads_per_worker}": options.threads_per_worker > 1 and executor != "ray",
        f"on_worker_death={options.on_worker_death!r}": options.on_worker_death != "raise",
        f"dispatch={options.dispatch!r}": options.dispatch != "auto",
    }
    for text, given in needs_processes.items():
        if given and not processes:
            raise ConfigError(f"{text} is for worker processes: give num_workers, and executor 'process' or 'auto'")
    limit = options.max_bytes_in_flight
    if limit is not None and (num_workers == 0 or operator.index(limit) < 1):
        raise ConfigError(f"max_bytes_in_flight={limit} must be positive, and is for loaders with workers")


def _check_ray(options: Options) -> None:
    from penstock.loader.ray.options import RayOptions

    given = RayOptions() if options.ray_options is None else options.ray_options
    if not isinstance(given, RayOptions):
        raise ConfigError(f"ray_options must be a RayOptions, as in RayOptions(address=...), got {given!r}")
    given.limits(options.num_workers)
    given.threads(options.threads_per_worker)
    if options.on_worker_death == "restart":
        raise ConfigError("executor='ray' replaces lost workers in any case: leave on_worker_death='restart' out")


def _ray_threads(options: Options) -> int:
    """Threads in each worker of the Ray executor."""
    from penstock.loader.ray.options import RayOptions

    return (options.ray_options or RayOptions()).threads(options.threads_per_worker)


def check_stream(dataset: Any, seed: int | None, tolerant: bool, options: Options) -> None:
    """Refuse what an iterable data set that is not ours cannot do.

    Raises:
        ConfigError: it is asked to.
    """
    name = type(dataset).__name__
    if isinstance(dataset, IterDataPipe):
        name = type(getattr(dataset, "_datapipe", dataset)).__name__  # torch's loader has wrapped it, to pickle it
        raise ConfigError(
            f"{name} is one of torch's DataPipes, which are sharded and seeded in ways of their own that Penstock does "
            "not follow: use torch.utils.data.DataLoader for it, or a plain IterableDataset"
        )
    if seed is not None:
        raise ConfigError(
            f"seed= has no effect on {name}: an iterable data set draws and orders as it likes. Leave seed out, or "
            "make it a map-style data set"
        )
    if tolerant:
        raise ConfigError(
            f"on_error cannot pass over a sample of {name}: an iterable data set that has raised has lost its place. "
            "Handle errors in its __iter__, or make it a map-style data set"
        )
    if options.on_worker_death != "raise":
        raise ConfigError(
            f"on_worker_death='restart' cannot make batches of {name} again: what an iterable data set yielded is gone"
        )
    if options.executor == "thread" and options.num_workers > 1 and has_state(dataset):
        raise ConfigError(f"{name} has a state, and threads share one data set: use executor='process', or one thread")
    threads = options.threads_per_worker
    if options.executor == "ray":
        threads = _ray_threads(options)
    if threads > 1:
        raise ConfigError(f"threads_per_worker makes no sense for {name}: each worker has one iterator of it")
    if options.dispatch == "chunk":
        raise ConfigError(f"dispatch='chunk' makes no sense for {name}: its iterators make batches one by one")


def how_of(options: Options, prefetch_factor: int | None, *, chosen: bool, releases_gil: bool) -> How:
    """The executor that the arguments mean.

    Args:
        chosen: whether the prefetch factor is the user's own choice.
        releases_gil: whether the data set spends its time outside of Python's lock, and several threads may ask it.
    """
    workers = options.num_workers
    depth = max(1, workers * (prefetch_factor or 2))
    light = depth if chosen else depth * _LIGHT
    if not workers:
        return How("inline", 0, 1, 0, 0)
    if options.executor == "ray":
        threads = _ray_threads(options)
        return How("ray", workers, threads, depth, light)
    if options.executor == "thread" or not PROCESSES:
        return How("thread", workers, 1, depth, depth)
    if options.executor == "auto" and releases_gil and options.threads_per_worker == 1:
        # One child: threads in the trainer's own process would slow it down, and more processes would cost memory.
        return How("process", 1, workers, depth, light)
    return How("process", workers, options.threads_per_worker, depth, light)


def default_sampler(
    dataset: Any, shuffle: bool | str | None, seed: int | None, generator: torch.Generator | None
) -> Sampler[Any]:
    """torch's order without a seed, ours with one.

    Raises:
        ConfigError: the data set has an order of its own.
    """
    if not shuffle or shuffle == "none":
        return SequentialSampler(dataset)
    if own_order(dataset) is not None:
        raise ConfigError(
            f"{type(dataset).__name__} has an order of its own: choose it there (shuffle=, seed=), and leave "
            f"shuffle={shuffle!r} out here"
        )
    if isinstance(shuffle, str) or seed is not None:
        name = shuffle if isinstance(shuffle, str) else "global"
        return RandomSampler(dataset, shuffle=name, seed=seed or 0)
    return RandomSampler(dataset, generator=generator)


def warn_threads(dataset: Any) -> None:
    """Say once what does not repeat in threads."""
    warnings.warn(
        f"{type(dataset).__name__} does not declare itself pure: in threads only penstock.generator() repeats, while "
        "Python's, NumPy's and torch's global generators are shared by all of them. Draw from penstock.generator() and "
        "set `pure = True` on the data set, or use executor='process'",
        stacklevel=4,
    )
