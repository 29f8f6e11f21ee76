"""What a loader's arguments mean: checks, and the sampler where none is given."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data import Sampler

from penstock.errors import ConfigError
from penstock.order import SHUFFLES
from penstock.order.hashing import derive_key
from penstock.samplers.random import RandomSampler
from penstock.samplers.sequential import SequentialSampler

__all__ = ["EXECUTORS", "check_options", "default_sampler", "warn_threads"]

EXECUTORS = ("auto", "inline", "thread", "process")


def check_options(
    executor: str,
    num_workers: int,
    multiprocessing_context: Any,
    shuffle: bool | str | None,
    seed: int | None,
    generator: torch.Generator | None,
) -> None:
    """Refuse what makes no sense for an executor.

    Raises:
        ConfigError: an unknown name, or a combination of which one part would be ignored.
    """
    if executor == "ray":
        raise ConfigError("executor='ray' is not in this version; use 'process' or 'thread'")
    if executor not in EXECUTORS:
        raise ConfigError(f"unknown executor {executor!r}: use one of {', '.join(map(repr, EXECUTORS))}")
    if executor in ("thread", "process") and num_workers == 0:
        raise ConfigError(f"executor={executor!r} needs num_workers of 1 or more")
    if executor == "inline" and num_workers:
        raise ConfigError(f"executor='inline' has no workers: leave num_workers={num_workers} out")
    if executor == "thread" and multiprocessing_context is not None:
        raise ConfigError("multiprocessing_context makes no sense for executor='thread'")
    if generator is not None and (seed is not None or isinstance(shuffle, str)):
        raise ConfigError("generator= is torch's way to choose an order, seed= and a named shuffle are ours: give one")
    if seed is not None:
        derive_key(seed)  # a seed outside 64 bits is refused here, not at the first batch
    if isinstance(shuffle, str) and shuffle not in SHUFFLES:
        raise ConfigError(f"unknown shuffle {shuffle!r}: use True, False, or one of {', '.join(map(repr, SHUFFLES))}")


def default_sampler(
    dataset: Any, shuffle: bool | str | None, seed: int | None, generator: torch.Generator | None
) -> Sampler[Any]:
    """torch's order without a seed, ours with one.

    Raises:
        ConfigError: the data set has an order of its own.
    """
    if not shuffle or shuffle == "none":
        return SequentialSampler(dataset)
    if hasattr(dataset, "start_pass"):
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
