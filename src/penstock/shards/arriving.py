"""`ArrivingShards`: shards in a store that are indexed while they arrive, for an order that needs no counts beforehand.

    shards = ArrivingShards(urls, storage)
    shards.expect([17, 3])                 # begin to copy them into the cache
    shards.counts_of([17, 3])                 # [1000, 1002]: they are here, and so are their indexes
    shards.arrived(rows, versions)         # in any process: samples, by `penstock.plan.windows.pack_rows`
    shards.complete, len(shards)           # once all were counted: a `ShardSet`

Promises: each shard is fetched once, by one process of the machine, and read and indexed once; all processes of a job
read the version that was counted, or get an error that names the object.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, SupportsIndex

import numpy as np

from penstock.errors import ConfigError, LengthUnknownError
from penstock.images.sample_record import SampleRecord
from penstock.manifest.indices import Indices
from penstock.plan.windows import Need, split_rows
from penstock.progress import progress_bar
from penstock.shards.arrivals import Arrivals
from penstock.shards.exchange import exchange_of
from penstock.shards.facts import Facts, ToldFacts
from penstock.shards.finding import build, find_handles, has_index
from penstock.shards.grouping import Sample
from penstock.shards.handles import CopiedShard, RemoteShard
from penstock.shards.opened import OpenShards
from penstock.shards.shardset import ShardSet
from penstock.shards.store_shard import StoreShard
from penstock.shards.stored import StoredShard
from penstock.shards.urls import Urls, expand_versions
from penstock.storage import Storage, is_remote
from penstock.storage.urls import listed
from penstock.wording import counted

__all__ = ["ArrivingShards", "open_shards"]


class ArrivingShards:
    """Shards of a store, of which any number are indexed.

    Args:
        handles: of all shards.

    ``len``, rows and the fingerprint are those of a `ShardSet`, once `complete`. Memory: some hundred bytes a shard.
    """

    def __init__(self, handles: list[StoreShard], told: ToldFacts | None = None) -> None:
        self.urls, self._handles = [handle.url for handle in handles], handles
        self._opened = OpenShards(handles)
        self._arrivals: Arrivals | None = None
        self._told = told or ToldFacts()
        self._missing = {number for number, handle in enumerate(handles) if handle.facts is None}

    # For plans, in the process that plans.

    @property
    def complete(self) -> bool:
        """Whether all shards are counted."""
        if self._missing:
            self._missing = {number for number in self._missing if self._handles[number].facts is None}
            if not self._missing:
                self._told.write([handle.facts for handle in self._handles if handle.facts is not None])
        return not self._missing

    def expect(self, needs: Sequence[Need], *, position: int = 0) -> None:
        """Begin to get shards, in this order. Others that were expected, and have not begun to arrive, are given up."""
        self._of_this_process.expect(needs, position)

    def advance(self, position: int) -> None:
        """Take note of how many samples the consumer has had: the cache may give up what it needs no more."""
        self._of_this_process.advance(position)

    def close(self) -> None:
        """End what runs in the background, and want nothing of the cache."""
        if self._arrivals is not None and self._arrivals.pid == os.getpid():
            self._arrivals.close()

    def counts_of(self, shards: Sequence[int]) -> list[int]:
        """Return how many samples shards have. Waits for them, or for the ranks that get them.

        Raises:
            ShardError, StorageError: a shard is damaged or cannot be had, by name.
        """
        return [facts.samples for facts in self._of_this_process.wait(shards)]

    def versions(self, shards: Sequence[int]) -> tuple[Any, ...]:
        """Return the facts of shards that were counted, with their numbers."""
        return tuple((shard, self._handles[shard].facts) for shard in shards)

    def finish(self, rank: int, world_size: int) -> None:
        """Count all shards that are not counted yet, while a bar shows how far that is.

        Where the store has the index of a shard, that is read, else the shard. Ranks share them out, where they can
        tell each other. Raises as `counts_of` does.
        """
        missing = [number for number, handle in enumerate(self._handles) if handle.facts is None]
        arrivals = self._of_this_process
        arrivals.count(missing[rank::world_size])
        with progress_bar("counting shards", len(missing), None, in_bytes=False) as advance:
            for number in missing:
                self.counts_of([number])
                advance(1)

    @property
    def _of_this_process(self) -> Arrivals:
        if self._arrivals is None or self._arrivals.pid != os.getpid():
            self._arrivals = Arrivals(self._handles, exchange_of(self.urls))
        return self._arrivals

    # For whoever makes batches, in any process.

    def arrived(self, rows: Indices, versions: Iterable[tuple[int, Facts]]) -> list[Sample]:
        """Return the samples at rows of `penstock.plan.windows.pack_rows`, in this order.

        Args:
            rows: int64 of shape (n,).
            versions: of their shards, from `versions`.
        """
        for number, facts in versions:
            self._handles[number].facts = self._handles[number].facts or facts
        return self._opened.read(*split_rows(np.asarray(rows, dtype=np.int64)))

    # As a source, once all is known.

    @cached_property
    def _all(self) -> ShardSet:
        shards = ShardSet.of_handles([handle.copied() for handle in self._handles])
        shards._opened = self._opened
        return shards

    @property
    def whole(self) -> ShardSet:
        """The same shards as a `ShardSet`.

        Raises:
            LengthUnknownError: some are not counted.
        """
        if not self.complete:
            raise LengthUnknownError(
                f"{counted(len(self._missing), 'shard')} of {len(self.urls):,} are not counted yet: iterate; or "
                "put their indexes beside them (penstock shards index); or open a ShardSet, which reads all of them "
                "first"
            )
        return self._all

    def __len__(self) -> int:
        return len(self.whole)

    @property
    def fingerprint(self) -> str:
        """Identity of the samples, see `ShardSet.fingerprint`."""
        return self.whole.fingerprint

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Whether a set with this fingerprint and so many samples has since got more shards at its end."""
        return self.whole.is_prefix_of_current(fingerprint, rows)

    def __getitem__(self, index: SupportsIndex) -> Sample:
        return self.whole[index]

    @property
    def starts(self) -> Indices:
        """The number of the first sample of each shard, and of all."""
        return self.whole.starts

    def stored(self) -> list[StoredShard]:
        """The shards, for look-ahead."""
        return self.whole.stored()

    def records(self, indices: Indices) -> list[Sample]:
        """The samples at rows of the whole, see `ShardSet.records`.

        Who asks for them knows that all shards are counted, even where this process began before that.
        """
        if not self.complete:
            for number, facts in enumerate(self._told.read() or []):
                self._handles[number].facts = self._handles[number].facts or facts
            self.finish(0, 1)
        return self.whole.records(indices)

    def as_images(self, rows: Indices, samples: list[Sample]) -> list[SampleRecord]:
        """Samples as records of images, see `ShardSet.as_images`."""
        return [SampleRecord(sample, None) for sample in samples]

    def __repr__(self) -> str:
        if self.complete:
            return repr(self.whole)
        return f"<{counted(len(self.urls), 'shard')}, {len(self._missing):,} not counted yet: {listed(self.urls)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrivingShards, (self._handles, self._told)


def open_shards(
    urls: Urls,
    *,
    copy: bool = True,
    storage: Storage | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    write_index: bool = False,
) -> ShardSet | ArrivingShards:
    """Open shards for training: those of a store are read at once, though they may have no indexes there.

    Args:
        urls, copy, storage, cache_dir, progress: see `ShardSet`.
        write_index: write the indexes that are made beside their shards.

    A store is asked for the indexes of the first and of the last shard; where one is missing, nothing else is looked
    for.

    Raises:
        ConfigError: ``write_index`` with shards that are not copied.
        ShardError, StorageError: see `ShardSet`.
    """
    found = expand_versions(urls, storage)
    folder = None if cache_dir is None else os.path.abspath(cache_dir)
    is_stored = copy and all(is_remote(url) for url, _ in found)
    if write_index and not is_stored:
        raise ConfigError("write_index= is for shards in a store that are copied (copy=True): no others are indexed")
    if is_stored and not all(has_index(found[number][0], storage) for number in (0, -1)):
        return ArrivingShards([StoreShard(url, storage, folder, stat, write_index=write_index) for url, stat in found])
    handles = find_handles(found, storage, folder, copy=copy)
    copied = [handle for handle in handles if isinstance(handle, CopiedShard)]
    if is_stored and any(handle.header is None for handle in copied):
        return ArrivingShards([StoreShard.of(handle, storage, folder, write_index=write_index) for handle in copied])
    build([handle for handle in handles if not isinstance(handle, RemoteShard)], progress=progress)
    return ShardSet.of_handles(handles)
