"""The arithmetic of a `Mixture`: from weights, a mode and a stop to proportions and the length of an epoch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.order.mixture import BlockMixture, exact_counts
from penstock.order.permutation import MAX_N

__all__ = ["MODES", "Proportions", "SourceStatistics", "make_proportions", "split_sources"]

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
        return exact_counts(self.weights, self.length)

    def order(self, key: int, length: int | None) -> BlockMixture:
        """Return which source stands at each position of an epoch with this key."""
        return _order(self.weights, key, length)


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


def make_proportions(weights: Sequence[Fraction], sizes: Sequence[int | None], mode: str, stop: Stop) -> Proportions:
    """Return the proportions of sources with these weights and sizes (None where nobody knows).

    Raises:
        ConfigError: a mode or stop that is unknown, or that does not go with the other arguments; an epoch that has no
            end in practice.
    """
    found = _make_proportions(weights, sizes, mode, stop)
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
