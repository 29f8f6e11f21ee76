"""`StoreShard`: a shard in a store whose samples may not be counted yet."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self

from penstock.errors import StorageAuthError, StorageNotFoundError
from penstock.progress import progress_bar
from penstock.shards.facts import Facts
from penstock.shards.handles import CopiedShard, OpenShard, RemoteShard, index_url
from penstock.shards.index import Header
from penstock.shards.ranged import RangedShard
from penstock.storage import Storage
from penstock.storage.backend import Cancel, Stat

__all__ = ["StoreShard", "write_beside"]

_SHARDS = 8  # shards read at a time while indexes are written


class StoreShard:
    """A shard in a store, which becomes a `CopiedShard` when its version is known.

    Args:
        url: its URL.
        storage: access options.
        cache_dir: see `CopiedShard`.
        stat: its version, if known.
        write_index: write the index beside the shard in the store, if this process builds it.

    Attributes: ``facts`` is None until this process has read the shard, or received the facts from another one.
    """

    is_file = False

    def __init__(
        self,
        url: str,
        storage: Storage | None,
        cache_dir: str | None,
        stat: Stat | None = None,
        facts: Facts | None = None,
        *,
        write_index: bool = False,
    ) -> None:
        self.url, self.storage, self._cache_dir = url, storage or Storage(), cache_dir
        self._stat, self.facts, self.write_index = stat, facts, write_index
        self._shard: CopiedShard | None = None

    @classmethod
    def of(cls, shard: CopiedShard, storage: Storage | None, cache_dir: str | None, *, write_index: bool) -> Self:
        """Return the shard of a handle, which may have an index."""
        made = cls(shard.url, storage, cache_dir, shard.source.stat, write_index=write_index)
        made._shard = shard
        if shard.header is not None:
            made._know(shard)
        return made

    def copied(self) -> CopiedShard:
        """Return the shard in the counted version, or else in the current one.

        Raises:
            StorageError: its version is unknown and it does not exist.
        """
        facts = self.facts
        stat = self._stat if facts is None else facts.version
        if self._shard is None or stat not in (None, self._shard.source.stat):
            self._shard = CopiedShard(self.url, self.storage, self._cache_dir, None, stat)
        if facts is not None:
            self._shard.header = Header(0, facts.samples, 0, 0, facts.version.size, 0, bytes.fromhex(facts.digest), 0)
        return self._shard

    def count(self, cancel: Cancel | None = None) -> Facts:
        """Count the shard unless it is counted, by the index beside it in the store if that exists; return the facts.

        Raises:
            StorageError: it is unavailable.
            ShardError: it is damaged or compressed; or the index belongs to another shard.
        """
        if not self.is_known():
            try:
                shard = RemoteShard(self.url, self.storage, self._stat)
            except (StorageNotFoundError, StorageAuthError):  # as in `has_index`
                return self.obtain(cancel=cancel)
            self._shard = CopiedShard(self.url, self.storage, self._cache_dir, shard)
            self._know(self._shard)
        return self.facts or self.obtain(cancel=cancel)

    def is_known(self) -> bool:
        """Return whether the shard is counted here, or was counted on this machine. Costs at most one request."""
        if self.facts is None:
            shard = self.copied()
            if shard.header is not None:
                self._know(shard)
        return self.facts is not None

    def obtain(self, *, only_later: bool = False, cancel: Cancel | None = None) -> Facts:
        """Copy and index the shard unless it is counted; return the facts. Raises as `count`.

        Arguments: see `CopiedShard.fetch`.

        Raises:
            NotCachedError: see `penstock.storage.Cache.open` on ``only_later``.
        """
        if not self.is_known():
            shard = self.copied()
            shard.build(lambda _: None, only_later=only_later, cancel=cancel)
            if self.write_index:
                self.storage.put(index_url(self.url), shard.index().path.read_bytes())
            self._know(shard)
        assert self.facts is not None
        return self.facts

    def fetch(self, cancel: Cancel) -> None:
        """Ensure that the cache has a copy.

        Raises:
            NotCachedError: the cached objects are needed sooner.
        """
        self.copied().fetch(only_later=True, cancel=cancel)

    def open(self) -> OpenShard | RangedShard:
        """Open the shard, see `CopiedShard.open`."""
        return self.copied().open()

    def _know(self, shard: CopiedShard) -> None:
        assert shard.header is not None
        self.facts = Facts(shard.source.stat, shard.header.samples, shard.header.digest.hex())

    def write_beside(self, *, force: bool = False, cancel: Cancel | None = None) -> bool:
        """Ensure that the store has an index beside the shard; return whether it was written. Raises as `count`.

        Args:
            force: write it again.
            cancel: see `CopiedShard.fetch`.
        """
        if not force:
            with suppress(StorageNotFoundError, StorageAuthError):
                self._shard = CopiedShard(
                    self.url, self.storage, self._cache_dir, RemoteShard(self.url, self.storage, self._stat)
                )
                self._know(self._shard)
                return False
        shard = self.copied()
        if shard.header is None:
            shard.build(lambda _: None, cancel=cancel)
        self.storage.put(index_url(self.url), shard.index().path.read_bytes())
        self._know(shard)
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreShard, (self.url, self.storage, self._cache_dir, self._stat, self.facts)


def write_beside(shards: Sequence[StoreShard], *, force: bool = False, progress: bool | None = None) -> int:
    """Ensure that the store has indexes beside shards, several at a time; return how many were written.

    Raises:
        StorageError: the store fails; written indexes stay, and the next call continues.
        ShardError: a shard is damaged or compressed.
    """
    cancel, written = Cancel(), 0
    with (
        ThreadPoolExecutor(_SHARDS, "penstock-indexes") as pool,
        progress_bar("indexing", len(shards), progress, in_bytes=False) as advance,
    ):
        try:
            for is_written in pool.map(lambda shard: shard.write_beside(force=force, cancel=cancel), shards):
                written += is_written
                advance(1)
        except BaseException:
            cancel.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return written
