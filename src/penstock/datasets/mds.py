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
from penstock.datasets.source_dataset import SourceDataset
from penstock.errors import ConfigError
from penstock.plan.share import MiniEpoch, SharePlan
from penstock.plan.share_options import ShareOptions, check_share
from penstock.random import in_sample, sample_scope
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
        rank, world_size, process_group, mesh, mini_epochs, group, seed, remainder, shuffle, block_size, window: see
            `penstock.RankDataset`. ``shuffle="block"``, with a ``block_size`` of about one shard, reads from only a few
            shards at a time; ``"global"`` reads from all of them.

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
        images: str | None = None,
        allow_pickle: bool | None = None,
        validate_hash: str | None = None,
        cache_dir: Cache | str | os.PathLike[str] | None = None,
        storage: Storage | None = None,
        load: Callable[[dict[str, Any]], Any] | None = None,
        **share: Unpack[ShareOptions],
    ) -> None:
        check_share(type(self), share, load)
        given: dict[str, Any] = {
            "split": split,
            "columns": columns,
            "images": images,
            "allow_pickle": allow_pickle,
            "validate_hash": validate_hash,
            "cache_dir": cache_dir,
            "storage": storage,
        }
        self.folder = _folder(source, {name: value for name, value in given.items() if value is not None})
        """The samples, in the order of the shards."""
        if self.folder.stored():
            plan = SharePlan(self.folder, ahead=ShardPrefetcher(self.folder), **share)
        else:
            plan = SharePlan(self.folder, **share)
        super().__init__(self.folder, plan, load)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the items at several indices."""
        keys = None if self.load is None or in_sample() else self.keys(indices)
        return MDSDataset.load_samples(self, indices, keys)

    def load_samples(
        self, indices: Sequence[int], keys: Sequence[int] | None, place: MiniEpoch | None = None
    ) -> list[Any]:
        """Return the items at several indices, each made in the scope of its key.

        Args:
            indices: of this rank's samples.
            keys: of the samples' generators; None to use the caller's scope.
            place: the mini-epoch that the indices belong to; by default the current one.
        """
        samples = self.records(indices, place)
        load = self.load
        if load is None:
            return samples
        if keys is None:
            return [load(sample) for sample in samples]
        items = []
        with sample_scope(0) as scope:
            for index, key, sample in zip(indices, keys, samples, strict=True):
                scope.move(key)
                try:
                    items.append(load(sample))
                except Exception as error:
                    error.add_note(f"while loading sample {self.row(index, place)} of {self.folder.path}")
                    raise
        return items

    @property
    def has_rows(self) -> bool:
        """Whether items can be loaded by row: False if a subclass makes its items itself."""
        return not self.own_items and type(self).load_samples is MDSDataset.load_samples

    def row(self, index: int, place: MiniEpoch | None = None) -> int:
        """Return the row on disk of the sample at an index."""
        return int(self.rows([index], place)[0])


def _folder(source: MDSFolder | str | os.PathLike[str], options: dict[str, Any]) -> MDSFolder:
    if not isinstance(source, MDSFolder):
        return MDSFolder(source, **options)
    if options:
        raise ConfigError(f"{', '.join(options)}: give these to MDSFolder(...); this one is already open")
    return source
