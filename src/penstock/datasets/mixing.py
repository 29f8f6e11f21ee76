"""The arithmetic of a `Mixture`: from weights, a mode and a stop to proportions and the length of an epoch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.order.mixture import BlockMixture
from penstock.order.permutation import MAX_N
from penstock.order.stages import WeightStage, WeightStages, staged_counts

__all__ = [
    "MODES",
    "Proportions",
    "SourceStatistics",
    "make_proportions",
    "read_schedule",
    "read_weights",
    "split_sources",
    "whole_numbers",
]

_FINEST = 1 << 40  # shares are exact as long as their common denominator is below this, else to within one in 10 ** 12

Stop = str | int | None


class Proportions(NamedTuple):
    """The weights of sources as coprime integers, and how many samples an epoch has; 0 if only the sources know."""

    weights: tuple[int, ...]
    length: int
    stop: str | int

    @property
    def per_epoch(self) -> tuple[int, ...]:
        """How many samples of each source an epoch has, the same in all epochs."""
        return staged_counts(self.weights, self.length)

    def order(self, key: int, length: int | None) -> BlockMixture:
        """Return which source stands at each position of an epoch with this key."""
        return _order(self.weights, key, length)

    def stages(self, schedule: Sequence[tuple[int, Sequence[Fraction]]]) -> WeightStages:
        """Return these weights from the beginning on, and those of a schedule behind them."""
        later = (WeightStage(begin, whole_numbers(weights)) for begin, weights in schedule)
        return (WeightStage(0, self.weights), *later)


class SourceStatistics(NamedTuple):
    """One source of a mixture.

    ``samples`` is its length, ``share`` its part of the mixture at the state's position, ``per_epoch`` its samples in
    the state's epoch, ``had`` how many of them the whole job has had since epoch 0, and ``passes`` how often it has
    been through the source.
    """

    name: str
    samples: int
    share: float
    per_epoch: int
    had: int
    passes: float


def _proportion(weights: Sequence[Fraction], sizes: Sequence[int | None]) -> list[Fraction]:
    return list(weights)


def _upsample(weights: Sequence[Fraction], sizes: Sequence[int | None]) -> list[Fraction]:
    return [
        weight * _known(size, number, "upsample")
        for number, (weight, size) in enumerate(zip(weights, sizes, strict=True))
    ]


def _repeat(weights: Sequence[Fraction], sizes: Sequence[int | None]) -> list[Fraction]:
    counts = [
        Fraction(round(weight * _known(size, number, "repeat")))
        for number, (weight, size) in enumerate(zip(weights, sizes, strict=True))
    ]
    if not all(counts):
        raise ConfigError(f"source {counts.index(Fraction(0))} would have no sample in an epoch: leave it out")
    return counts


def _choose(weights: Sequence[Fraction], sizes: Sequence[int | None]) -> list[Fraction]:
    if any(weight.denominator != 1 for weight in weights):
        raise ConfigError(f"mode='choose' takes numbers of samples, got {[float(weight) for weight in weights]}")
    return list(weights)


MODES: dict[str, Callable[[Sequence[Fraction], Sequence[int | None]], list[Fraction]]] = {
    "proportion": _proportion,
    "repeat": _repeat,
    "choose": _choose,
    "upsample": _upsample,
}
"""The registry of modes: a new one is a function ``(weights, sizes) -> shares``."""

_COUNTED = ("repeat", "choose")  # the shares are numbers of samples, which add up to an epoch


def split_sources(sources: Any, *, least: int = 1) -> tuple[list[Any], list[Fraction]]:
    """The data sets and their weights.

    Args:
        sources: pairs ``(dataset, weight)``.
        least: 0 takes weights of 0, too.

    Raises:
        ConfigError: no pairs, or weights that are not positive.
    """
    pairs = list(sources)
    if not pairs or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise ConfigError("a Mixture takes pairs (dataset, weight), at least one")
    weights = [fraction_of(weight) for _, weight in pairs]
    for number, (weight, (_, given)) in enumerate(zip(weights, pairs, strict=True)):
        if weight < 0 or (not weight and least):
            raise ConfigError(f"the weight of source {number} has to be a positive number, got {given!r}")
    if not any(weights):
        raise ConfigError("one weight at least has to be a positive number, got 0 for all sources")
    return [dataset for dataset, _ in pairs], weights


def fraction_of(weight: Any) -> Fraction:
    """Return a weight as it is written in decimals; -1 for what is no finite number."""
    try:
        return Fraction(weight) if isinstance(weight, int | Fraction) else Fraction(repr(float(weight)))
    except (TypeError, ValueError):
        return Fraction(-1)


def read_schedule(schedule: Any, names: Sequence[str]) -> list[tuple[int, list[Fraction]]]:
    """Return the positions and weights of a schedule.

    Raises:
        ConfigError: no pairs (position, weights) in ascending order.
    """
    found: list[tuple[int, list[Fraction]]] = []
    if not isinstance(schedule, list | tuple):
        raise ConfigError(f"schedule takes a list of pairs (position, weights), got {schedule!r}")
    for entry in schedule:
        if not isinstance(entry, tuple | list) or len(entry) != 2 or not hasattr(entry[0], "__index__"):
            raise ConfigError(f"schedule takes pairs (position, weights), got {entry!r}")
        begin = operator.index(entry[0])
        if begin < 0 or (found and begin <= found[-1][0]):
            raise ConfigError(f"the positions of a schedule ascend from 0 on, got {[pair[0] for pair in schedule]}")
        found.append((begin, read_weights(entry[1], names)))
    return found


def read_weights(weights: Any, names: Sequence[str]) -> list[Fraction]:
    """Return a weight for each source, given in order or by name; 0 takes a source out.

    Raises:
        ConfigError: others than the sources', negative ones, or none above 0.
    """
    if isinstance(weights, Mapping):
        unknown = [name for name in weights if name not in names]
        if unknown:
            raise ConfigError(f"there is no source {unknown[0]!r} in this mixture: its sources are {list(names)}")
        weights = [weights.get(name, 0) for name in names]
    fractions = [fraction_of(weight) for weight in weights] if isinstance(weights, Iterable) else []
    if len(fractions) != len(names) or min(fractions, default=-1) < 0 or not any(fractions):
        raise ConfigError(
            f"weights are a number of 0 or more for each of the {len(names)} sources, and not all 0: got {weights!r}"
        )
    return fractions


def whole_numbers(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return coprime integers in the proportions of the weights, 0 for a weight of 0."""
    positive = iter(_integers([weight for weight in weights if weight], exact=False))
    return tuple(next(positive) if weight else 0 for weight in weights)


def make_proportions(weights: Sequence[Fraction], sizes: Sequence[int | None], mode: str, stop: Stop) -> Proportions:
    """Return the proportions of sources with these weights and sizes (None where nobody knows).

    Raises:
        ConfigError: a mode or stop that is unknown, or that does not go with the other arguments; an epoch that has no
            end in practice.
    """
    present = [number for number, weight in enumerate(weights) if weight]
    found = _make_proportions([weights[n] for n in present], [sizes[n] for n in present], mode, stop)
    integers = dict(zip(present, found.weights, strict=True))
    found = found._replace(weights=tuple(integers.get(number, 0) for number in range(len(weights))))
    if found.length > MAX_N:
        raise ConfigError(f"an epoch of this mixture would have {found.length} samples, which is more than 2**62")
    return found


def _make_proportions(weights: Sequence[Fraction], sizes: Sequence[int | None], mode: str, stop: Stop) -> Proportions:
    if mode not in MODES:
        raise ConfigError(f"unknown mode {mode!r}: use one of {', '.join(map(repr, MODES))}")
    if stop is not None and mode in _COUNTED:
        raise ConfigError(f"stop={stop!r} does not go with mode={mode!r}, whose weights say how long an epoch is")
    if 0 in sizes:
        raise ConfigError(f"source {list(sizes).index(0)} is empty: leave it out")
    shares = MODES[mode](weights, sizes)
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
        raise ConfigError(f"stop={stop!r} has to be a positive number of samples, 'first' or 'all'")
    return Proportions(integers, operator.index(stop), operator.index(stop))


@lru_cache(maxsize=8)
def _order(weights: tuple[int, ...], key: int, length: int | None) -> BlockMixture:
    return BlockMixture(weights, key, length=length)


def _length(weights: Sequence[int], sizes: Sequence[int | None], stop: str) -> int:
    """Return the most samples of which no source has to give more than it has, or the fewest of which each has to give
    all that it has.

    At both of them the counts, which are shares rounded up or down, keep that promise as well.
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


def _known(size: int | None, number: int, mode: str) -> int:
    if size is None:
        raise ConfigError(
            f"mode={mode!r} needs the length of every source, and source {number} has none: use mode='proportion' or "
            "'choose'"
        )
    return size
