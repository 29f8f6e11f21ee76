"""`RankDataset`: this rank's share of a manifest, mini-epoch by mini-epoch, in constant memory.

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
from typing import Any, Unpack, cast

from torch.utils.data import Dataset, get_worker_info

from penstock.datasets.preload import Preload
from penstock.datasets.source_dataset import SourceDataset
from penstock.errors import ConfigError
from penstock.manifest import Manifest, Record
from penstock.manifest.classes import HasClasses
from penstock.plan.share import EpochView, SharePlan
from penstock.plan.share_options import ShareOptions, check_share

__all__ = ["RankDataset"]


class RankDataset(HasClasses, SourceDataset):
    """The samples of one rank in one mini-epoch, as a map-style data set of exactly that length.

    Args:
        source: a `Manifest`, or a path that `Manifest.open` understands.
        rank, world_size: by default from torch.distributed, else RANK and WORLD_SIZE, else 0 and 1; resolved at first
            use and fixed from then on.
        mini_epochs: into how many runs an epoch is cut; all are equally long, padding comes at the end of the epoch.
        group: cut the manifest into so many blocks, permute inside them and permute the blocks (short for
            ``shuffle="block"`` with that block size and ``window=1``).
        seed: the order is a function of (seed, epoch); the same on all ranks.
        remainder: ``"pad"``, ``"drop"`` or ``"uneven"``, see `penstock.order.Partition`. For exact evaluation use
            ``shuffle="none", remainder="uneven"``; for all rows on every rank ``world_size=1, rank=0``.
        shuffle: ``"global"``, ``"block"`` or ``"none"``; ``block_size`` and ``window`` belong to ``"block"``.
        load: ``load(record)`` makes the item, inside the scope of the sample's own `penstock.generator`; by default an
            item is the tuple ``(path, label, row)``.
        preload: gather this rank's rows into one compact buffer in memory, reading in file order; for manifests on
            slow network file systems. Costs ``2 * n / (world_size * mini_epochs)`` rows, since the next mini-epoch is
            gathered in the background.
        process_group: whose ranks share out the data, where that is not the default group.
        progress: a bar while a file is indexed or rows are gathered; by default if stderr is a terminal.

    Raises:
        ConfigError, PartitionError: arguments that make no sense.
        ManifestError: the manifest cannot be opened, or a row does not parse.

    Memory does not depend on the length of the manifest: the file is mapped and shared by all processes of a machine,
    and rows are found by arithmetic. A new mini-epoch costs nothing without ``preload``.

    ``set_epoch`` and ``set_mini_epoch`` take effect at the next ``iter()`` of a running loader, persistent workers
    included. Do not put a distributed sampler on top: that would split twice.
    """

    def __init__(
        self,
        source: Manifest | str | os.PathLike[str],
        *,
        load: Callable[[Record], Any] | None = None,
        preload: bool = False,
        progress: bool | None = None,
        **share: Unpack[ShareOptions],
    ) -> None:
        check_share(type(self), share, load)
        if isinstance(source, Dataset):
            name = type(source).__name__
            raise ConfigError(
                f"{type(self).__name__} takes a manifest or the name of one, got a data set ({name}). To filter rows, "
                "filter what is made of the whole manifest: Subset(RankDataset(manifest), keep)"
            )
        if progress is not None and isinstance(source, Manifest) and not preload:
            raise ConfigError(
                "progress= is for indexing a file or gathering rows (preload=True): there is neither here"
            )
        manifest = source if isinstance(source, Manifest) else Manifest.open(source, progress=progress)
        gathered = Preload(manifest, progress=progress) if preload else None
        prepare = None if gathered is None else gathered.prepare
        super().__init__(manifest, SharePlan(manifest, prepare=prepare, **share), load, reader=gathered)

    @property
    def manifest(self) -> Manifest:
        """The manifest behind the data set."""
        return cast(Manifest, self.source)

    def class_names(self) -> list[str] | None:
        """Return the names of the manifest's classes by label; None if it says none."""
        return self.manifest.classes

    def __len__(self) -> int:
        # Whatever loader asks will fork or spawn: its workers find the rows gathered.
        if get_worker_info() is None:
            self.plan.prepare()
        return super().__len__()

    def _read_one(self, view: EpochView, local: int, row: int) -> Record:
        return self.manifest[row] if self._reader is None else super()._read_one(view, local, row)

    def _items(self, records: list[Any]) -> list[Any]:
        return [(record.path, record.label, record.row) for record in records]
