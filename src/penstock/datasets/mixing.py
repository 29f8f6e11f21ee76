"""Compute the proportions and the epoch length of a `Mixture` from its weights, mode and stop."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.order.mixture import BlockMixture
from penstock.order.permutation import MAX_N

__all__ = [
    "Proportions",
    "SourceStatistics",
    "make_proportions",
    "read_names",
    "read_schedule",
    "read_weights",
    "split_sources",
    "whole_numbers",
]

# Fractions are exact if their common denominator is below this; otherwise they are rounded to one part in 10 ** 12.
_FINEST = 1 << 40


class Proportions(NamedTuple):
    """The weights of sources as coprime integers, and the number of samples in an epoch (0 if unknown in advance)."""

    weights: tuple[int, ...]
    length: int
    stop: str | int


class SourceStatistics(NamedTuple):
    """Statistics of one source of a mixture.

    Attributes:
        name: name of the source.
        samples: its length.
        share: its fraction of the mixture at the state's position.
        per_epoch: its samples in the state's epoch.
        had: the number of its samples that the whole job has consumed since epoch 0.
        passes: the number of passes through the source, ``had / samples``.
    """

    name: str
    samples: int
    share: float
    per_epoch: int
    had: int
    passes: float


def read_names(names: Sequence[str] | None, count: int) -> list[str]:
    """Return the names of sources, by default ``source 0`` and so on.

    Raises:
        ConfigError: they are not as many different names as sources.
    """
    names = [f"source {i}" for i in range(count)] if names is None else list(names)
    if len(set(names)) != count:
        raise ConfigError(f"{count} sources need as many different names, got {names}")
    return names


def split_sources(sources: Any, *, least: int = 1) -> tuple[list[Any], list[Fraction]]:
    """Return the datasets and their weights.

    Args:
        sources: pairs ``(dataset, weight)``.
        least: 0 accepts weights of 0.

    Raises:
        ConfigError: there are no pairs, or a weight is not positive.
    """
    pairs = list(sources)
    if not pairs or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise ConfigError("a Mixture takes pairs (dataset, weight), at least one")
    weights = [fraction_of(weight) for _, weight in pairs]
    for number, (weight, (_, given)) in enumerate(zip(weights, pairs, strict=True)):
        if weight < 0 or (not weight and least):
            raise ConfigError(f"the weight of source {number} must be a positive number, got {given!r}")
    if not any(weights):
        raise ConfigError("at least one weight must be a positive number, got 0 for all sources")
    return [dataset for dataset, _ in pairs], weights


def fraction_of(weight: Any) -> Fraction:
    """Return a weight as the exact fraction of its decimal text; -1 if it is not a finite number."""
    try:
        return Fraction(weight) if isinstance(weight, int | Fraction) else Fraction(repr(float(weight)))
    except (TypeError, ValueError):
        return Fraction(-1)


def read_schedule(schedule: Any, names: Sequence[str]) -> list[tuple[int, list[Fraction]]]:
    """Return the positions and weights of a schedule.

    Raises:
        ConfigError: the schedule is not a list of pairs (position, weights) in ascending order.
    """
    found: list[tuple[int, list[Fraction]]] = []
    if not isinstance(schedule, list | tuple):
        raise ConfigError(f"schedule takes a list of pairs (position, weights), got {schedule!r}")
    for entry in schedule:
        if not isinstance(entry, tuple | list) or len(entry) != 2 or not hasattr(entry[0], "__index__"):
            raise ConfigError(f"schedule takes pairs (position, weights), got {entry!r}")
        begin = operator.index(entry[0])
        if begin < 0 or (found and begin <= found[-1][0]):
            raise ConfigError(
                f"the positions of a schedule must be 0 or more, and ascend, got {[pair[0] for pair in schedule]}"
            )
        found.append((begin, read_weights(entry[1], names)))
    return found


def read_weights(weights: Any, names: Sequence[str]) -> list[Fraction]:
    """Return a weight for each source, given in order or by name; 0 turns a source off.

    Raises:
        ConfigError: weights of unknown sources, a negative weight, or no positive one.
    """
    if isinstance(weights, Mapping):
        unknown = [name for name in weights if name not in names]
        if unknown:
            raise ConfigError(f"there is no source {unknown[0]!r} in this mixture: its sources are {list(names)}")
        weights = [weights.get(name, 0) for name in names]
    fractions = [fraction_of(weight) for weight in weights] if isinstance(weights, Iterable) else []
    if len(fractions) != len(names) or min(fractions, default=-1) < 0 or not any(fractions):
        raise ConfigError(
            f"weights must be numbers of 0 or more, one for each of the {len(names)} sources, and not all 0: got "
            f"{weights!r}"
        )
    return fractions


def whole_numbers(shares: Sequence[Fraction], *, exact: bool = False) -> tuple[int, ...]:
    """Return coprime integers in the proportions of the shares; 0 for a share of 0."""
    scale, total = math.lcm(*(share.denominator for share in shares)), sum(shares)
    if exact or total * scale <= _FINEST:
        found = [int(share * scale) for share in shares]
    else:
        found = [max(1, round(share / total * _FINEST)) if share else 0 for share in shares]
    divisor = math.gcd(*found)
    return tuple(integer // divisor for integer in found)


def make_proportions(
    weights: Sequence[Fraction], sizes: Sequence[int | None], mode: str, stop: str | int | None
) -> Proportions:
    """Return the proportions of sources with these weights and sizes (None for an unknown size).

    Raises:
        ConfigError: an unknown mode or stop, one that contradicts the other arguments, or an epoch of more than 2**62
            samples.
        OrderError: weights that are too large.
    """
    if mode == "upsample":
        raise ConfigError("mode='upsample' is gone: leave mode= out, and multiply each weight by its source's length")
    if mode not in ("proportion", "repeat", "choose"):
        raise ConfigError(f"unknown mode {mode!r}: use 'proportion', 'repeat' or 'choose'")
    # In these modes, the shares are numbers of samples and add up to an epoch.
    counted = mode != "proportion"
    if stop is not None and counted:
        raise ConfigError(f"leave stop={stop!r} out: with mode={mode!r} the weights define the length of an epoch")
    shares = list(weights)
    for number, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        if weight and size == 0:
            raise ConfigError(f"source {number} is empty: leave it out")
        if mode == "choose" and weight.denominator != 1:
            raise ConfigError(f"mode='choose' takes numbers of samples, got {[float(weight) for weight in weights]}")
        if weight and mode == "repeat":
            if size is None:
                raise ConfigError(
                    f"mode='repeat' needs the length of every source, but source {number} has none: use "
                    "mode='proportion' or 'choose'"
                )
            shares[number] = Fraction(round(weight * size))
            if not shares[number]:
                raise ConfigError(f"source {number} would have no samples in an epoch: leave it out")
    integers = whole_numbers(shares, exact=counted)
    if counted:
        stop = length = int(sum(shares))
    elif stop is None or isinstance(stop, str):
        stop = "all" if stop is None else stop
        if stop not in ("first", "all"):
            raise ConfigError(f"unknown stop {stop!r}: use 'first', 'all' or a number of samples")
        length = _length(integers, sizes, stop)
    elif isinstance(stop, bool) or not hasattr(stop, "__index__") or operator.index(stop) < 1:
        raise ConfigError(f"stop= takes a positive number of samples, 'first' or 'all', got {stop!r}")
    else:
        stop = length = operator.index(stop)
    if length > MAX_N:
        raise ConfigError(f"an epoch of this mixture would have {length} samples, which is more than 2**62")
    # Raises for weights that are too large here, not at the first sample.
    BlockMixture(integers)
    return Proportions(integers, length, stop)


def _length(weights: Sequence[int], sizes: Sequence[int | None], stop: str) -> int:
    """Return the length of an epoch; 0 if it is unknown in advance.

    With "first", it is the largest number of samples for which no source has to repeat a sample. With "all", it is the
    smallest number for which every source has used all of its samples. Both also hold for the rounded counts.
    """
    total, lengths = sum(weights), []
    for weight, size in zip(weights, sizes, strict=True):
        if weight and size is None:
            return 0
        if weight and size is not None:
            lengths.append(size * total // weight if stop == "first" else -(-size * total // weight))
    return min(lengths) if stop == "first" else max(lengths)
