"""`Pages`: records of slices that a metadata server holds, with as few round trips as how they are asked for allows.

==========================  ============================================================================================
asked for                   what happens
==========================  ============================================================================================
in order                    pages are read ahead of the consumer, see `ReadAhead`
scattered, or in strides    exactly these rows, in one round trip for each request, however many they are
scattered, a small slice    the whole slice, once single requests have cost as much as that
==========================  ============================================================================================

Which it is shows by itself: samplers, numbers of workers and resumes need not be told. Memory: ``cache_bytes``, or
three pages where that is more.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.datasets.readahead import ReadAhead, is_run
from penstock.errors import ConfigError
from penstock.manifest import Manifest, Record
from penstock.order.permutation import Indices
from penstock.plan.share import EpochView, MiniEpoch, SharePlan
from penstock.server.protocol import Slice

if TYPE_CHECKING:
    from penstock.server import Client

__all__ = ["Pages"]

_ROUND_TRIP = 2048  # rows that could be streamed in the time that one round trip takes
_PATIENCE = 1.0  # seconds without a server after which nothing is read ahead: who needs rows asks, and is more patient


class Pages:
    """The records of one share's slices. Safe in threads; a copy in another process reads for itself.

    Args:
        client: whom to ask.
        name: of the data set, whose version is that of ``plan.source``.
        plan: which rows, in which order.
        cache_bytes: memory for pages.
        page_rows: rows of a page.
    """

    def __init__(self, client: Client, name: str, plan: SharePlan, *, cache_bytes: int, page_rows: int) -> None:
        if cache_bytes < 1 or page_rows < 1:
            raise ConfigError(f"cache_bytes and page_rows must be positive, got {cache_bytes} and {page_rows}")
        self._plan, self._slices = plan, _ServedSlices(client, name, plan, page_rows)
        self._cache_bytes, self._page_rows = cache_bytes, page_rows
        self._own()

    def _own(self) -> None:
        """What belongs to this process alone."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ahead: ReadAhead | None = None
        self._finalizer: Any = None
        self._expected: tuple[MiniEpoch, int] | None = None  # where the request that was answered last ended
        self._neighbours = 0  # requests in a row that each began where the one before it ended
        self._doubts = 1  # how many of them it takes; twice as many each time that pages were read ahead in vain
        self._place: MiniEpoch | None = None
        self._requests = 0  # answered one by one in this place

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("_plan", "_slices", "_cache_bytes", "_page_rows")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._own()

    def records(self, view: EpochView, local: Indices) -> list[Record]:
        """Return the records of some samples of a view, in this order."""
        if self._pid != os.getpid():
            self._own()  # forked: the thread is the parent's
        rows, at = view.rows(local), local + view.place.skip
        records: list[Record] = []
        for begin in range(0, len(rows), self._page_rows):
            end = begin + self._page_rows
            records += self._some(view.place.whole, at[begin:end], rows[begin:end])
        return records

    def record(self, view: EpochView, local: int, row: int) -> Record:
        """The record of one sample, which stands in this row of the manifest."""
        if self._pid != os.getpid():
            self._own()
        return self._some(view.place.whole, np.array([local + view.place.skip]), np.array([row]))[0]

    def close(self) -> None:
        """End the thread. Whatever is asked for later begins anew."""
        with self._lock:
            self._replace(None)

    def _some(self, place: MiniEpoch, at: Indices, rows: Indices) -> list[Record]:
        ahead = self._ahead
        try:
            found = None if ahead is None else ahead.get(place, at)
        except Exception:
            self._drop(ahead)  # who tries again begins anew
            raise
        manifest: Manifest = self._plan.source
        if ahead is None or found is None:
            records = manifest.records(rows)
            # A server knows whole slices, of which a filter leaves some rows, and others are excluded.
            if not self._plan.filters and self._plan.excluded is None:
                with self._lock:
                    self._answered(place, at)
            return records
        self._expected = None
        if not ahead.useful:
            self._drop(ahead)
            self._doubts *= 2
        return manifest.parse(found, rows)

    def _answered(self, place: MiniEpoch, at: Indices) -> None:
        """A request was answered by itself: will the next one be a neighbour, or have there been too many?"""
        size, begin, end = self._slices.size(place), int(at[0]), int(at[-1]) + 1
        in_order = is_run(at)
        self._neighbours = self._neighbours + 1 if in_order and self._expected == (place, begin) else 0
        self._expected = None
        self._requests, self._place = (self._requests if place == self._place else 0) + 1, place
        small = size * self._row_bytes <= self._cache_bytes and self._requests * _ROUND_TRIP >= size
        follower = (place, end) if end < size else (self._slices.after(place), 0)
        where = (place, 0) if small else follower
        if (small or self._neighbours >= self._doubts) and (self._ahead is None or not self._ahead.covers(*where)):
            self._replace(self._read_ahead(*where, whole=small))
        elif in_order:
            self._expected = follower

    def _read_ahead(self, place: MiniEpoch, first: int, *, whole: bool) -> ReadAhead:
        return ReadAhead(
            self._slices,
            place,
            first,
            page_rows=self._page_rows,
            cache_bytes=self._cache_bytes,
            page_bytes=self._page_rows * self._row_bytes,
            whole=whole,
        )

    @property
    def _row_bytes(self) -> float:
        """What a row takes in memory, about."""
        manifest: Manifest = self._plan.source
        return manifest.nbytes / max(1, len(manifest)) + 8

    def _drop(self, ahead: ReadAhead | None) -> None:
        with self._lock:
            if self._ahead is ahead:
                self._replace(None)

    def _replace(self, ahead: ReadAhead | None) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._finalizer = None if ahead is None else weakref.finalize(self, _stop, ahead, self._pid)
        self._ahead, self._requests = ahead, 0


def _stop(ahead: ReadAhead, pid: int) -> None:
    if pid == os.getpid():  # in a fork there is no such thread, and its lock may be held for ever
        ahead.stop()


class _ServedSlices:
    """The slices of a share as a server gives them. Knows nothing of `Pages`, so that the thread does not keep it."""

    def __init__(self, client: Client, name: str, plan: SharePlan, page_rows: int) -> None:
        self._client, self._name, self._plan, self._page_rows = copy.copy(client), name, plan, page_rows
        self._client.patience = min(_PATIENCE, client.patience)

    def size(self, place: MiniEpoch) -> int:
        return len(self._plan.make_view(place).partition)

    def after(self, place: MiniEpoch) -> MiniEpoch:
        return self._plan.following(place)

    def read(self, place: MiniEpoch, begin: int, end: int) -> Iterator[pa.RecordBatch]:
        plan, partition = self._plan, self._plan.make_view(place).partition
        request = Slice(
            name=self._name,
            fingerprint=plan.source.fingerprint,
            samples=place.samples,
            seed=plan.seed,
            epoch=place.epoch,
            shuffle=plan.shuffle,
            **plan.block,
            world_size=partition.world_size,
            rank=partition.rank,
            mini_epochs=partition.mini_epochs,
            mini_epoch=partition.mini_epoch,
            remainder=plan.remainder,
            consumed=partition.consumed,
            begin=begin,
            end=end,
            page_rows=self._page_rows,
        )
        return self._client.slice(request)
