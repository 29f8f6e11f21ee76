"""One rank's share of a manifest, or of anything else with rows: what `RankDataset`, `ShardDataset` and others have in
common.

    epoch's order (seed, epoch)  ->  partition (rank, mini-epoch)  ->  rows of the manifest

Invariant: nothing here is a list of samples. Position, row and key of a sample are computed when it is asked for, so
the memory of a share does not depend on the length of the manifest.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from penstock import distributed
from penstock.datasets.place import Place, SharedPlace
from penstock.errors import ConfigError, PartitionError, StateError
from penstock.order import ORDER_VERSION, SHUFFLES, Order, Partition, make_order
from penstock.order.hashing import derive_key
from penstock.order.partition import REMAINDERS
from penstock.order.permutation import Indices
from penstock.order.shuffle import DEFAULT_BLOCK_SIZE, DEFAULT_WINDOW
from penstock.plan.cursor import STATE_VERSION, Cursor, State, check_state, read_int, read_ints
from penstock.plan.epoch import EpochPlan
from penstock.plan.reader import Plan, Wish
from penstock.random import sample_key, sample_keys
from penstock.wording import counted

__all__ = ["Share", "SharePlan", "Slice", "Table"]


_SLICES = 4
"""Slices that are kept: a loader each."""


class Table(Protocol):
    """What is shared out: so many rows, with an identity. A `Manifest`, a `ShardSet`."""

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Identity of the rows: content alone, neither paths nor times."""

    def prefix_fingerprint(self, rows: int) -> str:
        """The fingerprint of the first rows alone, for tables that are only appended to."""

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Whether a table with this fingerprint and so many rows has since grown to be this one."""


class Slice(NamedTuple):
    """The samples of one rank in one mini-epoch, as arithmetic."""

    place: Place
    partition: Partition
    order: Order

    def __len__(self) -> int:
        return max(0, len(self.partition) - self.place.skip)

    def positions(self, local: npt.NDArray[np.int64]) -> Indices:
        """Global positions of local samples (int64 array); those of n and more are padding."""
        return self.partition[local + self.place.skip]

    def locate(self, index: int) -> tuple[int, int]:
        """Global position and row of one local sample.

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

    def rows(self, positions: Indices) -> Indices:
        """Rows of the manifest at these positions."""
        return self.order[positions % max(self.partition.n, 1)]


class Share:
    """Order, partition, place and state of one rank over a manifest.

    See `RankDataset` for the arguments and errors.
    """

    def __init__(
        self,
        manifest: Table,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        mini_epochs: int = 1,
        seed: int = 0,
        shuffle: str = "global",
        remainder: str = "pad",
        group: int | None = None,
        block_size: int | None = None,
        window: int | None = None,
    ) -> None:
        self.manifest: Any = manifest  # a Table; who made it knows of what kind
        if shuffle not in SHUFFLES:
            raise ConfigError(f"unknown shuffle {shuffle!r}: use one of {', '.join(map(repr, SHUFFLES))}")
        if remainder not in REMAINDERS:
            raise ConfigError(f"unknown remainder {remainder!r}: use one of {', '.join(map(repr, REMAINDERS))}")
        if mini_epochs < 1:
            raise PartitionError(f"mini_epochs must be positive, got {mini_epochs}")
        seed = operator.index(seed)
        derive_key(seed)  # a seed outside 64 bits is refused here, not at the first sample
        self.mini_epochs = operator.index(mini_epochs)
        self.seed = seed
        self.remainder = remainder
        self.shuffle, self.block = _block_options(shuffle, len(self.manifest), group, block_size, window)
        self._given = rank is not None or world_size is not None or process_group is not None
        self._world = distributed.current(rank, world_size, process_group=process_group) if self._given else None
        self.place = SharedPlace(Place(0, 0, len(self.manifest)))
        """Where a program that looks at the data set finds it. A loader holds its own place, and shows it here."""
        self.running = False
        self._loaded = False  # a state was loaded and nothing has begun since
        self._wish: Cursor = Cursor()
        self._wish_loaded = False
        self.times_set = 0
        self._slices: dict[Place, Slice] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Workers on other machines have no process group: what rank this is has to travel with the data set.
        return {**self.__dict__, "_world": self.world, "_slices": {}}

    @property
    def world(self) -> distributed.World:
        """Rank and world size, see `agreed`."""
        return self.agreed()

    def agreed(self) -> distributed.World:
        """Rank and world size, resolved at first use and fixed from then on.

        Raises:
            PartitionError: a process group was made later that disagrees.
        """
        if self._world is None:
            self._world = distributed.current()
        elif not self._given and dist.is_available() and dist.is_initialized():
            found = distributed.current()
            if found != self._world:
                raise PartitionError(
                    f"this data set was first used as rank {self._world.rank} of {self._world.world_size}, and now the "
                    f"process group says rank {found.rank} of {found.world_size}: initialise torch.distributed first, "
                    "or pass rank= and world_size="
                )
        return self._world

    # Where the job stands.

    def current(self) -> Slice:
        """The slice at the present place; computed again only when the place has changed."""
        return self.slice_at(self.place.get())

    def checked(self) -> Slice:
        """The slice at the present place, after a look at whether the process group still agrees."""
        self.agreed()
        return self.current()

    def slice_at(self, place: Place) -> Slice:
        """The slice at any place; those asked for last are kept, for loaders that take turns. Safe in threads."""
        slices = self._slices
        found = slices.get(place)
        if found is None:
            found = self.make_slice(place)
            # Another thread never sees a dict that changes.
            self._slices = dict([*slices.items()][1 - _SLICES :]) | {place: found}
        return found

    def rows_at(self, place: Place) -> Indices:
        """Rows of the whole mini-epoch at a place: a resume begins inside it."""
        slice_ = self.make_slice(place)
        return slice_.rows(slice_.partition.positions())

    def make_slice(self, place: Place) -> Slice:
        """The slice at a place, anew."""
        world = self.world
        rest = self.mini_epochs - place.mini_epochs_done
        number = place.mini_epoch - place.mini_epochs_done
        # A mini-epoch that was finished before the epoch was dealt out anew has nothing left.
        consumed = place.consumed if number >= 0 else place.samples
        partition = Partition(
            place.samples,
            world.world_size,
            world.rank,
            mini_epochs=max(rest, 1),
            mini_epoch=max(number, 0),
            remainder=self.remainder,
            consumed=consumed,
        )
        order = make_order(self.shuffle, place.samples, seed=self.seed, epoch=place.epoch, **self.block)
        return Slice(place, partition, order)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch at its first mini-epoch; the epoch of a state just loaded keeps its position."""
        place = self.place.get()
        if epoch < 0:
            raise ConfigError(f"epoch must be 0 or more, got {epoch}")
        if not (self._loaded and epoch == place.epoch):
            self.move(Place(epoch, 0, len(self.manifest)))
            # A loader that is in another mini-epoch of this epoch stays there.
            self._wish = Cursor(epoch=epoch)

    def set_mini_epoch(self, mini_epoch: int) -> None:
        """Start a mini-epoch of the present epoch; that of a state just loaded keeps its position."""
        place = self.place.get()
        if not 0 <= mini_epoch < self.mini_epochs:
            raise PartitionError(
                f"mini_epoch {mini_epoch} is outside the epoch's {self.mini_epochs}: "
                f"they go from 0 to {self.mini_epochs - 1}"
            )
        if self._loaded and mini_epoch == place.mini_epoch:
            return
        if mini_epoch < place.mini_epochs_done:  # before the resume: only a whole epoch has it
            place = Place(place.epoch, mini_epoch, place.samples)
        self.move(place._replace(mini_epoch=mini_epoch, skip=0))

    def after(self, place: Place) -> Place:
        """The place of the next mini-epoch, or of the next epoch after the last one."""
        if place.mini_epoch + 1 < self.mini_epochs:
            return place._replace(mini_epoch=place.mini_epoch + 1, skip=0)
        return Place(place.epoch + 1, 0, len(self.manifest))

    def move(self, place: Place, *, loaded: bool = False) -> None:
        """Go to a place, which is a wish for every loader, too; nothing of it has begun."""
        self.show(place, loaded=loaded, running=False)
        self._wish, self._wish_loaded, self.times_set = PlaceCursor.at(place), loaded, self.times_set + 1

    def show(self, place: Place, *, loaded: bool, running: bool) -> None:
        """Show programs that look where a loader is. No other loader minds it."""
        self.place.set(place)
        self.running, self._loaded = running, loaded
        if running and self._wish_loaded and self._wish == PlaceCursor.at(place):
            # A loaded state is used once.
            whole = Place(place.epoch, place.mini_epoch, len(self.manifest))
            self._wish, self._wish_loaded = PlaceCursor.at(whole), False

    def wish(self) -> Wish:
        """Return where somebody wants the next loader to begin."""
        return Wish(self._wish, self._wish_loaded)

    def keys(self, slice_: Slice, positions: Indices) -> list[int]:
        """Keys of the generators of the samples at these positions."""
        return sample_keys(self.seed, slice_.place.epoch, positions)

    def key(self, position: int) -> int:
        """Key of the generator of the sample at one position of the present epoch."""
        return sample_key(self.seed, self.current().place.epoch, position)

    # State.

    def identity(self) -> State:
        """What a state must agree with."""
        return {
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "fingerprint": self.manifest.fingerprint,
            "shuffle": self.shuffle,
            **self.block,
            "seed": self.seed,
            "mini_epochs": self.mini_epochs,
            "remainder": self.remainder,
        }

    def state(self, slice_: Slice, count: int) -> State:
        """The state once every rank has had ``count`` samples of a slice."""
        place, partition = slice_.place, slice_.partition
        had = min(place.skip + count, len(partition))
        if place.mini_epoch < place.mini_epochs_done:  # finished before the epoch was dealt out anew
            consumed, finished = place.consumed, True
        else:
            consumed = partition.consumed_after(had)
            finished = consumed >= min(
                partition.end, place.samples
            )  # by all ranks: uneven ones may have more than this
        return {
            **self.identity(),
            "samples": place.samples,
            "epoch": place.epoch,
            "mini_epoch": place.mini_epoch,
            "world_size": self.world.world_size,
            "consumed": consumed,
            "finished": finished,
            "dealt": [place.mini_epochs_done, place.consumed, had],
        }

    def load(self, state: Mapping[str, Any], *, allow_growth: bool) -> None:
        """Go to the place of a state, see `place_of`."""
        self.move(self.place_of(state, allow_growth=allow_growth), loaded=True)

    def place_of(self, state: Mapping[str, Any], *, allow_growth: bool = False) -> Place:
        """Return the place of a state, at the same or at another world size.

        Raises:
            StateError: the state is of another manifest, order or partition.
        """
        check_state(state, {"version": STATE_VERSION}, of="data set")
        check_state(state, self._expected(state, allow_growth), of="data set")
        epoch, mini_epoch, samples, consumed = (
            read_int(state, name, of="data set") for name in ("epoch", "mini_epoch", "samples", "consumed")
        )
        if mini_epoch >= self.mini_epochs or consumed > samples:
            raise StateError(
                f"this state is damaged: it stands in mini-epoch {mini_epoch} of {self.mini_epochs}, behind {consumed} "
                f"of {samples} samples"
            )
        done, base, skip = read_ints(state, "dealt", 3, of="data set")
        if done > self.mini_epochs or base > samples or skip > samples:
            raise StateError(f"this state is damaged: 'dealt' is {[done, base, skip]} of {samples} samples")
        if state.get("world_size") == self.world.world_size:
            return Place(epoch, mini_epoch, samples, done, base, skip)
        done = mini_epoch + 1 if state.get("finished") else mini_epoch
        return Place(epoch, mini_epoch, samples, done, consumed, 0)

    def _expected(self, state: Mapping[str, Any], allow_growth: bool) -> State:
        expected = {**self.identity(), "samples": len(self.manifest)}
        samples = state.get("samples")
        if allow_growth and type(samples) is int and 0 <= samples < len(self.manifest):
            # The epoch in progress ends on the rows it began with; later ones take in the new rows.
            expected |= {"samples": samples, "fingerprint": self.manifest.prefix_fingerprint(samples)}
            if self.manifest.is_prefix_of_current(str(state.get("fingerprint")), samples):
                expected["fingerprint"] = state["fingerprint"]
        return expected


@dataclass(frozen=True, kw_only=True)
class PlaceCursor(Cursor):
    """A cursor in a share: a place, and how its state is written."""

    place: Place
    write: Callable[[], State] = dict

    @classmethod
    def at(cls, place: Place, write: Callable[[], State] = dict) -> PlaceCursor:
        """Return the cursor at a place."""
        return cls(epoch=place.epoch, mini_epoch=place.mini_epoch, place=place, write=write)

    def state(self) -> State:
        """Return the state of the share."""
        return self.write()


class ShareEpoch(EpochPlan):
    """One slice: indices are local, positions are the epoch's."""

    def __init__(self, share: Share, slice_: Slice) -> None:
        self._share = share
        self._slice = slice_
        self.seed = share.seed
        self.place: Place = slice_.place
        self.epoch = slice_.place.epoch

    def __len__(self) -> int:
        return len(self._slice)

    def indices(self, start: int, stop: int) -> Indices:
        return np.arange(start, stop, dtype=np.int64)

    def positions(self, start: int, stop: int) -> Indices:
        return self._slice.positions(self.indices(start, stop))

    def cursor(self, count: int) -> PlaceCursor:
        place = self.place._replace(skip=self.place.skip + count)
        return PlaceCursor.at(place, lambda: self._share.state(self._slice, count))


class SharePlan(Plan[EpochPlan]):
    """The plan of a data set over a share.

    Args:
        share: whose order, partition and wish it is.
        prepare: called when a place is shown on the share.
    """

    def __init__(self, share: Share, prepare: Callable[[], None]) -> None:
        self._share = share
        self._prepare = prepare

    @property
    def key_seed(self) -> int:
        """Seed of the samples' generators."""
        return self._share.seed

    @property
    def times_set(self) -> Any:
        """Changes with every wish."""
        return self._share.times_set

    def wish(self) -> Wish:
        """Return where somebody wants the next loader to begin."""
        return self._share.wish()

    def bind(self, cursor: Cursor, entropy: Any) -> EpochPlan:
        """Return the slice from the cursor on."""
        share = self._share
        share.agreed()
        place = cursor.place if isinstance(cursor, PlaceCursor) else Place(cursor.epoch, 0, len(share.manifest))
        return ShareEpoch(share, share.slice_at(place))

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor that a state holds, at the same or at another world size."""
        return PlaceCursor.at(self._share.place_of(state))

    def read_grown(self, state: Mapping[str, Any]) -> Cursor:
        """Return the same over a manifest that has grown since."""
        return PlaceCursor.at(self._share.place_of(state, allow_growth=True))

    def whole(self, cursor: Cursor) -> Cursor:
        """Return the cursor itself: a slice is as long as what a resume left of it."""
        return cursor

    def again(self, run: EpochPlan) -> Cursor:
        """Return where a slice that was bound begins."""
        return PlaceCursor.at(run.place)

    def after(self, run: EpochPlan, had: int) -> Cursor:
        """Return the next mini-epoch, or the next epoch after the last one."""
        return PlaceCursor.at(self._share.after(run.place))

    def begin(self) -> None:
        """Begin an iteration by hand, at the place that the data set shows."""
        self.show(PlaceCursor.at(self._share.place.get()), loaded=False, running=True)

    def show(self, cursor: Cursor, *, loaded: bool, running: bool) -> None:
        """Show the place on the data set."""
        place = cursor.place if isinstance(cursor, PlaceCursor) else Place(cursor.epoch, 0, len(self._share.manifest))
        self._share.show(place, loaded=loaded, running=running)
        self._prepare()


def _block_options(
    shuffle: str, n: int, group: int | None, block_size: int | None, window: int | None
) -> tuple[str, dict[str, int]]:
    """The shuffle and its sizes; ``group`` is short for a block shuffle of that many blocks, each permuted inside."""
    if group is not None:
        if group < 1 or block_size is not None or window is not None or shuffle == "none":
            raise ConfigError(
                f"group={group} cuts the manifest into that many blocks and permutes them: it must be positive and "
                "goes with neither block_size=, window= nor shuffle='none'"
            )
        return "block", {"block_size": max(1, -(-n // group)), "window": 1}
    if shuffle == "block":
        sizes = {
            "block_size": DEFAULT_BLOCK_SIZE if block_size is None else block_size,
            "window": DEFAULT_WINDOW if window is None else window,
        }
        if min(sizes.values()) < 1:
            raise ConfigError(f"block_size and window must be positive, got {block_size} and {window}")
        return shuffle, sizes
    if block_size is not None or window is not None:
        raise ConfigError(f"block_size and window belong to shuffle='block', not to shuffle={shuffle!r}")
    return shuffle, {}
