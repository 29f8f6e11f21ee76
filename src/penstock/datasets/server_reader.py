"""`ServerReader`: read records from a metadata server, with as few round trips as the access pattern allows.

==========================  ============================================================================================
access pattern              reads
==========================  ============================================================================================
sequential                  pages are read ahead of the consumer, see `ReadAhead`
random or strided           exactly the requested rows, in one round trip for each request
random in a small slice     the whole slice, as soon as single requests have cost as much
==========================  ============================================================================================

The pattern is detected from the requests alone, for any samplers, workers and resumes. Memory: ``cache_bytes``,
or three pages if these are larger.
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

from penstock.datasets.readahead import ReadAhead, is_consecutive
from penstock.errors import ConfigError
from penstock.manifest import Manifest, Record
from penstock.order.permutation import Indices
from penstock.plan.share import EpochView, MiniEpoch, SharePlan
from penstock.server.protocol import Slice

if TYPE_CHECKING:
    from penstock.server import Client

__all__ = ["ServerReader"]

_ROUND_TRIP = 2048  # rows that could be streamed in the time of one round trip
# Seconds without a server after which the read-ahead stops. Direct requests for rows wait longer.
_PATIENCE = 1.0


class ServerReader:
    """The records of one rank's slices. Thread-safe; a copy in another process reads independently.

    Args:
        client: the connection to the server.
        name: name of the dataset; its version is the version of ``plan.source``.
        plan: the rows, in order.
        cache_bytes: memory for pages.
        page_rows: rows in a page.
    """

    def __init__(self, client: Client, name: str, plan: SharePlan, *, cache_bytes: int, page_rows: int) -> None:
        if cache_bytes < 1 or page_rows < 1:
            raise ConfigError(f"cache_bytes= and page_rows= must be positive, got {cache_bytes} and {page_rows}")
        self._plan, self._slices = plan, _ServedSlices(client, name, plan, page_rows)
        self._cache_bytes, self._page_rows = cache_bytes, page_rows
        self._reset()

    def _reset(self) -> None:
        """Create the state that belongs to this process alone."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ahead: ReadAhead | None = None
        self._finalizer: Any = None
        # The end of the last request that was answered directly.
        self._expected_next: tuple[MiniEpoch, int] | None = None
        # Consecutive requests that each began at the end of the one before.
        self._consecutive = 0
        # The number of such requests that starts the read-ahead; doubled each time a read-ahead was useless.
        self._needed_consecutive = 1
        self._place: MiniEpoch | None = None
        # Requests that were answered directly in this mini-epoch.
        self._requests = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("_plan", "_slices", "_cache_bytes", "_page_rows")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def records(self, view: EpochView, local: Indices) -> list[Record]:
        """Return the records of some samples of a view, in the order of ``local``."""
        if self._pid != os.getpid():
            # After a fork, the thread exists only in the parent process.
            self._reset()
        rows, at = view.rows(local), local + view.place.skip
        records: list[Record] = []
        for begin in range(0, len(rows), self._page_rows):
            end = begin + self._page_rows
            records += self._read(view.place.whole, at[begin:end], rows[begin:end])
        return records

    def record(self, view: EpochView, local: int, row: int) -> Record:
        """Return the record of one sample; ``row`` is its row in the manifest."""
        if self._pid != os.getpid():
            self._reset()
        return self._read(view.place.whole, np.array([local + view.place.skip]), np.array([row]))[0]

    def close(self) -> None:
        """Stop the read-ahead thread. Later requests start it again."""
        with self._lock:
            self._replace(None)

    def _read(self, place: MiniEpoch, at: Indices, rows: Indices) -> list[Record]:
        ahead = self._ahead
        try:
            found = None if ahead is None else ahead.get(place, at)
        except Exception:
            # A retry starts a new read-ahead.
            self._drop(ahead)
            raise
        manifest: Manifest = self._plan.source
        if ahead is None or found is None:
            records = manifest.records(rows)
            # The server sends whole slices, without filters and exclusions: read ahead only without these.
            if not self._plan.filters and self._plan.excluded is None:
                with self._lock:
                    self._count_direct_request(place, at)
            return records
        self._expected_next = None
        if not ahead.useful:
            self._drop(ahead)
            self._needed_consecutive *= 2
        return manifest.parse(found, rows)

    def _count_direct_request(self, place: MiniEpoch, at: Indices) -> None:
        """Count a request that was answered directly; start the read-ahead if access is sequential or the slice is
        small.
        """
        size, begin, end = self._slices.size(place), int(at[0]), int(at[-1]) + 1
        in_order = is_consecutive(at)
        self._consecutive = self._consecutive + 1 if in_order and self._expected_next == (place, begin) else 0
        self._expected_next = None
        self._requests, self._place = (self._requests if place == self._place else 0) + 1, place
        small = size * self._row_bytes <= self._cache_bytes and self._requests * _ROUND_TRIP >= size
        follower = (place, end) if end < size else (self._slices.after(place), 0)
        where = (place, 0) if small else follower
        is_worthwhile = small or self._consecutive >= self._needed_consecutive
        if is_worthwhile and (self._ahead is None or not self._ahead.covers(*where)):
            self._replace(self._read_ahead(*where, whole=small))
        elif in_order:
            self._expected_next = follower

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
        """Approximate memory of a row, in bytes."""
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
    # In a forked child the thread does not exist, and its lock may be held forever.
    if pid == os.getpid():
        ahead.stop()


class _ServedSlices:
    """The slices of a rank, read from a server. It does not refer to its `ServerReader`, so the thread does not keep
    the reader alive.
    """

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
