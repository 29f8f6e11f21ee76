"""Read an object in parallel blocks: a file-like stream with read-ahead.

Promises: all bytes in order, or an error; at most ``parallel`` blocks of memory per stream; `close` leaves no thread.
In a forked child, a stream restarts its transfers.
"""

from __future__ import annotations

import io
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

from penstock.errors import StorageUnavailableError
from penstock.storage.backend import Cancel, submit

__all__ = ["BLOCK", "PARALLEL", "BlockStream", "Fetch", "Waiting"]

BLOCK = 4 << 20  # bytes per request
PARALLEL = 8
_SMALL = 16  # the first request of a stream is this fraction of a block
_GRACE = 10.0  # seconds allowed beyond the deadline of a transfer

T = TypeVar("T")
Fetch = Callable[[int, int, Cancel], "bytes | bytearray | memoryview"]
"""Returns the bytes ``[begin, end)``; raises after its deadline, or when it is cancelled."""


class Waiting(Generic[T]):
    """The future result of ``work(cancel)``, which runs in a thread of its own and ends within ``deadline`` seconds."""

    def __init__(self, work: Callable[[Cancel], T], deadline: float) -> None:
        self._until, self._cancel = time.monotonic() + deadline + _GRACE, Cancel()
        self._future = submit(partial(work, self._cancel))

    def result(self) -> T:
        """Return the result when it has arrived; raise the error of the work."""
        try:
            return self._future.result(max(0.0, self._until - time.monotonic()))
        except TimeoutError:
            raise StorageUnavailableError("neither the requested bytes nor an error arrived; giving up") from None

    def cancel(self) -> None:
        """Cancel the transfer; its result is not needed."""
        self._cancel.set()


class BlockStream(io.RawIOBase):
    """A read-only, seekable binary file over ``[begin, end)`` of an object, with read-ahead.

    Args:
        fetch: returns a range.
        begin, end: the range of the object; `tell` and `seek` count from the beginning of the object.
        block: bytes per request.
        parallel: maximum number of concurrent requests. At the start, and after a seek, one block is fetched in two
            requests, the first of them small so that it arrives soon; once that is consumed, all requests start. So
            reading a header fetches one block, and reading on loses no time.
        deadline: seconds within which ``fetch`` ends.
        spent: called with a result of ``fetch`` when it is no longer needed.

    Unlike other raw files, `read(n)` returns n bytes, fewer only at the end. Not thread-safe.
    """

    _base: int  # start of the current block, and of the first one that was not requested
    _next: int
    _sizes: list[int]  # sizes of the next requests, in reverse order; later requests are whole blocks
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
        self._ahead: deque[tuple[int, Waiting[bytes | bytearray | memoryview]]] = deque()  # blocks with their position
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
        """Return the position of the next byte, from the beginning of the object."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Change the position and return it. Blocks that have arrived or are in transfer are reused."""
        target = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}[whence]
        if target < 0:
            raise ValueError(f"cannot seek to {target}")
        if not self._base <= target <= max(self._next, self._base + len(self._data)):
            self._drop()
            self._begin_at(target)
        self._position = target
        return target

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer and return the number of bytes, fewer only at the end."""
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
        """Return ``size`` bytes, fewer only at the end; all remaining bytes, requested at once, for -1."""
        left = max(0, self._end - self._position)
        if size is None or size < 0:
            self._ask_at_once()
        wanted = left if size is None or size < 0 else min(size, left)
        first = self._some(wanted)
        if len(first) == wanted:
            return bytes(first)
        rest = bytearray(wanted)
        rest[: len(first)] = first
        self.readinto(memoryview(rest)[len(first) :])
        return bytes(rest)

    def readall(self) -> bytes:
        """Return all remaining bytes."""
        return self.read(-1)

    def pieces(self) -> Iterator[memoryview]:
        """Yield all remaining bytes, a block at a time, without copying them; each is valid until the next."""
        self._ask_at_once()
        while len(piece := self._some(self._block)):
            yield piece

    def close(self) -> None:
        """Close the stream and cancel its transfers."""
        if not self.closed:
            self._drop()
        super().close()

    def _some(self, size: int) -> memoryview:
        """Return 1 to ``size`` bytes and advance past them; empty at the end."""
        if self.closed:
            raise ValueError("the stream is closed")
        if os.getpid() != self._pid:  # the threads exist only in the parent
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
        """Make the next block the current one."""
        while len(self._ahead) < self._window and self._next < self._end:
            stop = min(self._next + (self._sizes.pop() if self._sizes else self._block), self._end)
            self._ahead.append((self._next, Waiting(partial(self._fetch, self._next, stop), self._deadline)))
            self._next = stop
        begin, block = self._ahead[0]
        try:
            data = memoryview(block.result())
        except BaseException:  # also Ctrl-C: the next read requests the block again
            self._drop()
            self._begin_at(self._position)
            raise
        self._ahead.popleft()
        if len(self._data):
            self._spent(self._data.obj)
        self._data, self._base = data, begin
        self._window = self._parallel

    def _begin_at(self, position: int) -> None:
        """Drop all blocks and start again at this position."""
        self._base = self._next = position
        small = self._block // _SMALL
        self._sizes: list[int] = (
            [self._block - small, small] if small and self._parallel > 1 else []
        )  # before whole ones
        self._window = min(2, self._parallel)

    def _ask_at_once(self) -> None:
        """Use full-size requests from now on, since everything will be read."""
        self._sizes, self._window = [], self._parallel

    def _drop(self) -> None:
        if os.getpid() == self._pid:
            for _, block in list(self._ahead):  # another thread may change it
                block.cancel()
        self._ahead.clear()
        self._data = memoryview(b"")
