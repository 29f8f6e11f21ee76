"""Blocks of an object, several under way at a time: a file-like stream that looks ahead, and large reads in parallel.

Promises: bytes in order and all of them, or an error; memory of at most ``parallel`` blocks a stream; no thread is left
behind by `close`. A stream that a fork has copied begins its transfers anew in the child.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.errors import StorageUnavailableError
from penstock.storage.backend import Cancel
from penstock.threads import Daemon

__all__ = ["BLOCK", "PARALLEL", "BlockStream", "Fetch", "Waiting", "read_parallel"]

BLOCK = 4 << 20  # bytes asked for at once
PARALLEL = 8
_SMALL = 16  # the first request of a stream is this part of a block
_GRACE = 10.0  # seconds that a transfer may take to notice its own deadline

Fetch = Callable[[int, int, Cancel], "bytes | bytearray | memoryview"]
"""Gets ``[begin, end)``; raises once its own deadline is past, or when it is cancelled."""


class Waiting:
    """One block on its way, in a thread of its own: what ``fetch(begin, end)`` will give."""

    def __init__(self, fetch: Fetch, begin: int, end: int, deadline: float) -> None:
        self.begin, self.end = begin, end
        self._fetch, self._until = fetch, time.monotonic() + deadline + _GRACE
        self._cancel, self._done = Cancel(), threading.Event()
        self._data: bytes | bytearray | memoryview = b""
        self._error: BaseException | None = None
        Daemon(self._work, name="penstock-block", wake=self._cancel.set)

    def _work(self, _: Daemon) -> None:
        try:
            self._data = self._fetch(self.begin, self.end, self._cancel)
        except BaseException as error:
            self._error = error
        self._done.set()

    def result(self) -> memoryview:
        """Its bytes, once they are there. Raises what went wrong."""
        if not self._done.wait(max(0.0, self._until - time.monotonic())):
            raise StorageUnavailableError("what was asked for did not come, nor an error; giving up")
        if self._error is not None:
            raise self._error
        return memoryview(self._data)

    def cancel(self) -> None:
        """Give it up; nobody will ask for its bytes."""
        self._cancel.set()


class BlockStream(io.RawIOBase):
    """A read-only, seekable binary file over ``[begin, end)`` of an object, which reads ahead of its consumer.

    Args:
        fetch: gets a range.
        begin, end: the part of the object; `tell` and `seek` count from the object's own beginning.
        block: bytes of one request.
        parallel: requests under way at most. It begins, after a seek too, with one block in two requests, the first of
            them small so that it is here soon; once that is consumed it asks for all. So a look at a header fetches one
            block, and reading on loses no time.
        deadline: seconds in which ``fetch`` promises to end.
        spent: called with what ``fetch`` returned, once nothing of it is needed any more.

    Unlike other raw files, `read(n)` gives n bytes, fewer at the end alone. Not for several threads at once.
    """

    _base: int  # where the present block begins, and the first one that was not asked for
    _next: int
    _sizes: list[int]  # of the next requests, the last one first; those after them are whole blocks
    _window: int

    def __init__(
        self,
        fetch: Fetch,
        begin: int,
        end: int,
        *,
        block: int = BLOCK,
        parallel: int = PARALLEL,
        deadline: float,
        name: str = "",
        spent: Callable[[Any], None] = lambda data: None,
    ) -> None:
        super().__init__()
        self.name, self._spent = name, spent
        self._fetch, self._end, self._block, self._parallel, self._deadline = fetch, end, block, parallel, deadline
        self._position = begin
        self._ahead: deque[Waiting] = deque()
        self._data = memoryview(b"")
        self._begin_at(begin)
        self._pid = os.getpid()

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Where the next byte is read, from the beginning of the object."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go elsewhere. Within what is already there, or under way, nothing is asked for again."""
        target = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}[whence]
        if target < 0:
            raise ValueError(f"cannot seek to {target}")
        if not self._base <= target <= max(self._next, self._base + len(self._data)):
            self._drop()
            self._begin_at(target)
        self._position = target
        return target

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; less at the end alone."""
        with memoryview(buffer) as whole, whole.cast("B") as view:
            done = 0
            while done < len(view):
                some = self._some(len(view) - done)
                if not len(some):
                    break
                view[done : done + len(some)] = some
                done += len(some)
            return done

    def read(self, size: int | None = -1) -> bytes:
        """So many bytes, fewer at the end alone; all that are left for -1."""
        left = max(0, self._end - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        first = self._some(wanted)
        if len(first) == wanted:
            return bytes(first)
        rest = bytearray(wanted)
        rest[: len(first)] = first
        self.readinto(memoryview(rest)[len(first) :])
        return bytes(rest)

    def readall(self) -> bytes:
        """Everything up to the end."""
        return self.read(-1)

    def close(self) -> None:
        """Give up what is under way."""
        if not self.closed:
            self._drop()
        super().close()

    def _some(self, size: int) -> memoryview:
        """Between 1 and ``size`` bytes from the position on, and go behind them; none at the end."""
        if self.closed:
            raise ValueError("the stream is closed")
        if os.getpid() != self._pid:  # the threads stayed in the parent
            self._pid = os.getpid()
            self._ahead.clear()
            self._next = max(self._base + len(self._data), self._position)
        if size <= 0 or self._position >= self._end:
            return memoryview(b"")
        while self._position >= self._base + len(self._data):
            self._advance()
        start = self._position - self._base
        some = self._data[start : start + size]
        self._position += len(some)
        return some

    def _advance(self) -> None:
        """Make the next block the present one."""
        while len(self._ahead) < self._window and self._next < self._end:
            stop = min(self._next + (self._sizes.pop() if self._sizes else self._block), self._end)
            self._ahead.append(Waiting(self._fetch, self._next, stop, self._deadline))
            self._next = stop
        block = self._ahead[0]
        try:
            data = block.result()
        except BaseException:  # ask again when somebody reads again; Ctrl-C included
            self._drop()
            self._begin_at(self._position)
            raise
        self._ahead.popleft()
        if len(self._data):
            self._spent(self._data.obj)
        self._data, self._base = data, block.begin
        self._window = self._parallel

    def _begin_at(self, position: int) -> None:
        """Nothing is there nor under way: the next block is the one from here on."""
        self._base = self._next = position
        small = self._block // _SMALL
        self._sizes: list[int] = (
            [self._block - small, small] if small and self._parallel > 1 else []
        )  # before whole ones
        self._window = min(2, self._parallel)

    def _ask_at_once(self) -> None:
        """All that is there will be read: nothing to begin slowly for."""
        self._sizes, self._window = [], self._parallel

    def _drop(self) -> None:
        if os.getpid() == self._pid:
            for block in list(self._ahead):  # another thread may be at it
                block.cancel()
        self._ahead.clear()
        self._data = memoryview(b"")


def read_parallel(
    fetch: Fetch, begin: int, end: int, *, block: int = BLOCK, parallel: int = PARALLEL, deadline: float
) -> bytes:
    """The bytes ``[begin, end)``: at once if they are no more than a block, else several blocks at a time."""
    if end - begin <= block:
        return bytes(fetch(begin, end, Cancel()))
    with BlockStream(fetch, begin, end, block=block, parallel=parallel, deadline=deadline) as stream:
        stream._ask_at_once()
        return stream.read()
