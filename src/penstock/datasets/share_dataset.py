"""`ShareDataset`: what every map-style data set over one rank's share does, wherever its rows come from.

A subclass makes the `Share` and says how records are read (`_read`). Epochs, items, generators, passes and states are
here, so they are the same for a file, for rows gathered in memory and for a metadata server.
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from penstock.datasets.base import BatchedDataset
from penstock.datasets.place import Place
from penstock.datasets.share import Share, SharePlan, Slice
from penstock.manifest import Manifest
from penstock.order.permutation import Indices, normalise
from penstock.plan.cursor import State
from penstock.random import in_sample, load_each, sample_scope

__all__ = ["ShareDataset"]


class ShareDataset(BatchedDataset, abc.ABC):
    """The samples of one rank in one mini-epoch, as a map-style data set of exactly that length. See `RankDataset`.

    Args:
        share: which rows, in which order.
        load: ``load(record)`` makes the item; by default an item is the tuple ``(path, label, row)``.
    """

    splits_by_rank = True
    fork_safe = True
    """Whether workers may be forked: not if the manifest is on a server."""

    def __init__(self, share: Share, load: Callable[[Any], Any] | None) -> None:
        self._share = share
        self.load = load
        self.fork_safe = self.fork_safe and bool(getattr(share.manifest, "fork_safe", True))
        self.pure: bool = not self.own_items and (load is None or bool(getattr(load, "pure", False)))
        """Whether items depend on the manifest and `penstock.generator` alone. A ``load`` that draws from nothing else
        says so by an attribute ``pure = True``; for others a seeded loader seeds the global generators, sample by
        sample."""

    @abc.abstractmethod
    def _read(self, slice_: Slice, local: Indices) -> list[Any]:
        """The records of some samples of a slice, in this order."""

    def _items(self, records: list[Any]) -> list[Any]:
        """The items of records where there is no ``load``."""
        return [(record.path, record.label, record.row) for record in records]

    def _read_one(self, slice_: Slice, local: int, row: int) -> Any:
        """The record of one sample, which stands in this row of the manifest."""
        return self._read(slice_, np.array([local]))[0]

    def _prepare(self) -> None:
        """Called when the place has changed, and before a pass begins."""

    # What it is.

    @property
    def manifest(self) -> Manifest:
        """The manifest behind the data set."""
        return cast(Manifest, self._share.manifest)

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
        return len(self._share.checked())

    # Items.

    def __getitem__(self, index: int) -> Any:
        # One index at a time, Python's integers are much faster than arrays of one.
        slice_, index = self._share.current(), operator.index(index)
        position, row = slice_.locate(index)
        record = self._read_one(slice_, index % len(slice_), row)
        if self.load is None:
            return self._items([record])[0]
        if in_sample():
            return self.load(record)
        with sample_scope(self._share.key(position)):
            return self.load(record)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The items at several indices at once, which is how a loader should ask for them."""
        keys = None if self.load is None or in_sample() else self.keys(indices)
        return ShareDataset.load_samples(self, indices, keys)

    def load_samples(self, indices: Sequence[int], keys: Sequence[int] | None, place: Place | None = None) -> list[Any]:
        """The items at several indices, each made in the scope of its key; at another `place` than the present one if
        that is given."""
        records = self.records(indices, place)
        if self.load is None:
            return self._items(records)
        return load_each(self.load, records, keys)

    def records(self, indices: Sequence[int], place: Place | None = None) -> list[Any]:
        """The manifest's records at these indices, whatever ``load`` makes of them."""
        slice_ = self._share.current() if place is None else self._share.slice_at(place)
        return self._read(slice_, normalise(indices, len(slice_)))

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
        self._prepare()

    def set_mini_epoch(self, mini_epoch: int) -> None:
        """Go to the start of a mini-epoch of this epoch. That of a state just loaded keeps its position.

        Raises:
            PartitionError: a mini-epoch outside the epoch's.
        """
        self._share.set_mini_epoch(mini_epoch)
        self._prepare()

    def next_mini_epoch(self) -> int:
        """Go to the next mini-epoch, or to the first of the next epoch; returns its number."""
        self._share.move(self._share.after(self._share.place.get()))
        self._prepare()
        return self.mini_epoch

    @property
    def plan(self) -> SharePlan:
        """The order of this rank's samples, which loaders and samplers read."""
        return SharePlan(self._share, self._prepare)

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
        self._prepare()
