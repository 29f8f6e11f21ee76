"""`Arrivals`: background threads that copy and count shards of a store in the order of need."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from penstock.errors import NotCachedError
from penstock.shards.exchange import Exchange
from penstock.shards.facts import Facts
from penstock.storage import UNWRITABLE, Storage
from penstock.storage.backend import Cancel
from penstock.storage.futures import NEVER, Future, Uses
from penstock.threads import Daemon

__all__ = ["Arrivals", "Arriver", "Need"]

_THREADS = 8  # shards fetched at a time


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
    """Fetches shards in threads of this process, and receives the facts of other ranks' shards.

    Threads run while shards are pending. The consumer's planned uses are published in the cache, so that
    the cache keeps each shard until it is used.
    """

    def __init__(self, handles: Sequence[Arriver], exchange: Exchange | None) -> None:
        self.pid = os.getpid()
        self._handles, self._exchange = handles, exchange
        self._changed = threading.Condition()
        self._queue: deque[int] = deque()
        self._busy: set[int] = set()
        self._done: set[int] = set()  # fetched shards among those that are needed now
        self._urgent: set[int] = set()  # shards that a consumer waits for: the cache may evict anything for them
        self._errors: dict[int, BaseException] = {}
        self._own: set[int] = set()
        self._told: set[int] = set()  # shards whose facts were sent to the other ranks
        self._only_facts = False
        self._threads = 0
        self._cancel = Cancel()
        self._future: Future | None = None
        self.position = 0
        """Number of samples that the consumer has received."""

    def expect(self, needs: Sequence[Need]) -> None:
        """Fetch these shards next, in place of those expected before."""
        numbers = [need.shard for need in needs]
        if needs:
            self._publish(needs)
        with self._changed:
            self._only_facts = False
            self._own.update(numbers)
            self._done.intersection_update(numbers)
            self._queue = deque(n for n in numbers if n not in self._done and n not in self._busy)
            self._start()

    def advance(self, position: int) -> None:
        """Set the position of the consumer."""
        self.position = position
        if self._future is not None:
            self._future.advance(position)

    # The default argument stays valid when modules are already cleared at exit.
    def close(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Stop fetching, and withdraw the planned uses. A forked child has none of the threads, and does nothing."""
        if _ending() or self.pid != os.getpid():
            return
        self._give_up()
        self._cancel = Cancel()
        future, self._future = self._future, None
        if future is not None:
            future.close()

    def count(self, numbers: Sequence[int]) -> None:
        """Count shards whose samples are not needed, and send their facts to the other ranks."""
        with self._changed:
            self._only_facts, self._own = True, set(numbers)
            self._queue = deque(n for n in numbers if n not in self._busy and self._is_news(n))
            self._start()

    def _is_news(self, number: int) -> bool:
        """Return whether the facts of the shard are unknown here or to other ranks."""
        return self._handles[number].facts is None or (self._exchange is not None and number not in self._told)

    def _publish(self, needs: Sequence[Need]) -> None:
        try:
            if self._future is None:
                self._future = Future(self._handles[0].storage.the_cache().folder)
            last = [NEVER - 1 if need.last is None else need.last for need in needs]
            urls = [self._handles[need.shard].url for need in needs]
            uses = Uses.of(urls, [need.first for need in needs], last)
            self._future.publish(uses, position=self.position)
        except OSError as error:
            # The cache is read-only, or its disk is full. Opening a shard will report the problem.
            if error.errno not in UNWRITABLE:
                raise

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
        others = [number for number in missing if number not in self._own]
        if self._exchange is not None:
            # Own shards first: other ranks wait for these while this rank would wait for theirs.
            for number in missing:
                if number in self._own:
                    self._wait_for(number)
            for number, facts in zip(others, self._exchange.wait(others), strict=True):
                self._handles[number].facts = facts
        elif others:
            with self._changed:
                self._queue.extend(number for number in others if number not in self._busy)
                self._start()
        return [self._wait_for(number) for number in shards]

    def _wait_for(self, number: int) -> Facts:
        with self._changed:
            while self._handles[number].facts is None:
                if number in self._errors:
                    raise self._errors.pop(number)
                self._urgent.add(number)
                if number not in self._busy and number not in self._queue:
                    self._queue.appendleft(number)
                    self._start()
                self._changed.wait()
            self._urgent.discard(number)
            facts = self._handles[number].facts
        assert facts is not None
        return facts

    def _start(self) -> None:
        """Start as many threads as needed. The caller holds the lock."""
        for _ in range(min(_THREADS - self._threads, len(self._queue))):
            self._threads += 1
            Daemon(self._work, name="penstock-shards", wake=self._give_up)

    def _give_up(self) -> None:
        self._cancel.set()
        with self._changed:
            self._queue.clear()
            self._changed.notify_all()

    def _work(self, thread: Daemon) -> None:
        while (taken := self._take()) is not None:
            number, cancel = taken
            error: BaseException | None = None
            had = True
            try:
                self._bring(number, cancel)
            except NotCachedError:
                # The next `expect` retries, or a consumer waits for it by then.
                had = False
            except BaseException as raised:  # raised again in the consumer that waits for the shard
                error = raised
            with self._changed:
                self._busy.discard(number)
                if had:
                    self._done.add(number)
                if error is not None and not cancel.is_set():
                    self._errors[number] = error
                self._changed.notify_all()

    def _bring(self, number: int, cancel: Cancel) -> None:
        handle = self._handles[number]
        only_facts = self._only_facts or number not in self._own
        if only_facts:
            facts = handle.count(cancel)
        else:
            facts = handle.obtain(only_later=number not in self._urgent, cancel=cancel)
        with self._changed:
            self._changed.notify_all()
        if self._exchange is not None and number not in self._told:
            self._exchange.tell(number, facts)
            self._told.add(number)
        if not only_facts:
            handle.fetch(cancel)

    def _take(self) -> tuple[int, Cancel] | None:
        with self._changed:
            if not self._queue:
                self._threads -= 1
                return None
            number = self._queue.popleft()
            self._busy.add(number)
            self._errors.pop(number, None)
            return number, self._cancel
