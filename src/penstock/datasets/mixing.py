"""The arithmetic of a `Mixture`: from weights, a mode and a stop to an interleaving and the length of an epoch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.order.interleave import Interleave

__all__ = ["MODES", "Plan", "SourceStatistics", "make_plan", "split_sources"]

_FINEST = 1 << 40  # shares are exact as long as their common denominator is below this, else to within one in 10 ** 12

Stop = str | int | None


class Plan(NamedTuple):
    """How sources are interleaved, and how many samples an epoch has; 0 if only the sources know."""

    interleave: Interleave
    length: int
    stop: str | int


class SourceStatistics(NamedTuple):
    """One source of a mixture.

    ``samples`` is its length, ``share`` its part of the mixture, ``per_epoch`` its samples in an epoch, ``had`` how
    many of them the whole job has had since epoch 0, and ``passes`` how often it has been through the source.
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


def split_sources(sources: Any) -> tuple[list[Any], list[Fraction]]:
    """The data sets and their weights.

    Raises:
        ConfigError: no pairs, or weights that are not positive.
    """
    pairs = list(sources)
    if not pairs or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise ConfigError("a Mixture takes pairs (dataset, weight), at least one")
    weights = []
    for number, (_, weight) in enumerate(pairs):
        try:
            fraction = Fraction(weight) if isinstance(weight, int | Fraction) else Fraction(repr(float(weight)))
        except (TypeError, ValueError):  # infinite, not a number, no number at all
            fraction = Fraction(0)
        if fraction <= 0:
            raise ConfigError(f"the weight of source {number} has to be a positive number, got {weight!r}")
        weights.append(fraction)
    return [dataset for dataset, _ in pairs], weights


def make_plan(weights: Sequence[Fraction], sizes: Sequence[int | None], mode: str, stop: Stop) -> Plan:
    """The interleaving of sources with these weights and sizes (None where nobody knows).

    Raises:
        ConfigError: a mode or stop that is unknown, or that does not go with the other arguments.
    """
    if mode not in MODES:
        raise ConfigError(f"unknown mode {mode!r}: use one of {', '.join(map(repr, MODES))}")
    if stop is not None and mode in _COUNTED:
        raise ConfigError(f"stop={stop!r} does not go with mode={mode!r}, whose weights say how long an epoch is")
    if 0 in sizes:
        raise ConfigError(f"source {list(sizes).index(0)} is empty: leave it out")
    shares = MODES[mode](weights, sizes)
    interleave = Interleave(_integers(shares, exact=mode in _COUNTED))
    if mode in _COUNTED:
        total = int(sum(shares))
        return Plan(interleave, total, total)
    if stop is None:
        stop = "all"
    if isinstance(stop, str):
        if stop not in ("first", "all"):
            raise ConfigError(f"unknown stop {stop!r}: use 'first', 'all' or a number of samples")
        return Plan(interleave, 0 if None in sizes else _length(interleave, sizes, stop), stop)
    if isinstance(stop, bool) or not hasattr(stop, "__index__") or operator.index(stop) < 1:
        raise ConfigError(f"stop={stop!r} has to be a positive number of samples, 'first' or 'all'")
    return Plan(interleave, operator.index(stop), operator.index(stop))


def _length(interleave: Interleave, sizes: Sequence[int | None], stop: str) -> int:
    """Samples until the first source would begin anew, or until the last one has been had once."""
    known = [(source, size) for source, size in enumerate(sizes) if size is not None]
    if stop == "first":
        return min(interleave.position(source, size) for source, size in known)
    return max(interleave.position(source, size - 1) + 1 for source, size in known)


def _integers(shares: Sequence[Fraction], *, exact: bool) -> list[int]:
    """Integers in the proportions of the shares."""
    scale = math.lcm(*(share.denominator for share in shares))
    total = sum(shares)
    if exact or total * scale <= _FINEST:
        return [int(share * scale) for share in shares]
    return [max(1, round(share / total * _FINEST)) for share in shares]


def _known(size: int | None, number: int, mode: str) -> int:
    if size is None:
        raise ConfigError(
            f"mode={mode!r} needs the length of every source, and source {number} has none: use mode='proportion' or "
            "'choose'"
        )
    return size
