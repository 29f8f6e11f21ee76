"""`Arrivals`: the shards of a store that are copied and counted in the order of need."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from penstock.shards.exchange import Exchange, Facts
from penstock.storage import Storage
from penstock.storage.backend import Cancel
from penstock.storage.fetcher import Fetcher
from penstock.storage.futures import NEVER, Use

__all__ = ["Arrivals", "Arriver", "Need"]


class Arriver(Protocol):
    """A file in a store, whose samples may have been counted.

    Attributes: ``facts`` is None until this process has counted it, or received the facts from another one.
    """

    url: str
    storage: Storage
    facts: Facts | None

    def count(self, cancel: Cancel | None = None) -> Facts:
        """Count its samples unless they are counted, by its index if one exists; return the facts."""

    def obtain(self, *, only_later: bool = False, cancel: Cancel | None = None) -> Facts:
        """Copy and count it unless it is counted; return the facts. Arguments: see `penstock.storage.Cache.open`."""

    def fetch(self, cancel: Cancel) -> object:
        """Ensure that the cache has a copy; raise NotCachedError if the cached objects are needed sooner."""


class Need(NamedTuple):
    """A shard that this rank needs, and when it is read.

    Attributes:
        shard: number of the shard.
        first: number of samples that this rank reads before the first possible sample of the shard.
        last: number of samples that this rank reads up to the last one of the shard; None while it is unknown.
    """

    shard: int
    first: int
    last: int | None


class Arrivals:
    """Fetches and counts shards by a `Fetcher` of this process, and receives the facts of other ranks' shards."""

    def __init__(self, handles: Sequence[Arriver], exchange: Exchange | None) -> None:
        self.pid = os.getpid()
        self._handles, self._exchange = handles, exchange
        self._fetcher = Fetcher(handles[0].storage)
        self._own: set[int] = set()
        self._told: set[int] = set()  # shards whose facts were sent to the other ranks
        self._only_facts = False
        self.position = 0
        """Number of samples that the consumer has received."""

    def expect(self, needs: Sequence[Need]) -> None:
        """Fetch these shards next, in place of those expected before."""
        self._only_facts = False
        self._own.update(need.shard for need in needs)
        uses = [self._use(need.shard, need.first, NEVER - 1 if need.last is None else need.last) for need in needs]
        self._fetcher.follow(uses, position=self.position)

    def count(self, numbers: Sequence[int]) -> None:
        """Count shards whose samples are not needed, and send their facts to the other ranks."""
        self._only_facts, self._own = True, set(numbers)
        self._fetcher.follow([self._use(number) for number in numbers if self._is_news(number)], position=self.position)

    def advance(self, position: int) -> None:
        """Set the position of the consumer."""
        self.position = position
        self._fetcher.advance(position)

    # The default argument stays valid when modules are already cleared at exit.
    def close(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Stop fetching, and withdraw the planned uses. A forked child has none of the threads, and does nothing."""
        if not _ending():
            self._fetcher.close()

    def hear_of(self, number: int, seconds: float) -> bool:
        """Return whether a shard is known, fetched by this rank, or reported by another rank within ``seconds``."""
        handle = self._handles[number]
        if handle.facts is None and number not in self._own and self._exchange is not None:
            handle.facts = self._exchange.hear(number, seconds)
            return handle.facts is not None
        return True

    def wait(self, shards: Sequence[int]) -> list[Facts]:
        """Wait for the facts of shards and return them."""
        missing = [number for number in shards if self._handles[number].facts is None]
        if self._exchange is not None:
            # Own shards first: other ranks wait for these while this rank would wait for theirs.
            self._wait([number for number in missing if number in self._own])
            others = [number for number in missing if number not in self._own]
            for number, heard in zip(others, self._exchange.wait(others), strict=True):
                self._handles[number].facts = heard
        self._wait(missing)
        return [facts for number in shards if (facts := self._handles[number].facts) is not None]

    def _wait(self, numbers: Sequence[int]) -> None:
        handles = {self._handles[number].url: self._handles[number] for number in numbers}
        uses = [self._use(number, self.position, NEVER - 1) for number in numbers]
        self._fetcher.wait(uses, lambda use: handles[use.url].facts is not None)

    def _use(self, number: int, first: int = NEVER, last: int = NEVER) -> Use:
        """Return the use of a shard; one that is only counted is never needed."""
        return Use(self._handles[number].url, first, last, bring=partial(self._bring, number))

    def _is_news(self, number: int) -> bool:
        """Return whether the facts of the shard are unknown here or to other ranks."""
        return self._handles[number].facts is None or (self._exchange is not None and number not in self._told)

    def _bring(self, number: int, only_later: bool, cancel: Cancel) -> None:
        handle = self._handles[number]
        only_facts = self._only_facts or number not in self._own
        facts = handle.count(cancel) if only_facts else handle.obtain(only_later=only_later, cancel=cancel)
        self._fetcher.notify()
        if self._exchange is not None and number not in self._told:
            self._exchange.tell(number, facts)
            self._told.add(number)
        if not only_facts:
            handle.fetch(cancel)
