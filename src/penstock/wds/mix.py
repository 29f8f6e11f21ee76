"""Mixes of several datasets: round robin, or at random."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from penstock import distributed
from penstock.errors import ConfigError, StateError
from penstock.hashing import derive_key, mix
from penstock.plan.cursor import State, check_state, read_int
from penstock.plan.stream import Stream, StreamStart
from penstock.wds.iterators import Context, Step, choose_epoch, open_source
from penstock.wds.stream import EpochDataset, EpochStream

__all__ = ["RandomMix", "RoundRobin"]

_Choose = Callable[[int, int, list[int]], int]
"""Chooses the next source: a function of the item's number, the last source, and the sources that have not ended."""


class _MixStream(EpochStream):
    """One epoch of a mix, over one stream per source."""

    def __init__(self, sources: list[Step], choose: _Choose, longest: bool, cursor: State) -> None:
        super().__init__(int(cursor["epoch"]))
        self._sources, self._choose, self._longest, self._cursor = sources, choose, longest, cursor
        self._number, self._last = int(cursor["number"]), int(cursor["last"])
        self._alive = list(cursor["alive"])

    def next_item(self) -> Any:
        while self._alive:
            chosen = self._choose(self._number, self._last, self._alive)
            try:
                item = next(self._sources[chosen])
            except StopIteration:
                self._alive = [other for other in self._alive if other != chosen] if self._longest else []
                continue
            self._number, self._last = self._number + 1, chosen
            return item
        raise StopIteration

    def cursor(self) -> State:
        return {
            **self._cursor,
            "number": self._number,
            "last": self._last,
            "alive": list(self._alive),
            "sources": [source.cursor()[0] for source in self._sources],
        }


class _Mix(EpochDataset):
    """A mix of datasets.

    A resumable dataset gets one stream for each time it occurs in the mix. The stream reads the epoch of the mix from
    its beginning, whatever was iterated before.
    """

    def __init__(self, datasets: Sequence[Iterable[Any]], longest: bool) -> None:
        super().__init__()
        if not datasets:
            raise ConfigError("a mix needs at least one dataset")
        self.datasets, self.longest = list(datasets), longest

    def choice(self, epoch: int) -> _Choose:
        """Return the function that chooses the sources of an epoch."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. Choosing the epoch of a state just loaded keeps its position.

        Raises:
            ConfigError: a negative epoch.
        """
        super().set_epoch(epoch)
        if self._loaded is None:
            self._choose(epoch)

    def open_behind(self, last: Stream | None, opening: StreamStart) -> Stream:
        """Return the stream of a loader's epoch. Sources get the epoch if `set_epoch` chose it."""
        if opening.chosen and opening.stream is None:
            self._choose(opening.epoch)
        return super().open_behind(last, opening)

    def _choose(self, epoch: int) -> None:
        for dataset in self.datasets:
            choose_epoch(dataset, epoch)

    def first_cursor(self, epoch: int) -> State:
        """Return the cursor at the beginning of an epoch."""
        count = len(self.datasets)
        start = {"where": None, "epoch": epoch, "number": 0, "last": -1}
        return {**self._identity(), **start, "alive": list(range(count)), "sources": [None] * count}

    def check_cursor(self, cursor: Mapping[str, Any]) -> None:
        """Check that a cursor belongs to this mix, rank and worker.

        Raises:
            StateError: it does not, or it is damaged.
        """
        check_state(cursor, self._identity(), of="mix")
        for name in ("epoch", "number"):
            read_int(cursor, name, of="mix")
        alive, sources, count = cursor.get("alive"), cursor.get("sources"), len(self.datasets)
        if not (
            isinstance(alive, list)
            and all(one in range(count) for one in alive)
            and isinstance(sources, list)
            and len(sources) == count
            and cursor.get("last") in range(-1, count)
        ):
            raise StateError(
                "the state of this mix is damaged: 'alive', 'last' or 'sources' is missing or does not fit its "
                "datasets. Start again without the state"
            )
        if cursor["number"] or len(alive) < count:  # a stream that has not started fits every rank and worker
            check_state(cursor, {"where": self._where()}, of="mix")

    def _identity(self) -> State:
        count = len(self.datasets)
        return {"kind": type(self).__name__, "count": count, "longest": self.longest}

    def open_at(self, cursor: State) -> Stream:
        """Return a stream from a checked cursor."""
        epoch = int(cursor["epoch"])
        context = Context(0, epoch, 0, self._world.get(), distributed.worker())
        pairs = zip(self.datasets, cursor["sources"], strict=True)
        sources = [open_source(source, context, own) for source, own in pairs]
        return _MixStream(sources, self.choice(epoch), self.longest, {**cursor, "where": self._where()})


class RoundRobin(_Mix):
    """One item of each dataset in turn; ends when the first dataset ends, or with ``longest`` when the last does."""

    def __init__(self, datasets: Sequence[Iterable[Any]], longest: bool = False) -> None:
        super().__init__(datasets, longest)

    def choice(self, epoch: int) -> _Choose:
        """Return the function that chooses the sources of an epoch."""
        return _in_turn


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

    def choice(self, epoch: int) -> _Choose:
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
