"""Concurrent requests: `BlockStream` is a file that reads ahead, `read_ranges` reads parts of objects, `in_order` and
`in_threads` call other functions of a store.

Promises: all bytes and results in order, or an error; waits have the deadlines of the transfers; at most ``parallel``
blocks or objects in memory; closing leaves no thread that anybody waits for. In a forked child, a stream restarts its
transfers.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from penstock.storage.transfer import Cancel, submit

if TYPE_CHECKING:
    from penstock.storage.remote import RemoteSource

__all__ = ["BLOCK", "PARALLEL", "SMALL_REQUESTS", "BlockStream", "Range", "in_order", "in_threads", "read_ranges"]

BLOCK = 4 << 20  # bytes per request
PARALLEL = 8
SMALL_REQUESTS = 48
"""The maximum number of concurrent small requests."""
_OBJECTS = 16  # objects or ranges that are read concurrently
_FIRST_PART = 16  # the first request of a stream is this fraction of a block
_GAP = 4 << 10  # up to this many unneeded bytes between ranges are read to save a request

T = TypeVar("T")
R = TypeVar("R")
Fetch = Callable[[int, int, Cancel], "bytes | bytearray | memoryview"]
"""Returns the bytes ``[begin, end)``; raises after a deadline of its own, or when it is cancelled."""


def in_order(function: Callable[[T, Cancel], R], items: Sequence[T], *, parallel: int = _OBJECTS) -> Generator[R]:
    """Yield the result of a function for each item, in order, from up to ``parallel`` concurrent calls.

    An error is raised at its position in the order. Closing the generator cancels the calls.
    """
    pending: deque[tuple[Future[R], Cancel]] = deque()
    try:
        for item in items:
            cancel = Cancel()
            pending.append((submit(partial(function, item, cancel)), cancel))
            if len(pending) == parallel:
                yield pending.popleft()[0].result()
        while pending:
            yield pending.popleft()[0].result()
    finally:
        for _, cancel in pending:
            cancel.set()


def in_threads(function: Callable[[T], R], items: Sequence[T], *, count: int = SMALL_REQUESTS) -> list[R]:
    """Return the results of a function that waits for a store, for each item, from ``count`` concurrent calls.

    The first exception, in the order of the items, is raised. Calls that have not started are skipped.
    """
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(count, "penstock-looks") as pool:
        return list(pool.map(function, items))


class Range(NamedTuple):
    """The bytes ``[begin, end)`` of an object."""

    source: RemoteSource
    begin: int
    end: int


def read_ranges(wanted: Sequence[Range]) -> Iterator[bytes]:
    """Yield the bytes of ranges, in the given order. Raises as `penstock.storage.RemoteSource.read_at`.

    Ranges that follow each other in one object come by one request of at most `Storage.block` bytes, also with up to
    4 KiB between two of them. Memory: up to 16 requests, or one range.
    """
    requests: list[list[Range]] = []
    for part in wanted:
        last = requests[-1] if requests else []
        if (
            last
            and last[0].source is part.source
            and last[-1].begin <= part.begin <= last[-1].end + _GAP
            and part.end - last[0].begin <= part.source.storage.block
        ):
            last.append(part)
        else:
            requests.append([part])
    with closing(in_order(_read_neighbours, requests)) as answers:
        for parts, data in zip(requests, answers, strict=True):
            first = parts[0].begin
            for part in parts:
                yield data[part.begin - first : part.end - first]


def _read_neighbours(parts: list[Range], cancel: Cancel) -> bytes:
    source, begin, end = parts[0].source, parts[0].begin, max(part.end for part in parts)
    if end - begin > source.storage.block or not source.stat.ranged:
        return source.read_at(begin, end - begin)
    return bytes(source.fetch(begin, end, cancel))


class BlockStream(io.RawIOBase):
    """A read-only, seekable binary file over ``[begin, end)`` of an object, with read-ahead.

    Args:
        fetch: returns a range.
        begin, end: the range of the object; `tell` and `seek` count from the beginning of the object.
        block: bytes per request.
        parallel: maximum number of concurrent requests. At the start, and after a seek, one block is fetched in two
            requests, the first of them small so that it arrives soon; once that is consumed, all requests start. So
            reading a header fetches one block, and reading on loses no time.
        name: the name of the file.
        spent: called with a result of ``fetch`` when it is no longer needed.

    Unlike other raw files, `read(n)` returns n bytes, fewer only at the end. Not thread-safe.
    """

    _position: int
    _base: int  # the position of the current block, and of the first byte that was not requested
    _next: int

    def __init__(
        self,
        fetch: Fetch,
        begin: int,
        end: int,
        *,
        block: int = BLOCK,
        parallel: int = PARALLEL,
        name: str = "",
        spent: Callable[[Any], None] = lambda data: None,
    ) -> None:
        super().__init__()
        self.name, self._spent = name, spent
        self._fetch, self._end, self._block, self._parallel = fetch, end, block, parallel
        self._pid = os.getpid()
        # The first byte of each requested block, its content, and the signal that cancels the request.
        self._blocks: deque[tuple[int, Future[Any], Cancel]] = deque()
        self._begin_at(begin)

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
        if self._base <= target <= max(self._next, self._base + len(self._data)):
            self._position = target
        else:
            self._begin_at(target)
        return target

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer and return the number of bytes, fewer only at the end."""
        with memoryview(buffer) as whole, whole.cast("B") as view:
            done = 0
            while len(some := self._some(len(view) - done)):
                view[done : done + len(some)] = some
                done += len(some)
            return done

    def read(self, size: int | None = -1) -> bytes:
        """Return ``size`` bytes, fewer only at the end; all remaining bytes, requested at once, for -1."""
        left = max(0, self._end - self._position)
        if size is None or size < 0:
            self._request_all()
            size = left
        wanted = min(size, left)
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
        self._request_all()
        while len(piece := self._some(self._block)):
            yield piece

    def close(self) -> None:
        """Close the stream and cancel its transfers."""
        if not self.closed:
            self._begin_at(self._position)
        super().close()

    def _begin_at(self, position: int) -> None:
        """Cancel all requests, and start again at this position."""
        if os.getpid() == self._pid:
            for _, _, cancel in list(self._blocks):  # another thread may change it
                cancel.set()
        self._blocks.clear()
        self._data = memoryview(b"")  # the current block
        self._position = self._base = self._next = position
        small = self._block // _FIRST_PART
        # Sizes of the next requests, in reverse order; later requests are whole blocks.
        self._sizes = [self._block - small, small] if small and self._parallel > 1 else []
        self._window = min(2, self._parallel)

    def _request_all(self) -> None:
        """Use full-size requests from now on, since everything will be read."""
        self._sizes, self._window = [], self._parallel

    def _some(self, size: int) -> memoryview:
        """Return 1 to ``size`` bytes and advance past them; empty at the end."""
        if self.closed:
            raise ValueError("the stream is closed")
        if os.getpid() != self._pid:  # the threads exist only in the parent
            self._pid = os.getpid()
            self._blocks.clear()
            self._next = max(self._base + len(self._data), self._position)
        if size <= 0 or self._position >= self._end:
            return memoryview(b"")
        while self._position >= self._base + len(self._data):
            self._next_block()
        start = self._position - self._base
        some = self._data[start : start + size]
        self._position += len(some)
        return some

    def _next_block(self) -> None:
        while len(self._blocks) < self._window and self._next < self._end:
            stop = min(self._next + (self._sizes.pop() if self._sizes else self._block), self._end)
            cancel = Cancel()
            self._blocks.append((self._next, submit(partial(self._fetch, self._next, stop, cancel)), cancel))
            self._next = stop
        begin, block, _ = self._blocks[0]
        try:
            data = memoryview(block.result())
        except BaseException:  # also Ctrl-C: the next read requests the block again
            self._begin_at(self._position)
            raise
        self._blocks.popleft()
        if len(self._data):
            self._spent(self._data.obj)
        self._data, self._base = data, begin
        self._window = self._parallel
