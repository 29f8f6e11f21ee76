"""`CopiesAhead`: prefetch copies of objects in the known order of their first use.

    ahead = CopiesAhead(storage)
    ahead.follow([Use(url, first=0, last=99), Use(other, first=100, last=199)])
    ahead.get(url)            a complete copy, open
    ahead.advance(100)        report that the consumer is at position 100: the next objects are fetched

Objects are fetched in the order of need. The planned uses are published in the cache's folder, so the cache first
evicts the objects whose next use by any process is furthest away (`penstock.storage.futures`).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import NotCachedError
from penstock.storage.backend import Cancel, Stat
from penstock.storage.download import PIECE
from penstock.storage.files import SourceFile
from penstock.storage.futures import NEVER, Future, Uses
from penstock.storage.remote import RemoteSource, Storage
from penstock.threads import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CopiesAhead", "Stoppable", "Use", "ahead_bytes"]

_COPIES = 4  # large objects fetched at a time, which share the storage's requests
_PART, _MOST = 16, 4 << 30  # prefetched bytes take at most 1/16 of the cache's limit, and at most 4 GiB
_PATIENCE = 10.0


@dataclass(frozen=True)
class Use:
    """The planned use of one object, in positions: samples, or another unit that the consumer counts.

    Attributes:
        url: the object's URL.
        first: the first position that needs it.
        last: the last position of this use.
        again: the first position of the next use, `NEVER` if unknown.
        whole: False for an object that is read by ranges: it is not fetched.
        size: in bytes, 0 if unknown.
        stat: its version; looked up by one request if not given.
    """

    url: str
    first: int
    last: int
    again: int = NEVER
    whole: bool = True
    size: int = 0
    stat: Stat | None = None


def ahead_bytes(limit: int) -> int:
    """Return how many bytes of a cache's limit prefetched objects may take."""
    return min(limit // _PART, _MOST)


class CopiesAhead:
    """Fetches the objects of one consumer into the cache, in the order of their first use.

    Args:
        storage: access options and the cache.
        ahead_bytes: maximum bytes of prefetched objects, complete or in transfer, besides the next object. Default: a
            sixteenth of the cache's limit, at most 4 GiB. They may evict copies that are needed later.

    `get` raises the error of an object, once. A few threads run from `follow` until `close`, or until this object is
    garbage-collected. A forked child has no threads: it opens copies that its parent fetches.
    At most `Storage.parallel` requests at a time. Memory: a block of 4 MiB for each, and the ``uses``.
    """

    def __init__(self, storage: Storage, *, ahead_bytes: int | None = None) -> None:
        self._storage, self._ahead_bytes = storage, ahead_bytes
        self._pid = os.getpid()
        self._fetching: _Fetching | None = None
        self._future: Future | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_storage": self._storage, "_ahead_bytes": self._ahead_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_storage"], ahead_bytes=state["_ahead_bytes"])  # type: ignore[misc]

    def follow(self, uses: Sequence[Use], *, position: int = 0) -> None:
        """Fetch these objects, in place of those from earlier calls.

        Args:
            uses: the uses, in the order of their first position.
            position: the position of the consumer.

        Raises:
            OSError: the cache's folder cannot be written to.
        """
        if self._pid != os.getpid():
            return
        cache = self._storage.the_cache()
        if self._future is None:
            self._future = Future(cache.folder)
        columns = [[use.first, use.last, use.again, use.whole] for use in uses]
        first, last, again, whole = np.array(columns, np.int64).reshape(-1, 4).T
        self._future.publish(Uses.of([use.url for use in uses], first, last, again, whole != 0), position=position)
        if self._fetching is None:
            bound = ahead_bytes(cache.limit()) if self._ahead_bytes is None else self._ahead_bytes
            self._fetching = fetching = _Fetching(self._storage, bound)
            weakref.finalize(self, fetching.stop)
        self._fetching.follow(uses, position)

    def advance(self, position: int) -> None:
        """Set the position of the consumer. Costs microseconds."""
        if self._pid == os.getpid() and self._fetching is not None and self._future is not None:
            self._future.advance(position)
            self._fetching.advance(position)

    def get(self, url: str) -> SourceFile:
        """Return an open, complete copy of an object; wait for it, with the deadlines of `Storage`.

        Raises:
            StorageError: it could not be fetched.
        """
        fetching = self._fetching if self._pid == os.getpid() else None
        if fetching is None:
            return self._storage.the_cache().open(RemoteSource(url, self._storage), progress=False)
        error = fetching.failed.pop(url, None)
        if error is not None:
            raise error
        return self._storage.the_cache().open(fetching.source(url), progress=False)

    def close(self) -> None:
        """End the threads, within seconds, and withdraw the uses. Partial downloads resume later."""
        if self._pid != os.getpid():
            return
        fetching, self._fetching = self._fetching, None
        future, self._future = self._future, None
        if fetching is not None:
            fetching.close()
        if future is not None:
            future.close()


class _Fetching:
    """The threads and their shared state."""

    def __init__(self, storage: Storage, bound: int) -> None:
        self._most = storage.parallel  # maximum number of concurrent requests
        self._each = max(1, storage.parallel // _COPIES)  # maximum for one object
        self.failed: dict[str, BaseException] = {}
        self._storage, self._bound = replace(storage, parallel=self._each), bound
        self._cache = storage.the_cache()
        self._sources: dict[str, RemoteSource] = {}
        self._uses: Sequence[Use] = ()
        self._position = self._turn = 0
        self._next = 0  # the first use that no thread has taken
        self._declined: list[int] = []  # uses that did not fit the cache, with the position at that time
        self._declined_at = -1
        self._under_way = 0  # sum of the requests that the current downloads may make
        self._ahead: list[list[int]] = []  # first position and bytes of each prefetched object
        self._changed = threading.Condition()
        self._door = threading.Lock()
        self._cancel = Cancel()
        self._pid = os.getpid()
        self._threads = [Daemon(self._work, name="penstock-copies", wake=self._wake) for _ in range(self._most)]

    # The consumer's side.

    def follow(self, uses: Sequence[Use], position: int) -> None:
        with self._changed:
            self._uses, self._position, self._next, self._turn = uses, position, 0, self._turn + 1
            self._declined, self._declined_at = [], -1
            self._ahead = []
            self.failed.clear()
            self._changed.notify_all()

    def advance(self, position: int) -> None:
        with self._changed:
            self._position = position
            self._ahead = [room for room in self._ahead if room[0] > position]
            self._changed.notify_all()

    def source(self, url: str, stat: Stat | None = None) -> RemoteSource:
        """Return the version of an object that this consumer reads."""
        found = self._sources.get(url)
        if found is None:
            found = self._sources.setdefault(url, RemoteSource(url, self._storage, stat))
        return found

    def stop(self) -> None:
        """Ask the threads to end."""
        for thread in self._threads:
            thread.stop()

    def close(self) -> None:
        self.stop()
        for thread in self._threads:
            thread.join(_PATIENCE)

    def _wake(self) -> None:
        if self._pid != os.getpid():  # in a forked child: a thread of the parent may hold the locks
            return
        self._cancel.set()
        with self._changed:
            self._changed.notify_all()

    # The threads' side.

    def _work(self, thread: Daemon) -> None:
        while True:
            # One admission at a time: a later object must not take the space of one that is needed sooner.
            with _Once(self._door) as admitted:
                taken = self._take(thread)
                if taken is None:
                    return
                try:
                    self._bring(thread, *taken, admitted)
                finally:
                    self._done(*taken)

    def _bring(self, thread: Daemon, requests: int, turn: int, number: int, room: list[int], admitted: _Once) -> None:
        use = self._uses_of(turn, number)
        if use is None:
            return
        try:
            source = self.source(use.url, use.stat)
            fetched = 0 if self._cache.has(source) else source.size
            if fetched:
                stoppable = Stoppable(source, self._cancel, admitted)
                self._cache.open(stoppable, only_later=True, progress=False)
        except NotCachedError:
            self._decline(turn, number, room)
        except BaseException as error:
            with self._changed:
                room[1] = 0
                if turn == self._turn and not thread.stopping:
                    self.failed[use.url] = error
        else:
            with self._changed:
                room[1] = fetched

    def _done(self, requests: int, *_: object) -> None:
        with self._changed:
            self._under_way -= requests
            self._changed.notify_all()

    def _uses_of(self, turn: int, number: int) -> Use | None:
        with self._changed:
            return self._uses[number] if turn == self._turn else None

    def _take(self, thread: Daemon) -> tuple[int, int, int, list[int]] | None:
        """Wait until an object may be fetched; return its requests, turn, use and room, or None to end."""
        with self._changed:
            while not thread.stopping:
                number = self._wanted()
                if number is not None:
                    use = self._uses[number]
                    room = [use.first, use.size]
                    self._ahead.append(room)
                    requests = self._requests_of(use)
                    self._under_way += requests
                    return requests, self._turn, number, room
                self._changed.wait()
            return None

    def _wanted(self) -> int | None:
        self._declined = [number for number in self._declined if self._uses[number].last >= self._position]
        if self._declined and self._declined_at < self._position:
            return self._declined.pop(0) if self._has_requests(self._uses[self._declined[0]]) else None
        while self._next < len(self._uses):
            use = self._uses[self._next]
            if not use.whole or use.last < self._position:
                self._next += 1
                continue
            ahead = sum(size for first, size in self._ahead if first > self._position)
            if self._declined or (ahead and ahead + use.size > self._bound) or not self._has_requests(use):
                return None
            self._next += 1
            return self._next - 1
        return None

    def _requests_of(self, use: Use) -> int:
        """Return how many concurrent requests an object may make; an unknown size counts as large."""
        return min(self._each, -(-use.size // PIECE) or self._each)

    def _has_requests(self, use: Use) -> bool:
        return self._under_way + self._requests_of(use) <= self._most

    def _decline(self, turn: int, number: int, room: list[int]) -> None:
        """Retry this use when the consumer has advanced: then copies exist that it needs later."""
        with self._changed:
            room[1] = 0
            if turn == self._turn:
                self._declined = sorted([*self._declined, number])
                self._declined_at = self._position


class _Once:
    """A lock held until `release`, which any thread may call, or until the end of the block."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock, self._held, self._guard = lock, False, threading.Lock()

    def __enter__(self) -> _Once:
        self._lock.acquire()
        self._held = True
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        with self._guard:
            held, self._held = self._held, False
        if held:
            self._lock.release()


class Stoppable:
    """A source whose requests can be cancelled. Its first request admits it to the cache."""

    def __init__(self, source: RemoteSource, cancel: Cancel, admitted: _Once | None = None) -> None:
        self.url, self.size, self.fingerprint = source.url, source.size, source.fingerprint
        self.stat, self.storage = source.stat, source.storage
        self._source, self._cancel, self._admitted = source, cancel, admitted

    @property
    def given_up(self) -> bool:
        """Whether it was cancelled."""
        return self._cancel.is_set()

    def fetch(self, begin: int, end: int, cancel: Cancel | None = None, data: bytearray | None = None) -> bytearray:
        with self._joined(cancel) as both:
            return self._source.fetch(begin, end, both, data)

    def fetch_into(self, write: Any, begin: int, end: int, cancel: Cancel | None = None) -> None:
        with self._joined(cancel) as both:
            self._source.fetch_into(write, begin, end, both)

    @contextmanager
    def _joined(self, cancel: Cancel | None) -> Iterator[Cancel]:
        """Yield a signal that is set when either of two signals is."""
        if self._admitted is not None:
            self._admitted.release()
        both = cancel if cancel is not None else Cancel()
        key = self._cancel.add(both.set)
        try:
            yield both
        finally:
            self._cancel.remove(key)
