"""The interface of object stores, and the threads that wait for their answers.

A backend sends one request and reports the answer. `penstock.storage.transfer` retries, resumes and compares versions.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar

from penstock.threads import Daemon

__all__ = ["Answer", "Backend", "Cancel", "Stat", "Transient", "call_in_thread", "submit"]

_SPARE = 1.0  # seconds after which an idle thread ends
_SHUTDOWN_TIMEOUT_S = 1.0  # an abandoned call ends when its next bytes arrive; a hung server sends none

T = TypeVar("T")
Job = Callable[[], Callable[[], None]]


@dataclass(frozen=True)
class Stat:
    """The identity of an object's version: size in bytes, etag, modification time as text.

    ``ranged``: whether the server supports range requests.
    """

    size: int
    etag: str = ""
    modified: str = ""
    ranged: bool = True

    @property
    def fingerprint(self) -> str:
        """A text that changes with the object, as far as the server shows."""
        return f"{self.size}:{self.etag or self.modified}"

    def difference(self, other: Stat) -> str:
        """Return how this version differs from another one of the same object; empty if it does not."""
        if self.size != other.size:
            return f"it had {self.size:,} bytes and has {other.size:,}"
        if self.etag and other.etag:
            return f"its etag was {self.etag} and is {other.etag}" if self.etag != other.etag else ""
        if self.modified and other.modified and self.modified != other.modified:
            return f"it was modified at {other.modified}, before that at {self.modified}"
        return ""


class Transient(Exception):
    """A failure that a retry may fix: a lost connection, a timeout, a 5xx status."""


class Answer(NamedTuple):
    """The answer to a request: the version, the position of its first byte in the object, and its bytes in pieces."""

    stat: Stat
    begin: int
    pieces: Generator[bytes | memoryview]


class Cancel:
    """Cancels transfers in other threads: `set` it, and they stop waiting."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._calls: dict[int, Callable[[], object]] = {}

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._event.is_set()

    def set(self) -> None:
        """Cancel all present and future transfers that use this object."""
        with self._lock:
            self._event.set()
            calls = list(self._calls.values())
        for call in calls:
            call()

    def sleep(self, seconds: float) -> None:
        """Wait this long, or until it is set."""
        self._event.wait(seconds)

    def add(self, call: Callable[[], object]) -> int:
        """Register a function that `set` calls; call it at once if already set. Return the key for `remove`."""
        with self._lock:
            self._calls[id(call)] = call
            late = self._event.is_set()
        if late:
            call()
        return id(call)

    def remove(self, key: int) -> None:
        """Unregister the function of this key; no error if it is gone."""
        with self._lock:
            self._calls.pop(key, None)


class Backend(Protocol):
    """One kind of store. Used by several threads at once; each process creates its own.

    Methods block until the store answers; `call_in_thread` calls them. They raise `Transient`, StorageNotFoundError,
    StorageAuthError or StorageError.
    """

    def stat(self, url: str) -> Stat:
        """Return size and version."""

    def read(self, url: str, begin: int, end: int | None, *, ranged: bool) -> Answer:
        """Request the bytes ``[begin, end)``, or all from ``begin`` on.

        If ``ranged`` is False, the server is known not to support ranges: request the whole object.
        """

    def put(self, url: str, data: bytes, *, if_absent: bool) -> bool:
        """Write a whole object; return False if ``if_absent`` and it exists."""

    def find(self, url: str) -> list[tuple[str, Stat]]:
        """Return the URLs that match a pattern, sorted, with their versions."""


class _Threads:
    """Threads that wait for answers: started when none is free; an idle one ends after a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[SimpleQueue[Job | None]] = []  # the queue of each idle thread

    def run(self, job: Job) -> None:
        """Run a job in a thread, and call its result once the thread is free."""
        with self._lock:
            box = self._free.pop() if self._free else None
        if box is not None:
            box.put(job)
            return
        box = SimpleQueue()
        box.put(job)
        Daemon(
            partial(self._work, box),
            name="penstock-storage",
            wake=partial(box.put, None),
            shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
        )

    def _work(self, box: SimpleQueue[Job | None], _: Daemon) -> None:
        while True:
            try:
                job = box.get(timeout=_SPARE)
            except Empty:
                with self._lock:
                    if box in self._free:
                        self._free.remove(box)
                        return
                # Another thread has taken the queue and is about to put a job.
                continue
            if job is None:
                return
            tell = job()
            # The callback may submit the next job to this thread.
            with self._lock:
                self._free.append(box)
            tell()
            # These may hold large objects.
            del job, tell


_threads: dict[int, _Threads] = {}
"""The threads of this process. A forked child has its own, since it lacks those of its parent."""


def submit(function: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Call a function that may block forever in a thread, and return its future result."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> Callable[[], None]:
        try:
            tell = partial(future.set_result, function())
        except BaseException as error:
            tell = partial(future.set_exception, error)
        try:
            return partial(_tell, future, tell)
        finally:
            # An error's traceback refers to this frame, so this frame must not refer to the error.
            del tell

    _threads.setdefault(os.getpid(), _Threads()).run(work)
    return future


def call_in_thread(function: Callable[[], T], *, deadline: float, cancel: Cancel) -> T:
    """Return the result of a function that may block forever; its thread is abandoned if it does.

    Raises:
        TimeoutError: past the deadline.
        Transient: it was cancelled.
    """
    future = submit(function)
    key = cancel.add(future.cancel)
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except concurrent.futures.CancelledError:
        raise Transient("it was cancelled") from None
    finally:
        cancel.remove(key)


def _tell(future: concurrent.futures.Future[Any], tell: Callable[[], None]) -> None:
    if future.set_running_or_notify_cancel():
        tell()
