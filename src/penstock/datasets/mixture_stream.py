"""`MixtureStream`: iterable-style datasets mixed in fixed proportions, separately in each worker.

Streams split themselves across ranks and workers, so each worker mixes the items of its own iterators. The proportions
hold in every worker, as in an epoch of a `Mixture` (`penstock.order.mixture`).

    position p of a worker  ->  order of the mixture: source  ->  next item of this source (`SourceStream`)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock import distributed
from penstock.datasets.mixing import make_proportions, split_sources
from penstock.errors import ConfigError, StateError
from penstock.hashing import derive_key, mix
from penstock.order.mixture import MIXTURE_ORDER, BlockMixture
from penstock.plan.cursor import State, check_state, read_int
from penstock.plan.source_stream import SourceStream, check_pass, keeps_position
from penstock.plan.stream import ResumableDataset, Stream
from penstock.stages import stage
from penstock.wording import counted

__all__ = ["MixtureStream"]

_CHUNK = 256  # positions computed at once
_END = object()


class MixtureStream(ResumableDataset):
    """A `Mixture` of iterable-style datasets. `Mixture` creates it.

    Args:
        sources: pairs ``(dataset, weight)``.
        mode: ``"proportion"`` or ``"choose"`` (numbers of samples of the whole job); ``"repeat"`` and ``"upsample"``
            for sources with a length.
        stop: ``"first"``: at the end of the shortest source. ``"all"`` (default): when every source has reached its
            end; shorter ones start again. Or a number of samples of the whole job.
        names: names of the sources, for errors and for the loader's statistics, where each source is a stage.
        tag: items are ``(item, number of the source)``.

    Each iteration is a new epoch, unless `set_epoch` was called. Penstock's sources begin at the mixture's epoch;
    others receive it with ``set_epoch`` if they have this method. A source that starts again moves on to its next
    epoch.

    Raises:
        ConfigError: invalid arguments, such as a dataset that is given twice and stores its own position; or (while
            iterating) a source that yields nothing. An error in a source ends the iteration; the state is then that
            of the last item before the error.

    State: the number of items, and the positions of the sources: cursors of Penstock's, states of users' iterators or
    datasets. A source without a state is read again up to its position. The state can be loaded only on the same ranks
    and workers.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Any, Any]],
        *,
        mode: str = "proportion",
        stop: str | int | None = None,
        names: Sequence[str] | None = None,
        tag: bool = False,
    ) -> None:
        super().__init__()
        self.sources, weights = split_sources(sources)
        self.names = [f"source {i}" for i in range(len(self.sources))] if names is None else list(names)
        if len(set(self.names)) != len(self.sources):
            raise ConfigError(f"{len(self.sources)} sources need as many different names, got {self.names}")
        _check_duplicates(self.sources)
        sizes = [_size(source) for source in self.sources]
        self._proportions = make_proportions(weights, sizes, mode, stop)
        # Raise for invalid weights here, not at the first sample.
        self._proportions.order(0, None)
        self.tag = tag
        self._world = distributed.LateWorld(of="mixture")

    def __repr__(self) -> str:
        sources = f"<{counted(len(self.sources), 'source')}: {', '.join(map(str, self.names))}>"
        return f"{type(self).__name__} of {sources}\n  order: mixture in each worker, epoch {self.epoch}"

    def counts(self, samples: int) -> dict[str, int]:
        """Return the number of samples of each source among the first ``samples`` samples of one worker, here the
        calling process.
        """
        return dict(zip(self.names, self._order(self._limit(), self.epoch).counts(samples), strict=True))

    def _order(self, limit: int | None, epoch: int) -> BlockMixture:
        """Return the source of each sample of this worker; the proportions are exact at ``limit``.

        Each worker of each rank has its own order, so that a step of the job sees sources in proportion to their
        weights.
        """
        number, _ = self._worker_number()
        return self._proportions.order(mix(derive_key(0, epoch, MIXTURE_ORDER), number), limit)

    def _limit(self) -> int | None:
        """Return the number of samples that this worker yields; None if it is unknown in advance."""
        stop = self._proportions.stop
        if isinstance(stop, str):
            return None
        number, total = self._worker_number()
        return stop // total + (number < stop % total)

    def _worker_number(self) -> tuple[int, int]:
        """Return the number of this worker among the workers of all ranks, and their total."""
        worker, world = distributed.worker(), self._world.known() or self._world.get()
        return world.rank * worker.total + worker.id, world.world_size * worker.total

    def _where(self) -> list[int]:
        """Return [rank, ranks, worker, workers] of this process."""
        return [*self._world.get(), *distributed.worker()]

    # State.

    def _identity(self) -> State:
        return {
            "order": MIXTURE_ORDER,
            "weights": list(self._proportions.weights),
            "stop": self._proportions.stop,
        }

    def first_cursor(self, epoch: int) -> State:
        begun = [{"turns": 0, "had": 0} for _ in self.sources]
        return {**self._identity(), "epoch": epoch, "where": None, "yielded": 0, "sources": begun}

    def check_cursor(self, cursor: Mapping[str, Any]) -> None:
        of = "Mixture"
        check_state(cursor, self._identity(), of=of)
        read_int(cursor, "epoch", of=of)
        # Before the first item, any worker can resume.
        check_state(cursor, {"where": self._where() if read_int(cursor, "yielded", of=of) else None}, of=of)
        entries = cursor.get("sources")
        if not isinstance(entries, list) or len(entries) != len(self.sources):
            raise StateError(
                f"the state of this {of} needs a state for each of its {len(self.sources)} sources, got {entries!r}"
            )
        for entry, source, name in zip(entries, self.sources, self.names, strict=True):
            check_pass(entry, source, name=name, of=of)
            read_int(entry, "turns", of=of)
            if not entry["had"] and entry.keys() != {"turns", "had"}:
                raise StateError(
                    f"the state of this {of} is damaged: {name} has yielded nothing, but has {sorted(entry)}"
                )

    def open_at(self, cursor: State) -> Stream:
        where, limit = self._where(), self._limit()
        order = self._order(limit, int(cursor["epoch"]))
        epoch = _MixedEpoch(self.sources, self.names, self._proportions.stop, self.tag, order, limit, where)
        return _MixedStream(epoch, cursor)


class _MixedEpoch(NamedTuple):
    """The sources of one epoch, in this worker's order."""

    sources: list[Any]
    names: list[str]
    stop: str | int
    tag: bool
    order: BlockMixture
    limit: int | None
    where: list[int]

    def source_numbers(self, begin: int) -> Iterator[int]:
        """Yield the source of each position, from position ``begin`` on."""
        while self.limit is None or begin < self.limit:
            end = begin + _CHUNK if self.limit is None else min(begin + _CHUNK, self.limit)
            yield from self.order.locate(np.arange(begin, end))[0].tolist()
            begin = end

    def is_over(self, turns: list[int]) -> bool:
        """Return whether the mixture ends, given how often each source has reached its end."""
        return any(turns) if self.stop == "first" else self.stop == "all" and all(turns)


class _MixedStream(Stream):
    """An iterator over the items of a mixture's sources.

    It has no reference to its dataset, which refers to it: such a cycle would keep files open until the next garbage
    collection.
    """

    def __init__(self, epoch: _MixedEpoch, cursor: State) -> None:
        self._epoch, self._cursor = epoch, cursor
        self._yielded = int(cursor["yielded"])
        self._turns = [int(entry["turns"]) for entry in cursor["sources"]]
        """How often each source has started again."""
        self._passes = [self._open_pass(number, entry) for number, entry in enumerate(cursor["sources"])]
        self._source_numbers = epoch.source_numbers(self._yielded)
        self._over = epoch.is_over(self._turns)

    def _open_pass(self, number: int, cursor: Mapping[str, Any] | None = None) -> SourceStream:
        epoch = int(self._cursor["epoch"]) + self._turns[number]
        return SourceStream(self._epoch.sources[number], name=self._epoch.names[number], epoch=epoch, cursor=cursor)

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        # Reset below when there is an item, so that an error also ends the stream.
        self._over = True
        number = next(self._source_numbers)
        with stage(self._epoch.names[number]):
            item = self._next_item(number)
        self._over = False
        self._yielded += 1
        return (item, number) if self._epoch.tag else item

    def _next_item(self, number: int) -> Any:
        """Return the next item of a source; at its end, start the source again, unless the mixture ends."""
        item = next(self._passes[number], _END)
        if item is not _END:
            return item
        name, had = self._epoch.names[number], self._passes[number].delivered
        self._turns[number] += 1
        if self._epoch.is_over(self._turns):
            raise StopIteration
        if not had:
            raise ConfigError(f"{name} yielded no samples: leave it out, or give it more shards")
        self._passes[number] = self._open_pass(number)
        item = next(self._passes[number], _END)
        if item is _END:
            raise ConfigError(f"{name} yielded samples once, but none when iterated again: it must be re-iterable")
        return item

    def cursor(self) -> State:
        pairs = zip(self._turns, self._passes, strict=True)
        return {
            **self._cursor,
            "where": list(self._epoch.where) if self._yielded else None,
            "yielded": self._yielded,
            "sources": [{"turns": turns, **one.cursor()} for turns, one in pairs],
        }


def _check_duplicates(sources: Sequence[Any]) -> None:
    """Raise ConfigError if a user's object that stores its own position is given twice: it would need two positions."""
    seen: list[Any] = []
    for source in _stateful_sources(sources):
        if any(source is other for other in seen):
            raise ConfigError(
                f"this {type(source).__name__} is given as a source twice, but its state_dict can store only one "
                "position: give a copy.deepcopy of it the second time"
            )
        seen.append(source)


def _stateful_sources(sources: Sequence[Any]) -> Iterator[Any]:
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
