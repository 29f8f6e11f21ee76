"""Transfer exact byte ranges of an object: with retries that resume at the next byte, all from one version.

Promises: every byte of ``[begin, end)`` is written once, in order, and from the expected version; otherwise an error is
raised. Each transfer has a deadline, and a shorter one for each time the server is silent.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

from penstock.errors import PenstockError, StorageChangedError, StorageError, StorageUnavailableError
from penstock.storage.backend import Answer, Cancel, Stat, Transient, call_in_thread
from penstock.storage.backends import backend_for
from penstock.storage.urls import shown

if TYPE_CHECKING:
    from penstock.storage.remote import Storage

__all__ = ["persist", "rank_note", "transfer"]

_ENOUGH = 1 << 16  # after this many bytes of progress, the count of failures starts again
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 10.0

T = TypeVar("T")
Write = Callable[[int, bytes | memoryview], object]


class _Receiver:
    """Writes the bytes that arrive from `position` on, and refuses other versions."""

    def __init__(self, url: str, begin: int, end: int | None, known: Stat | None, write: Write) -> None:
        self.url, self.position, self.end, self.known = url, begin, end, known
        self._write, self._skip = write, 0
        self._lock, self._is_open = threading.Lock(), True

    def take(self, answer: Answer) -> None:
        """Take what is wanted of an answer, in the thread where it arrives."""
        with closing(answer.pieces):
            self.begun(answer.stat, answer.begin)
            for piece in answer.pieces:
                with self._lock:
                    if not self._is_open:
                        raise Transient("the request was abandoned")
                    if not self.piece(piece):
                        return

    def close(self) -> None:
        """Accept nothing more from an abandoned request, whose thread may still run."""
        with self._lock:
            self._is_open = False

    def begun(self, stat: Stat, offset: int) -> None:
        if self.known is None:
            self.known = stat
            self.end = stat.size if self.end is None else min(self.end, stat.size)
        elif difference := self.known.difference(stat):
            raise StorageChangedError(
                f"{shown(self.url)} changed while it was read: {difference}. Open it again; to update an "
                "object in use, write a new one under another name"
            )
        if self.end is None:
            self.end = stat.size
        if offset > self.position:
            raise StorageError(
                f"{shown(self.url)}: byte {self.position} was requested, but the server started at byte {offset}"
            )
        self._skip = self.position - offset

    def piece(self, data: bytes | memoryview) -> bool:
        assert self.end is not None
        view = memoryview(data)
        if self._skip:  # a server without ranges starts at byte 0
            skipped = min(self._skip, len(view))
            self._skip -= skipped
            view = view[skipped:]
        view = view[: self.end - self.position]
        if len(view):
            self._write(self.position, view)
            self.position += len(view)
        return self.position < self.end


def persist(
    url: str,
    what: str,
    once: Callable[[], T],
    how: Storage,
    *,
    position: Callable[[], int] = lambda: 0,
    cancel: Cancel | None = None,
) -> T:
    """Return the result of ``once()``, called in a thread until it does not raise `Transient`.

    Args:
        url: the object, for messages.
        what: the verb, for messages.
        once: makes one request; if it hangs, its thread is abandoned.
        how: limits of time and of failures in a row. The pauses grow with these.
        position: the next byte; a failure after some progress counts as the first.
        cancel: ends it.

    Raises:
        StorageUnavailableError: it keeps failing. Other errors are raised unchanged.
    """
    cancel = cancel or Cancel()
    deadline, mark, in_a_row = time.monotonic() + how.deadline, position(), 0
    for attempt in itertools.count(1):
        try:
            return call_in_thread(once, deadline=deadline, cancel=cancel)
        except Transient as error:
            in_a_row = 1 if position() - mark >= _ENOUGH else in_a_row + 1
            mark = position()
            pause = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** (in_a_row - 1)) * random.uniform(0.5, 1.0)
            is_late = time.monotonic() + pause >= deadline
            if cancel.is_set() or is_late or in_a_row >= how.attempts:
                late = ", and its time is up" if in_a_row < how.attempts else ""
                raise StorageUnavailableError(
                    f"cannot {what} {shown(url)}{rank_note()}: {error} (attempt {attempt}{late})"
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
        cancel.sleep(pause)
    raise AssertionError("unreachable")


def transfer(
    url: str,
    begin: int,
    end: int | None,
    how: Storage,
    *,
    known: Stat | None,
    write: Write,
    cancel: Cancel | None = None,
) -> Stat:
    """Fetch the bytes ``[begin, end)`` (or up to the object's end) and pass them to ``write``, in order.

    Args:
        url: the object.
        begin, end: the bytes.
        how: access options, deadlines.
        known: the expected version; None for any version, which may end before ``end``.
        write: called with a position and bytes, in the thread where they arrive.

    Returns:
        The version that was read.

    Raises:
        StorageChangedError: another version, or the object was replaced meanwhile.
        StorageUnavailableError: it keeps failing, or exceeds the deadline. Names object, attempt and rank.
        StorageNotFoundError, StorageAuthError, StorageError: failures that retries do not fix.
    """
    receiver, backend = _Receiver(url, begin, end, known, write), backend_for(url, how)

    def once() -> None:
        is_ranged = receiver.known is None or receiver.known.ranged
        receiver.take(backend.read(url, receiver.position, receiver.end, ranged=is_ranged))
        assert receiver.end is not None
        if receiver.position < receiver.end:
            missing = receiver.end - receiver.position
            raise Transient(f"the answer ended {missing:,} bytes early, at byte {receiver.position:,}")

    if end is None or begin < end:
        what = f"read bytes {begin:,} to {'the end' if end is None else f'{end:,}'} of"
        try:
            persist(url, what, once, how, position=lambda: receiver.position, cancel=cancel)
        finally:
            receiver.close()
    assert receiver.known is not None or end is not None
    return receiver.known if receiver.known is not None else Stat(begin)


def rank_note() -> str:
    """Return `` (rank 3 of 8)`` in a job of several ranks, else an empty text; for messages."""
    try:
        from penstock.distributed import current

        world = current()
    except Exception:  # a problem with ranks must not hide the error that is reported
        return ""
    return f" (rank {world.rank} of {world.world_size})" if world.world_size > 1 else ""
