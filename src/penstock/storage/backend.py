"""What a kind of object store has to offer, and the loop that the asynchronous ones share.

A back end asks once and reports what it sees; it neither retries nor judges. Retrying, resuming and comparing is the
business of `penstock.storage.transfer`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from penstock.threads import Daemon

__all__ = ["Backend", "Cancel", "Receiver", "Stat", "Transient", "call_in_thread", "run_async"]

T = TypeVar("T")


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


class _Loop:
    """The event loop of this process, in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        Daemon(lambda _: self.loop.run_forever(), name="penstock-storage", wake=self._stop)

    def _stop(self) -> None:
        self.loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        # A library whose answer comes when the interpreter has gone would end the process by an abort.
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True)
        ended.add_done_callback(lambda _: self.loop.stop())


_lock = threading.Lock()
_loop: _Loop | None = None
_of_parents: list[_Loop | None] = []  # closing one would take its files from the parent


def _shared_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = _Loop()
        return _loop.loop


def _after_fork() -> None:
    global _lock, _loop
    _of_parents.append(_loop)
    _lock, _loop = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run_async(coroutine: Coroutine[Any, Any, T], *, deadline: float, cancel: Cancel) -> T:
    """The result of a coroutine on the event loop of this process, from any other thread.

    Raises:
        TimeoutError: past the deadline. The coroutine is cancelled.
        Transient: it was cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, _shared_loop())
    key = cancel.add(future.cancel)
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except concurrent.futures.CancelledError:
        raise Transient("it was cancelled") from None
    except BaseException:
        future.cancel()
        raise
    finally:
        cancel.remove(key)


def call_in_thread(function: Callable[[], T], *, deadline: float, cancel: Cancel) -> T:
    """The result of a function that may block for ever, from a thread that is left behind if it does.

    Raises: as `run_async`.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work(_: Daemon) -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:
            failure = error
        if not future.set_running_or_notify_cancel():
            return
        if failure is not None:
            future.set_exception(failure)
        else:
            future.set_result(cast(T, result))

    key = cancel.add(future.cancel)
    Daemon(work, name="penstock-storage")
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except concurrent.futures.CancelledError:
        raise Transient("it was cancelled") from None
    finally:
        cancel.remove(key)
