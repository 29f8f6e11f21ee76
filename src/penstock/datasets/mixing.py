"""Compute the proportions and the epoch length of a `Mixture` from its weights, mode and stop."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.order.mixture import BlockMixture, WeightStage, WeightStages, exact_counts
from penstock.order.permutation import MAX_N

__all__ = [
    "Proportions",
    "SourceStatistics",
    "make_proportions",
    "read_schedule",
    "read_weights",
    "split_sources",
    "whole_numbers",
]

# Fractions are exact if their common denominator is below this; otherwise they are rounded to one part in 10 ** 12.
_FINEST = 1 << 40

Stop = str | int | None


class Proportions(NamedTuple):
    """The weights of sources as coprime integers, and the number of samples in an epoch (0 if unknown in advance)."""

    weights: tuple[int, ...]
    length: int
    stop: str | int

    @property
    def per_epoch(self) -> tuple[int, ...]:
        """The number of samples of each source in an epoch; the same in all epochs."""
        return exact_counts(self.weights, self.length)

    def order(self, key: int, length: int | None) -> BlockMixture:
        """Return the source at each position of an epoch with this key."""
        return _order(self.weights, key, length)

    def stages(self, schedule: Sequence[tuple[int, Sequence[Fraction]]]) -> WeightStages:
        """Return these weights, followed by the weights of a schedule."""
        later = (WeightStage(begin, whole_numbers(weights)) for begin, weights in schedule)
        return (WeightStage(0, self.weights), *later)


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


_COUNTED = ("repeat", "choose")  # modes whose shares are numbers of samples and add up to an epoch


def _shares(weights: Sequence[Fraction], sizes: Sequence[int | None], mode: str) -> list[Fraction]:
    """Return the shares of sources in a mode."""
    if mode == "choose" and any(weight.denominator != 1 for weight in weights):
        raise ConfigError(f"mode='choose' takes numbers of samples, got {[float(weight) for weight in weights]}")
    if mode != "repeat":
        return list(weights)
    if None in sizes:
        raise ConfigError(
            f"mode='repeat' needs the length of every source, but source {list(sizes).index(None)} has none: use "
            "mode='proportion' or 'choose'"
        )
    counts = [Fraction(round(weight * (size or 0))) for weight, size in zip(weights, sizes, strict=True)]
    if not all(counts):
        raise ConfigError(f"source {counts.index(Fraction(0))} would have no samples in an epoch: leave it out")
    return counts


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


def whole_numbers(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return coprime integers in the proportions of the weights; 0 for a weight of 0."""
    positive = iter(_integers([weight for weight in weights if weight], exact=False))
    return tuple(next(positive) if weight else 0 for weight in weights)


def make_proportions(weights: Sequence[Fraction], sizes: Sequence[int | None], mode: str, stop: Stop) -> Proportions:
    """Return the proportions of sources with these weights and sizes (None for an unknown size).

    Raises:
        ConfigError: an unknown mode or stop, one that contradicts the other arguments, or an epoch of more than 2**62
            samples.
    """
    present = [number for number, weight in enumerate(weights) if weight]
    found = _make_proportions([weights[n] for n in present], [sizes[n] for n in present], mode, stop)
    integers = dict(zip(present, found.weights, strict=True))
    found = found._replace(weights=tuple(integers.get(number, 0) for number in range(len(weights))))
    if found.length > MAX_N:
        raise ConfigError(f"an epoch of this mixture would have {found.length} samples, which is more than 2**62")
    return found


def _make_proportions(weights: Sequence[Fraction], sizes: Sequence[int | None], mode: str, stop: Stop) -> Proportions:
    if mode == "upsample":
        raise ConfigError("mode='upsample' is gone: leave mode= out, and multiply each weight by its source's length")
    if mode not in ("proportion", *_COUNTED):
        raise ConfigError(f"unknown mode {mode!r}: use 'proportion', 'repeat' or 'choose'")
    if stop is not None and mode in _COUNTED:
        raise ConfigError(f"leave stop={stop!r} out: with mode={mode!r} the weights define the length of an epoch")
    if 0 in sizes:
        raise ConfigError(f"source {list(sizes).index(0)} is empty: leave it out")
    shares = _shares(weights, sizes, mode)
    integers = _integers(shares, exact=mode in _COUNTED)
    if mode in _COUNTED:
        total = int(sum(shares))
        return Proportions(integers, total, total)
    if stop is None:
        stop = "all"
    if isinstance(stop, str):
        if stop not in ("first", "all"):
            raise ConfigError(f"unknown stop {stop!r}: use 'first', 'all' or a number of samples")
        return Proportions(integers, 0 if None in sizes else _length(integers, sizes, stop), stop)
    if isinstance(stop, bool) or not hasattr(stop, "__index__") or operator.index(stop) < 1:
        raise ConfigError(f"stop= takes a positive number of samples, 'first' or 'all', got {stop!r}")
    return Proportions(integers, operator.index(stop), operator.index(stop))


@lru_cache(maxsize=8)
def _order(weights: tuple[int, ...], key: int, length: int | None) -> BlockMixture:
    return BlockMixture(weights, key, length=length)


def _length(weights: Sequence[int], sizes: Sequence[int | None], stop: str) -> int:
    """Return the length of an epoch.

    With "first", it is the largest number of samples for which no source has to repeat a sample. With "all", it is the
    smallest number for which every source has used all of its samples. Both also hold for the rounded counts.
    """
    total = sum(weights)
    known = [(weight, size) for weight, size in zip(weights, sizes, strict=True) if size is not None]
    if stop == "first":
        return min(size * total // weight for weight, size in known)
    return max(-(-size * total // weight) for weight, size in known)


def _integers(shares: Sequence[Fraction], *, exact: bool) -> tuple[int, ...]:
    """Return coprime integers in the proportions of the shares."""
    scale = math.lcm(*(share.denominator for share in shares))
    total = sum(shares)
    if exact or total * scale <= _FINEST:
        found = [int(share * scale) for share in shares]
    else:
        found = [max(1, round(share / total * _FINEST)) for share in shares]
    divisor = math.gcd(*found)
    return tuple(integer // divisor for integer in found)
