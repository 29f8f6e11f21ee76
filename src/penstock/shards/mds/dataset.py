"""`MDSDataset`: this rank's share of an MDS data set, in an order that anyone can reproduce.

dataset = MDSDataset("data/imagenet-mds", split="train", images="rgb", load=augment, seed=0)
loader = DataLoader(dataset, batch_size=256, num_workers=8)
for epoch in range(90):
    loader.set_epoch(epoch)
    for batch in loader: ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from penstock.datasets.place import Place
from penstock.datasets.share import Share, Slice
from penstock.datasets.share_dataset import ShareDataset
from penstock.errors import ConfigError
from penstock.order.permutation import Indices
from penstock.random import in_sample, sample_scope
from penstock.shards.mds.folder import MDSFolder
from penstock.storage import Cache, Storage

__all__ = ["MDSDataset"]


class MDSDataset(ShareDataset):
    """The samples of one rank in one mini-epoch, as a map-style data set of exactly that length.

    Args:
        source: the folder that holds ``index.json``, its address in a store, or an open `MDSFolder`.
        split, columns, images, allow_pickle, validate_hash, cache_dir, storage: see `MDSFolder`.
        load: ``load(sample)`` makes the item, inside the scope of the sample's own `penstock.generator`; by default an
            item is the sample, a dict of its columns.
        rank, world_size, process_group, mini_epochs, group, seed, remainder, shuffle, block_size, window: see
            `penstock.RankDataset`. ``shuffle="block"`` with a ``block_size`` about the samples of a shard keeps reads
            within few shards at a time; ``"global"`` reads from all of them.

    Raises:
        ConfigError, PartitionError: arguments that make no sense.
        ShardError: see `MDSFolder`.

    Index ``i`` is the i-th sample of this rank; ``dataset.folder[i]`` is the i-th one on disk.
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
        rank: int | None = None,
        world_size: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        mini_epochs: int = 1,
        group: int | None = None,
        seed: int = 0,
        remainder: str = "pad",
        shuffle: str = "global",
        block_size: int | None = None,
        window: int | None = None,
    ) -> None:
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
        """The samples as they are on disk."""
        share = Share(
            self.folder,
            rank=rank,
            world_size=world_size,
            process_group=process_group,
            mini_epochs=mini_epochs,
            seed=seed,
            shuffle=shuffle,
            remainder=remainder,
            group=group,
            block_size=block_size,
            window=window,
        )
        super().__init__(share, load)

    @property
    def fingerprint(self) -> str:
        """Identity of the samples, see `MDSFolder.fingerprint`."""
        return self.folder.fingerprint

    def _read(self, slice_: Slice, local: Indices) -> list[Any]:
        return self.folder.records(slice_.rows(slice_.positions(local)))

    def _items(self, records: list[Any]) -> list[Any]:
        return records

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The items at several indices at once."""
        keys = None if self.load is None or in_sample() else self.keys(indices)
        return MDSDataset.load_samples(self, indices, keys)

    def load_samples(self, indices: Sequence[int], keys: Sequence[int] | None, place: Place | None = None) -> list[Any]:
        """The items at several indices, each made in the scope of its key; at another `place` than the present one if
        that is given."""
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

    def row(self, index: int, place: Place | None = None) -> int:
        """The number on disk of the sample at an index."""
        slice_ = self._share.current() if place is None else self._share.slice_at(place)
        return int(slice_.rows(slice_.positions(np.array([index % len(slice_)])))[0])


def _folder(source: MDSFolder | str | os.PathLike[str], options: dict[str, Any]) -> MDSFolder:
    if not isinstance(source, MDSFolder):
        return MDSFolder(source, **options)
    if options:
        raise ConfigError(f"{', '.join(options)} belong to MDSFolder(...), and this one is open already")
    return source
