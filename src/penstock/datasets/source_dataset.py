"""`SourceDataset`: the one class behind our map-style data sets: a view of a source, in the order of a plan.

    source.records(rows)   <-   plan: rows of (seed, epoch, rank, position)   ->   load(record)

A subclass opens its source, and says what an item is where there is no ``load``. Epochs, items, generators and states
are here, so they are the same for a file, for rows gathered in memory and for a metadata server.
"""

from __future__ import annotations

import abc
import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np

from penstock.order.permutation import Indices
from penstock.plan.cursor import State
from penstock.plan.share import EpochView, MiniEpoch, ShareCursor, SharePlan
from penstock.plan.source import Source
from penstock.random import call_in_scope, in_sample, load_each
from penstock.sources.batched import BatchedDataset

__all__ = ["Redealt", "SourceDataset", "ViewReader"]


class ViewReader(Protocol):
    """Reads whole spans of a view ahead, in place of ``source.records``: rows gathered in memory, pages of a server."""

    def records(self, view: EpochView, local: Indices) -> list[Any]:
        """Return the records of some samples of a view, in this order."""


class Redealt(abc.ABC):
    """A map-style data set whose rows hold other samples each time that somebody goes through it."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def load_turn(self, turn: int, rows: Sequence[int], keys: Sequence[int] | None) -> list[Any]:
        """Return the items of rows in the ``turn``-th time through, each made in the scope of its key."""

    @abc.abstractmethod
    def excluding(self, exclude: Any) -> Self:
        """Return the same data set without some of the samples that its rows hold, for which others stand."""


class SourceDataset(BatchedDataset):
    """The samples of one rank in one mini-epoch, as a map-style data set of exactly that length. See `RankDataset`.

    Args:
        source: the rows.
        plan: which of them this rank gets, in which order.
        load: ``load(record)`` makes the item; by default the item is the record.
        reader: reads records in place of the source.
    """

    splits_by_rank = True
    fork_safe = True
    """Whether workers may be forked: not if the manifest is on a server."""

    def __init__(
        self,
        source: Source,
        plan: SharePlan,
        load: Callable[[Any], Any] | None = None,
        *,
        reader: ViewReader | None = None,
    ) -> None:
        self.source = source
        self.plan = plan
        """The order of this rank's samples, which loaders and samplers read."""
        self.load = load
        self._reader = reader
        self.fork_safe = self.fork_safe and bool(getattr(source, "fork_safe", True))
        self.pure: bool = not self.own_items and (load is None or bool(getattr(load, "pure", False)))
        """Whether items depend on the source and `penstock.generator` alone. A ``load`` that draws from nothing else
        says so by an attribute ``pure = True``; for others a seeded loader seeds the global generators, sample by
        sample."""

    def _read(self, view: EpochView, local: Indices) -> list[Any]:
        """Return the records of some samples of a view, in this order."""
        return self.source.records(view.rows(local)) if self._reader is None else self._reader.records(view, local)

    def _read_one(self, view: EpochView, local: int, row: int) -> Any:
        """Return the record of one sample, which stands in this row of the source."""
        return self._read(view, np.array([local]))[0]

    def _items(self, records: list[Any]) -> list[Any]:
        """Return the items of records where there is no ``load``."""
        return records

    def __copy__(self) -> Self:
        """Return a data set at the same place that goes its own way from there, over the same source."""
        copies: dict[int, Any] = {id(self.source): self.source}
        # Together: the plan of a data set may hold its reader, and a reader its plan.
        copy.deepcopy((self.plan, self._reader), copies)
        made = object.__new__(type(self))
        made.__dict__ = {name: copies.get(id(value), value) for name, value in self.__dict__.items()}
        return made

    @property
    def filter_rows(self) -> int:
        """How many rows a filter of this data set is over."""
        return self.plan.samples

    def filtered(self, keep: Any) -> SourceDataset:
        """Return a data set of some of the rows, in an order of their own. See `penstock.Subset`."""
        # Filters need Arrow's functions, which take a while to import.
        from penstock.datasets.keep import Filterable, kept_rows

        made = copy.copy(self)
        made.plan.keep(kept_rows(keep, Filterable.of(self.source, self.fingerprint, self.plan.samples, self.plan.kept)))
        return made

    # What it is.

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.source!r}\n{self.plan!r}"

    @property
    def fingerprint(self) -> str:
        """Identity of the rows: content alone, neither names nor times."""
        return self.plan.fingerprint

    @property
    def rank(self) -> int:
        """This rank."""
        return self.plan.world.rank

    @property
    def world_size(self) -> int:
        """The job's ranks."""
        return self.plan.world.world_size

    @property
    def mini_epochs(self) -> int:
        """Mini-epochs in an epoch."""
        return self.plan.mini_epochs

    @property
    def seed(self) -> int:
        """Seed of the order."""
        return self.plan.seed

    @property
    def epoch(self) -> int:
        """The present epoch."""
        return self.plan.shown.epoch

    @property
    def mini_epoch(self) -> int:
        """The present mini-epoch of the epoch."""
        return self.plan.shown.mini_epoch

    @property
    def running(self) -> bool:
        """Whether a run over the present mini-epoch has begun."""
        return self.plan.running

    @property
    def place(self) -> MiniEpoch:
        """Epoch, mini-epoch and position in one. Our loaders send it along with each batch, so that iterators which are
        at different places do not get into each other's way."""
        return self.plan.shown

    def __len__(self) -> int:
        _ = self.plan.world  # a process group that was made later must not disagree
        return len(self.plan.view())

    # Items.

    def __getitem__(self, index: int) -> Any:
        # One index at a time, Python's integers are much faster than arrays of one.
        view, index = self.plan.view(), operator.index(index)
        position, row = view.locate(index)
        record = self._read_one(view, index % len(view), row)
        if self.load is None:
            return self._items([record])[0]
        if in_sample():
            return self.load(record)
        return call_in_scope(view.key(position), self.load, record)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the items at several indices at once, which is how a loader should ask for them."""
        keys = None if self.load is None or in_sample() else self.keys(indices)
        return SourceDataset.load_samples(self, indices, keys)

    def load_samples(
        self, indices: Sequence[int], keys: Sequence[int] | None, place: MiniEpoch | None = None
    ) -> list[Any]:
        """Return the items at several indices, each made in the scope of its key.

        Args:
            indices: of this rank's samples.
            keys: of their generators; None where the caller's scope is to hold.
            place: another place than the present one.
        """
        records = self.records(indices, place)
        if self.load is None:
            return self._items(records)
        return load_each(self.load, records, keys)

    @property
    def has_rows(self) -> bool:
        """Whether items can be asked for by the rows of the source: not those that a subclass makes by itself."""
        own = type(self).load_samples
        return not self.own_items and own is SourceDataset.load_samples

    def load_rows(self, rows: Sequence[int], keys: Sequence[int] | None) -> list[Any]:
        """Return the items of rows, whatever the order: of the source, or of those that filters keep.

        Args:
            rows: 0 to ``plan.samples - 1``.
            keys: of their generators; None where the caller's scope is to hold.
        """
        records = self.source.records(self.plan.kept(np.asarray(rows, dtype=np.int64)))
        return self._items(records) if self.load is None else load_each(self.load, records, keys)

    def records(self, indices: Sequence[int], place: MiniEpoch | None = None) -> list[Any]:
        """Return the source's records at these indices, whatever ``load`` makes of them."""
        view = self.plan.view(place)
        return self._read(view, view.local(indices))

    def rows(self, indices: Sequence[int], place: MiniEpoch | None = None) -> Indices:
        """Return the rows of the source at these indices, int64 of shape (n,)."""
        view = self.plan.view(place)
        return view.rows(view.local(indices))

    def keys(self, indices: Sequence[int], place: MiniEpoch | None = None) -> list[int]:
        """Return the keys of the generators of the samples at these indices."""
        view = self.plan.view(place)
        return view.keys(view.local(indices))

    # Where the job stands.

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. The epoch of a state just loaded keeps its position.

        Raises:
            ConfigError: a negative epoch.
        """
        self.plan.set_epoch(epoch)

    def set_mini_epoch(self, mini_epoch: int) -> None:
        """Go to the start of a mini-epoch of this epoch. That of a state just loaded keeps its position.

        Raises:
            PartitionError: a mini-epoch outside the epoch's.
        """
        self.plan.set_mini_epoch(mini_epoch)

    def next_mini_epoch(self) -> int:
        """Go to the next mini-epoch, or to the first of the next epoch; return its number."""
        self.plan.request_start(self.plan.following(self.plan.shown))
        return self.mini_epoch

    def state_dict(self, count: int = 0) -> State:
        """Return the state once every rank has had ``count`` samples since the last `set_epoch`, `set_mini_epoch` or
        load.

        A Penstock loader counts by itself: use its ``state_dict``.
        """
        return self.plan.bind(ShareCursor.at(self.plan.shown), None).cursor(count).state()

    def load_state_dict(self, state: Mapping[str, Any], *, allow_growth: bool = False) -> None:
        """Go to the place of a state, at the same or at another world size.

        With the same number of ranks the mini-epoch goes on exactly where it was. With another number what is left of
        the epoch is dealt out again, evenly over the mini-epochs that are left.

        Args:
            state: from `state_dict`, or from a loader's.
            allow_growth: accept a source to which rows were appended since: the epoch in progress ends on the rows it
                began with, and the next one takes in all.

        Raises:
            StateError: the state is of another source, order or partition.
        """
        cursor = self.plan.read_grown(state) if allow_growth else self.plan.read(state)
        self.plan.request_resume(cursor)
