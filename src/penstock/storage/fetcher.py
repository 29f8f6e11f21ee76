"""`Fetcher`: the threads that copy objects into the cache before they are needed, in the order of need.

    fetcher = Fetcher(storage)
    fetcher.follow([Use(url, first=0, last=99), Use(other, first=100, last=199)])
    fetcher.advance(100)      report that the consumer is at position 100: the next objects are fetched

The planned uses are published in the cache's folder, so the cache first evicts the objects whose next use by any
process is furthest away (`penstock.storage.planned_use`). A consumer opens its objects itself: from a copy, complete or
in transfer, or else from the store.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from penstock.errors import NotCachedError
from penstock.storage.download import PIECE
from penstock.storage.local import UNWRITABLE
from penstock.storage.planned_use import Use, UsePublisher
from penstock.storage.remote import RemoteSource, Storage
from penstock.storage.transfer import Cancel
from penstock.threads import Daemon

__all__ = ["Fetcher", "ahead_bytes"]

_COPIES = 4  # large objects fetched at a time, which share the storage's requests
_PART, _MOST = 16, 4 << 30  # prefetched bytes take at most 1/16 of the cache's limit, and at most 4 GiB

_PATIENCE = 10.0  # seconds for which `close` waits for a thread


def ahead_bytes(limit: int) -> int:
    """Return how many bytes of a cache's limit prefetched objects may take."""
    return min(limit // _PART, _MOST)


class Fetcher:
    """Fetches the objects of one consumer into the cache, in the order of their first use.

    Args:
        storage: access options and the cache.
        ahead_bytes: maximum bytes of prefetched objects, complete or in transfer, besides the next object. Default: a
            sixteenth of the cache's limit, at most 4 GiB. They may evict copies that are needed later.

    Threads run while something may be fetched, at most `Storage.parallel`. A large object uses a quarter of so many
    requests, a small one a single request. Memory: the blocks in transfer, and the uses. In a forked child, calls do
    nothing.
    """

    def __init__(self, storage: Storage, *, ahead_bytes: int | None = None) -> None:
        self._most = storage.parallel
        self._each = max(1, storage.parallel // _COPIES)
        self._storage, self._bound = replace(storage, parallel=self._each), ahead_bytes
        self._pid = os.getpid()
        self._publisher: UsePublisher | None = None
        self._sources: dict[str, RemoteSource] = {}
        self._changed = threading.Condition()
        self._admission = threading.Lock()
        self._cancel = Cancel()
        self._threads: set[Daemon] = set()
        self._plan = 0  # number of the current plan
        self._position = 0
        self._waiting: list[tuple[int, Use]] = []  # a heap, in the order of need
        self._urgent: dict[str, Use] = {}  # objects that a consumer waits for: the cache may evict anything for them
        self._busy: dict[str, int] = {}  # objects in transfer, with the number of their requests
        self._ahead: dict[str, tuple[int, int]] = {}  # first position and bytes of prefetched objects
        self._full_at: int | None = None  # the position at which the cache had no space for the next object
        self._errors: dict[str, BaseException] = {}

    def follow(self, uses: Sequence[Use], *, position: int = 0) -> None:
        """Fetch these objects, in the order of need, in place of those from earlier calls that are not in transfer."""
        if self._pid != os.getpid():
            return
        try:
            cache = self._storage.the_cache()
            if self._publisher is None:
                self._publisher = UsePublisher(cache.folder)
            if self._bound is None:
                self._bound = ahead_bytes(cache.limit())
            self._publisher.publish(uses, position=position)
        except OSError as error:
            # The cache is read-only, or its disk is full: opening an object will report it.
            if error.errno not in UNWRITABLE:
                raise
        with self._changed:
            self._plan, self._position, self._full_at = self._plan + 1, position, None
            self._waiting = [(number, use) for number, use in enumerate(uses) if use.copied]
            self._ahead.clear()
            self._start()

    def advance(self, position: int) -> None:
        """Set the position of the consumer. Costs microseconds."""
        if self._pid != os.getpid():
            return
        if self._publisher is not None:
            self._publisher.advance(position)
        with self._changed:
            self._position = position
            self._ahead = {url: ahead for url, ahead in self._ahead.items() if ahead[0] > position}
            self._start()

    def wait(self, uses: Sequence[Use], is_done: Callable[[Use], bool]) -> None:
        """Fetch objects at once, until all of them are done; raise the first error of `Use.fetch`."""
        with self._changed:
            while missing := [use for use in uses if not is_done(use)]:
                for use in missing:
                    if use.url in self._errors:
                        raise self._errors.pop(use.url)
                    if use.url not in self._busy:
                        self._urgent.setdefault(use.url, use)
                self._start()
                self._changed.wait()

    def notify(self) -> None:
        """Let `wait` look again."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads, within seconds, and withdraw the uses. Partial downloads resume later."""
        if self._pid != os.getpid():
            return
        self._stop()
        self._cancel = Cancel()
        for thread in list(self._threads):
            if thread is not threading.current_thread():  # the garbage collector may close it in any thread
                thread.join(_PATIENCE)
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def _stop(self) -> None:
        self._cancel.set()
        with self._changed:
            self._waiting, self._ahead = [], {}
            self._urgent.clear()
            self._changed.notify_all()

    # The threads. Whoever calls `_start` or `_next` holds the lock.

    def _start(self) -> None:
        """Start a thread if an object may be fetched; that thread starts the next one."""
        if len(self._threads) < self._most and self._next() is not None:
            self._threads.add(Daemon(self._work, name="penstock-fetch", wake=self._stop))

    def _next(self) -> Use | None:
        """Return the object that may be fetched now."""
        if self._urgent:
            return next(iter(self._urgent.values()))
        # If the cache was full, it has copies that are needed later once the consumer has advanced.
        while self._waiting and self._full_at != self._position:
            use = self._waiting[0][1]
            if use.last >= self._position and use.url not in self._busy:
                ahead = sum(size for first, size in self._ahead.values() if first > self._position)
                fits = not ahead or self._bound is None or ahead + use.size <= self._bound
                return use if fits and sum(self._busy.values()) + self._requests(use) <= self._most else None
            heapq.heappop(self._waiting)
        return None

    def _requests(self, use: Use) -> int:
        """Return how many concurrent requests an object makes."""
        return min(self._each, max(1, -(-use.size // PIECE)))

    def _work(self, thread: Daemon) -> None:
        while True:
            with ExitStack() as admission:
                # One at a time: a later object must not take the space of one that is needed sooner.
                admission.enter_context(self._admission)
                with self._changed:
                    use = self._next()
                    if use is None:
                        self._threads.discard(thread)
                        return
                    is_urgent = self._urgent.pop(use.url, None) is not None
                    number = 0 if is_urgent else heapq.heappop(self._waiting)[0]
                    plan, cancel, position = self._plan, self._cancel, self._position
                    self._busy[use.url] = self._requests(use)
                    self._ahead[use.url] = use.first, use.size
                    self._errors.pop(use.url, None)
                    self._start()
                size, is_full, error = 0, False, None
                try:
                    size = self._fetch(use, is_urgent, cancel, admission)
                except NotCachedError:
                    is_full = True
                except BaseException as raised:
                    # Without a reader for it, the error is that of whoever opens the object.
                    error = raised if use.fetch is not None and not cancel.is_set() else None
            with self._changed:
                del self._busy[use.url]
                if plan == self._plan:
                    self._ahead[use.url] = use.first, size
                    if is_full and not is_urgent:
                        heapq.heappush(self._waiting, (number, use))
                        self._full_at = position
                if error is not None:
                    self._errors[use.url] = error
                del error
                self._changed.notify_all()

    def _fetch(self, use: Use, is_urgent: bool, cancel: Cancel, admission: ExitStack) -> int:
        """Fetch an object; return the bytes that were not in the cache."""
        if use.fetch is not None:
            admission.close()
            use.fetch(not is_urgent, cancel)
            return use.size
        if use.url not in self._sources:
            self._sources[use.url] = RemoteSource(use.url, self._storage, use.stat)
        source, cache = self._sources[use.url], self._storage.the_cache()
        if cache.has(source):
            return 0
        cache.open(source.until(cancel, admission.close), only_later=True, progress=False)
        return source.size
