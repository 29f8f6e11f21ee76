"""`StoreShard`: a shard in a store that nobody may have counted yet."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from penstock.errors import NotCachedError, StorageAuthError, StorageNotFoundError
from penstock.shards.facts import Facts
from penstock.shards.handles import CopiedShard, OpenShard, RemoteShard
from penstock.shards.index import Header
from penstock.shards.ranged import RangedShard
from penstock.storage import Storage
from penstock.storage.backend import Cancel

__all__ = ["StoreShard"]


class StoreShard:
    """A shard in a store: a `CopiedShard` once somebody has asked for its version.

    Args:
        url: its address.
        storage: how the store is reached.
        cache_dir: see `CopiedShard`.

    Attributes: ``facts`` are None until the shard was read here, or somebody who has read it told them.
    """

    is_file = False

    def __init__(self, url: str, storage: Storage | None, cache_dir: str | None, facts: Facts | None = None) -> None:
        self.url, self.storage, self._cache_dir = url, storage or Storage(), cache_dir
        self.facts = facts
        self._shard: CopiedShard | None = None

    def copied(self) -> CopiedShard:
        """Return the shard in the version that was counted, or in the present one.

        Raises:
            StorageError: nothing is known of it, and it is not there.
        """
        facts = self.facts
        stat = None if facts is None else facts.version
        if self._shard is None or stat not in (None, self._shard.source.stat):
            self._shard = CopiedShard(self.url, self.storage, self._cache_dir, None, stat)
        if facts is not None:
            self._shard.header = Header(0, facts.samples, 0, 0, facts.version.size, 0, bytes.fromhex(facts.digest), 0)
        return self._shard

    def count(self, cancel: Cancel | None = None) -> Facts:
        """Have the shard counted, unless it is: by the index beside it in the store, if there is one.

        Raises:
            StorageError: it cannot be had.
            ShardError: it is damaged, or compressed; or the index is that of another shard.
        """
        if not self.is_known():
            try:
                shard = RemoteShard(self.url, self.storage)
            except (StorageNotFoundError, StorageAuthError):  # as in `has_index`
                return self.obtain(cancel=cancel)
            self._shard = CopiedShard(self.url, self.storage, self._cache_dir, shard)
            self._know(self._shard)
        return self.facts or self.obtain(cancel=cancel)

    def is_known(self) -> bool:
        """Return whether the shard is counted, or was by somebody of this machine. Costs one request at most."""
        if self.facts is None:
            shard = self.copied()
            if shard.header is not None:
                self._know(shard)
        return self.facts is not None

    def obtain(self, *, only_later: bool = False, cancel: Cancel | None = None) -> Facts:
        """Have the shard copied and indexed, unless it is counted already. Raises as `count` does.

        Arguments are those of `CopiedShard.fetch`.

        Raises:
            NotCachedError: see `penstock.storage.Cache.open` on ``only_later``.
        """
        if not self.is_known():
            shard = self.copied()
            shard.build(lambda _: None, only_later=only_later, cancel=cancel)
            self._know(shard)
        assert self.facts is not None
        return self.facts

    def fetch(self, cancel: Cancel) -> None:
        """Have a copy in the cache, unless what is there is needed sooner. Raises as `count` does."""
        with suppress(NotCachedError):
            self.copied().fetch(only_later=True, cancel=cancel)

    def open(self) -> OpenShard | RangedShard:
        """Open it, see `CopiedShard.open`."""
        return self.copied().open()

    def _know(self, shard: CopiedShard) -> None:
        assert shard.header is not None
        self.facts = Facts(shard.source.stat, shard.header.samples, shard.header.digest.hex())

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreShard, (self.url, self.storage, self._cache_dir, self.facts)
