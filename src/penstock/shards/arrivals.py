"""`Arrivals`: shards of a store that threads of this process copy and count, as they are needed."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from penstock.errors import NotCachedError
from penstock.plan.windows import Need
from penstock.shards.exchange import Exchange
from penstock.shards.facts import Facts
from penstock.storage import UNWRITABLE, Storage
from penstock.storage.backend import Cancel
from penstock.storage.futures import NEVER, Future, Uses
from penstock.threads import Daemon

__all__ = ["Arrivals", "Arriver"]

_THREADS = 8  # shards that arrive at a time


class Arriver(Protocol):
    """A file in a store that somebody may have counted.

    Attributes: ``facts`` are None until it was counted here, or somebody who has counted it told them.
    """

    url: str
    storage: Storage
    facts: Facts | None

    def count(self, cancel: Cancel | None = None) -> Facts:
        """Have it counted, unless it is: by its index, if there is one."""

    def obtain(self, *, only_later: bool = False, cancel: Cancel | None = None) -> Facts:
        """Have it copied and counted, unless it is counted. Arguments: see `penstock.storage.Cache.open`."""

    def fetch(self, cancel: Cancel) -> None:
        """Have a copy in the cache, or NotCachedError where what is there is needed sooner."""


class Arrivals:
    """Gets shards by threads of this process, and what other ranks tell of theirs.

    Threads run while there is something to get. What the consumer needs until when is published in the cache, which
    keeps it until then.
    """

    def __init__(self, handles: Sequence[Arriver], exchange: Exchange | None) -> None:
        self.pid = os.getpid()
        self._handles, self._exchange = handles, exchange
        self._changed = threading.Condition()
        self._queue: deque[int] = deque()
        self._busy: set[int] = set()
        self._had: set[int] = set()  # of the shards that are needed now, those that were brought
        self._asked: set[int] = set()  # shards that somebody waits for: whatever the cache holds makes room
        self._errors: dict[int, BaseException] = {}
        self._own: set[int] = set()
        self._told: set[int] = set()  # shards of which the other ranks were told
        self._only_facts = False
        self._threads = 0
        self._cancel = Cancel()
        self._future: Future | None = None

    def expect(self, needs: Sequence[Need], position: int) -> None:
        """Get these next, and forget about the rest."""
        numbers = [need.shard for need in needs]
        if needs:
            self._publish(needs, position)
        with self._changed:
            self._only_facts = False
            self._own.update(numbers)
            self._had.intersection_update(numbers)
            self._queue = deque(n for n in numbers if n not in self._had and n not in self._busy)
            self._start()

    def advance(self, position: int) -> None:
        """Take note of where the consumer is."""
        if self._future is not None:
            self._future.advance(position)

    def close(self) -> None:
        """Get nothing more, and want nothing of the cache."""
        self._give_up()
        self._cancel = Cancel()
        future, self._future = self._future, None
        if future is not None:
            future.close()

    def count(self, numbers: Sequence[int]) -> None:
        """Have shards counted, and the other ranks told of them: nobody needs their samples now."""
        with self._changed:
            self._only_facts, self._own = True, set(numbers)
            self._queue = deque(n for n in numbers if n not in self._busy and self._is_news(n))
            self._start()

    def _is_news(self, number: int) -> bool:
        """Whether somebody does not know the shard."""
        return self._handles[number].facts is None or (self._exchange is not None and number not in self._told)

    def _publish(self, needs: Sequence[Need], position: int) -> None:
        try:
            if self._future is None:
                self._future = Future(self._handles[0].storage.the_cache().folder)
            last = [NEVER - 1 if need.last is None else need.last for need in needs]
            urls = [self._handles[need.shard].url for need in needs]
            uses = Uses.of(urls, [need.first for need in needs], last)
            self._future.publish(uses, position=position)
        except OSError as error:
            # The cache may only be read, or its disk is full. Whoever needs a shard opens it, and says what is wrong.
            if error.errno not in UNWRITABLE:
                raise

    def hear_of(self, number: int, seconds: float) -> bool:
        """Return whether a shard is known, or this rank gets it, or another one tells of it within so many seconds."""
        handle = self._handles[number]
        if handle.facts is None and number not in self._own and self._exchange is not None:
            handle.facts = self._exchange.hear(number, seconds)
            return handle.facts is not None
        return True

    def wait(self, shards: Sequence[int]) -> list[Facts]:
        """Return what is known of shards, once it is."""
        missing = [number for number in shards if self._handles[number].facts is None]
        others = [number for number in missing if number not in self._own]
        if self._exchange is not None:
            # Its own ones first: other ranks wait for them, and this one would wait for those.
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
                self._asked.add(number)
                if number not in self._busy and number not in self._queue:
                    self._queue.appendleft(number)
                    self._start()
                self._changed.wait()
            self._asked.discard(number)
            facts = self._handles[number].facts
        assert facts is not None
        return facts

    def _start(self) -> None:
        """Have as many threads as are needed. The caller holds the lock."""
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
                # The next `expect` tries again, or somebody waits for it by then.
                had = False
            except BaseException as raised:  # raised where somebody waits for the shard
                error = raised
            with self._changed:
                self._busy.discard(number)
                if had:
                    self._had.add(number)
                if error is not None and not cancel.is_set():
                    self._errors[number] = error
                self._changed.notify_all()

    def _bring(self, number: int, cancel: Cancel) -> None:
        handle = self._handles[number]
        only_facts = self._only_facts or number not in self._own
        if only_facts:
            facts = handle.count(cancel)
        else:
            facts = handle.obtain(only_later=number not in self._asked, cancel=cancel)
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
