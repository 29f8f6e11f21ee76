"""`ShardDataset`: one rank's samples of tar shards, in a reproducible order.

dataset = ShardDataset("train-{000..999}.tar", decode=True, seed=0)
loader = DataLoader(dataset, batch_size=256, num_workers=8)
for epoch in range(90):
    loader.set_epoch(epoch)
    for batch in loader: ...      # {"__key__": [...], "__url__": [...], "jpg": ..., "cls": tensor}
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack, cast

from penstock.datasets.shard_prefetch import ShardPrefetcher
from penstock.datasets.source_dataset import SourceDataset, opened
from penstock.distributed import LateWorld
from penstock.errors import ConfigError, StorageAuthError, StorageNotFoundError
from penstock.images.sample_record import SampleRecord
from penstock.order.permutation import Indices
from penstock.plan.share import EpochView, MiniEpoch, SharePlan
from penstock.plan.share_options import ShareOptions, check_share
from penstock.shards.arriving import ArrivingSource
from penstock.shards.decode import chained
from penstock.shards.exchange import agree_on
from penstock.shards.first_epoch import ShardSamples, WindowPlan, check_window_shards
from penstock.shards.grouping import Sample
from penstock.shards.shardset import ShardSet, build, find_shards
from penstock.shards.tar_shard import TarShard, index_url
from penstock.stages import stage
from penstock.storage import RemoteSource, Storage, is_remote
from penstock.storage.names import Urls, expand_versions, with_versions

__all__ = ["ShardDataset"]


class ArrivingShards(ArrivingSource):
    """Tar shards in a store, which may not be counted yet; once all are, `whole` is a `ShardSet`."""

    _shards: Sequence[TarShard]

    def __init__(self, shards: Sequence[TarShard], shared: str | None = None) -> None:
        super().__init__(shards, shared)
        self._all = ShardSet.of(self._shards)

    def _read(self, numbers: Indices, rows: Indices) -> list[Sample]:
        found: list[Sample] = self._all.read(numbers, rows)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrivingShards, (self._shards, self._shared)


class ShardDataset(SourceDataset):
    """The samples of tar shards, split across ranks. A map-style dataset of one rank's samples in one mini-epoch.

    Args:
        urls: the shards, see `ShardSet`; or an open `ShardSet`.
        decode: True decodes images, numbers, text, JSON and arrays by file extension. A mapping from extensions to
            functions of bytes does the same, and its functions have precedence. A function receives the whole sample.
            By default values are bytes.
        load: ``load(sample)`` converts the sample to the item, in the scope of the sample's own `penstock.generator`.
            By default the item is the sample, a dict.
        rank, world_size, seed, shuffle, ...: see `penstock.RankDataset`. ``shuffle="block"``, with a ``block_size`` of
            about one shard, reads from only a few shards at a time; ``"global"`` reads from all of them.
        locality: ``"node"``: each node reads the same shards in every epoch, see `penstock.RankDataset`. With
            ``shuffle="block"`` and shards of ``block_size`` samples, nodes share few shards.
        copy, storage, cache_dir, progress: see `ShardSet`.
        window_shards: for shards in a store without indexes: the number of a rank's shards that the first epoch mixes,
            see below.
        write_index: write each index that is built here into the store, beside its shard. The next job then reads it,
            on any machine.

    Raises:
        ConfigError, PartitionError: invalid arguments.
        ShardError: see `ShardSet`.
        StorageChangedError: (on access) a shard in a store was replaced, see below.

    Each sample occurs once per epoch, for any number of shards, ranks and workers. All ranks have the same number of
    batches, unless ``remainder="uneven"``. The state has a few integers and can be loaded on any number of ranks. Index
    ``i`` is the i-th sample of this rank; ``dataset.shards[i]`` is sample ``i`` on disk.

    Shards in a store need no index: the first batch is ready when the first shard has been downloaded. Until all
    samples have been counted, an epoch has a special order: shards are permuted and assigned to ranks, the samples of
    up to ``window_shards`` shards of a rank are shuffled together, and ranks exchange their sample counts. Each sample
    still occurs once, and ranks have the same number of batches. ``len`` raises `LengthUnknownError` until the last
    shard has been counted. The next epoch has the order that you chose. A state of the first epoch can be loaded on
    the same number of ranks. Shards are read in the versions that they have now, see `penstock.storage.names`; a state
    in this epoch also names the content of up to ``window_shards`` shards per rank, and another content is an error.

    Memory use does not depend on the number of samples: all processes share the mapped indexes.
    """

    def __init__(
        self,
        urls: ShardSet | Urls,
        *,
        decode: bool | Mapping[str, Callable[[bytes], Any] | None] | Callable[[Sample], Sample] | None = None,
        load: Callable[[Sample], Any] | None = None,
        copy: bool = True,
        storage: Storage | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
        window_shards: int = 8,
        write_index: bool = False,
        **share: Unpack[ShareOptions],
    ) -> None:
        check_share(type(self), share, load)
        check_window_shards(window_shards)
        given: dict[str, Any] = {"storage": storage, "cache_dir": cache_dir, "progress": progress}
        self.shards: ShardSet | ArrivingShards
        if isinstance(urls, ShardSet):
            others = {"copy": None if copy else False, "write_index": write_index or None}
            self.shards = opened(ShardSet, urls, {**given, **others})
        else:
            world: dict[str, Any] = {name: share.get(name) for name in ("rank", "world_size", "process_group", "mesh")}
            ranks = LateWorld(**world, of="dataset").ranks
            self.shards = _open(urls, copy=copy, write_index=write_index, world_size=ranks, **given)
        """The samples, in the order of the shards."""
        plan: SharePlan
        if any(is_remote(url) for url in self.shards.urls):
            plan = WindowPlan(self.shards, window_shards=window_shards, ahead=ShardPrefetcher(self.shards), **share)
        else:
            plan = SharePlan(self.shards, **share)
        super().__init__(self.shards, plan, chained(decode, load))
        self.releases_gil = decode is True
        """Whether items are mostly made without the GIL: True for decoded images."""

    def image_records(self, indices: Sequence[int], place: MiniEpoch | None = None) -> list[SampleRecord]:
        """Return several samples as image records, for `penstock.ImageDataset`. See `ShardSet.as_images`."""
        samples = self.records(indices, place)
        if isinstance(self.shards, ArrivingShards):
            return [SampleRecord(sample, None) for sample in samples]
        return self.shards.as_images(self.rows(indices, place), samples)

    def _read(self, view: EpochView, local: Indices) -> list[Any]:
        rows, place = view.rows(local), cast(MiniEpoch | ShardSamples, view.place)
        with stage("read"):
            if isinstance(place, ShardSamples) and place.facts is not None:
                return cast(ArrivingShards, self.shards).arrived(rows, place.facts)
            return self.shards.records(rows)

    def _read_one(self, view: EpochView, local: int, row: int) -> Any:
        return self.shards[row]


def _open(
    urls: Urls,
    *,
    copy: bool,
    storage: Storage | None,
    cache_dir: str | os.PathLike[str] | None,
    progress: bool | None,
    write_index: bool,
    world_size: int,
) -> ShardSet | ArrivingShards:
    """Open shards for training; shards in a store can be read at once, even without indexes.

    Looks in the store for the indexes of the first and the last shard; if one is missing, it looks for no others, but
    for the versions of the shards (see `with_versions`), which are read in these versions.

    Ranks may look at different times while indexes appear. So all ranks use the result of the first rank, if there is a
    process group; without one, ranks that write indexes assume that none exist.
    """
    found = expand_versions(urls, storage)
    folder = None if cache_dir is None else os.path.abspath(cache_dir)
    is_stored = copy and all(is_remote(url) for url, _ in found)
    if write_index and not is_stored:
        raise ConfigError("write_index= needs shards in a store that are copied (copy=True): no others are indexed")

    def has_index(url: str) -> bool:
        try:
            RemoteSource(index_url(url), storage)
        except (StorageNotFoundError, StorageAuthError):
            # Without list permission, stores answer "no access" for missing objects.
            return False
        return True

    may_be_counted = not is_stored or all(has_index(found[number][0]) for number in (0, -1))
    shards = find_shards(found, storage, folder, copy=copy) if may_be_counted else []
    if is_stored:
        if not shards:
            found = with_versions(found, storage)
        is_counted = is_agreed = bool(shards) and all(shard.facts is not None for shard in shards)
        if world_size > 1:
            said = agree_on([url for url, _ in found], "counted" if is_counted else "uncounted", world_size)
            is_agreed = is_counted and not write_index if said is None else said == "counted"
        if not is_agreed:
            if is_counted or not shards:
                shards = [TarShard(url, storage, folder, stat) for url, stat in found]
            for shard in shards:
                shard.write_index = write_index
            return ArrivingShards(shards)
        shards = shards if is_counted else find_shards(found, storage, folder, copy=True)
    build(shards, progress=progress)
    return ShardSet.of(shards)
