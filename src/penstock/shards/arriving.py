"""`ArrivingShards`: tar shards in a store that are indexed while they are fetched, see `ArrivingSource`."""

from __future__ import annotations

import os
from typing import Any

from penstock.errors import ConfigError
from penstock.images.sample_record import SampleRecord
from penstock.order.permutation import Indices
from penstock.shards.arriving_source import ArrivingSource
from penstock.shards.exchange import SharedFacts, agree_on
from penstock.shards.find_handles import build, find_handles, has_index, open_handles
from penstock.shards.grouping import Sample
from penstock.shards.handles import StoreShard
from penstock.shards.opened import OpenShards
from penstock.shards.shardset import ShardSet
from penstock.storage import Storage, is_remote
from penstock.storage.names import Urls, expand_versions, with_versions

__all__ = ["ArrivingShards", "open_shards"]


class ArrivingShards(ArrivingSource):
    """Shards in a store, which may not be indexed yet; once all are, `whole` is a `ShardSet`."""

    def __init__(self, handles: list[StoreShard], shared: SharedFacts | None = None) -> None:
        super().__init__(handles, shared)
        self._opened = OpenShards(handles)

    def _read(self, numbers: Indices, rows: Indices) -> list[Sample]:
        return self._opened.read(numbers, rows)

    def _make_whole(self) -> ShardSet:
        shards = ShardSet.of_handles(self._handles)
        shards._opened = self._opened
        return shards

    def as_images(self, rows: Indices, samples: list[Sample]) -> list[SampleRecord]:
        """Return samples as image records, see `ShardSet.as_images`."""
        return [SampleRecord(sample, None) for sample in samples]

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrivingShards, (self._handles, self._shared)


def open_shards(
    urls: Urls,
    *,
    copy: bool = True,
    storage: Storage | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    write_index: bool = False,
    world_size: int = 1,
) -> ShardSet | ArrivingShards:
    """Open shards for training; shards in a store can be read at once, even without indexes.

    Args:
        urls, copy, storage, cache_dir, progress: see `ShardSet`.
        write_index: write new indexes beside their shards in the store.
        world_size: number of ranks that open them, each for its share.

    Looks in the store for the indexes of the first and the last shard; if one is missing, it looks for no others, but
    for the versions of the shards (see `with_versions`), which are read in these versions.

    Ranks may look at different times while indexes appear. So all ranks use the result of the first rank, if there is a
    process group; without one, ranks that write indexes assume that none exist.

    Raises:
        ConfigError: ``write_index`` with shards that are not copied.
        ShardError, StorageError: see `ShardSet`.
    """
    found = expand_versions(urls, storage)
    folder = None if cache_dir is None else os.path.abspath(cache_dir)
    is_stored = copy and all(is_remote(url) for url, _ in found)
    if write_index and not is_stored:
        raise ConfigError("write_index= needs shards in a store that are copied (copy=True): no others are indexed")
    if not is_stored:
        return ShardSet.of_handles(open_handles(found, storage, folder, copy=copy, progress=progress))

    def find() -> list[StoreShard]:
        handles = find_handles(found, storage, folder, copy=True)
        return [handle for handle in handles if isinstance(handle, StoreShard)]

    handles = find() if all(has_index(found[number][0], storage) for number in (0, -1)) else []
    if not handles:
        found = with_versions(found, storage)
    counted = agreed = bool(handles) and all(handle.facts is not None for handle in handles)
    if world_size > 1:
        said = agree_on([url for url, _ in found], "counted" if counted else "uncounted", world_size)
        agreed = counted and not write_index if said is None else said == "counted"
    if agreed:
        if not counted:
            build(handles := find(), progress=progress)
        return ShardSet.of_handles(handles)
    if counted or not handles:
        handles = [StoreShard(url, storage, folder, stat) for url, stat in found]
    for handle in handles:
        handle.write_index = write_index
    return ArrivingShards(handles)
