"""Transfer exact byte ranges of an object: with retries that resume at the next byte, all from one version.

Promises: every byte of ``[begin, end)`` is written once, in order, and from the expected version; otherwise an error is
raised. Each transfer has a deadline, and a shorter one for each time the server is silent.

A `Store` makes one request and reports the answer. It may block forever, so a thread makes the request, and is
abandoned past the deadline.
"""

from __future__ import annotations

import concurrent.futures
import os
import random
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from penstock.errors import PenstockError, StorageChangedError, StorageError, StorageUnavailableError
from penstock.storage.urls import shown
from penstock.threads import Daemon

if TYPE_CHECKING:
    from penstock.storage.remote import Storage

__all__ = ["Answer", "Cancel", "Stat", "Store", "Transient", "persist", "rank_note", "submit", "transfer"]

_ENOUGH = 1 << 16  # after this many bytes of progress, the count of failures starts again
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 10.0
_IDLE_THREAD_S = 1.0  # after which an idle thread ends
_SHUTDOWN_TIMEOUT_S = 1.0  # an abandoned call ends when its next bytes arrive; a hung server sends none

T = TypeVar("T")
Write = Callable[[int, bytes | memoryview], object]
"""Takes a position in the object, and the bytes from there on."""


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


class Store(Protocol):
    """One kind of store. Used by several threads at once; each process creates its own.

    Methods block until the store answers. They raise `Transient`, StorageNotFoundError, StorageAuthError or
    StorageError.
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


class Cancel(threading.Event):
    """Cancels transfers in other threads: `set` it, and they stop waiting."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._calls: dict[int, Callable[[], object]] = {}

    def set(self) -> None:
        """Cancel all present and future transfers that use this object."""
        with self._lock:
            super().set()
            calls = list(self._calls.values())
        for call in calls:
            call()

    def add(self, call: Callable[[], object]) -> int:
        """Register a function that `set` calls; call it at once if already set. Return the key for `remove`."""
        with self._lock:
            self._calls[id(call)] = call
        if self.is_set():
            call()
        return id(call)

    def remove(self, key: int) -> None:
        """Unregister the function of this key; no error if it is gone."""
        with self._lock:
            self._calls.pop(key, None)


_idle_threads: dict[int, list[SimpleQueue[Any]]] = {}
"""The queues of the idle threads of this process. A forked child has its own, since it lacks those of its parent."""


def submit(function: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Call a function that may block forever in a thread, and return its future result."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    idle = _idle_threads.setdefault(os.getpid(), [])
    try:
        jobs = idle.pop()
    except IndexError:
        jobs = SimpleQueue()
        Daemon(
            partial(_work, jobs, idle),
            name="penstock-storage",
            wake=partial(jobs.put, None),
            shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
        )
    jobs.put((future, function))
    return future


def _work(jobs: SimpleQueue[Any], idle: list[SimpleQueue[Any]], _: Daemon) -> None:
    """Do the jobs of a queue until none comes for a while."""
    while True:
        try:
            job = jobs.get(timeout=_IDLE_THREAD_S)
        except Empty:
            try:
                idle.remove(jobs)
                return
            except ValueError:  # another thread has taken the queue and is about to put a job
                continue
        if job is None:
            return
        future, function = job
        try:
            tell = partial(future.set_result, function())
        except BaseException as error:
            tell = partial(future.set_exception, error)
        # The callback of the future may submit the next job to this thread.
        idle.append(jobs)
        if future.set_running_or_notify_cancel():
            tell()
        # They may hold large objects, or an error whose traceback holds this frame.
        del job, future, function, tell


def persist(
    url: str,
    what: str,
    once: Callable[[], T],
    how: Storage,
    *,
    position: Callable[[], int] = lambda: 0,
    cancel: Cancel | None = None,
) -> T:
    """Return the result of ``once()``, which makes one request, called in a thread until it does not raise `Transient`.

    ``what`` is the verb of messages. The pauses grow with the failures in a row; a failure after some progress of
    ``position()`` counts as the first. The thread of a call that hangs is abandoned.

    Raises:
        StorageUnavailableError: it keeps failing, exceeds the deadline or is cancelled. Other errors are unchanged.
    """
    cancel = cancel or Cancel()
    deadline, mark, attempt, in_a_row = time.monotonic() + how.deadline, position(), 0, 0
    while True:
        attempt += 1
        future = submit(once)
        key = cancel.add(future.cancel)
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except (Transient, concurrent.futures.CancelledError) as error:
            in_a_row = 1 if position() - mark >= _ENOUGH else in_a_row + 1
            mark = position()
            pause = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** (in_a_row - 1)) * random.uniform(0.5, 1.0)
            is_late = time.monotonic() + pause >= deadline
            if cancel.is_set() or is_late or in_a_row >= how.attempts:
                late = ", and its time is up" if in_a_row < how.attempts else ""
                reason = error if isinstance(error, Transient) else "it was cancelled"
                raise StorageUnavailableError(
                    f"cannot {what} {shown(url)}{rank_note()}: {reason} (attempt {attempt}{late})"
                ) from None
        except PenstockError as error:
            if note := rank_note():
                error.add_note(f"in attempt {attempt}{note}")
            raise
        except TimeoutError:
            raise StorageUnavailableError(
                f"cannot {what} {shown(url)}{rank_note()}: not done in {how.deadline:g} s (attempt "
                f"{attempt}); the server or the network is too slow, or hangs"
            ) from None
        finally:
            cancel.remove(key)
        cancel.wait(pause)


class _Receiver:
    """Writes the bytes that arrive from `position` on, and refuses other versions."""

    def __init__(self, url: str, begin: int, end: int | None, known: Stat | None, write: Write) -> None:
        self.url, self.position, self.end, self.known, self._write = url, begin, end, known, write
        self._lock, self._is_open = threading.Lock(), True

    def receive(self, store: Store) -> None:
        """Request what is missing, and take what is wanted of the answer."""
        is_ranged = self.known is None or self.known.ranged
        answer = store.read(self.url, self.position, self.end, ranged=is_ranged)
        with closing(answer.pieces):
            if self.known is None:
                self.known = answer.stat
                self.end = answer.stat.size if self.end is None else min(self.end, answer.stat.size)
            elif difference := self.known.difference(answer.stat):
                raise StorageChangedError(
                    f"{shown(self.url)} changed while it was read: {difference}. Open it again; to update an "
                    "object in use, write a new one under another name"
                )
            end = self.end = answer.stat.size if self.end is None else self.end
            if answer.begin > self.position:
                raise StorageError(
                    f"{shown(self.url)}: byte {self.position} was requested, but the server started at byte "
                    f"{answer.begin}"
                )
            skip = self.position - answer.begin  # a server without ranges starts at byte 0
            for piece in answer.pieces:
                with self._lock:
                    if not self._is_open:
                        raise Transient("the request was abandoned")
                    wanted = memoryview(piece)[skip : skip + end - self.position]
                    skip = max(0, skip - len(piece))
                    if len(wanted):
                        self._write(self.position, wanted)
                        self.position += len(wanted)
                    if self.position >= end:
                        return
        if self.position < end:
            raise Transient(f"the answer ended {end - self.position:,} bytes early, at byte {self.position:,}")

    def close(self) -> None:
        """Accept nothing more from an abandoned request, whose thread may still run."""
        with self._lock:
            self._is_open = False


def transfer(
    url: str, begin: int, end: int | None, how: Storage, *, known: Stat | None, write: Write, cancel: Cancel | None
) -> Stat:
    """Fetch the bytes ``[begin, end)`` (or up to the object's end), and return the version that was read.

    They are passed in order to ``write``, in the thread where they arrive. ``known`` is the expected version; None for
    any version, which may end before ``end``.

    Raises:
        StorageChangedError: another version, or the object was replaced meanwhile.
        StorageUnavailableError: it keeps failing, or exceeds the deadline. Names object, attempt and rank.
        StorageNotFoundError, StorageAuthError, StorageError: failures that retries do not fix.
    """
    if end is not None and begin >= end:
        return known or Stat(begin)
    receiver = _Receiver(url, begin, end, known, write)
    once = partial(receiver.receive, how.store_of(url))
    what = f"read bytes {begin:,} to {'the end' if end is None else f'{end:,}'} of"
    try:
        persist(url, what, once, how, position=lambda: receiver.position, cancel=cancel)
    finally:
        receiver.close()
    assert receiver.known is not None
    return receiver.known


def rank_note() -> str:
    """Return `` (rank 3 of 8)`` in a job of several ranks, else an empty text; for messages."""
    try:
        from penstock.distributed import current

        world = current()
    except Exception:  # a problem with ranks must not hide the error that is reported
        return ""
    return f" (rank {world.rank} of {world.world_size})" if world.world_size > 1 else ""
