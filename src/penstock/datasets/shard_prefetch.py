"""`ShardPrefetcher`: copy shards from a store into the cache before they are needed, by the epoch's order.

    view.rows -> shard of each row -> first and last position of each shard; first position in the next epoch
    the shards in use at a time fit the cache:   shards are copied and evicted; the shard needed last is evicted first
    they do not fit (a global shuffle):          as many shards as fit stay in the cache; ranges of the others are read

So an epoch downloads only the data that the cache cannot hold, for any shuffle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from penstock.plan.share import EpochView, LookAhead, MiniEpoch
from penstock.shards.shard_file import StoredShard
from penstock.storage import RemoteSource
from penstock.storage.fetcher import Fetcher
from penstock.storage.planned_use import NEVER, Use, all_fit, bytes_for_copies, choose_copies, object_name
from penstock.threads import Daemon

__all__ = ["ShardPrefetcher", "spans"]

_CHUNK = 1 << 18  # rows examined between two checks for a stop
_AT_ONCE = 1 << 21  # rows examined before the first sample; the others are examined in the background

Ints = npt.NDArray[np.int64]


class ShardPrefetcher(LookAhead):
    """Prefetch the shards of one rank, see the module.

    Args:
        shards: a source with ``starts`` of its shards, and those that are ``stored``. All of these use one `Storage`.
            Their sizes and indexes are read when needed.

    Cost: the rows of an epoch are computed once more, at about ten million per second. Memory grows with the
    number of shards, not of rows.
    """

    def __init__(self, shards: Any) -> None:
        self._set = shards
        self._place: MiniEpoch | None = None
        self._consumed = 0
        self._thread: Daemon | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardPrefetcher, (self._set,)

    @cached_property
    def _shards(self) -> list[StoredShard]:
        return list(self._set.stored())

    @cached_property
    def _starts(self) -> Ints:
        return np.array(self._set.starts, np.int64)

    @cached_property
    def _fetcher(self) -> Fetcher:
        return Fetcher(self._shards[0].source.storage)

    def prepare(self, view: EpochView, following: EpochView) -> None:
        """Start to copy the shards that a view needs, in the order in which it needs them."""
        if view.place == self._place or get_worker_info() is not None or not self._shards:
            return
        self._place, self._consumed = view.place, 0
        if self._thread is not None:
            self._thread.stop()
        is_whole = self._plan_uses(view, following, _AT_ONCE)
        if not is_whole:

            def work(thread: Daemon) -> None:
                self._plan_uses(view, following, None, lambda: thread.stopping)

            self._thread = Daemon(work, name="penstock-shard-uses")

    def advance(self, place: MiniEpoch, count: int) -> None:
        """Record that the consumer has received the first ``count`` samples of the view at a place."""
        if place == self._place:
            self._consumed = count
            self._fetcher.advance(count)

    def close(self) -> None:
        """End the background work, and cancel all further copies."""
        if self._thread is not None:
            self._thread.stop()
        if "_fetcher" in self.__dict__:
            self._fetcher.close()
        self._place = None

    def _plan_uses(
        self, view: EpochView, following: EpochView, most: int | None, stopping: Callable[[], bool] = lambda: False
    ) -> bool:
        """Compute the uses of all shards, from at most ``most`` rows; return whether these rows were enough."""
        first, last, is_exact = spans(view, self._starts, most, stopping)
        again, _, is_next_exact = spans(following, self._starts, most, stopping)
        if stopping():
            return True
        again = np.where(again < NEVER, len(view) + again, NEVER)
        needed = [shard for shard in self._shards if min(first[shard.number], again[shard.number]) < NEVER]
        uses = self._uses(needed, first, last, again, len(view)) if needed else []
        self._fetcher.follow(uses, position=self._consumed)
        return is_exact and is_next_exact

    def _uses(self, shards: Sequence[StoredShard], first: Ints, last: Ints, again: Ints, end: int) -> list[Use]:
        numbers = np.array([shard.number for shard in shards])
        sources = [shard.source for shard in shards]
        sizes = np.array([source.size for source in sources], np.int64)
        first, last, again = first[numbers], last[numbers], again[numbers]
        cache, whole = sources[0].storage.the_cache(), np.ones(len(shards), np.bool_)
        room, indexes = bytes_for_copies(cache.limit()), list[RemoteSource]()
        has_ranges = all(shard.indexes is not None for shard in shards)
        if has_ranges and not all_fit(sizes, first, last, room):
            indexes = [one for shard in shards for one in shard.indexes or ()]
            room -= sum(one.size for one in indexes)
            # All ranks of a node choose the same shards, and prefer those already in the cache.
            there = np.array([cache.has(source) for source in sources])
            whole = choose_copies(sizes, again, there, [object_name(source.url) for source in sources], room)
        columns = zip(sources, first.tolist(), last.tolist(), again.tolist(), whole.tolist(), strict=True)
        uses = [
            Use(source.url, begin, stop, later, is_whole, source.size, source.stat)
            for source, begin, stop, later, is_whole in columns
        ]
        index_uses = [Use(one.url, 0, end, end, size=one.size, stat=one.stat) for one in indexes]
        return index_uses + sorted(uses, key=lambda use: use.first)


def spans(
    view: EpochView, starts: Ints, most: int | None = None, stopping: Callable[[], bool] = lambda: False
) -> tuple[Ints, Ints, bool]:
    """Return the first and last position at which a view needs each shard, and whether they are exact.

    Args:
        view: the samples; positions count from its beginning.
        starts: the first row of each shard, and the total number of rows.
        most: the number of samples to examine; None for all. A shard seen by then counts as needed until the last
            examined sample, any other shard as needed from there on.
        stopping: returns True to stop early.

    A shard that the view does not need has the positions `NEVER` and -1. The search stops early if every shard occurs
    as evenly as in a random order: then all shards are needed to the end.
    """
    count, shards = len(view), len(starts) - 1
    first, last = np.full(shards, NEVER), np.full(shards, -1)
    examined = 0
    while examined < count and not stopping():
        if most is not None and examined >= most:
            first[first == NEVER] = examined
            last[last < 0] = count - 1
            return first, last, False
        end = min(examined + _CHUNK, count)
        positions = np.arange(examined, end, dtype=np.int64)
        numbers = starts.searchsorted(view.rows(positions), "right") - 1
        # NumPy keeps the last of several assignments to one index.
        last[numbers] = positions
        begin = np.full(shards, NEVER)
        begin[numbers[::-1]] = positions[::-1]
        first = np.minimum(first, begin)
        examined = end
        halves = numbers[: _CHUNK // 2], numbers[_CHUNK // 2 :]
        if end == _CHUNK and all(len(np.unique(half)) == shards for half in halves):
            return first, np.full(shards, count - 1), True
    return first, last, True
