"""`SharePlan`: one rank's share of a source, mini-epoch by mini-epoch: the plan of Penstock's map-style datasets.

    epoch's order (seed, epoch)  ->  partition (rank, mini-epoch)  ->  rows of the source

Invariant: there is no list of samples. Position, row and key of a sample are computed at each access, so the memory of
a share does not depend on the length of the source.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch.distributed as dist
import xxhash
from torch.utils.data import StackDataset, Subset

from penstock import distributed
from penstock.errors import ConfigError, PartitionError, StateError
from penstock.hashing import checked_seed, sample_keys
from penstock.order import ORDER_VERSION, SHUFFLES, Order, Partition, make_order
from penstock.order.partition import REMAINDERS, Layout
from penstock.order.permutation import Indices, normalise
from penstock.order.shuffle import block_options
from penstock.plan.cursor import Cursor, State, check_state, checked_epoch, read_int, read_ints
from penstock.plan.epoch import EpochPlan
from penstock.plan.reader import Bookmark, Draws, Plan
from penstock.plan.shared import SharedIntegers
from penstock.plan.source import Source
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.order.mixture import WeightStage
    from penstock.plan.exclusion import ExcludedRows, ExclusionMark
    from penstock.plan.filter import KeptRows

__all__ = ["EpochRows", "EpochView", "LookAhead", "MiniEpoch", "ShareCursor", "ShareEpoch", "SharePlan"]

_KEPT_VIEWS = 4
"""Views in the cache: one for each of several loaders."""


class MiniEpoch(NamedTuple):
    """A mini-epoch (sub-epoch) of an epoch, and a position in it.

    Attributes:
        epoch: number of the epoch.
        mini_epoch: number of the mini-epoch.
        samples: number of rows of the epoch.
        mini_epochs_done, consumed: number of mini-epochs and samples that the job had consumed when the rest of the
            epoch was split among another number of ranks; 0 for a whole epoch.
        skip: number of this rank's samples of the mini-epoch that were consumed before a resume.
        changes: changes of a mixture's weights during the job.
    """

    epoch: int
    mini_epoch: int
    samples: int
    mini_epochs_done: int = 0
    consumed: int = 0
    skip: int = 0
    changes: tuple[WeightStage, ...] = ()

    @property
    def numbers(self) -> list[int]:
        """All attributes except the changes."""
        return list(self[:6])

    @property
    def whole(self) -> MiniEpoch:
        """The start of the same mini-epoch."""
        return self._replace(skip=0)


@dataclass(frozen=True, kw_only=True)
class ShareCursor(Cursor):
    """A cursor in a share.

    Attributes:
        place: the mini-epoch and the position in it.
        entries: the cursor as a JSON-serialisable dict, which `SharePlan.read` accepts; empty for a start that a
            program chose.
    """

    place: MiniEpoch
    entries: State = field(default_factory=dict)

    @staticmethod
    def at(place: MiniEpoch) -> ShareCursor:
        """Return the cursor at a place."""
        return ShareCursor(epoch=place.epoch, mini_epoch=place.mini_epoch, place=place)

    def whole(self) -> ShareCursor:
        """Return the start of the mini-epoch, for the ranks of this job."""
        return ShareCursor.at(self.place._replace(mini_epochs_done=0, consumed=0, skip=0))

    def state(self) -> State:
        """Return the cursor as entries of a state."""
        return self.entries


class EpochView:
    """The samples of one rank in one mini-epoch. Indices are local: the rank's samples are 0 to ``len - 1``.

    Attributes:
        seed: of the samples' generators.
        place: the mini-epoch, and the position at which this view begins.
        partition: the rank's positions in the whole mini-epoch.
        order: of the whole epoch over all ranks.
    """

    def __init__(self, seed: int, place: MiniEpoch, partition: Partition, order: Order) -> None:
        self.seed = seed
        self.place = place
        self.epoch = place.epoch
        self.partition = partition
        self.order = order

    def __len__(self) -> int:
        return max(0, self.partition.length - self.place.skip)

    def local(self, indices: Sequence[int]) -> Indices:
        """Return local indices as an array; negative ones count from the end."""
        return normalise(indices, len(self))

    def positions_of(self, local: Indices) -> Indices:
        """Return the positions of local samples, int64 of shape (n,)."""
        return self.partition[local + self.place.skip]

    def rows(self, local: Indices) -> Indices:
        """Return the rows of local samples, int64 of shape (n,)."""
        return self.order[self.positions_of(local) % max(self.partition.n, 1)]

    def keys(self, local: Indices) -> list[int]:
        """Return the keys of the generators of local samples."""
        keys: list[int] = sample_keys(self.seed, self.epoch, self.positions_of(local)).tolist()
        return keys

    def locate(self, index: int) -> tuple[int, int]:
        """Return position and row of one local sample. This is faster than arrays of one index.

        Raises:
            IndexError: the index is outside this rank's share.
        """
        size = len(self)
        if not -size <= index < size:
            raise IndexError(
                f"index {index} is out of range for the {counted(size, 'sample')} of rank {self.partition.rank}"
            )
        position = self.partition[index % size + self.place.skip]
        return position, self.order[position % self.partition.n]


class LookAhead:
    """Fetches data before it is needed, in the process of the reader. This base class fetches nothing."""

    def prepare(self, view: EpochView, following: EpochView) -> None:
        """Prepare a view that will be read next, and the view after it."""

    def advance(self, place: MiniEpoch, count: int) -> None:
        """Record that the consumer has received the first ``count`` samples of the view at a place."""

    def close(self) -> None:
        """Stop background work until the next `prepare`."""


class ShareEpoch(EpochPlan):
    """The epoch plan of a view. Indices are local; positions count in the whole job's epoch."""

    def __init__(self, plan: SharePlan, view: EpochView) -> None:
        self._plan = plan
        self.view = view
        self.seed, self.epoch = view.seed, view.epoch

    @property
    def place(self) -> MiniEpoch:
        """The place of the view."""
        return self.view.place

    def __len__(self) -> int:
        return len(self.view)

    @property
    def start(self) -> Cursor:
        """The start of the mini-epoch."""
        return ShareCursor.at(self.place).whole()

    def after(self, count: int) -> Cursor:
        """Return the start of the next mini-epoch, or of the next epoch after the last one."""
        return ShareCursor.at(self._plan.following(self.place))

    def block(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return local indices, and positions in the epoch; positions of n or more are padding."""
        indices = np.arange(start, stop, dtype=np.int64)
        return indices, self.view.positions_of(indices)

    @property
    def layout(self) -> Layout:
        """How the epoch is distributed to ranks."""
        mark = self._plan.excluded_mark
        return self._plan.layout(self.view.place, self._plan.world)._replace(excluded=mark and mark[1])

    def cursor(self, count: int) -> ShareCursor:
        """Return the cursor of the job when every rank has received ``count`` samples of this view."""
        plan, partition, place = self._plan, self.view.partition, self.place
        place = place._replace(skip=min(place.skip + count, len(partition)))
        # The mini-epoch may have been finished before the epoch was split again.
        if place.mini_epoch < place.mini_epochs_done:
            consumed, finished = place.consumed, True
        else:
            consumed = partition.consumed_after(place.skip)
            # Finished by all ranks: with remainder="uneven", others may have more samples than this rank.
            finished = consumed >= min(partition.end, place.samples)
        grown = plan.begun_with.get(place.samples)
        entries = {
            **plan.identity(),
            **({} if grown is None else {"fingerprint": grown}),
            "samples": place.samples,
            "epoch": place.epoch,
            "mini_epoch": place.mini_epoch,
            "world_size": partition.world_size,
            "consumed": consumed,
            "finished": finished,
            "dealt": [place.mini_epochs_done, place.consumed, place.skip],
            **plan.write_changes(place.changes),
        }
        return replace(ShareCursor.at(place), consumed=consumed, entries=entries)


class SharePlan(Plan[ShareEpoch]):
    """The order of a source's rows, split into mini-epochs and among ranks.

    Args:
        source: the rows.
        ahead: fetches data ahead of the reader.
        rank, world_size, ...: see `penstock.plan.share_options.ShareOptions`.

    Raises:
        ConfigError, PartitionError: an argument is invalid, or arguments contradict each other.
    """

    def __init__(
        self,
        source: Source,
        *,
        ahead: LookAhead | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        mesh: dist.device_mesh.DeviceMesh | None = None,
        mini_epochs: int = 1,
        seed: int = 0,
        shuffle: str = "global",
        remainder: str = "pad",
        group: int | None = None,
        block_size: int | None = None,
        window: int | None = None,
        exclude: Any = None,
        locality: str = "none",
    ) -> None:
        if shuffle not in SHUFFLES:
            raise ConfigError(f"unknown shuffle {shuffle!r}: use one of {', '.join(map(repr, SHUFFLES))}")
        if remainder not in REMAINDERS:
            raise ConfigError(f"unknown remainder {remainder!r}: use one of {', '.join(map(repr, REMAINDERS))}")
        if locality not in ("none", "node"):
            raise ConfigError(f"unknown locality {locality!r}: use 'none' or 'node'")
        if locality == "node" and shuffle == "none":
            raise ConfigError(
                "locality='node' assigns shards to nodes in its own order, but shuffle='none' means the order of the "
                "file: use shuffle='block' or 'global', or leave locality= out"
            )
        if mini_epochs < 1:
            raise PartitionError(f"mini_epochs must be positive, got {mini_epochs}")
        self.source: Any = source
        self.mini_epochs = operator.index(mini_epochs)
        self.seed = checked_seed(seed)
        self.remainder = remainder
        self.filters: tuple[KeptRows, ...] = ()
        """Filters of the rows, each applied to the rows that the one before keeps."""
        self.excluded: ExcludedRows | None = None
        """Excluded rows, numbered among the rows that the filters keep."""
        if exclude is not None:
            # Imported here because few runs exclude rows, and every worker imports this module.
            from penstock.plan.exclusion import ExcludedRows

            self.excluded = ExcludedRows.of(exclude, self.samples)
        if group is None:
            self.shuffle, self.block = shuffle, block_options(shuffle, block_size, window)
        elif group < 1 or block_size is not None or window is not None or shuffle == "none":
            raise ConfigError(
                f"group={group} cuts the manifest into that many blocks and permutes them: it must be positive, and "
                "cannot be combined with block_size=, window= or shuffle='none'"
            )
        else:
            self.shuffle, self.block = "block", {"block_size": max(1, -(-self.samples // group)), "window": 1}
        self._world = distributed.LateWorld(rank, world_size, process_group=process_group, mesh=mesh, of="dataset")
        self._by_node = locality == "node"
        if self._by_node:
            if window is not None:
                raise ConfigError("locality='node' has one block in use for each of its 192 parts: leave window= out")
            self.block.pop("window", None)
        self.ahead = ahead
        self._views: dict[MiniEpoch, EpochView] = {}
        self._shown = SharedIntegers(MiniEpoch(0, 0, self.samples).numbers)
        self.begun_with: dict[int, str] = {}
        """Fingerprints of the rows with which epochs of loaded states began, if rows were appended since, by number.

        States of such an epoch name them, so that they load again, also after more growth.
        """
        self.bookmark = Bookmark()
        # Whether a state was loaded and no reader has begun since.
        self._loaded = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": {}}

    @property
    def samples(self) -> int:
        """Number of rows after filtering."""
        return len(self.filters[-1] if self.filters else self.source)

    @property
    def fingerprint(self) -> str:
        """Identity of the rows and their filters."""
        if not self.filters:
            return str(self.source.fingerprint)
        names = [self.source.fingerprint, *(kept.fingerprint for kept in self.filters)]
        return xxhash.xxh3_128_hexdigest(" ".join(names).encode())

    @property
    def excluded_mark(self) -> ExclusionMark | None:
        """Number and hash of the excluded rows; None if no row is excluded."""
        return None if self.excluded is None else self.excluded.mark

    def kept(self, rows: Indices) -> Indices:
        """Return the source's rows from their ordinals among the rows that the filters keep."""
        for kept in reversed(self.filters):
            rows = kept.find(rows)
        return rows

    def keep(self, kept: KeptRows) -> None:
        """Add a filter, and begin at the start of the current epoch."""
        self.filters, self._views = (*self.filters, kept), {}
        self.excluded = None if self.excluded is None else self.excluded.among(kept)
        self.request(ShareCursor.at(MiniEpoch(self.shown.epoch, 0, self.samples)))

    @property
    def world(self) -> distributed.World:
        """Rank and world size; see `penstock.distributed.LateWorld`."""
        return self._world.get()

    @property
    def ranks(self) -> int:
        """The current number of ranks, which this does not fix."""
        return self._world.ranks

    def agrees_with(self, shuffle: bool | str) -> bool:
        """Return whether the order matches a loader's ``shuffle=``: True is any shuffle, False the order of rows."""
        return (self.shuffle != "none") is shuffle if isinstance(shuffle, bool) else self.shuffle == shuffle

    @property
    def keeps_rows(self) -> bool:
        """Whether an index is the same row in every epoch and mini-epoch."""
        return self.mini_epochs == 1 and self.excluded is None and self.agrees_with(False)

    def unshuffle(self) -> None:
        """Take the order of the source, in which no rank repeats a row, and begin at the start of the epoch."""
        self.shuffle, self.block, self._by_node, self._views = "none", {}, False, {}
        self.remainder = "uneven" if self.remainder == "pad" else self.remainder
        self.request(ShareCursor.at(MiniEpoch(self.shown.epoch, 0, self.samples)))

    # Views.

    def view(self, place: MiniEpoch | None = None) -> EpochView:
        """Return the view at a place, by default at `shown`. Thread-safe.

        Recent views are cached, for several loaders that are read alternately.
        """
        place = self._shown_to_caller() if place is None else place
        views = self._views
        found = views.get(place)
        if found is None:
            found = self.make_view(place)
            # A new dict, because another thread may be reading the old one.
            self._views = dict([*views.items()][1 - _KEPT_VIEWS :]) | {place: found}
        return found

    def _shown_to_caller(self) -> MiniEpoch:
        """Return `shown` for a program that reads by index.

        Raises:
            ConfigError: torch's ``Subset`` or ``StackDataset`` reads. They call nothing when they are created, so in
                torch's loader they can be recognised only here.
        """
        fixed = self.keeps_rows and (self.remainder != "pad" or self.world.world_size == 1)
        frame = None if fixed else sys._getframe(1)
        while frame is not None:
            reads = frame.f_code.co_name in ("__getitem__", "__getitems__")
            if reads and isinstance(frame.f_locals.get("self"), Subset | StackDataset):
                raise ConfigError(
                    "torch's Subset, random_split and StackDataset take an index for a row, but an index of this "
                    "dataset is a position in its own order, which is another row in another epoch: parts would share "
                    "rows, and pairs would not fit. Use penstock.Subset(dataset, rows), which takes rows of the "
                    "source, or open the dataset with shuffle='none', remainder='uneven'"
                )
            frame = frame.f_back
        return self.shown

    def make_view(self, place: MiniEpoch) -> EpochView:
        """Return a new view at a place, without caching it."""
        world = self.world
        partition = self.layout(place, world).partition(world.rank)
        return EpochView(self.seed, place, partition, self.rows_in(place))

    def rows_in(self, place: MiniEpoch) -> Order:
        """Return the row at each position of a place's epoch."""
        order = self.make_order(place)
        if not self.filters and self.excluded is None:
            return order
        return cast(Order, EpochRows(order, self, place.epoch))

    def layout(self, place: MiniEpoch, world: distributed.World) -> Layout:
        """Return how samples are distributed to ranks from a place on."""
        epoch, mini_epoch, samples, done, base, skip, _ = place
        rank, ranks = world
        ends, parts = REMAINDERS.index(self.remainder), self.mini_epochs
        return Layout(0, epoch, mini_epoch, done, base, skip, ranks, 1, samples, ends, parts=parts, rank=rank)

    def make_order(self, place: MiniEpoch) -> Order:
        """Return the order of an epoch over all ranks."""
        if self._by_node:
            from penstock.order.nodes import NodeShuffle

            return NodeShuffle(place.samples, seed=self.seed, epoch=place.epoch, **self.block)
        return make_order(self.shuffle, place.samples, seed=self.seed, epoch=place.epoch, **self.block)

    def following(self, place: MiniEpoch) -> MiniEpoch:
        """Return the place of the next mini-epoch, or of the next epoch after the last one."""
        if place.mini_epoch + 1 < self.mini_epochs:
            return place._replace(mini_epoch=place.mini_epoch + 1, skip=0)
        return MiniEpoch(place.epoch + 1, 0, self.samples, changes=place.changes)

    def __repr__(self) -> str:
        """Return a description of the order and the share, without fixing rank and world size."""
        place, world = self.shown, self._world.known()
        rest = None if world is None else max(0, len(self.layout(place, world).partition(world.rank)) - place.skip)
        left = "" if rest is None else f", {counted(rest, 'sample')}"
        part = f", mini-epoch {place.mini_epoch} of {self.mini_epochs}" if self.mini_epochs > 1 else ""
        return (
            f"  order: {self._order_in_words()}, seed {self.seed}, epoch {place.epoch}{part}\n"
            f"  share: {self._world}{left}"
        )

    def _order_in_words(self) -> str:
        nodes = ", by node" if self._by_node else ""
        return self.shuffle + nodes + "".join(f", {name} {size:,}" for name, size in self.block.items())

    # The position that a dataset shows, and the requests of its user.

    @property
    def shown(self) -> MiniEpoch:
        """The position that the dataset shows to programs. Each reader has its own position, and records it here."""
        return MiniEpoch(*self._shown.get())  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch at whose first mini-epoch readers begin next.

        After loading a state, setting the state's own epoch keeps the position of the state.

        Raises:
            ConfigError: the epoch is not an integer from 0 to 2**62 - 1.
        """
        epoch = checked_epoch(epoch)
        if not (self._loaded and epoch == self.shown.epoch):
            # Without a mini-epoch, so that a loader in another mini-epoch of this epoch stays there.
            self.request(Cursor(epoch=epoch))

    def set_mini_epoch(self, mini_epoch: int) -> None:
        """Set the mini-epoch, in the epoch of `shown`, at which readers begin next.

        After loading a state, setting the state's own mini-epoch keeps the position of the state.

        Raises:
            PartitionError: the mini-epoch is outside its range.
        """
        place = self.shown
        Partition(0, mini_epochs=self.mini_epochs, mini_epoch=mini_epoch)  # raises if it is outside its range
        if self._loaded and mini_epoch == place.mini_epoch:
            return
        # A mini-epoch before a resume exists only in the partition of the whole epoch.
        if mini_epoch < place.mini_epochs_done:
            place = place._replace(mini_epochs_done=0, consumed=0)
        self.request(ShareCursor.at(place._replace(mini_epoch=mini_epoch, skip=0)))

    def request(self, cursor: Cursor, *, loaded: bool = False) -> None:
        """Let every reader begin next at a cursor: ``loaded`` from a state, or the start of an epoch or mini-epoch."""
        self.show(cursor, loaded=loaded, running=False)
        self.bookmark.write(cursor, loaded=loaded)

    def show(self, cursor: Cursor, *, loaded: bool, running: bool) -> None:
        """Record the position of a reader in `shown`, in shared memory for workers."""
        place, mark = self._place(cursor), self.bookmark
        self._shown.set(place.numbers)
        self._loaded, mark.epoch = loaded, place.epoch
        if running and mark.loaded and isinstance(mark.cursor, ShareCursor) and mark.cursor.place == place:
            # A loaded state is used once.
            whole = MiniEpoch(place.epoch, place.mini_epoch, self.samples, changes=place.changes)
            mark.cursor, mark.loaded = ShareCursor.at(whole), False
        self.prepare()

    def _place(self, cursor: Cursor) -> MiniEpoch:
        """Return the place of a cursor."""
        return cursor.place if isinstance(cursor, ShareCursor) else MiniEpoch(cursor.epoch, 0, self.samples)

    def prepare(self) -> None:
        """Prepare the rows of the current view and of the next one."""
        if self.ahead is not None:
            view = self.view(self.shown)
            self.ahead.prepare(view, self.view(self.following(view.place.whole)))

    def advance(self, place: MiniEpoch, count: int) -> None:
        """Record that the consumer has received the first ``count`` samples of the view at a place."""
        if self.ahead is not None:
            self.ahead.advance(place, count)

    # As a plan.

    @property
    def key_seed(self) -> int:
        """Seed of the samples' generators."""
        return self.seed

    def bind(self, cursor: Cursor, draws: Draws) -> ShareEpoch:
        """Return the share of an epoch from the cursor on."""
        # Raises if a process group that was made later disagrees.
        _ = self.world
        return ShareEpoch(self, self.view(self._place(cursor)))

    def write_changes(self, changes: tuple[WeightStage, ...]) -> State:
        """Return the entries of a state that may change during a job: weights of a mixture, excluded rows."""
        mark = self.excluded_mark
        return {} if mark is None else {"excluded": list(mark)}

    # States.

    def identity(self) -> State:
        """Return the entries that a state must match."""
        return {
            "order_version": ORDER_VERSION,
            "fingerprint": self.fingerprint,
            "shuffle": self.shuffle,
            **self.block,
            **({"locality": "virtual nodes"} if self._by_node else {}),
            "seed": self.seed,
            "mini_epochs": self.mini_epochs,
            "remainder": self.remainder,
        }

    def read(self, state: Mapping[str, Any], *, allow_growth: bool = False) -> ShareCursor:
        """Return the cursor in a state of the same or of another world size.

        Args:
            state: of the same source and order.
            allow_growth: also accept a state from before rows were appended to the source. The current epoch keeps the
                rows with which it began. Its later states name these, too.

        Raises:
            StateError: the state belongs to another source, order or partition, or is damaged.
        """
        of, samples, expected = "dataset", self.samples, self.identity()
        check_state(state, {}, of=of)
        had: Any = state.get("samples")
        fingerprint = str(state.get("fingerprint"))
        # Filters were made for the old number of rows.
        may_have_grown = allow_growth and not self.filters and type(had) is int and 0 <= had < samples
        if may_have_grown and self.source.is_prefix_of_current(fingerprint, had):
            samples, expected["fingerprint"] = had, fingerprint
        locality = {"locality": "none"} if "locality" in state else {}
        check_state(state, {**locality, **expected, "samples": samples}, of=of)
        epoch, mini_epoch, consumed = (read_int(state, name, of=of) for name in ("epoch", "mini_epoch", "consumed"))
        if mini_epoch >= self.mini_epochs or consumed > samples:
            raise StateError(
                f"this state is damaged: it is in mini-epoch {mini_epoch} of {self.mini_epochs}, after {consumed} of "
                f"{samples} samples"
            )
        done, base, skip = read_ints(state, "dealt", 3, of=of)
        if done > self.mini_epochs or base > samples or skip > samples:
            raise StateError(f"this state is damaged: 'dealt' is {[done, base, skip]} for {samples} samples")
        if "excluded" in state:
            from penstock.plan.exclusion import check_excluded

            check_excluded(state, self.excluded_mark, of=of)
        if state.get("world_size") != self.world.world_size:
            done, base, skip = mini_epoch + 1 if state.get("finished") else mini_epoch, consumed, 0
        if samples != self.samples:
            self.begun_with[samples] = fingerprint
        return ShareCursor.at(MiniEpoch(epoch, mini_epoch, samples, done, base, skip))


class EpochRows:
    """The rows of a source at positions of an epoch, after filters and exclusion: ``rows[positions]``."""

    def __init__(self, order: Order, plan: SharePlan, epoch: int) -> None:
        self._order, self._plan, self._epoch = order, plan, epoch

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, positions: Any) -> Any:
        places, plan = np.asarray(self._order[positions]), self._plan
        if plan.excluded is not None:
            places = plan.excluded.replace(places.reshape(-1), plan.seed, self._epoch).reshape(places.shape)
        rows = plan.kept(places)
        return rows if places.ndim else int(rows)

    def positions_of(self, row: int) -> list[int]:
        """Return the positions of a row of the source: none if it is left out, several if a filter repeats it or if it
        replaces other rows.
        """
        numbers = np.array([row] if 0 <= row < len(self._plan.source) else [], np.int64)
        for kept in self._plan.filters:
            numbers = kept.places_of(numbers)
        places: list[int] = numbers.tolist()
        excluded, seed = self._plan.excluded, self._plan.seed
        if excluded is not None:
            places = [place for number in places for place in excluded.places_of(number, seed, self._epoch)]
        return [int(self._order.inverse[place]) for place in places]  # type: ignore[attr-defined]
