"""Transfer exact byte ranges of an object: with retries that resume at the next byte, all from one version.

Promises: every byte of ``[begin, end)`` is written once, in order, and from the expected version; otherwise an error is
raised. Each transfer has a deadline, and a shorter one for each time the server is silent.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, StorageChangedError, StorageError, StorageUnavailableError
from penstock.storage.backend import Backend, Cancel, Stat, Transient
from penstock.storage.urls import shown

if TYPE_CHECKING:
    from tenacity import RetryCallState

__all__ = ["Patience", "find_objects", "put_object", "rank_note", "stat_object", "transfer"]

_ENOUGH = 1 << 16  # after this many bytes of progress, the count of failures starts again
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 10.0

Write = Callable[[int, bytes | memoryview], None]


@dataclass(frozen=True)
class Patience:
    """Limits of a transfer: seconds without a byte, seconds in total, consecutive failures."""

    idle: float = 30.0
    deadline: float = 300.0
    attempts: int = 15


class _Receiver:
    """Writes the bytes that arrive from `position` on, and refuses other versions."""

    def __init__(
        self, url: str, begin: int, end: int | None, known: Stat | None, write: Write | None, target: memoryview | None
    ) -> None:
        self.url, self.position, self.end, self.known = url, begin, end, known
        self._write, self._skip, self._begin, self._target = write, 0, begin, target

    @property
    def ranged(self) -> bool:
        return self.known is None or self.known.ranged

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
            if self._target is not None:
                at = self.position - self._begin
                self._target[at : at + len(view)] = view
            elif self._write is not None:
                self._write(self.position, view)
            self.position += len(view)
        return self.position < self.end


class _Attempts:
    """Counts consecutive failures and computes the pauses; progress resets the count."""

    def __init__(self, patience: Patience, deadline: float, position: Callable[[], int]) -> None:
        self._patience, self._deadline, self._position = patience, deadline, position
        self._mark, self.in_a_row, self.total = position(), 0, 0

    def failed(self) -> None:
        """Count a failure."""
        if self._position() - self._mark >= _ENOUGH:
            self.in_a_row = 0
        self._mark = self._position()
        self.in_a_row += 1
        self.total += 1

    def give_up(self, state: RetryCallState) -> bool:
        return self.in_a_row >= self._patience.attempts or time.monotonic() + self.wait(state) >= self._deadline

    def wait(self, state: RetryCallState) -> float:
        return min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** (self.in_a_row - 1)) * random.uniform(0.5, 1.0)


def _persist(
    url: str, what: str, once: Callable[[float], None], position: Callable[[], int], patience: Patience, cancel: Cancel
) -> None:
    """Call ``once(deadline)`` until it does not raise `Transient`.

    Raises:
        StorageUnavailableError: it keeps failing. Other errors are raised unchanged.
    """
    from tenacity import Retrying, retry_if_exception_type  # imported late: it imports tornado if that is installed

    deadline = time.monotonic() + patience.deadline
    attempts = _Attempts(patience, deadline, position)

    def attempt() -> None:
        try:
            once(deadline)
        except Transient:
            attempts.failed()
            raise

    retrying = Retrying(
        retry=retry_if_exception_type(Transient),
        wait=attempts.wait,
        stop=lambda state: cancel.is_set() or attempts.give_up(state),
        sleep=cancel.sleep,
        reraise=True,
    )
    try:
        retrying(attempt)
    except Transient as error:
        late = ", and its time is up" if attempts.in_a_row < patience.attempts else ""
        raise StorageUnavailableError(
            f"cannot {what} {shown(url)}{rank_note()}: {error} (attempt {attempts.total}{late})"
        ) from None
    except PenstockError as error:
        if note := rank_note():
            error.add_note(f"in attempt {attempts.total + 1}{note}")
        raise
    except TimeoutError:
        raise StorageUnavailableError(
            f"cannot {what} {shown(url)}{rank_note()}: not done in {patience.deadline:g} s (attempt "
            f"{attempts.total + 1}); the server or the network is too slow, or hangs"
        ) from None


def stat_object(backend: Backend, url: str, *, patience: Patience, cancel: Cancel | None = None) -> Stat:
    """Return size and version of an object, by one request. Raises the errors of `transfer`."""
    found: list[Stat] = []
    given_up = cancel or Cancel()

    def once(deadline: float) -> None:
        found.append(backend.stat(url, idle=patience.idle, deadline=deadline, cancel=given_up))

    _persist(url, "open", once, lambda: 0, patience, given_up)
    return found[0]


def find_objects(backend: Backend, url: str, *, patience: Patience) -> list[tuple[str, Stat]]:
    """Return the objects that match a pattern, see `Backend.find`. Raises the errors of `transfer`."""
    found: list[tuple[str, Stat]] = []

    def once(deadline: float) -> None:
        found.extend(backend.find(url, deadline=deadline))

    _persist(url, "list", once, lambda: 0, patience, Cancel())
    return found


def put_object(
    backend: Backend, url: str, data: bytes, *, if_absent: bool, patience: Patience, cancel: Cancel | None = None
) -> bool:
    """Write a whole object; return False if ``if_absent`` and it exists. Raises the errors of `transfer`."""
    done: list[bool] = []
    given_up = cancel or Cancel()

    def once(deadline: float) -> None:
        idle = patience.idle
        done.append(backend.put(url, data, if_absent=if_absent, idle=idle, deadline=deadline, cancel=given_up))

    _persist(url, "write", once, lambda: 0, patience, given_up)
    return done[0]


def transfer(
    backend: Backend,
    url: str,
    begin: int,
    end: int | None,
    *,
    known: Stat | None,
    write: Write | None = None,
    target: memoryview | None = None,
    patience: Patience,
    cancel: Cancel | None = None,
) -> Stat:
    """Fetch the bytes ``[begin, end)`` (or up to the object's end) and pass them to ``write``, in order.

    Args:
        known: the expected version; None for any version, which may end before ``end``.
        write: called with a position and bytes, in the thread where they arrive.
        target: a buffer of exactly ``end - begin`` bytes to fill instead. Do not use it after an error.

    Returns:
        The version that was read.

    Raises:
        StorageChangedError: another version, or the object was replaced meanwhile.
        StorageUnavailableError: it keeps failing, or exceeds the deadline. Names object, attempt and rank.
        StorageNotFoundError, StorageAuthError, StorageError: failures that retries do not fix.
    """
    receiver = _Receiver(url, begin, end, known, write, target)
    given_up = cancel or Cancel()

    def once(deadline: float) -> None:
        at = receiver.position
        backend.fetch(url, at, receiver.end, receiver, idle=patience.idle, deadline=deadline, cancel=given_up)
        assert receiver.end is not None
        if receiver.position < receiver.end:
            missing = receiver.end - receiver.position
            raise Transient(f"the answer ended {missing:,} bytes early, at byte {receiver.position:,}")

    if end is None or begin < end:
        _persist(
            url,
            f"read bytes {begin:,} to {'the end' if end is None else f'{end:,}'} of",
            once,
            lambda: receiver.position,
            patience,
            given_up,
        )
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
