"""Mixes of several datasets: round robin, or at random."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from penstock import distributed
from penstock.datasets.mixture_stream import Choose, MixStream, StreamMix
from penstock.errors import ConfigError, StateError
from penstock.hashing import derive_key, mix
from penstock.plan.cursor import State
from penstock.plan.stream import Stream
from penstock.wds.pipeline import Context, Step, choose_epoch, open_source


class _Mix(StreamMix):
    """A mix of datasets.

    A resumable dataset gets one stream for each time it occurs in the mix. The stream reads the epoch of the mix from
    its beginning, whatever was iterated before.
    """

    def __init__(self, datasets: Sequence[Iterable[Any]], longest: bool = False) -> None:
        super().__init__()
        if not datasets:
            raise ConfigError("a mix needs at least one dataset")
        self.datasets = self.sources = list(datasets)
        self.longest = longest

    def choice(self, epoch: int) -> Choose:
        """Return the function that chooses the sources of an epoch: by default, one after the other."""
        return _in_turn

    def _choose(self, epoch: int) -> None:
        for dataset in self.datasets:
            choose_epoch(dataset, epoch)

    def _identity(self) -> State:
        return {"kind": type(self).__name__, "count": len(self.datasets), "longest": self.longest}

    def open_at(self, cursor: State) -> Stream:
        """Return a stream from a checked cursor."""
        epoch, where = int(cursor["epoch"]), self._where()
        context = Context(0, epoch, 0, self._world.get(), distributed.worker())
        open_pass = partial(_open_pass, self.datasets, context)
        return MixStream(cursor, self.choice(epoch), open_pass, "all" if self.longest else "first", where)


def _open_pass(datasets: list[Any], context: Context, number: int, turns: int, at: Any) -> Step:
    if at is not None and not (isinstance(at, list) and len(at) == 1):
        raise StateError(f"the state of this mix is damaged: for source {number} it has {at!r}")
    return open_source(datasets[number], context, None if at is None else at[0])


class RoundRobin(_Mix):
    """One item of each dataset in turn; ends when the first dataset ends, or with ``longest`` when the last does."""


def _in_turn(number: int, last: int, alive: list[int]) -> int:
    return next((source for source in alive if source > last), alive[0])


class RandomMix(_Mix):
    """Items of datasets drawn at random; ends when the first dataset ends, or with ``longest`` when the last does.

    Args:
        datasets: the sources.
        probs: their weights, equal by default.
        longest: continue with the others when one has ended.
        seed: draws are a function of seed, epoch, rank, worker and position.

    `penstock.Mixture` keeps proportions exactly.
    """

    def __init__(
        self,
        datasets: Sequence[Iterable[Any]],
        probs: Sequence[float] | None = None,
        longest: bool = False,
        *,
        seed: int = 0,
    ) -> None:
        weights = [1.0] * len(datasets) if probs is None else [float(p) for p in probs]
        if len(weights) != len(datasets) or any(not w >= 0 for w in weights) or not sum(weights) > 0:
            raise ConfigError(f"probs needs {len(datasets)} weights of 0 or more, one per dataset, got {probs}")
        derive_key(seed)
        self.probs, self.seed = weights, seed
        super().__init__(datasets, longest)

    def _identity(self) -> State:
        return {**super()._identity(), "probs": self.probs, "seed": self.seed}

    def choice(self, epoch: int) -> Choose:
        """Return the function that chooses the sources of an epoch."""
        key = mix(derive_key(self.seed, epoch, "wds random mix"), *self._where())
        return partial(_draw, key, self.probs)


def _draw(key: int, weights: list[float], number: int, last: int, alive: list[int]) -> int:
    """Draw a source by weight: a function of the key, the number of the item, and the sources that are left."""
    total = sum(weights[source] for source in alive)
    if not total:
        return alive[0]
    point = mix(key, number, len(alive)) / 2**64 * total
    for source in alive:
        point -= weights[source]
        if point < 0:
            return source
    return alive[-1]
