"""Shards of a store that are in the cache when they are needed: an epoch's order says which, and until when.

    view.rows -> shard of each row -> first and last position of each shard, first one in the next epoch
    all in use at a time fit the cache:   copies come and go, those needed last go first
    they do not (a global shuffle):       some shards stay copied, as many as fit; ranges are read of the others

So an epoch fetches the part of the data that the cache cannot hold, whatever the shuffle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from penstock.plan.share import EpochView, MiniEpoch
from penstock.shards.stored import StoredShard
from penstock.storage import UNWRITABLE, RemoteSource
from penstock.storage.copy_choice import come_and_go, stay, usable
from penstock.storage.futures import NEVER, object_name
from penstock.storage.prefetch import CopiesAhead, Use
from penstock.threads import Daemon

__all__ = ["ShardsAhead", "ShardsInStores", "spans"]

_CHUNK = 1 << 18  # rows looked at between two looks at the clock
_AT_ONCE = 1 << 21  # rows for which a consumer waits; the others are looked at in the background

Ints = npt.NDArray[np.int64]


class ShardsInStores(Protocol):
    """Shards, of which any number lie in a store."""

    @property
    def starts(self) -> Any:
        """The number of the first sample of each shard, and of all."""

    def stored(self) -> list[StoredShard]:
        """Return the shards in a store that are copied."""


class ShardsAhead:
    """Looks ahead for one rank of a job: see the module. It is a share's ``prepare`` and ``advance``.

    Args:
        shards: of which those in a store are all of one `Storage`. What they hold is asked for when it is needed.

    Cost: an epoch's rows are computed once more, some ten million a second; memory for each shard, none for rows.
    """

    def __init__(self, shards: ShardsInStores) -> None:
        self._set = shards
        self._begin()

    def _begin(self) -> None:
        self._place: MiniEpoch | None = None
        self._had = 0
        self._pid = os.getpid()
        self._thread: Daemon | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_set": self._set}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set = state["_set"]
        self._begin()

    @cached_property
    def _shards(self) -> list[StoredShard]:
        return self._set.stored()

    @cached_property
    def _starts(self) -> Ints:
        return np.array(self._set.starts, np.int64)

    @cached_property
    def _ahead(self) -> CopiesAhead:
        return CopiesAhead(self._shards[0].storage)

    def prepare(self, view: EpochView, following: EpochView) -> None:
        """Fetch what a view needs, in the order in which it does."""
        if view.place == self._place or self._pid != os.getpid() or get_worker_info() is not None or not self._shards:
            return
        self._place, self._had = view.place, 0
        if self._thread is not None:
            self._thread.stop()
        is_whole = self._follow(view, following, _AT_ONCE)
        if not is_whole:
            work = partial(self._follow_all, view, following)
            self._thread = Daemon(work, name="penstock-shard-uses")

    def advance(self, view: EpochView, count: int) -> None:
        """Go on: the consumer has had the first ``count`` samples of a view."""
        if view.place == self._place:
            self._had = count
            self._ahead.advance(count)

    def close(self) -> None:
        """End what runs in the background, and want nothing more."""
        if self._thread is not None and self._pid == os.getpid():
            self._thread.stop()
        if "_ahead" in self.__dict__:
            self._ahead.close()
        self._place = None

    def _follow_all(self, view: EpochView, following: EpochView, thread: Daemon) -> None:
        self._follow(view, following, None, lambda: thread.stopping)

    def _follow(
        self, view: EpochView, following: EpochView, most: int | None, stopping: Callable[[], bool] = lambda: False
    ) -> bool:
        """Compute the uses of all shards, looking at so many rows at most; return whether these were enough."""
        first, last, had = spans(view, self._starts, most, stopping)
        again, _, had_again = spans(following, self._starts, most, stopping)
        if stopping():
            return True
        uses = self._uses(first, last, np.where(again < NEVER, len(view) + again, NEVER), len(view))
        try:
            self._ahead.follow(uses, position=self._had)
        except OSError as error:
            # The cache may only be read, or its disk is full. Whoever needs a shard opens it, and says what is wrong.
            if error.errno not in UNWRITABLE:
                raise
            return True
        return had and had_again

    def _uses(self, first: Ints, last: Ints, again: Ints, end: int) -> list[Use]:
        numbers = np.array([shard.number for shard in self._shards])
        needed = (first[numbers] < NEVER) | (again[numbers] < NEVER)
        if not needed.any():
            return []
        shards = [self._shards[place] for place in np.flatnonzero(needed).tolist()]
        numbers = numbers[needed]
        first, last, again = first[numbers], last[numbers], again[numbers]
        sizes = np.array([shard.size for shard in shards], np.int64)
        whole, indexes = self._copied(shards, sizes, first, last, again)
        rows = zip(shards, first.tolist(), last.tolist(), again.tolist(), whole.tolist(), strict=True)
        uses = [
            Use(shard.url, begin, stop, later, is_whole, shard.size, shard.stat)
            for shard, begin, stop, later, is_whole in rows
        ]
        beside = [Use(one.url, 0, end, end, size=one.size, stat=one.stat) for one in indexes]
        return beside + sorted(uses, key=lambda use: use.first)

    def _copied(
        self, shards: Sequence[StoredShard], sizes: Ints, first: Ints, last: Ints, again: Ints
    ) -> tuple[npt.NDArray[np.bool_], list[RemoteSource]]:
        """Return which shards are copied, and which indexes the others need."""
        cache = shards[0].storage.the_cache()
        room = usable(cache.limit())
        everything = np.ones(len(shards), np.bool_)
        has_ranges = all(shard.index is not None and shard.stat is not None for shard in shards)
        if not has_ranges or come_and_go(sizes, first, last, room):
            return everything, []
        indexes = [one for shard in shards for one in shard.index or ()]
        room -= sum(one.size for one in indexes)
        # All ranks of a node choose the same ones, and those that are there already.
        there = np.array([cache.has(RemoteSource(shard.url, shard.storage, shard.stat)) for shard in shards])
        return stay(sizes, again, there, [object_name(shard.url) for shard in shards], room), indexes


def spans(
    view: EpochView, starts: Ints, most: int | None = None, stopping: Callable[[], bool] = lambda: False
) -> tuple[Ints, Ints, bool]:
    """Return where a view needs each shard first and last, and whether that is all known.

    Args:
        view: whose samples are counted from its beginning.
        starts: the first row of each shard, and the number of rows.
        most: how many samples to look at; None for all of them. A shard that was seen by then counts as needed until
            the end of what was looked at, another one from there on.
        stopping: says when to give up.

    Returns:
        int64 arrays of a number for each shard: `NEVER` and -1 where the view does not need it.

    It looks no further once every shard was seen and a shard comes as often as chance has it: then all are needed to
    the end.
    """
    count, shards = len(view), len(starts) - 1
    first, last = np.full(shards, NEVER), np.full(shards, -1)
    had = 0
    while had < count and not stopping():
        if most is not None and had >= most:
            first[first == NEVER] = had
            last[last < 0] = count - 1
            return first, last, False
        end = min(had + _CHUNK, count)
        positions = np.arange(had, end, dtype=np.int64)
        numbers = starts.searchsorted(view.rows(positions), "right") - 1
        # Of several assignments to one place the last one holds.
        last[numbers] = positions
        begin = np.full(shards, NEVER)
        begin[numbers[::-1]] = positions[::-1]
        first = np.minimum(first, begin)
        had = end
        if end == _CHUNK and _is_global(numbers, shards):
            return first, np.full(shards, count - 1), True
    return first, last, True


def _is_global(numbers: Ints, shards: int) -> bool:
    """Return whether the rows of a chunk come from all shards, in both of its halves."""
    half = len(numbers) // 2
    return all(len(np.unique(part)) == shards for part in (numbers[:half], numbers[half:]))
