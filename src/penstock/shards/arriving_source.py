"""`ArrivingSource`: files in a store that are counted while they are fetched, for orders without counts in advance.

    source.expect([17, 3])                  # start copying them into the cache
    source.counts_of([17, 3])               # [1000, 1002]: they are cached and counted
    source.arrived(rows, versions)          # in any process: samples, by `penstock.plan.windows.pack_rows`
    source.complete, len(source)            # once all are counted: the same as counted files

Promises: one process of the machine fetches each file once, and reads and counts it once; all processes of a job read
the counted version, or raise an error that names the object.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Generic, Protocol, SupportsIndex, TypeVar

import numpy as np

from penstock.errors import LengthUnknownError
from penstock.order.permutation import Indices
from penstock.plan.epoch import COUNTING_ADVICE
from penstock.plan.windows import Need, split_rows
from penstock.progress import progress_bar
from penstock.shards.arrivals import Arrivals, Arriver
from penstock.shards.exchange import exchange_of
from penstock.shards.facts import Facts, ToldFacts
from penstock.shards.stored import StoredShard
from penstock.storage.urls import listed
from penstock.wording import counted

__all__ = ["ArrivingSource", "Whole"]

_PEER_TIMEOUT_S = 10.0  # after which this rank counts the shards of another rank itself


class Whole(Protocol):
    """The same files, once all are counted."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: SupportsIndex) -> Any: ...

    @property
    def fingerprint(self) -> str: ...

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool: ...

    @property
    def starts(self) -> Any: ...

    def records(self, indices: Any) -> list[Any]: ...

    def stored(self) -> list[StoredShard]: ...


H = TypeVar("H", bound=Arriver)
W = TypeVar("W", bound=Whole)


class ArrivingSource(abc.ABC, Generic[H, W]):
    """Files in a store, which may not be counted yet.

    Args:
        handles: handles of all files.
        told: shares the counts with other processes of the machine; by default with those that unpickle this object.

    Once `complete`, ``len``, rows and fingerprint are those of `whole`. Memory: some hundred bytes a file.
    """

    def __init__(self, handles: list[H], told: ToldFacts | None = None) -> None:
        self.urls, self._handles = [handle.url for handle in handles], handles
        self._arrivals: Arrivals | None = None
        self._world_size = 1
        self._told = told or ToldFacts()
        self._missing = {number for number, handle in enumerate(handles) if handle.facts is None}

    @abc.abstractmethod
    def _read(self, numbers: Indices, rows: Indices) -> list[Any]:
        """Return rows of files whose facts are known, in this order."""

    @abc.abstractmethod
    def _make_whole(self) -> W:
        """Return all files as one counted source; all facts are known."""

    # For plans, in the main process.

    def join(self, world_size: int) -> None:
        """Set the number of ranks that share the files."""
        self._world_size = world_size

    @property
    def complete(self) -> bool:
        """Whether all shards are counted."""
        if self._missing:
            self._missing = {number for number in self._missing if self._handles[number].facts is None}
            if not self._missing:
                self._told.write([handle.facts for handle in self._handles if handle.facts is not None])
        return not self._missing

    def expect(self, needs: Sequence[Need], *, position: int = 0) -> None:
        """Start fetching shards, in this order; earlier ones whose fetch has not started are dropped."""
        self._of_this_process.expect(needs, position)

    def advance(self, position: int) -> None:
        """Set the number of samples consumed, so that the cache may evict shards that are no longer needed."""
        self._of_this_process.advance(position)

    def close(self) -> None:
        """Stop the background threads, and withdraw the planned uses."""
        if self._arrivals is not None and self._arrivals.pid == os.getpid():
            self._arrivals.close()

    def counts_of(self, shards: Sequence[int]) -> list[int]:
        """Return the sample counts of shards. Waits for them, or for the ranks that fetch them.

        Raises:
            ShardError, StorageError: a shard is damaged or unavailable; the message names it.
        """
        return [facts.samples for facts in self._of_this_process.wait(shards)]

    def versions(self, shards: Sequence[int]) -> tuple[Any, ...]:
        """Return the facts of counted shards, with their numbers."""
        return tuple((shard, self._handles[shard].facts) for shard in shards)

    def identities(self, shards: Sequence[int]) -> list[str]:
        """Return the `Facts.identity` of counted shards."""
        return [facts.identity for facts in self._of_this_process.wait(shards)]

    def finish(self, rank: int, world_size: int) -> None:
        """Count the remaining shards, with a progress bar.

        Reads the index of a shard if the store has it, else the shard. Ranks divide the work if they can exchange
        results. Raises as `counts_of` does.
        """
        self.join(world_size)
        missing = [number for number, handle in enumerate(self._handles) if handle.facts is None]
        arrivals = self._of_this_process
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
                self.counts_of([number])
                advance(1)

    @property
    def _of_this_process(self) -> Arrivals:
        if self._arrivals is None or self._arrivals.pid != os.getpid():
            self._arrivals = Arrivals(self._handles, exchange_of(self.urls, self._world_size))
        return self._arrivals

    # For workers, in any process.

    def arrived(self, rows: Indices, versions: Iterable[tuple[int, Facts]]) -> list[Any]:
        """Return the samples at rows of `penstock.plan.windows.pack_rows`, in this order.

        Args:
            rows: int64 of shape (n,).
            versions: the result of `versions` for their shards.
        """
        for number, facts in versions:
            self._know(number, facts)
        return self._read(*split_rows(np.asarray(rows, dtype=np.int64)))

    def _know(self, number: int, facts: Facts) -> None:
        self._handles[number].facts = self._handles[number].facts or facts

    # As a source, once all files are counted.

    @cached_property
    def _all(self) -> W:
        return self._make_whole()

    @property
    def whole(self) -> W:
        """The same files as one counted source.

        Raises:
            LengthUnknownError: some are not counted.
        """
        if not self.complete:
            raise LengthUnknownError(
                f"{counted(len(self._missing), 'shard')} of {len(self.urls):,} are not counted yet: iterate over a "
                f"DataLoader; or {COUNTING_ADVICE}"
            )
        return self._all

    def __len__(self) -> int:
        return len(self.whole)

    @property
    def fingerprint(self) -> str:
        """The identity of the samples."""
        return self.whole.fingerprint

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Return whether a set with this fingerprint and number of samples has since grown into this one."""
        return self.whole.is_prefix_of_current(fingerprint, rows)

    def __getitem__(self, index: SupportsIndex) -> Any:
        return self.whole[index]

    @property
    def starts(self) -> Any:
        """The first sample number of each shard, and the number of all samples."""
        return self.whole.starts

    def stored(self) -> list[StoredShard]:
        """The shards, for prefetching."""
        return self.whole.stored()

    def records(self, indices: Indices) -> list[Any]:
        """Return the samples at rows of the whole set, in this order.

        All shards must be counted, though this process may have started before that.
        """
        if not self.complete:
            for number, facts in enumerate(self._told.read() or []):
                self._know(number, facts)
            self.finish(0, 1)
        return self.whole.records(indices)

    def __repr__(self) -> str:
        if self.complete:
            return repr(self.whole)
        return f"<{counted(len(self.urls), 'shard')}, {len(self._missing):,} not counted yet: {listed(self.urls)}>"
