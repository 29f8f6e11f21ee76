"""`ShardDataset`: this rank's share of tar shards, in an order that anyone can reproduce.

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

from penstock.datasets.shards_ahead import ShardsAhead
from penstock.datasets.source_dataset import SourceDataset
from penstock.distributed import current
from penstock.errors import ConfigError
from penstock.images.sample_record import SampleRecord
from penstock.order.permutation import Indices
from penstock.plan.share import EpochView, MiniEpoch, SharePlan
from penstock.plan.share_options import ShareOptions, check_share
from penstock.plan.windows import ShardSamples, WindowPlan, check_window_shards
from penstock.shards.arriving import open_shards
from penstock.shards.decode import chained
from penstock.shards.grouping import Sample
from penstock.shards.shardset import ShardSet
from penstock.shards.urls import Urls
from penstock.stages import stage
from penstock.storage import Storage, is_remote

__all__ = ["ShardDataset"]


class ShardDataset(SourceDataset):
    """The samples of one rank in one mini-epoch, as a map-style data set of exactly that length.

    Args:
        urls: the shards, see `ShardSet`; or an open `ShardSet`.
        decode: True makes images, numbers, text, JSON and arrays of the bytes, by their extensions; a mapping of
            extensions to functions of bytes does so with those in front; a function gets the sample. By default values
            are bytes.
        load: ``load(sample)`` makes the item, inside the scope of the sample's own `penstock.generator`; by default an
            item is the sample, a dict.
        rank, world_size, process_group, mini_epochs, group, seed, remainder, shuffle, block_size, window: see
            `penstock.RankDataset`. ``shuffle="block"`` with a ``block_size`` of about a shard's samples keeps reads
            within few shards at a time; ``"global"`` reads from all of them.
        locality, nodes: ``locality="node"`` deals whole shards to nodes, each of which keeps most of its own from epoch
            to epoch, see `penstock.RankDataset`.
        copy, storage, cache_dir, progress: see `ShardSet`.
        window_shards: of shards in a store that have no indexes: how many of a rank's are mixed in the first epoch, see
            below.
        write_index: write the index of each shard that is made here beside the shard in the store: then the next job
            finds it, on whichever machine.

    Raises:
        ConfigError, PartitionError: arguments that make no sense.
        ShardError: see `ShardSet`.

    Every sample comes once an epoch, whatever the number of shards, ranks and workers, and all ranks have equally many
    batches, unless ``remainder="uneven"``. The state is a few integers, and loads on any number of ranks. Index ``i``
    is the i-th sample of this rank; ``dataset.shards[i]`` is the i-th one on disk.

    Shards in a store need no index: the first batch comes once the first shard is here. As long as nobody has counted
    the samples, an epoch has an order of its own: shards are permuted and dealt to ranks, the samples of up to
    ``window_shards`` of a rank are shuffled together, and ranks tell each other how many there are. Every sample still
    comes once, and ranks have equally many. ``len`` is a `LengthUnknownError` until the last shard was counted;
    the next epoch has the order that is asked for. A state of such an epoch fits any number of ranks, too.

    Memory does not depend on the number of samples: the indexes are mapped and shared by all processes.
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
        if isinstance(urls, ShardSet) and (
            not copy or write_index or any(value is not None for value in given.values())
        ):
            raise ConfigError(
                f"copy, write_index, {', '.join(given)} are for shards to be opened, and this set is open already"
            )
        self.shards = (
            urls
            if isinstance(urls, ShardSet)
            else open_shards(urls, copy=copy, write_index=write_index, world_size=_world_size(share), **given)
        )
        """The samples as they are on disk."""
        plan: SharePlan
        if any(is_remote(url) for url in self.shards.urls):
            plan = WindowPlan(self.shards, window_shards=window_shards, ahead=ShardsAhead(self.shards), **share)
        else:
            plan = SharePlan(self.shards, by_shards=True, **share)
        super().__init__(self.shards, plan, chained(decode, load))
        self.releases_gil = decode is True
        """Whether items are mostly made outside of Python's lock: images are, when they are decoded."""

    def image_records(self, indices: Sequence[int], place: MiniEpoch | None = None) -> list[SampleRecord]:
        """Several samples as records of images, for `penstock.ImageDataset`. See `ShardSet.as_images`."""
        return self.shards.as_images(self.rows(indices, place), self.records(indices, place))

    def _read(self, view: EpochView, local: Indices) -> list[Any]:
        rows, place = view.rows(local), cast(MiniEpoch | ShardSamples, view.place)
        with stage("read"):
            if isinstance(place, ShardSamples):
                return self.shards.arrived(rows, place.versions)
            return self.shards.records(rows)

    def _read_one(self, view: EpochView, local: int, row: int) -> Any:
        return self.shards[row]


def _world_size(share: ShareOptions) -> int:
    return current(share.get("rank"), share.get("world_size"), process_group=share.get("process_group")).world_size
