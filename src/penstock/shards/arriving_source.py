"""`ArrivingSource`: files in a store that are counted while they are fetched, for orders without counts in advance.

    arrivals = source.arrivals(world_size)  # copies shards into the cache, and counts them
    arrivals.wait([17, 3])                  # their facts: they are cached and counted
    source.arrived(rows, facts)             # in any process: samples, by `penstock.shards.opened.pack_rows`
    source.complete, len(source)            # once all are counted: the same as counted files

Promises: one process of the machine fetches each file once, and reads and counts it once; all processes of a job read
the counted version, or raise an error that names the object.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, SupportsIndex

import numpy as np

from penstock.order.permutation import Indices
from penstock.progress import progress_bar
from penstock.shards.arrivals import Arrivals
from penstock.shards.exchange import Facts, SharedFacts, exchange_of
from penstock.shards.first_epoch import unknown_length
from penstock.shards.opened import split_rows
from penstock.shards.stored import StoredShard
from penstock.storage.urls import listed
from penstock.wording import counted

__all__ = ["ArrivingSource"]

_PEER_TIMEOUT_S = 10.0  # after which this rank counts the shards of another rank itself


class ArrivingSource(abc.ABC):
    """Files in a store, which may not be counted yet.

    Args:
        handles: handles of all files, see `penstock.shards.arrivals.Arriver`.
        shared: shares the counts with other processes of the machine; by default with those that unpickle this object.

    Once `complete`, ``len``, rows and fingerprint are those of `whole`. Memory: some hundred bytes a file.
    """

    def __init__(self, handles: list[Any], shared: SharedFacts | None = None) -> None:
        self.urls: list[str] = [handle.url for handle in handles]
        self._handles = handles
        self._arrivals: Arrivals | None = None
        self._shared = shared or SharedFacts()
        self._missing = {number for number, handle in enumerate(handles) if handle.facts is None}

    @abc.abstractmethod
    def _read(self, numbers: Indices, rows: Indices) -> list[Any]:
        """Return rows of files whose facts are known, in this order."""

    @abc.abstractmethod
    def _make_whole(self) -> Any:
        """Return all files as one counted source; all facts are known."""

    # For plans, in the main process.

    @property
    def complete(self) -> bool:
        """Whether all shards are counted."""
        if self._missing:
            self._missing = {number for number in self._missing if self._handles[number].facts is None}
            if not self._missing:
                self._shared.write([handle.facts for handle in self._handles])
        return not self._missing

    def facts(self, shards: Sequence[int]) -> list[Facts]:
        """Return the facts of shards, when all are counted."""
        return [self._handles[number].facts for number in shards]

    def arrivals(self, world_size: int) -> Arrivals:
        """Return what fetches the files in this process, for one of the ranks that share them."""
        if self._arrivals is None or self._arrivals.pid != os.getpid():
            self._arrivals = Arrivals(self._handles, exchange_of(self.urls, world_size))
        return self._arrivals

    def finish(self, rank: int, world_size: int) -> None:
        """Count the remaining shards, with a progress bar.

        Reads the index of a shard if the store has it, else the shard. Ranks divide the work if they can exchange
        results. Raises as `Arrivals.wait` does.
        """
        missing = [number for number, handle in enumerate(self._handles) if handle.facts is None]
        arrivals = self.arrivals(world_size)
        # Divided by number: a rank that left an epoch early may lack other shards than the rest.
        arrivals.count(range(rank, len(self._handles), world_size))
        if not missing:
            return
        with progress_bar("counting shards", len(missing), None, in_bytes=False) as advance:
            # Own shards first, as in `Arrivals.wait`.
            for number in sorted(missing, key=lambda number: number % world_size != rank):
                if not arrivals.hear_of(number, _PEER_TIMEOUT_S):
                    # Another rank is still in the epoch that this one left, and does not count its part yet.
                    arrivals.count([number for number in missing if self._handles[number].facts is None])
                arrivals.wait([number])
                advance(1)

    # For workers, in any process.

    def arrived(self, rows: Indices, facts: Iterable[tuple[int, Facts]]) -> list[Any]:
        """Return the samples at rows of `penstock.shards.opened.pack_rows`, in this order.

        Args:
            rows: int64 of shape (n,).
            facts: numbers and facts of their shards.
        """
        self._know(facts)
        return self._read(*split_rows(np.asarray(rows, dtype=np.int64)))

    def _know(self, facts: Iterable[tuple[int, Facts]]) -> None:
        for number, known in facts:
            self._handles[number].facts = self._handles[number].facts or known

    # As a source, once all files are counted.

    @cached_property
    def _all(self) -> Any:
        return self._make_whole()

    @property
    def whole(self) -> Any:
        """The same files as one counted source.

        Raises:
            LengthUnknownError: some are not counted.
        """
        if not self.complete:
            raise unknown_length()
        return self._all

    def __len__(self) -> int:
        return len(self.whole)

    @property
    def fingerprint(self) -> str:
        """The identity of the samples."""
        return str(self.whole.fingerprint)

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Return whether a set with this fingerprint and number of samples has since grown into this one."""
        return bool(self.whole.is_prefix_of_current(fingerprint, rows))

    def __getitem__(self, index: SupportsIndex) -> Any:
        return self.whole[index]

    @property
    def starts(self) -> Any:
        """The first sample number of each shard, and the number of all samples."""
        return self.whole.starts

    def stored(self) -> list[StoredShard]:
        """The shards, for prefetching."""
        return list(self.whole.stored())

    def records(self, indices: Indices) -> list[Any]:
        """Return the samples at rows of the whole set, in this order.

        All shards must be counted, though this process may have started before that.
        """
        if not self.complete:
            self._know(enumerate(self._shared.read()))
            self.finish(0, 1)
        return list(self.whole.records(indices))

    def __repr__(self) -> str:
        if self.complete:
            return repr(self.whole)
        return f"<{counted(len(self.urls), 'shard')}, {len(self._missing):,} not counted yet: {listed(self.urls)}>"
