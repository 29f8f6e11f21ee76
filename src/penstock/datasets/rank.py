"""`RankDataset`: one rank's samples of a manifest, mini-epoch by mini-epoch, in constant memory.

dataset = RankDataset("train.txt", mini_epochs=4, seed=0)
loader = DataLoader(dataset, batch_size=256, num_workers=8, persistent_workers=True)
for epoch in range(90):
    dataset.set_epoch(epoch)
    for mini_epoch in range(4):
        dataset.set_mini_epoch(mini_epoch)
        for paths, labels, rows in loader: ...
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Unpack

from torch.utils.data import Dataset

from penstock.datasets.source_dataset import SourceDataset
from penstock.errors import ConfigError
from penstock.manifest import Manifest, Record
from penstock.manifest.classes import HasClasses
from penstock.plan.share import EpochView, SharePlan
from penstock.plan.share_options import NO_PRELOAD, ShareOptions, check_share

__all__ = ["RankDataset"]


class RankDataset(HasClasses, SourceDataset):
    """The samples of a manifest, split across ranks. A map-style dataset of one rank's samples in one mini-epoch.

    Args:
        source: a `Manifest`, or a path for `Manifest.open`.
        rank, world_size: by default those of the job, see `penstock.distributed`. They are resolved at first use.
        process_group, mesh: the process group, or a DeviceMesh whose data dimensions, split the data; by default the
            default group.
        mini_epochs: the number of mini-epochs (sub-epochs) in an epoch, all of the same length.
        seed: the order is a function of (seed, epoch). It must be the same on all ranks.
        shuffle: ``"global"``, ``"block"`` or ``"none"``. ``block_size`` and ``window`` are options of ``"block"``.
        group: cut the rows into this number of blocks, shuffle inside the blocks, and shuffle the blocks (short for
            ``shuffle="block"`` with that block size and ``window=1``).
        remainder: ``"pad"``, ``"drop"`` or ``"uneven"``, see `penstock.order.Partition`. For an exact evaluation use
            ``shuffle="none", remainder="uneven"``; for all rows on every rank ``world_size=1, rank=0``.
        exclude: row numbers to leave out, at most 100,000. Other rows, drawn from (seed, epoch, row), replace them; all
            other positions keep their rows, so an earlier state can still be loaded.
        locality: ``"node"``: each rank reads the same rows in every epoch, see `penstock.order.NodeShuffle`.
        load: ``load(record)`` converts the record to the item, in the scope of the sample's own `penstock.generator`.
            By default the item is the tuple ``(path, label, row)``.
        progress: show a progress bar while a file is indexed; by default if stderr is a terminal.

    Raises:
        ConfigError, PartitionError: invalid arguments.
        ManifestError: the manifest cannot be opened, or a row cannot be parsed.

    Memory use does not depend on the length of the manifest: all processes of a machine share the mapped file, and the
    rows of a rank are computed, not stored. A new mini-epoch costs nothing.

    ``set_epoch`` and ``set_mini_epoch`` take effect at the next ``iter()`` of a running loader, also with persistent
    workers. Do not put a distributed sampler on top: the data would be split twice.
    """

    def __init__(
        self,
        source: Manifest | str | os.PathLike[str],
        *,
        load: Callable[[Record], Any] | None = None,
        progress: bool | None = None,
        **share: Unpack[ShareOptions],
    ) -> None:
        if "preload" in share:
            raise ConfigError(f"{type(self).__name__}: {NO_PRELOAD}")
        check_share(type(self), share, load)
        if isinstance(source, Dataset):
            name = type(source).__name__
            raise ConfigError(
                f"{type(self).__name__} takes a manifest or its path, got a dataset ({name}). To filter rows, filter "
                "the dataset of the whole manifest: Subset(RankDataset(manifest), keep)"
            )
        if progress is not None and isinstance(source, Manifest):
            raise ConfigError("progress= is for indexing a file, and this manifest is open: give it to Manifest.open")
        self.manifest = source if isinstance(source, Manifest) else Manifest.open(source, progress=progress)
        """The manifest of the dataset."""
        super().__init__(self.manifest, SharePlan(self.manifest, **share), load)

    def class_names(self) -> list[str] | None:
        """Return the manifest's class names by label; None if it has none."""
        return self.manifest.classes

    def _read_one(self, view: EpochView, local: int, row: int) -> Record:
        return self.manifest[row]

    def _items(self, records: list[Any]) -> list[Any]:
        return [(record.path, record.label, record.row) for record in records]
