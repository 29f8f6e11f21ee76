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

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.utils.data import get_worker_info

from penstock.datasets.base import BatchedDataset
from penstock.datasets.place import Place
from penstock.datasets.preload import Preload
from penstock.datasets.share import Share, SharePass
from penstock.errors import ConfigError
from penstock.manifest import Manifest, Record
from penstock.order.permutation import normalise
from penstock.random import in_sample, load_each, sample_scope
from penstock.samplers.base import Pass
from penstock.state import State

__all__ = ["RankDataset"]


class RankDataset(BatchedDataset):
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

    splits_by_rank = True

    def __init__(
        self,
        source: Manifest | str | os.PathLike[str],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        mini_epochs: int = 1,
        group: int | None = None,
        seed: int = 0,
        remainder: str = "pad",
        shuffle: str = "global",
        block_size: int | None = None,
        window: int | None = None,
        load: Callable[[Record], Any] | None = None,
        preload: bool = False,
        process_group: dist.ProcessGroup | None = None,
        progress: bool | None = None,
    ) -> None:
        self._share = Share(
            source,
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
            progress=progress,
        )
        if progress is not None and isinstance(source, Manifest) and not preload:
            raise ConfigError(
                "progress= is for indexing a file or gathering rows (preload=True): there is neither here"
            )
        self.load = load
        self._preload = Preload(self._share.manifest, self._share.rows_at, progress=progress) if preload else None
        self.pure: bool = not self.own_items and (load is None or bool(getattr(load, "pure", False)))
        """Whether items depend on the manifest and `penstock.generator` alone. A ``load`` that draws from nothing else
        says so by an attribute ``pure = True``; for others a seeded loader seeds the global generators, sample by
        sample."""

    # What it is.

    @property
    def manifest(self) -> Manifest:
        """The manifest behind the data set."""
        return self._share.manifest

    @property
    def rank(self) -> int:
        """This rank."""
        return self._share.world.rank

    @property
    def world_size(self) -> int:
        """The job's ranks."""
        return self._share.world.world_size

    @property
    def mini_epochs(self) -> int:
        """Mini-epochs in an epoch."""
        return self._share.mini_epochs

    @property
    def seed(self) -> int:
        """Seed of the order."""
        return self._share.seed

    @property
    def epoch(self) -> int:
        """The present epoch."""
        return self._share.place.get().epoch

    @property
    def mini_epoch(self) -> int:
        """The present mini-epoch of the epoch."""
        return self._share.place.get().mini_epoch

    @property
    def running(self) -> bool:
        """Whether a pass over the present mini-epoch has begun."""
        return self._share.running

    @property
    def place(self) -> Place:
        """Epoch, mini-epoch and position in one. Our loaders send it along with each batch, so that iterators which are
        at different places do not get into each other's way."""
        return self._share.place.get()

    def __len__(self) -> int:
        if self._preload is not None and get_worker_info() is None:
            self._gather()  # whatever loader asks will fork or spawn: its workers find the rows gathered
        return len(self._share.checked())

    # Items.

    def __getitem__(self, index: int) -> Any:
        if self._preload is not None:
            return RankDataset.__getitems__(self, [operator.index(index)])[0]
        # One index at a time, Python's integers are much faster than arrays of one.
        position, row = self._share.current().locate(operator.index(index))
        record = self.manifest[row]
        if self.load is None:
            return record.path, record.label, record.row
        if in_sample():
            return self.load(record)
        with sample_scope(self._share.key(position)):
            return self.load(record)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The items at several indices at once, which is how a loader should ask for them."""
        return RankDataset.load_samples(self, indices, None if self.load is None or in_sample() else self.keys(indices))

    def load_samples(self, indices: Sequence[int], keys: Sequence[int] | None, place: Place | None = None) -> list[Any]:
        """The items at several indices, each made in the scope of its key; at another `place` than the present one if
        that is given."""
        records = self.records(indices, place)
        if self.load is None:
            return [(record.path, record.label, record.row) for record in records]
        return load_each(self.load, records, keys)

    def records(self, indices: Sequence[int], place: Place | None = None) -> list[Record]:
        """The manifest's records at these indices, whatever ``load`` makes of them."""
        slice_ = self._share.current() if place is None else self._share.slice_at(place)
        local = normalise(indices, len(slice_))
        if self._preload is not None:
            return self._preload.get(slice_.place.whole).records(self.manifest, local + slice_.place.skip)
        return self.manifest.records(slice_.rows(slice_.positions(local)))

    def keys(self, indices: Sequence[int], place: Place | None = None) -> list[int]:
        """Keys of the generators of the samples at these indices."""
        slice_ = self._share.current() if place is None else self._share.slice_at(place)
        return self._share.keys(slice_, slice_.positions(normalise(indices, len(slice_))))

    # Where the job stands.

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. The epoch of a state just loaded keeps its position.

        Raises:
            ConfigError: a negative epoch.
        """
        self._share.set_epoch(epoch)
        self._gather()

    def set_mini_epoch(self, mini_epoch: int) -> None:
        """Go to the start of a mini-epoch of this epoch. That of a state just loaded keeps its position.

        Raises:
            PartitionError: a mini-epoch outside the epoch's.
        """
        self._share.set_mini_epoch(mini_epoch)
        self._gather()

    def next_mini_epoch(self) -> int:
        """Go to the next mini-epoch, or to the first of the next epoch; returns its number."""
        self._share.move(self._share.after(self._share.place.get()))
        self._gather()
        return self.mini_epoch

    def _gather(self) -> None:
        if self._preload is not None:
            place = self._share.place.get().whole
            self._preload.get(place)
            self._preload.prefetch(self._share.after(place))

    def peek_pass(self) -> Pass:
        """The pass over the present mini-epoch, without beginning it."""
        return SharePass(self._share, self._share.current())

    def start_pass(self) -> Pass:
        """The pass over the present mini-epoch that begins now; loaders and samplers call this."""
        self._gather()
        return SharePass(self._share, self._share.start())

    def state_dict(self, count: int = 0) -> State:
        """The state once every rank has had ``count`` samples since the last `set_epoch`, `set_mini_epoch` or load.

        A Penstock loader counts by itself: use its ``state_dict``.
        """
        return self._share.state(self._share.current(), count)

    def load_state_dict(self, state: Mapping[str, Any], *, allow_growth: bool = False) -> None:
        """Go to the place of a state, at the same or at another world size.

        With the same number of ranks the mini-epoch goes on exactly where it was. With another number what is left of
        the epoch is dealt out again, evenly over the mini-epochs that are left.

        Args:
            state: from `state_dict`, or from a loader's.
            allow_growth: accept a manifest to which rows were appended since: the epoch in progress ends on the rows
                it began with, and the next one takes in all.

        Raises:
            StateError: the state is of another manifest, order or partition.
        """
        self._share.load(state, allow_growth=allow_growth)
        self._gather()
