"""`SourceDataset`: the base class of the map-style datasets: a view of a source, in the order of a plan.

    source.records(rows)   <-   plan: rows of (seed, epoch, rank, position)   ->   load(record)

A subclass opens its source, and defines the items of a dataset without ``load``. Epochs, items, generators and states
are implemented here, so they are the same for a file and for a metadata server. `SourceWrapper` is the base class of
datasets that convert the items of another one.
"""

from __future__ import annotations

import abc
import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.hashing import sample_key
from penstock.manifest.classes import HasClasses, unknown_classes
from penstock.order.permutation import Indices
from penstock.plan.cursor import State, pack, unpack
from penstock.plan.reader import Draws
from penstock.plan.share import EpochView, MiniEpoch, ShareCursor, SharePlan
from penstock.plan.share_options import ShareOptions
from penstock.plan.source import Source
from penstock.random import call_in_scope, in_sample, load_each
from penstock.sources.batched import BatchedDataset

__all__ = [
    "Empty",
    "EpochVaryingDataset",
    "RowCache",
    "SourceDataset",
    "SourceWrapper",
    "load_into",
    "opened",
    "with_blocks",
]

S = TypeVar("S")
T = TypeVar("T")

Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Allocates a tensor of this shape and dtype, in the memory of a batch."""

_BLOCK = 4096  # rows that are computed at once, 32 KiB


def opened(kind: type[S], source: Any, options: Mapping[str, Any]) -> S:
    """Return a source if it is open already, else ``kind(source, **options)``. Options that are None are left out.

    Raises:
        ConfigError: options for a source that is open already.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if not isinstance(source, kind):
        constructor: Callable[..., S] = kind
        return constructor(source, **given)
    if given:
        raise ConfigError(f"{', '.join(given)}: give these to {kind.__name__}(...); this one is already open")
    return source


def with_blocks(share: ShareOptions, table: Any) -> None:
    """Set the blocks of ``shuffle="block"`` to those that a table decodes once, unless the caller chose others."""
    chosen = any(share.get(name) is not None for name in ("group", "block_size", "window"))
    if share.get("shuffle") == "block" and not chosen and (blocks := table.blocks()) is not None:
        share["block_size"], share["window"] = blocks


def load_into(
    load: Callable[..., T],
    form: tuple[tuple[int, ...], torch.dtype] | None,
    records: Sequence[Any],
    keys: Sequence[int] | None,
    into: Empty | None,
) -> list[T]:
    """Return the items of records, each made in the scope of its key. With ``into``, and if the first parts of all
    items have one form, ``load(record, out=)`` writes them to the rows of one tensor.
    """
    if into is None or form is None or not records:
        return load_each(load, records, keys)
    rows = iter(into((len(records), *form[0]), form[1]).unbind())
    return load_each(lambda record: load(record, out=next(rows)), records, keys)


class EpochVaryingDataset(abc.ABC):
    """A map-style dataset whose rows hold different samples in each pass, such as packs of documents."""

    @abc.abstractmethod
    def load_pass(self, turn: int, rows: Sequence[int], keys: Sequence[int] | None) -> list[Any]:
        """Return the items of rows in pass number ``turn``, each made in the scope of its key."""

    @abc.abstractmethod
    def excluding(self, exclude: Any) -> Self:
        """Return the same dataset with some samples in its rows excluded and replaced by others."""


class RowCache:
    """Caches the rows of the next indices, for datasets whose order is slower to compute than rows are to read.

    Computing the order of 64 samples costs about as much as that of a thousand, and more than copying 64 short rows.
    Loaders request consecutive indices, so the rows of a block of them are computed at once. Thread-safe.
    """

    def __init__(self) -> None:
        self._kept: tuple[EpochView, int, Indices] | None = None

    def rows(self, view: EpochView, indices: Sequence[int]) -> Indices:
        """Return the rows of some samples of a view, int64 of shape (indices,).

        Raises:
            IndexError: an index is outside this rank's samples.
        """
        local = view.local(indices)
        begin = int(local[0]) if len(local) else 0
        if len(local) < 2 or int(local[-1]) - begin != len(local) - 1 or (local[1:] - local[:-1] != 1).any():
            return view.rows(local)
        kept = self._kept
        if kept is None or kept[0] is not view or not kept[1] <= begin <= kept[1] + len(kept[2]) - len(local):
            rows = view.rows(np.arange(begin, min(begin + max(_BLOCK, len(local)), len(view))))
            self._kept = kept = view, begin, rows
        return kept[2][begin - kept[1] : begin - kept[1] + len(local)]

    def __reduce__(self) -> tuple[type[RowCache], tuple[()]]:
        return RowCache, ()


class SourceDataset(BatchedDataset):
    """A map-style dataset of one rank's samples in one mini-epoch. See `RankDataset`.

    Args:
        source: the stored rows.
        plan: this rank's rows, in order.
        load: ``load(record)`` converts the record to the item; by default the item is the record.
    """

    splits_by_rank = True
    fork_safe = True
    """Whether workers may be forked: False if the manifest is on a server."""

    def __init__(self, source: Source, plan: SharePlan, load: Callable[[Any], Any] | None = None) -> None:
        self.source = source
        self.plan = plan
        """The order of this rank's samples; loaders and samplers read it."""
        self.load = load
        self._row_cache = RowCache()
        self.fork_safe = self.fork_safe and bool(getattr(source, "fork_safe", True))
        self.pure: bool = not self.own_items and (load is None or bool(getattr(load, "pure", False)))
        """Whether items depend only on the source and `penstock.generator`, which a ``load`` declares with an attribute
        ``pure = True``. For others, a seeded loader seeds the global generators for each sample."""

    def _read(self, view: EpochView, local: Indices) -> list[Any]:
        """Return the records of some samples of a view, in the order of ``local``."""
        return self.source.records(view.rows(local))

    def _read_one(self, view: EpochView, local: int, row: int) -> Any:
        """Return the record of one sample; ``row`` is its row in the source."""
        return self._read(view, np.array([local]))[0]

    def _items(self, records: list[Any]) -> list[Any]:
        """Return the items of records in a dataset without ``load``."""
        return records

    def __copy__(self) -> Self:
        """Return a dataset over the same source, with the same position; the two then move independently."""
        copies: dict[int, Any] = {id(self.source): self.source}
        copy.deepcopy(self.plan, copies)
        made = object.__new__(type(self))
        made.__dict__ = {name: copies.get(id(value), value) for name, value in self.__dict__.items()}
        return made

    @property
    def filter_rows(self) -> int:
        """The number of rows that a filter of this dataset selects from."""
        return self.plan.samples

    def filtered(self, keep: Any) -> SourceDataset:
        """Return a dataset of some of the rows, in its own order. See `penstock.Subset`."""
        # Imported here, because filters import Arrow's functions, which takes a while.
        from penstock.datasets.keep import Filterable, kept_rows

        len(self.source)  # raises a LengthUnknownError for shards that are not counted yet
        made = copy.copy(self)
        made.plan.keep(kept_rows(keep, Filterable.of(self.source, self.fingerprint, self.plan.samples, self.plan.kept)))
        return made

    def in_order(self) -> Self:
        """Return a dataset of the same rows in the order of the source, in which no rank repeats a row."""
        made = copy.copy(self)
        made.plan.unshuffle()
        return made

    # Identity and position.

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.source!r}\n{self.plan!r}"

    @property
    def fingerprint(self) -> str:
        """Identity of the rows: a hash of their content, without names and times."""
        return self.plan.fingerprint

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.plan.world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks of the job."""
        return self.plan.world.world_size

    @property
    def mini_epochs(self) -> int:
        """Number of mini-epochs in an epoch."""
        return self.plan.mini_epochs

    @property
    def seed(self) -> int:
        """Seed of the order."""
        return self.plan.seed

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self.plan.shown.epoch

    @property
    def mini_epoch(self) -> int:
        """The current mini-epoch of the epoch."""
        return self.plan.shown.mini_epoch

    @property
    def place(self) -> MiniEpoch:
        """The current epoch, mini-epoch and position. Penstock's loaders send it with each batch."""
        return self.plan.shown

    def __len__(self) -> int:
        # Resolve rank and world size now; later access checks that the process group has not changed.
        _ = self.plan.world
        return len(self.plan.view())

    # Items.

    def __getitem__(self, index: int) -> Any:
        return self.load_one(index, self.load)

    def load_one(self, index: int, load: Callable[[Any], Any] | None) -> Any:
        """Return the item at an index, which ``load`` makes in the scope of its key."""
        # For one index, Python integers are much faster than arrays of length 1.
        view, index = self.plan.view(), operator.index(index)
        position, row = view.locate(index)
        record = self._read_one(view, index % len(view), row)
        if load is None:
            return self._items([record])[0]
        if in_sample():
            return load(record)
        return call_in_scope(sample_key(view.seed, view.epoch, position), load, record)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the items at several indices at once; loaders use this."""
        keys = None if self.load is None or in_sample() else self.keys(indices)
        return SourceDataset.load_samples(self, indices, keys)

    def load_samples(
        self, indices: Sequence[int], keys: Sequence[int] | None, place: MiniEpoch | None = None
    ) -> list[Any]:
        """Return the items at several indices, each made in the scope of its key.

        Args:
            indices: of this rank's samples.
            keys: of the samples' generators; None to use the caller's scope.
            place: the mini-epoch of the indices; by default the current one.
        """
        records = self.records(indices, place)
        if self.load is None:
            return self._items(records)
        row_name = getattr(self.source, "row_name", None)
        name = None if row_name is None else lambda k: str(row_name(int(self.rows([indices[k]], place)[0])))
        return load_each(self.load, records, keys, name)

    @property
    def has_rows(self) -> bool:
        """Whether `load_rows` can return items by row of the source; False if a subclass makes its items itself."""
        return not self.own_items and type(self).load_samples is SourceDataset.load_samples

    def load_rows(self, rows: Sequence[int], keys: Sequence[int] | None) -> list[Any]:
        """Return the items of rows, independent of the order.

        Args:
            rows: rows of the source, or positions among the rows that filters keep: 0 to ``plan.samples - 1``.
            keys: of the samples' generators; None to use the caller's scope.
        """
        records = self.source.records(self.plan.kept(np.asarray(rows, dtype=np.int64)))
        return self._items(records) if self.load is None else load_each(self.load, records, keys)

    def records(self, indices: Sequence[int], place: MiniEpoch | None = None) -> list[Any]:
        """Return the source's records at several indices, before ``load``."""
        view = self.plan.view(place)
        return self._read(view, view.local(indices))

    def rows(self, indices: Sequence[int], place: MiniEpoch | None = None) -> Indices:
        """Return the rows of the source at several indices, int64 of shape (n,)."""
        view = self.plan.view(place)
        return view.rows(view.local(indices))

    def _rows_of_batch(self, indices: Sequence[int], place: MiniEpoch | None) -> Indices:
        """Return the rows of a batch, for sources that are faster to read than the order is to compute."""
        return self._row_cache.rows(self.plan.view(place), indices)

    def keys(self, indices: Sequence[int], place: MiniEpoch | None = None) -> list[int]:
        """Return the keys of the samples' generators at several indices."""
        view = self.plan.view(place)
        return view.keys(view.local(indices))

    # Epochs and state.

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. If a state of this epoch was just loaded, keep its position.

        Raises:
            ConfigError: the epoch is negative.
        """
        self.plan.set_epoch(epoch)

    def set_mini_epoch(self, mini_epoch: int) -> None:
        """Go to the start of a mini-epoch of this epoch, or keep the position of a state of it that was just loaded.

        Raises:
            PartitionError: the epoch has no such mini-epoch.
        """
        self.plan.set_mini_epoch(mini_epoch)

    def next_mini_epoch(self) -> int:
        """Go to the next mini-epoch, or to the first of the next epoch; return its number."""
        self.plan.request(ShareCursor.at(self.plan.following(self.plan.shown)))
        return self.mini_epoch

    def state_dict(self, count: int = 0) -> State:
        """Return the state after every rank has consumed ``count`` samples since the last `set_epoch`, `set_mini_epoch`
        or load.

        A Penstock loader counts by itself: use its ``state_dict``.
        """
        return pack(self.plan.bind(ShareCursor.at(self.plan.shown), Draws()).cursor(count).state())

    def load_state_dict(self, state: Mapping[str, Any], *, allow_growth: bool = False) -> None:
        """Go to the position of a state.

        With the same number of ranks, the mini-epoch continues exactly where it was. With another number, the rest of
        the epoch is split evenly across the new ranks and the remaining mini-epochs.

        Args:
            state: from `state_dict`.
            allow_growth: accept a source with rows appended since then, which the next epoch includes.

        Raises:
            StateError: the state is of another source, order or partition.
        """
        entries = unpack(state, of=type(self).__name__)
        self.plan.request(self.plan.read(entries, allow_growth=allow_growth), loaded=True)


_FORWARDED = frozenset(
    {"epoch", "load_state_dict", "mini_epoch", "next_mini_epoch", "running", "samples", "seed", "set_epoch", "plan"}
    | {"rank", "world_size", "place", "set_mini_epoch", "splits_by_rank", "state_dict", "batch_size", "drop_last"}
    | {"fingerprint", "fork_safe"}
)
"""Attributes of a dataset with its own order. A wrapper has them only if the wrapped dataset has them."""


class SourceWrapper:
    """A dataset that converts the items of another dataset. Order, position and state are those of that dataset."""

    source: Any
    """The wrapped dataset."""

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.source!r}"

    def __len__(self) -> int:
        return len(self.source)

    def __copy__(self) -> Self:
        made = object.__new__(type(self))
        # A copy has its own position, see `SourceDataset`.
        made.__dict__.update(self.__dict__, source=copy.copy(self.source))
        return made

    def with_source(self, source: Any) -> Self:
        """Return a copy that wraps another dataset."""
        made = copy.copy(self)
        made.source = source
        return made

    def in_order(self) -> Self:
        """Return the same dataset over its source in order, see `SourceDataset.in_order`."""
        return self.with_source(self.source.in_order())

    def __getattr__(self, name: str) -> Any:
        if name in _FORWARDED:
            return getattr(self.source, name)
        if name in ("classes", "class_to_idx") and isinstance(self, HasClasses):
            # Python calls __getattr__ when the property itself raised an AttributeError.
            raise unknown_classes(self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
