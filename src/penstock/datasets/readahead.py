"""`ReadAhead`: a thread that reads pages of a slice ahead of the consumer, then the first pages of the next slice.

    slice of the current mini-epoch                     slice of the next one
    ... 11 | 12 | 13 | 14 | 15                          16 | 17 | 18 ...
        oldest     mark     (thread is here) next

Pages are numbered consecutively across slices; ``mark`` is the consumer's page. Invariants: the pages in memory are
``oldest`` to ``next``; except for the page at the mark and its neighbours, they take at most ``cache_bytes``. The
thread requests as many pages at once as fit in memory, so no stream stays open while the consumer is busy, and
the server buffers nothing for a slow consumer.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from penstock.errors import PenstockError
from penstock.manifest.formats.columns import as_batch
from penstock.manifest.indices import as_arrow
from penstock.order.permutation import Indices
from penstock.plan.share import MiniEpoch
from penstock.threads import Daemon

__all__ = ["ReadAhead", "Slices", "is_consecutive"]

_FEW = 4  # pages before `ReadAhead.useful` can become False


class Slices(Protocol):
    """The source of pages. A place identifies a whole slice."""

    def size(self, place: MiniEpoch) -> int:
        """Return the number of rows in a slice."""
        ...

    def after(self, place: MiniEpoch) -> MiniEpoch:
        """Return the slice after this one; the same place if there is none."""
        ...

    def read(self, place: MiniEpoch, begin: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield rows ``begin`` to ``end`` of a slice, in order, in batches of any size."""
        ...


class _Segment(NamedTuple):
    """The part of one slice that is read: its page k has the number ``number + k``."""

    place: MiniEpoch
    first: int
    size: int
    number: int
    pages: int

    @property
    def end(self) -> int:
        return self.number + self.pages


class ReadAhead:
    """Read pages in order, from row ``first`` of a slice on. The thread starts at once; `stop` ends it.

    Args:
        slices: the source of pages.
        place, first: the first slice, and its first row to read.
        page_rows: rows in a page.
        cache_bytes: memory limit of the pages.
        page_bytes: estimated memory of a page, used until pages have arrived.
        whole: the consumer will read all rows of the slice, in any order.
    """

    def __init__(
        self,
        slices: Slices,
        place: MiniEpoch,
        first: int,
        *,
        page_rows: int,
        cache_bytes: int,
        page_bytes: float,
        whole: bool = False,
    ) -> None:
        self._slices, self._page_rows, self._cache_bytes, self._page_bytes = slices, page_rows, cache_bytes, page_bytes
        self._segments = [self._segment(place, first, 0)]
        self._pages: dict[int, pa.RecordBatch] = {}
        self._bytes = self._oldest = self._next = self._mark = 0
        self._pages_at_once = 1  # pages in the next request; doubled with each request
        self._requested_rows: int | None = None if whole else 0  # rows that the consumer has requested
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = Daemon(self._work, name="penstock-pages", wake=self._wake)

    def _segment(self, place: MiniEpoch, first: int, number: int) -> _Segment:
        size = self._slices.size(place)
        return _Segment(place, first, size, number, -(-max(0, size - first) // self._page_rows))

    # The consumer's side.

    def get(self, place: MiniEpoch, at: Indices) -> pa.RecordBatch | None:
        """Return the rows ``at`` of a slice, in this order; None if they are neither in memory nor next.

        Wait for pages that are next. After a server error, return None, too: the caller then requests the rows
        directly, and gets the error, or the rows if the server is back.
        """
        with self._changed:
            segment = self._find(place) or self._next_segment(place)
            if segment is None or self._thread.stopping:
                return None
            begin, end = (int(at[0]), int(at[-1])) if is_consecutive(at) else (int(at.min()), int(at.max()))
            first, last = (segment.number + (row - segment.first) // self._page_rows for row in (begin, end))
            if begin < segment.first or first < self._oldest:
                return None
            if last >= self._next and last > min(self._next, first) + 1:
                # Too far ahead, or not in memory together with the first page.
                return None
            self._count_request(first, len(at))
            while last >= self._next and self._error is None and not self._thread.stopping:
                self._changed.wait()
            if last >= self._next or first < self._oldest:
                if self._error is None or isinstance(self._error, PenstockError):
                    return None
                raise self._error
            pages = [self._pages[number] for number in range(first, last + 1)]
        return _pick(pages, at - (segment.first + (first - segment.number) * self._page_rows), self._page_rows)

    def covers(self, place: MiniEpoch, row: int) -> bool:
        """Return whether the thread has read, or will read, this row of a slice."""
        with self._changed:
            segment = None if self._thread.stopping or self._error is not None else self._find(place)
            return segment is not None and segment.number + (row - segment.first) // self._page_rows >= self._oldest

    @property
    def useful(self) -> bool:
        """Whether the consumer has requested at least a third of the rows that it has passed.

        If not, it reads scattered rows, or only a part of the slice.
        """
        with self._changed:
            requested = self._requested_rows
            return requested is None or self._mark < _FEW or requested * 3 >= self._mark * self._page_rows

    def stop(self) -> None:
        """Tell the thread to end, and wake waiting callers. Does not wait for the thread."""
        self._thread.stop()

    def _find(self, place: MiniEpoch) -> _Segment | None:
        return next((segment for segment in reversed(self._segments) if segment.place == place), None)

    def _next_segment(self, place: MiniEpoch) -> _Segment | None:
        """Start a slice if it follows the last one and most of the last one has been read; else return None."""
        last = self._segments[-1]
        if place == last.place or last.end > self._next + 1 or place != self._slices.after(last.place):
            return None
        in_memory = [segment for segment in self._segments if segment.end > self._oldest]
        self._segments = [*in_memory, self._segment(place, 0, last.end)]
        self._changed.notify_all()
        return self._segments[-1]

    def _count_request(self, first: int, rows: int) -> None:
        if self._requested_rows is not None:
            self._requested_rows += rows
        if first > self._mark:
            self._mark = first
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # The thread's side.

    def _work(self, thread: Daemon) -> None:
        try:
            while (request := self._next_request(thread)) is not None:
                place, begin, end = request
                with closing(_paged(self._slices.read(place, begin, end), self._page_rows)) as pages:
                    for page in pages:
                        self._add(page)
                        if thread.stopping:
                            return
        # Raised in `get`, in the thread that waits for the page.
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next_request(self, thread: Daemon) -> tuple[MiniEpoch, int, int] | None:
        """Return the next request, once there is memory for it: a place, and rows of its slice. None to end."""
        with self._changed:
            while not thread.stopping:
                segment = next((segment for segment in self._segments if self._next < segment.end), None)
                if segment is not None and (count := self._pages_to_request()) > 0:
                    begin = segment.first + (self._next - segment.number) * self._page_rows
                    return segment.place, begin, min(begin + count * self._page_rows, segment.size)
                last = self._segments[-1]
                wait = segment is not None or self._mark < last.number
                if wait or not self._next_segment(self._slices.after(last.place)):
                    self._changed.wait()
            return None

    def _pages_to_request(self) -> int:
        """Return the number of pages to request at once; 0 while less than half of the memory is free."""
        page_bytes = self._bytes / len(self._pages) if self._pages else self._page_bytes
        needed = self._first_needed()
        kept = sum(page.nbytes for number, page in self._pages.items() if number >= needed)
        count = min(int((self._cache_bytes - kept) / page_bytes), self._pages_at_once)
        if count < min(self._pages_at_once, self._cache_bytes / page_bytes / 2):
            count = 0
        self._pages_at_once = min(2 * self._pages_at_once, 1 << 20) if count else self._pages_at_once
        return max(count, self._mark + 2 - self._next)

    def _first_needed(self) -> int:
        """Return the first page that may be requested again: the page before the mark, or the first of the slice."""
        if self._requested_rows is not None:
            return self._mark - 1
        return next(segment.number for segment in reversed(self._segments) if segment.number <= self._mark)

    def _add(self, page: pa.RecordBatch) -> None:
        with self._changed:
            self._pages[self._next] = page
            self._bytes += page.nbytes
            self._next += 1
            while self._bytes > self._cache_bytes and self._oldest < self._first_needed():
                self._bytes -= self._pages.pop(self._oldest).nbytes
                self._oldest += 1
            self._changed.notify_all()


def _paged(batches: Iterator[pa.RecordBatch], page_rows: int) -> Generator[pa.RecordBatch, None, None]:
    """Yield the same rows in batches of ``page_rows``; the last batch has the rest."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        while sum(part.num_rows for part in held) >= page_rows:
            page = held[0] if held[0].num_rows == page_rows else _joined(held)
            yield page.slice(0, page_rows)
            held = [page.slice(page_rows)] if page.num_rows > page_rows else []
    if held:
        yield _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else as_batch(pa.Table.from_batches(batches))


def is_consecutive(at: Indices) -> bool:
    """Return whether rows are consecutive."""
    return int(at[-1]) - int(at[0]) == len(at) - 1 and (len(at) == 1 or bool((np.diff(at) == 1).all()))


def _pick(pages: list[pa.RecordBatch], at: Indices, page_rows: int) -> pa.RecordBatch:
    """Return rows of consecutive pages; consecutive rows of one page without a copy."""
    # Scattered rows: most pages may contain none of them.
    if len(pages) > 2:
        numbers = at // page_rows
        wanted, places = np.unique(numbers, return_inverse=True)
        pages, at = [pages[number] for number in wanted.tolist()], at + (places - numbers) * page_rows
    if not is_consecutive(at):
        return as_batch(pa.Table.from_batches(pages).take(as_arrow(at)))
    if len(pages) == 1:
        return pages[0].slice(int(at[0]), len(at))
    return as_batch(pa.Table.from_batches(pages).slice(int(at[0]), len(at)))
