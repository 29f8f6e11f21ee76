"""`MDSDataset`: one rank's samples of an MDS dataset, in a reproducible order.

dataset = MDSDataset("data/imagenet-mds", split="train", images="rgb", load=augment, seed=0)
loader = DataLoader(dataset, batch_size=256, num_workers=8)
for epoch in range(90):
    loader.set_epoch(epoch)
    for batch in loader: ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from penstock.datasets.shard_prefetch import ShardPrefetcher
from penstock.datasets.source_dataset import SourceDataset, opened
from penstock.images.sample_record import ColumnRecord, ImageType
from penstock.plan.share import MiniEpoch, SharePlan
from penstock.plan.share_options import ShareOptions, check_share
from penstock.shards.mds.folder import MDSFolder
from penstock.storage import Cache, Storage

__all__ = ["MDSDataset"]


class MDSDataset(SourceDataset):
    """The samples of an MDS dataset, split across ranks. A map-style dataset of one rank's samples in one mini-epoch.

    Args:
        source: the folder with ``index.json``, its address in a store, or an open `MDSFolder`.
        split, columns, images, allow_pickle, validate_hash, cache_dir, storage: see `MDSFolder`.
        load: ``load(sample)`` converts the sample to the item, in the scope of the sample's own `penstock.generator`.
            By default the item is the sample: a dict of its columns.
        rank, world_size, seed, shuffle, ...: see `penstock.RankDataset`. ``shuffle="block"``, with a ``block_size`` of
            about one shard, reads from only a few shards at a time; ``"global"`` reads from all of them.

    Raises:
        ConfigError, PartitionError: invalid arguments.
        ShardError: see `MDSFolder`.

    Index ``i`` is the i-th sample of this rank; ``dataset.folder[i]`` is row ``i`` on disk.
    """

    def __init__(
        self,
        source: MDSFolder | str | os.PathLike[str],
        *,
        split: str | None = None,
        columns: Sequence[str] | None = None,
        images: ImageType | None = None,
        allow_pickle: bool | None = None,
        validate_hash: str | None = None,
        cache_dir: Cache | str | os.PathLike[str] | None = None,
        storage: Storage | None = None,
        load: Callable[[dict[str, Any]], Any] | None = None,
        **share: Unpack[ShareOptions],
    ) -> None:
        check_share(type(self), share, load)
        given: dict[str, Any] = {"split": split, "columns": columns, "images": images, "allow_pickle": allow_pickle}
        given |= {"validate_hash": validate_hash, "cache_dir": cache_dir, "storage": storage}
        self.folder = opened(MDSFolder, source, given)
        """The samples, in the order of the shards."""
        ahead = ShardPrefetcher(self.folder) if self.folder.stored() else None
        super().__init__(self.folder, SharePlan(self.folder, ahead=ahead, **share), load)

    def image_and_label(self) -> tuple[str, str | None]:
        """Return the columns of images and labels. See `MDSFolder.image_and_label`."""
        return self.folder.image_and_label()

    def image_records(self, indices: Sequence[int], place: MiniEpoch | None = None) -> list[ColumnRecord]:
        """Return several samples as image records, for `penstock.ImageDataset`."""
        return self.folder.image_records(self.rows(indices, place))

    def row(self, index: int, place: MiniEpoch | None = None) -> int:
        """Return the row on disk of the sample at an index."""
        return int(self.rows([index], place)[0])
