"""`ArrivingSource`: files in a store that are counted while they are fetched, for orders without counts in advance.

    arrivals = source.arrivals(world_size)  # copies shards into the cache, and counts them
    arrivals.wait([17, 3])                  # their facts: they are cached and counted
    source.arrived(rows, facts)             # in any process: samples, by `penstock.shards.shard_file.pack_rows`
    source.complete, len(source)            # once all are counted: the same as counted files

Promises: one process of the machine fetches each file once, and reads and counts it once; all processes of a job read
the counted version, or raise an error that names the object.
"""

from __future__ import annotations

import abc
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, SupportsIndex

import numpy as np

from penstock.errors import LengthUnknownError
from penstock.order.permutation import Indices
from penstock.progress import progress_bar
from penstock.shards.exchange import Exchange, exchange_of
from penstock.shards.shard_file import Facts, ShardFile, StoredShard, split_rows
from penstock.storage import UNWRITABLE
from penstock.storage.derived import derived_path, write_derived
from penstock.storage.fetcher import Fetcher
from penstock.storage.planned_use import NEVER, Use
from penstock.storage.transfer import Cancel
from penstock.storage.urls import listed
from penstock.wording import counted

__all__ = ["ADVICE", "Arrivals", "ArrivingSource", "unknown_length"]

_PEER_TIMEOUT_S = 10.0  # after which this rank counts the shards of another rank itself

ADVICE = (
    "put indexes beside tar shards (penstock shards index); or open ShardDataset(ShardSet(...)), of JSON "
    "lines TableDataset(JsonFiles(...)), which read all of them before they begin"
)
"""Advice of errors that need the number of samples in shards."""


def unknown_length() -> LengthUnknownError:
    """Return the error for code that needs the number of samples while it is unknown."""
    return LengthUnknownError(
        "the number of samples in these shards is unknown until all of them have been read once, because they have no "
        f"indexes in the store: read them through a DataLoader; or {ADVICE}"
    )


class Arrivals:
    """Fetches and counts shards by a `Fetcher` of this process, and receives the facts of other ranks' shards."""

    def __init__(self, shards: Sequence[ShardFile], exchange: Exchange | None) -> None:
        self.pid = os.getpid()
        self._shards, self._exchange = shards, exchange
        self._fetcher = Fetcher(shards[0].storage)
        self._own: set[int] = set()
        self._sent: set[int] = set()  # shards whose facts were sent to the other ranks
        self._only_facts = False
        self.position = 0
        """Number of samples that the consumer has received."""

    def expect(self, needs: Sequence[tuple[int, int, int]]) -> None:
        """Fetch shards next, in place of those expected before.

        Args:
            needs: number of a shard, and the number of samples that this rank reads before the first possible sample
                of it, and up to its last one.
        """
        self._only_facts = False
        self._own.update(shard for shard, _, _ in needs)
        self._fetcher.follow([self._use(*need) for need in needs], position=self.position)

    def count(self, numbers: Iterable[int]) -> None:
        """Count shards whose samples are not needed, and send their facts to the other ranks."""
        self._only_facts, self._own = True, set(numbers)
        unsent = set() if self._exchange is None else self._own - self._sent
        news = [number for number in numbers if number in unsent or self._shards[number].facts is None]
        self._fetcher.follow([self._use(number) for number in news], position=self.position)

    def advance(self, position: int) -> None:
        """Set the position of the consumer."""
        self.position = position
        self._fetcher.advance(position)

    # The default argument stays valid when modules are already cleared at exit.
    def close(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Stop fetching, and withdraw the planned uses. A forked child has none of the threads, and does nothing."""
        if not _ending():
            self._fetcher.close()

    def hear(self, number: int, seconds: float) -> bool:
        """Return whether a shard is known, fetched by this rank, or reported by another rank within ``seconds``."""
        shard = self._shards[number]
        if shard.facts is None and number not in self._own and self._exchange is not None:
            shard.facts = self._exchange.hear(number, seconds)
            return shard.facts is not None
        return True

    def wait(self, shards: Sequence[int]) -> list[Facts]:
        """Wait for the facts of shards and return them."""
        missing = [number for number in shards if self._shards[number].facts is None]
        if self._exchange is not None:
            # Own shards first: other ranks wait for these while this rank would wait for theirs.
            self._fetch([number for number in missing if number in self._own])
            for number in missing:
                shard = self._shards[number]
                if number not in self._own and shard.facts is None:
                    shard.facts = self._exchange.wait(number)
        self._fetch(missing)
        return [facts for number in shards if (facts := self._shards[number].facts) is not None]

    def _fetch(self, numbers: Sequence[int]) -> None:
        shards = {self._shards[number].url: self._shards[number] for number in numbers}
        uses = [self._use(number, self.position, NEVER - 1) for number in numbers]
        self._fetcher.wait(uses, lambda use: shards[use.url].facts is not None)

    def _use(self, number: int, first: int = NEVER, last: int = NEVER) -> Use:
        """Return the use of a shard; one that is only counted is never needed."""
        return Use(self._shards[number].url, first, last, fetch=partial(self._bring, number))

    def _bring(self, number: int, only_later: bool, cancel: Cancel) -> None:
        shard = self._shards[number]
        only_facts = self._only_facts or number not in self._own
        facts = shard.count(cancel) if only_facts else shard.obtain(only_later=only_later, cancel=cancel)
        self._fetcher.notify()
        if self._exchange is not None and number not in self._sent:
            self._exchange.send(number, facts)
            self._sent.add(number)
        if not only_facts:
            shard.fetch(cancel)


class ArrivingSource(abc.ABC):
    """Files in a store, which may not be counted yet.

    Args:
        shards: the files.
        shared: name of a file for the counts, shared with the processes of the machine that unpickle this object.

    Once `complete`, ``len``, rows and fingerprint are those of `whole`. Memory: some hundred bytes a file.
    """

    _all: Any
    """All files as one counted source, once all are counted."""

    def __init__(self, shards: Sequence[ShardFile], shared: str | None = None) -> None:
        self.urls = [shard.url for shard in shards]
        # A file that is named twice is one object, which is fetched and counted once.
        named = {shard.url: shard for shard in shards}
        self._shards: Sequence[ShardFile] = [named[url] for url in self.urls]
        self._arrivals: Arrivals | None = None
        self._shared = shared or f"facts-{secrets.token_hex(8)}.json"
        self._missing = self._uncounted()

    @abc.abstractmethod
    def _read(self, numbers: Indices, rows: Indices) -> list[Any]:
        """Return rows of files whose facts are known, in this order."""

    # For plans, in the main process.

    def _uncounted(self) -> list[int]:
        return [number for number, shard in enumerate(self._shards) if shard.facts is None]

    @property
    def complete(self) -> bool:
        """Whether all shards are counted."""
        if self._missing:
            self._missing = [number for number in self._missing if self._shards[number].facts is None]
            if not self._missing:
                self._share_facts()
        return not self._missing

    def _share_facts(self) -> None:
        """Write the facts for workers that began before. If the disk is full or read-only, they read the shards."""
        path = derived_path("shards", self._shared)
        try:
            path.parent.mkdir(exist_ok=True)
            with write_derived(path) as file:
                file.write(json.dumps([facts.to_json() for facts in self.facts(range(len(self._shards)))]).encode())
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise

    def facts(self, shards: Iterable[int]) -> list[Any]:
        """Return the facts of counted shards."""
        return [self._shards[number].facts for number in shards]

    def arrivals(self, world_size: int) -> Arrivals:
        """Return what fetches the files in this process, for one of the ranks that share them."""
        if self._arrivals is None or self._arrivals.pid != os.getpid():
            self._arrivals = Arrivals(self._shards, exchange_of(self.urls, world_size) if world_size > 1 else None)
        return self._arrivals

    def finish(self, rank: int, world_size: int) -> None:
        """Count the remaining shards, with a progress bar.

        Reads the index of a shard if the store has it, else the shard. Ranks divide the work if they can exchange
        results. Raises as `Arrivals.wait` does.
        """
        missing, arrivals = self._uncounted(), self.arrivals(world_size)
        # Divided by number: a rank that left an epoch early may lack other shards than the rest.
        arrivals.count(range(rank, len(self._shards), world_size))
        if not missing:
            return
        with progress_bar("counting shards", len(missing), None, in_bytes=False) as advance:
            # Own shards first, as in `Arrivals.wait`.
            for number in sorted(missing, key=lambda number: number % world_size != rank):
                if not arrivals.hear(number, _PEER_TIMEOUT_S):
                    # Another rank is still in the epoch that this one left, and does not count its part yet.
                    arrivals.count(self._uncounted())
                arrivals.wait([number])
                advance(1)

    # For workers, in any process.

    def arrived(self, rows: Indices, facts: Iterable[tuple[int, Facts]]) -> list[Any]:
        """Return the samples at rows of `pack_rows`, in this order, given the numbers and facts of their shards."""
        self._learn(facts)
        return self._read(*split_rows(np.asarray(rows, dtype=np.int64)))

    def _learn(self, facts: Iterable[tuple[int, Facts]]) -> None:
        for number, known in facts:
            self._shards[number].facts = self._shards[number].facts or known

    # As a source, once all files are counted.

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
            with suppress(OSError):  # they were not written, or were written on another machine
                found = json.loads(derived_path("shards", self._shared).read_bytes())
                self._learn(enumerate(map(Facts.of_json, found)))
            self.finish(0, 1)
        return list(self.whole.records(indices))

    def __repr__(self) -> str:
        if self.complete:
            return repr(self.whole)
        return f"<{counted(len(self.urls), 'shard')}, {len(self._missing):,} not counted yet: {listed(self.urls)}>"
