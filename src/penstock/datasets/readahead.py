"""Pages of a slice that a thread gets before they are asked for, and then the first pages of the next slice.

    slice of the present mini-epoch                     slice of the next one
    ... 11 | 12 | 13 | 14 | 15                          16 | 17 | 18 ...
        oldest     mark        (thread is here) next

Pages are numbered through, over the end of a slice; ``mark`` is the one that the consumer is at. Invariants: the pages
in memory are those from ``oldest`` to ``next``; apart from the page at the mark and its neighbours, they take no more
than ``cache_bytes``. The thread asks for as many pages at a time as there is room for, so that no stream stays
open while the consumer is busy, and a server has nothing to hold for a slow one.
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

__all__ = ["ReadAhead", "Slices", "is_run"]

_FEW = 4  # pages after which it shows whether the consumer wants what is read ahead


class Slices(Protocol):
    """Where pages come from. A place stands for the whole slice there."""

    def size(self, place: MiniEpoch) -> int:
        """Rows of a slice."""
        ...

    def after(self, place: MiniEpoch) -> MiniEpoch:
        """The slice that is wanted after this one; the same place if there is none."""
        ...

    def read(self, place: MiniEpoch, begin: int, end: int) -> Iterator[pa.RecordBatch]:
        """Rows ``begin`` to ``end`` of a slice, in order, in batches of any size."""
        ...


class _Leg(NamedTuple):
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
    """Pages in order from row ``first`` of a slice on. The thread begins at once, and ends with `stop`.

    Args:
        slices: where they come from.
        place, first: where to begin.
        page_rows: rows of a page.
        cache_bytes: bound of the pages in memory.
        page_bytes: an estimate of what a page takes, for the first of them.
        whole: the consumer wants all rows of the slice, in whatever order.
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
        self._legs = [self._leg(place, first, 0)]
        self._pages: dict[int, pa.RecordBatch] = {}
        self._bytes = self._oldest = self._next = self._mark = 0
        self._run = 1  # pages to ask for: twice as many each time
        self._asked: int | None = None if whole else 0  # rows
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = Daemon(self._work, name="penstock-pages", wake=self._wake)

    def _leg(self, place: MiniEpoch, first: int, number: int) -> _Leg:
        size = self._slices.size(place)
        return _Leg(place, first, size, number, -(-max(0, size - first) // self._page_rows))

    # The consumer's side.

    def get(self, place: MiniEpoch, at: Indices) -> pa.RecordBatch | None:
        """The rows ``at`` of a slice, in this order; None if they are neither here nor next to come.

        Waits for pages that are next to come. Where the server failed, that is None too: whoever asks for rows himself
        learns why, or finds that it is back.
        """
        with self._changed:
            leg = self._find(place) or self._next_leg(place)
            if leg is None or self._thread.stopping:
                return None
            begin, end = (int(at[0]), int(at[-1])) if is_run(at) else (int(at.min()), int(at.max()))
            first, last = (leg.number + (row - leg.first) // self._page_rows for row in (begin, end))
            if begin < leg.first or first < self._oldest:
                return None
            if last >= self._next and last > min(self._next, first) + 1:
                return None  # too far off; or there is no room for it as long as the first is needed
            self._count(first, len(at))
            while last >= self._next and self._error is None and not self._thread.stopping:
                self._changed.wait()
            if last >= self._next or first < self._oldest:
                if self._error is None or isinstance(self._error, PenstockError):
                    return None
                raise self._error
            pages = [self._pages[number] for number in range(first, last + 1)]
        return _pick(pages, at - (leg.first + (first - leg.number) * self._page_rows), self._page_rows)

    def covers(self, place: MiniEpoch, row: int) -> bool:
        """Whether the thread has got, or will get, this row of a slice."""
        with self._changed:
            leg = None if self._thread.stopping or self._error is not None else self._find(place)
            return leg is not None and leg.number + (row - leg.first) // self._page_rows >= self._oldest

    @property
    def useful(self) -> bool:
        """Whether at least a third of what was passed was asked for: else the consumer jumps, or has only a part."""
        with self._changed:
            return self._asked is None or self._mark < _FEW or self._asked * 3 >= self._mark * self._page_rows

    def stop(self) -> None:
        """End the thread, and whoever waits for it. Does not wait for it."""
        self._thread.stop()

    def _find(self, place: MiniEpoch) -> _Leg | None:
        return next((leg for leg in reversed(self._legs) if leg.place == place), None)

    def _next_leg(self, place: MiniEpoch) -> _Leg | None:
        """Go on to a slice, if it comes after the last one, and most of that is here."""
        last = self._legs[-1]
        if place == last.place or last.end > self._next + 1 or place != self._slices.after(last.place):
            return None
        self._legs = [leg for leg in self._legs if leg.end > self._oldest] + [self._leg(place, 0, last.end)]
        self._changed.notify_all()
        return self._legs[-1]

    def _count(self, first: int, rows: int) -> None:
        if self._asked is not None:
            self._asked += rows
        if first > self._mark:
            self._mark = first
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # The thread's side.

    def _work(self, thread: Daemon) -> None:
        try:
            while (run := self._wanted(thread)) is not None:
                place, begin, end = run
                with closing(_paged(self._slices.read(place, begin, end), self._page_rows)) as pages:
                    for page in pages:
                        self._add(page)
                        if thread.stopping:
                            return
        except BaseException as error:  # handed over to whoever waits for the page
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _wanted(self, thread: Daemon) -> tuple[MiniEpoch, int, int] | None:
        """What to get next, once there is room for it: a place, and rows of its slice. None to end."""
        with self._changed:
            while not thread.stopping:
                leg = next((leg for leg in self._legs if self._next < leg.end), None)
                if leg is not None and (count := self._room()) > 0:
                    begin = leg.first + (self._next - leg.number) * self._page_rows
                    return leg.place, begin, min(begin + count * self._page_rows, leg.size)
                last = self._legs[-1]
                if leg is not None or self._mark < last.number or not self._next_leg(self._slices.after(last.place)):
                    self._changed.wait()
            return None

    def _room(self) -> int:
        """How many pages to get at once; none while less than half of the memory is free."""
        page_bytes = self._bytes / len(self._pages) if self._pages else self._page_bytes
        needed = self._needed()
        kept = sum(page.nbytes for number, page in self._pages.items() if number >= needed)
        count = min(int((self._cache_bytes - kept) / page_bytes), self._run)
        if count < min(self._run, self._cache_bytes / page_bytes / 2):
            count = 0
        self._run = min(2 * self._run, 1 << 20) if count else self._run
        return max(count, self._mark + 2 - self._next)

    def _needed(self) -> int:
        """The first page that may be asked for again: that before the mark, or the first of the slice."""
        if self._asked is not None:
            return self._mark - 1
        return next(leg.number for leg in reversed(self._legs) if leg.number <= self._mark)

    def _add(self, page: pa.RecordBatch) -> None:
        with self._changed:
            self._pages[self._next] = page
            self._bytes += page.nbytes
            self._next += 1
            while self._bytes > self._cache_bytes and self._oldest < self._needed():
                self._bytes -= self._pages.pop(self._oldest).nbytes
                self._oldest += 1
            self._changed.notify_all()


def _paged(batches: Iterator[pa.RecordBatch], page_rows: int) -> Generator[pa.RecordBatch, None, None]:
    """The same rows in batches of ``page_rows``, the last one of what is left."""
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


def is_run(at: Indices) -> bool:
    """Whether rows are asked for in order, without gaps."""
    return int(at[-1]) - int(at[0]) == len(at) - 1 and (len(at) == 1 or bool((np.diff(at) == 1).all()))


def _pick(pages: list[pa.RecordBatch], at: Indices, page_rows: int) -> pa.RecordBatch:
    """Rows of pages that stand one behind the other; a run of rows of one page without a copy."""
    if len(pages) > 2:  # scattered: most pages may have none of them
        numbers = at // page_rows
        wanted, places = np.unique(numbers, return_inverse=True)
        pages, at = [pages[number] for number in wanted.tolist()], at + (places - numbers) * page_rows
    if not is_run(at):
        return as_batch(pa.Table.from_batches(pages).take(as_arrow(at)))
    if len(pages) == 1:
        return pages[0].slice(int(at[0]), len(at))
    return as_batch(pa.Table.from_batches(pages).slice(int(at[0]), len(at)))
