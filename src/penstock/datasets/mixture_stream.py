"""`MixtureStream`: iterable-style datasets mixed in fixed proportions, separately in each worker.

Streams split themselves across ranks and workers, so each worker mixes the items of its own iterators. The proportions
hold in every worker, as in an epoch of a `Mixture` (`penstock.order.mixture`).

    position p of a worker  ->  order of the mixture: source  ->  next item of this source (`SourceStream`)

`StreamMix` and `MixStream` are also the base of the mixes of `penstock.wds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock import distributed
from penstock.datasets.mixing import make_proportions, read_names, split_sources
from penstock.errors import ConfigError, StateError
from penstock.hashing import derive_key, mix
from penstock.order.mixture import MIXTURE_ORDER, BlockMixture
from penstock.plan.cursor import State, check_state, read_int
from penstock.plan.epoch_stream import EpochDataset, EpochStream
from penstock.plan.source_stream import SourceStream, check_pass, keeps_position
from penstock.plan.stream import ResumableDataset, Stream
from penstock.stages import stage
from penstock.wording import counted

__all__ = ["Choose", "MixStream", "MixtureStream", "StreamMix"]

_CHUNK = 256  # positions computed at once

Choose = Callable[[int, int, list[int]], int]
"""Returns the source of an item: a function of its number, the source of the last item, and the sources that have not
ended. Raises StopIteration at the end of the epoch."""


class StreamMix(EpochDataset):
    """A mix of the streams of several datasets, the attribute ``sources``; `open_at` returns a `MixStream`.

    State: the number of items, and how often each source has ended and where its stream is. It can be loaded only on
    the same ranks and workers.
    """

    of = "mix"
    sources: list[Any]

    def _identity(self) -> State:
        """Return the entries that a state must have."""
        raise NotImplementedError

    def first_cursor(self, epoch: int) -> State:
        """Return the cursor at the beginning of an epoch."""
        entries = [{"turns": 0, "at": None} for _ in self.sources]
        return {**self._identity(), "epoch": epoch, "where": None, "yielded": 0, "last": -1, "sources": entries}

    def check_cursor(self, cursor: Mapping[str, Any]) -> None:
        """Check that a cursor belongs to this mix, rank and worker.

        Raises:
            StateError: it does not, or it is damaged.
        """
        check_state(cursor, self._identity(), of=self.of)
        read_int(cursor, "epoch", of=self.of)
        entries, last, count = cursor.get("sources"), cursor.get("last"), len(self.sources)
        found = entries if isinstance(entries, list) and all(isinstance(entry, Mapping) for entry in entries) else []
        if len(found) != count or any("at" not in entry for entry in found) or last not in range(-1, count):
            raise StateError(
                f"the state of this {self.of} needs a state for each of its {count} sources, and the last one of them; "
                f"got {entries!r} and {last!r}"
            )
        turns = [read_int(entry, "turns", of=self.of) for entry in found]
        # Before the first item, any worker can resume.
        begun = read_int(cursor, "yielded", of=self.of) or any(turns)
        check_state(cursor, {"where": self._where() if begun else None}, of=self.of)


class MixStream(EpochStream):
    """One epoch of a mix.

    Args:
        cursor: where it begins.
        choose: see `Choose`.
        open_pass: opens a source: its number, how often it has ended, and a cursor or None.
        stop: ``"first"``: the mix ends with its first source; ``"all"``: when all have ended.
        where: rank and worker, for the cursor.
        names: of sources that start again when they end; None for others.
        tag: whether items are ``(item, number of the source)``.

    It has no reference to its dataset, which refers to it: such a cycle would keep files open until the next garbage
    collection.
    """

    def __init__(
        self,
        cursor: State,
        choose: Choose,
        open_pass: Callable[[int, int, Any], Any],
        stop: str | int,
        where: list[int],
        names: list[str] | None = None,
        tag: bool = False,
    ) -> None:
        super().__init__(int(cursor["epoch"]))
        self._cursor, self._choose, self._open_pass, self._stop = cursor, choose, open_pass, stop
        self._where, self._names, self._tag = where, names, tag
        self._yielded, self._last = int(cursor["yielded"]), int(cursor["last"])
        self._turns = [int(entry["turns"]) for entry in cursor["sources"]]
        """How often each source has ended."""
        self._passes = [
            open_pass(number, turns, entry["at"])
            for number, (turns, entry) in enumerate(zip(self._turns, cursor["sources"], strict=True))
        ]
        self._alive = self._left()

    def _left(self) -> list[int]:
        """Return the sources that have not ended, or start again; none at the end of the mix."""
        turns, stop = self._turns, self._stop
        if (stop == "first" and any(turns)) or (stop == "all" and all(turns)):
            return []
        return [number for number, ended in enumerate(turns) if self._names or not ended]

    def next_item(self) -> Any:
        while self._alive:
            chosen = self._choose(self._yielded, self._last, self._alive)
            try:
                item = next(self._passes[chosen])
            except StopIteration:
                self._turns[chosen] += 1
                self._alive = self._left()
                if self._alive and self._names:
                    self._start_again(chosen, self._names[chosen])
                continue
            self._yielded, self._last = self._yielded + 1, chosen
            return (item, chosen) if self._tag else item
        raise StopIteration

    def _start_again(self, source: int, name: str) -> None:
        if not self._passes[source].delivered:
            if self._turns[source] == 1:
                raise ConfigError(f"{name} yielded no samples: leave it out, or give it more shards")
            raise ConfigError(f"{name} yielded samples once, but none when iterated again: it must be re-iterable")
        self._passes[source] = self._open_pass(source, self._turns[source], None)

    def cursor(self) -> State:
        pairs = zip(self._turns, self._passes, strict=True)
        return {
            **self._cursor,
            "where": list(self._where) if self._yielded or any(self._turns) else None,
            "yielded": self._yielded,
            "last": self._last,
            "sources": [{"turns": turns, "at": one.cursor()} for turns, one in pairs],
        }


class MixtureStream(StreamMix):
    """A `Mixture` of iterable-style datasets. `Mixture` creates it.

    Args:
        sources: pairs ``(dataset, weight)``.
        mode: ``"proportion"`` or ``"choose"`` (numbers of samples of the whole job); ``"repeat"`` for sources with
            a length.
        stop: ``"first"``: at the end of the shortest source. ``"all"`` (default): when every source has reached its
            end; shorter ones start again. Or a number of samples of the whole job.
        names: names of the sources, for errors and for the loader's statistics, where each source is a stage.
        tag: items are ``(item, number of the source)``.

    Each iteration is a new epoch, unless `set_epoch` was called. Sources begin at the mixture's epoch (others than
    Penstock's by ``set_epoch``, if they have it). A source that starts again moves on to its next epoch.

    Raises:
        ConfigError: invalid arguments, such as a dataset that is given twice and stores its own position; or (while
            iterating) a source that yields nothing. An error in a source ends the iteration.

    State: the number of items, and the positions of the sources: cursors of Penstock's, states of users' iterators or
    datasets. A source without a state is read again up to its position. The state can be loaded only on the same ranks
    and workers.
    """

    of = "Mixture"

    # Until the next epoch begins, this is still the one that has ended, unlike with the mixes of wds.
    epoch = ResumableDataset.epoch
    _running = ResumableDataset._running

    def __init__(
        self,
        sources: Sequence[tuple[Any, Any]],
        *,
        mode: str = "proportion",
        stop: str | int | None = None,
        names: Sequence[str] | None = None,
        tag: bool = False,
    ) -> None:
        super().__init__(of="mixture")
        self.sources, weights = split_sources(sources)
        self.names = read_names(names, len(self.sources))
        stateful = list(_stateful_sources(self.sources))
        for number, source in enumerate(stateful):
            if any(source is other for other in stateful[:number]):
                raise ConfigError(
                    f"this {type(source).__name__} is given as a source twice, but its state_dict can store only one "
                    "position: give a copy.deepcopy of it the second time"
                )
        self._proportions = make_proportions(weights, list(map(_size, self.sources)), mode, stop)
        self.tag = tag

    def __repr__(self) -> str:
        sources = f"<{counted(len(self.sources), 'source')}: {', '.join(map(str, self.names))}>"
        return f"{type(self).__name__} of {sources}\n  order: mixture in each worker, epoch {self.epoch}"

    def counts(self, samples: int) -> dict[str, int]:
        """Return the number of samples of each source among the first ``samples`` samples of one worker, here the
        calling process.
        """
        order, _ = self._order(self.epoch)
        return dict(zip(self.names, order.counts(samples), strict=True))

    def _order(self, epoch: int) -> tuple[BlockMixture, int | None]:
        """Return the source of each sample of this worker, and their number; None if it is unknown in advance.

        Each worker of each rank has its own order, so that a step of the job sees sources in proportion to their
        weights. The proportions are exact at the last sample.
        """
        worker, world = distributed.worker(), self._world.known() or self._world.get()
        number, total = world.rank * worker.total + worker.id, world.world_size * worker.total
        stop = self._proportions.stop
        limit = None if isinstance(stop, str) else stop // total + (number < stop % total)
        key = mix(derive_key(0, epoch, MIXTURE_ORDER), number)
        return BlockMixture(self._proportions.weights, key, length=limit), limit

    # State.

    def _identity(self) -> State:
        weights, _, stop = self._proportions
        return {"order": MIXTURE_ORDER, "weights": list(weights), "stop": stop}

    def check_cursor(self, cursor: Mapping[str, Any]) -> None:
        super().check_cursor(cursor)
        for entry, source, name in zip(cursor["sources"], self.sources, self.names, strict=True):
            if (at := entry["at"]) is not None:
                check_pass(at, source, name=name, of=self.of)
                if not at["had"] and at.keys() != {"had"}:
                    raise StateError(
                        f"the state of this {self.of} is damaged: {name} has yielded nothing, but has {sorted(at)}"
                    )

    def open_at(self, cursor: State) -> Stream:
        epoch, stop = int(cursor["epoch"]), self._proportions.stop
        open_pass = partial(_open_pass, self.sources, self.names, epoch)
        choose = _InOrder(*self._order(epoch))
        return MixStream(cursor, choose, open_pass, stop, self._where(), self.names, self.tag)


class _InOrder:
    """Chooses the sources in the order of a mixture, up to ``limit`` items."""

    def __init__(self, order: BlockMixture, limit: int | None) -> None:
        self._order, self._limit = order, limit
        self._begin = 0
        self._chunk: list[int] = []

    def __call__(self, number: int, last: int, alive: list[int]) -> int:
        if not 0 <= number - self._begin < len(self._chunk):
            end = number + _CHUNK if self._limit is None else min(number + _CHUNK, self._limit)
            if number >= end:
                raise StopIteration
            self._begin, self._chunk = number, self._order.locate(np.arange(number, end))[0].tolist()
        return self._chunk[number - self._begin]


class _TimedSource(SourceStream):
    """A source whose time the loader's statistics show."""

    def __next__(self) -> Any:
        with stage(self._name):
            return super().__next__()


def _open_pass(sources: list[Any], names: list[str], epoch: int, number: int, turns: int, at: Any) -> SourceStream:
    return _TimedSource(sources[number], name=names[number], epoch=epoch + turns, cursor=at)


def _stateful_sources(sources: Sequence[Any]) -> Iterator[Any]:
    """Yield the users' objects that store their own positions: given twice, one would need two positions."""
    for source in sources:
        if keeps_position(source):
            yield source
        elif isinstance(source, MixtureStream):
            yield from _stateful_sources(source.sources)


def _size(source: Any) -> int | None:
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None
