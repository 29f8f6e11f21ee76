"""What a kind of object store has to offer, and the threads that wait for its answers.

A back end asks once and reports what it sees; it neither retries nor judges. Retrying, resuming and comparing is the
business of `penstock.storage.transfer`.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from penstock.threads import Daemon

__all__ = ["Backend", "Cancel", "Guarded", "Receiver", "Stat", "Transient", "call_in_thread"]

_SPARE = 1.0  # seconds after which a thread that nobody needs ends
_PATIENCE = 1.0  # seconds at exit: bytes that come end a call that was given up, and a server that hangs sends none

T = TypeVar("T")
Job = Callable[[], Callable[[], None]]


@dataclass(frozen=True)
class Stat:
    """What identifies the version of an object: size in bytes, entity tag, time of its last modification as text.

    ``ranged`` says whether the server answers requests for parts.
    """

    size: int
    etag: str = ""
    modified: str = ""
    ranged: bool = True

    @property
    def fingerprint(self) -> str:
        """One text that changes when the object does, as far as the server tells."""
        return f"{self.size}:{self.etag or self.modified}"

    def difference(self, other: Stat) -> str:
        """What tells this from another look at the same object; empty when nothing does."""
        if self.size != other.size:
            return f"it had {self.size:,} bytes and has {other.size:,}"
        if self.etag and other.etag:
            return f"its etag was {self.etag} and is {other.etag}" if self.etag != other.etag else ""
        if self.modified and other.modified and self.modified != other.modified:
            return f"it was modified at {other.modified}, before that at {self.modified}"
        return ""


class Transient(Exception):
    """What may go well the next time: a cut, a timeout, an answer 5xx."""


class Receiver(Protocol):
    """What a request is answered to. Called from whichever thread the answer arrives in; what it raises ends it."""

    @property
    def ranged(self) -> bool:
        """False where the server is known to have no ranges."""

    def begun(self, stat: Stat, offset: int) -> None:
        """The answer begins, and its first byte is the object's byte ``offset``."""

    def piece(self, data: bytes | memoryview) -> bool:
        """Some bytes, in order; False once no more are wanted."""


class Cancel:
    """Ends transfers that are under way in other threads: `set` it, and what they wait for is given up."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._calls: dict[int, Callable[[], object]] = {}

    def is_set(self) -> bool:
        """Whether everything is to be given up."""
        return self._event.is_set()

    def set(self) -> None:
        """Cancel everything that was and will be begun with this."""
        with self._lock:
            self._event.set()
            calls = list(self._calls.values())
        for call in calls:
            call()

    def sleep(self, seconds: float) -> None:
        """Wait, unless it is set."""
        self._event.wait(seconds)

    def add(self, call: Callable[[], object]) -> int:
        """Have something called by `set`; at once where it was set before. Returns the key for `remove`."""
        with self._lock:
            self._calls[id(call)] = call
            late = self._event.is_set()
        if late:
            call()
        return id(call)

    def remove(self, key: int) -> None:
        """Forget what `add` returned this key for; nothing if that is done already."""
        with self._lock:
            self._calls.pop(key, None)


class Backend(Protocol):
    """One kind of store. Used by several threads at once; made anew in every process.

    All raise `Transient`, StorageNotFoundError, StorageAuthError or StorageError; and TimeoutError past ``deadline``, a
    time of `time.monotonic`. ``idle`` is how long no byte may come.
    """

    def stat(self, url: str, *, idle: float, deadline: float, cancel: Cancel) -> Stat:
        """Size and version."""

    def fetch(
        self, url: str, begin: int, end: int | None, into: Receiver, *, idle: float, deadline: float, cancel: Cancel
    ) -> None:
        """Ask for the bytes from ``begin`` to before ``end``, or for all from there on."""

    def put(self, url: str, data: bytes, *, if_absent: bool, idle: float, deadline: float, cancel: Cancel) -> bool:
        """Write an object as a whole; False where ``if_absent`` was asked and there is one."""

    def find(self, url: str, *, deadline: float) -> list[tuple[str, Stat]]:
        """The addresses that a pattern matches, sorted, with their versions."""


class _Threads:
    """Threads that wait for answers: made when none is free, they end when none is needed for a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[SimpleQueue[Job | None]] = []  # the box of each thread that waits

    def run(self, job: Job) -> None:
        """Have something done, and what it returns called once the thread is free."""
        with self._lock:
            box = self._free.pop() if self._free else None
        if box is not None:
            box.put(job)
            return
        box = SimpleQueue()
        box.put(job)
        Daemon(
            partial(self._work, box), name="penstock-storage", wake=partial(box.put, None), shutdown_timeout=_PATIENCE
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
                # Somebody has taken the box, and is about to use it.
                continue
            if job is None:
                return
            tell = job()
            # Whoever is told asks again, of this thread.
            with self._lock:
                self._free.append(box)
            tell()
            # What they hold may be large.
            del job, tell


_threads = _Threads()


def _after_fork() -> None:
    global _threads
    _threads = _Threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def call_in_thread(function: Callable[[], T], *, deadline: float, cancel: Cancel) -> T:
    """Return the result of a function that may block for ever, from a thread that is left behind if it does.

    Raises:
        TimeoutError: past the deadline.
        Transient: it was cancelled.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> Callable[[], None]:
        try:
            tell = partial(future.set_result, function())
        except BaseException as error:
            tell = partial(future.set_exception, error)
        try:
            return partial(_tell, future, tell)
        finally:
            # An error's traceback has this frame, which must not have the error.
            del tell

    key = cancel.add(future.cancel)
    _threads.run(work)
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except concurrent.futures.CancelledError:
        raise Transient("it was cancelled") from None
    finally:
        cancel.remove(key)


def _tell(future: concurrent.futures.Future[Any], tell: Callable[[], None]) -> None:
    if future.set_running_or_notify_cancel():
        tell()


class Guarded:
    """A receiver that hears nothing more of a request which was given up, though its thread goes on."""

    def __init__(self, into: Receiver) -> None:
        self._into, self._lock, self._is_open = into, threading.Lock(), True

    @property
    def ranged(self) -> bool:
        """As the receiver says."""
        return self._into.ranged

    def begun(self, stat: Stat, offset: int) -> None:
        """Tell the receiver."""
        with self._hearing():
            self._into.begun(stat, offset)

    def piece(self, data: bytes | memoryview) -> bool:
        """Give the receiver some bytes."""
        with self._hearing():
            return self._into.piece(data)

    def close(self) -> None:
        """Hear nothing more; a piece that is being taken is waited for."""
        with self._lock:
            self._is_open = False

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        with self._lock:
            if not self._is_open:
                raise Transient("it was given up")
            yield
