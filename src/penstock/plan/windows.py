"""`WindowPlan`: the order of shards in a store that nobody has counted yet, and `WindowEpoch`, an epoch of it.

    shards permuted by (seed, epoch)  ->  windows (`penstock.order.windows`)  ->  samples, once a window is counted

An epoch that begins while indexes are missing goes through the shards in windows, to its end, whatever is known by
then. Every other epoch has the order of `SharePlan`. How many samples an epoch of windows has shows when its last
window does.

Invariant: a state has the place of one window, how many samples came before it, and how many were had. So it is as
small as any, and fits any number of ranks: others finish the window as it was dealt, and deal the shards behind it
anew.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, SupportsIndex, Unpack

import numpy as np
import xxhash

from penstock.distributed import World
from penstock.errors import ConfigError, StateError
from penstock.hashing import derive_key, mix
from penstock.order import ORDER_VERSION, Order, make_order
from penstock.order.permutation import Indices
from penstock.order.windows import Stage, WindowOrder, window_spans
from penstock.plan.cursor import STATE_VERSION, Cursor, State, check_state, read_int, read_ints
from penstock.plan.epoch import TO_BE_COUNTED, EpochPlan, unknown_length
from penstock.plan.reader import Wish
from penstock.plan.share import EpochView, LookAhead, MiniEpoch, ShareCursor, ShareEpoch, SharePlan
from penstock.plan.share_options import ShareOptions
from penstock.wording import counted

__all__ = [
    *("UNKNOWN", "Arriving", "Need", "ShardSamples", "WindowCursor", "WindowEpoch", "WindowPlan"),
    *("check_window_shards", "pack_rows", "split_rows"),
]

UNKNOWN = -1
"""How many samples an epoch of windows has, in its `MiniEpoch`."""

_SHIFT = 40  # bits of a sample's number within its shard


class ShardSamples(NamedTuple):
    """Where a batch's samples are: a place for data sets, whose indices then are rows of `pack_rows`.

    Attributes:
        epoch: the number of the epoch.
        versions: what the shards of the batch are, for processes that did not see them arrive.
    """

    epoch: int
    versions: tuple[Any, ...]


class Need(NamedTuple):
    """A shard that this rank gets, and when it reads it.

    Attributes:
        shard: its number.
        first: this rank's samples, in the present run, before the first one that may be of the shard.
        last: those up to the last one; None while nobody knows.
    """

    shard: int
    first: int
    last: int | None


class Arriving(Protocol):
    """Shards that are counted while they arrive. See `penstock.shards.arriving_source.ArrivingSource`."""

    urls: list[str]

    @property
    def complete(self) -> bool:
        """Whether all shards are counted."""

    def join(self, world_size: int) -> None:
        """Take note of how many ranks share the shards."""

    def expect(self, needs: Sequence[Need], *, position: int = 0) -> None:
        """Begin to get shards that come next, in this order, and give up others that have not begun to arrive."""

    def advance(self, position: int) -> None:
        """Take note of how many samples the consumer has had."""

    def close(self) -> None:
        """End what runs in the background, until something is expected again."""

    def counts_of(self, shards: Sequence[int]) -> list[int]:
        """Return how many samples shards have. Waits for them."""

    def finish(self, rank: int, world_size: int) -> None:
        """Count all shards that are not counted yet, together with the other ranks."""

    def versions(self, shards: Sequence[int]) -> tuple[Any, ...]:
        """Return what other processes have to know of shards that were counted."""


def pack_rows(shards: Indices, samples: Indices) -> Indices:
    """Return one number for each pair of a shard and a sample in it."""
    return (shards << _SHIFT) | samples


def split_rows(rows: Indices) -> tuple[Indices, Indices]:
    """Return the shards and the samples of `pack_rows`."""
    return rows >> _SHIFT, rows & ((1 << _SHIFT) - 1)


@dataclass(frozen=True, kw_only=True)
class WindowCursor(ShareCursor):
    """A cursor in an epoch of windows; ``consumed`` counts samples of the whole job.

    Attributes:
        stage: how the shards of the window are dealt.
        window: its number in the stage.
        begin: samples of the epoch before it.
    """

    stage: Stage
    window: int
    begin: int

    @property
    def data(self) -> str:
        """Identity of the shards' names. What they are called once they are counted, ranks learn at different times."""
        return str(self.plan["shards"])

    def state(self) -> State:
        """Return the cursor as a JSON-serialisable dict, which `WindowPlan.read` takes back."""
        return {
            "version": STATE_VERSION,
            **self.plan,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "stage": list(self.stage),
            "window": [self.window, self.begin],
        }


class WindowView(EpochView):
    """The samples of a rank in an epoch of windows, for whoever makes batches: indices are rows of `pack_rows`."""

    place: Any

    def __init__(self, seed: int, place: MiniEpoch | ShardSamples) -> None:
        self.seed, self.place, self.epoch = seed, place, place.epoch

    def __len__(self) -> int:
        raise unknown_length()

    def local(self, indices: Sequence[int]) -> Indices:
        """Return indices as an array."""
        if not isinstance(self.place, ShardSamples):
            raise unknown_length()
        return np.asarray(indices, dtype=np.int64)

    def rows(self, local: Indices) -> Indices:
        """Return the rows of samples, which their indices are."""
        return local

    def locate(self, index: int) -> tuple[int, int]:
        raise unknown_length()

    def positions_of(self, local: Indices) -> Indices:
        raise unknown_length()


class WindowEpoch(EpochPlan):
    """One epoch of windows on one rank, from a cursor on. It is read forwards; `reach` says how far it is known."""

    grows = True

    def __init__(self, plan: WindowPlan, cursor: WindowCursor) -> None:
        self._plan, self._start = plan, cursor
        self.seed, self.epoch = plan.seed, cursor.epoch
        self._world = plan.world
        self._order = plan.shard_order(cursor.epoch)
        self._windows: list[_Window] = []
        self._read_here: list[list[int]] = []  # for each of them, the shards that this rank reads
        self._known = cursor.begin  # samples of the epoch up to the end of the last window that was opened
        self._upcoming = cursor.stage, cursor.window
        self._orders: dict[int, WindowOrder] = {}
        self._reading: list[int] = []
        self._had = 0  # this rank's samples of this run, by the consumer

    def __len__(self) -> int:
        while not self._over:
            if not self._plan.source.complete:
                raise unknown_length()
            self._open_next()
        rest, world = max(0, self._known - self._start.consumed), self._world
        if self._plan.remainder == "uneven":
            return max(0, -(-(rest - world.rank) // world.world_size))
        if not rest:
            return 0
        return rest // world.world_size if self._plan.remainder == "drop" else -(-rest // world.world_size)

    def reach(self, count: int) -> int:
        """Return how many of this rank's samples are known: ``count`` at least, or all there are.

        Waits for windows: for the shards of this rank to arrive, and for the other ranks to tell the counts of theirs.

        Raises:
            ShardError, StorageError: a shard is damaged or cannot be had, by name.
        """
        self._plan.windows_until = self.epoch + 1
        while not self._over and self._rounds() < count:
            self._expect()
            self._open_next()
            self._expect()
        return len(self) if self._over else self._rounds()

    def indices(self, start: int, stop: int) -> Indices:
        """Return rows, see `pack_rows`: int64 of shape (stop - start,)."""
        positions = self._folded(self.positions(start, stop))
        rows = np.empty_like(positions)
        for number in np.unique(self._window_of(positions)).tolist():
            window = self._windows[number]
            here = (positions >= window.begin) & (positions < window.end)
            rows[here] = pack_rows(*self._window_order(number).at(positions[here]))
        self._reading = np.unique(split_rows(rows)[0]).tolist()
        return rows

    def positions(self, start: int, stop: int) -> Indices:
        """Return positions in the epoch: int64 of shape (stop - start,)."""
        begin, step = self._start.consumed + self._world.rank, self._world.world_size
        return np.arange(begin + start * step, begin + stop * step, step, dtype=np.int64)

    @property
    def place(self) -> ShardSamples:
        """What workers have to know of the shards that `indices` named last."""
        return ShardSamples(self.epoch, self._plan.source.versions(self._reading))

    def cursor(self, count: int) -> WindowCursor:
        """Return where the job is once every rank has had ``count`` samples of this epoch plan: on all ranks the same.

        That is the window of the last sample, or the one behind it: every rank has opened the former, whatever it has
        opened since.
        """
        consumed = self._start.consumed + count * self._world.world_size
        if self._over:
            consumed = min(consumed, self._known)
        number = bisect_left(self._windows, consumed, key=lambda window: window.end)
        if consumed <= self._start.consumed or number == len(self._windows):
            return self._start
        window = self._windows[number]
        if consumed < window.end:
            return self._plan.cursor_at(self.epoch, consumed, window.stage, window.number, window.begin)
        return self._plan.cursor_at(self.epoch, consumed, *self._following(window), consumed)

    def exhaust(self) -> None:
        """Take note that the plan is read no further."""
        self._plan.source.expect([])

    # Windows.

    @property
    def _over(self) -> bool:
        """Whether all windows were opened."""
        begin, end = self._span(*self._upcoming)
        return begin == end

    def _span(self, stage: Stage, number: int) -> tuple[int, int]:
        return window_spans(stage, number, len(self._order), self._plan.window_shards)

    def _rounds(self) -> int:
        """Samples that each rank has of the windows that were opened, before the end is known."""
        return max(0, self._known - self._start.consumed) // self._world.world_size

    def _open_next(self) -> None:
        """Open a window: its shards are counted."""
        stage, number = self._upcoming
        shards = self._shards(stage, number)
        samples = sum(self._plan.source.counts_of(shards))
        self._windows.append(_Window(stage, number, shards, self._known, self._known + samples))
        self._known += samples
        self._read_here.append(self._shards_read(len(self._windows) - 1))
        self._upcoming = self._following(self._windows[-1])

    def _following(self, window: _Window) -> tuple[Stage, int]:
        """Return what comes behind a window: on other ranks than its stage's, a new stage."""
        stage, number = window.stage, window.number
        if stage.world_size == self._world.world_size:
            return stage, number + 1
        return Stage(self._span(stage, number)[1], window.end, self._world.world_size), 0

    def _shards(self, stage: Stage, number: int) -> list[int]:
        begin, end = self._span(stage, number)
        shards: list[int] = self._order[np.arange(begin, end)].tolist() if end > begin else []
        return shards

    def delivered(self, count: int) -> None:
        """Take note that the consumer has had the first ``count`` samples."""
        self._had = count
        self._plan.source.advance(count)

    def _expect(self) -> None:
        """Have the shards of the next two windows fetched, and those of windows that are read kept.

        The place of the second one is known without counts, though a new stage may begin with it.
        """
        stage, number = self._upcoming
        after = (stage, number + 1)
        if stage.world_size != self._world.world_size:
            after = Stage(self._span(stage, number)[1], 0, self._world.world_size), 0
        needs = [need for number in range(len(self._windows)) for need in self._needs(number)]
        for turn, place in enumerate(((stage, number), after)):
            first = self._rounds() + turn
            needs += [Need(shard, first, None) for shard in self._own(self._shards(*place), self._world)]
        self._plan.source.expect(needs, position=self._had)

    def _needs(self, number: int) -> list[Need]:
        """Return when this rank reads the shards of a window that was opened."""
        window, world, base = self._windows[number], self._world.world_size, self._start.consumed
        first, last = ((place - base) // world for place in (window.begin, window.end))
        if last < self._had:
            return []
        return [Need(shard, max(0, first), last) for shard in self._read_here[number]]

    def _shards_read(self, number: int) -> list[int]:
        """Return which shards of a window this rank reads: its own, and those of which others have too much."""
        window = self._windows[number]
        if window.stage.world_size != self._world.world_size:
            return window.shards
        own, read = self._own(window.shards, self._world), self._window_order(number).of_rank(self._world.rank)[0]
        return own + sorted(set(np.unique(read).tolist()).difference(own))

    @staticmethod
    def _own(shards: list[int], world: World) -> list[int]:
        """Return the shards of a window that a rank gets, and counts for all."""
        return shards[world.rank :: world.world_size]

    def _window_of(self, positions: Indices) -> Indices:
        ends = np.array([window.end for window in self._windows], dtype=np.int64)
        return np.searchsorted(ends, positions, "right")

    def _folded(self, positions: Indices) -> Indices:
        """Return positions, with those behind the end as repeats of the last window's."""
        if not self._over or not len(positions) or positions[-1] < self._known:
            return positions
        last = next(window for window in reversed(self._windows) if window.end > window.begin)
        behind = positions >= self._known
        return np.where(behind, last.begin + (positions - self._known) % (last.end - last.begin), positions)

    def _window_order(self, number: int) -> WindowOrder:
        found = self._orders.get(number)
        if found is None:
            window = self._windows[number]
            # The last two are enough: the plan is read forwards, and padding is of the last window.
            self._orders = {n: order for n, order in self._orders.items() if n >= number - 1}
            found = self._orders[number] = self._plan.window_order(self.epoch, window)
        return found


class _Window(NamedTuple):
    """A window whose shards are counted."""

    stage: Stage
    number: int
    shards: list[int]
    begin: int
    end: int


class WindowPlan(SharePlan):
    """The order of shards in a store: that of `SharePlan` where all of them are indexed when an epoch begins.

    Args:
        source: the shards.
        window_shards: how many shards of a rank are mixed in an epoch of windows, at most.
        ahead: looks ahead in epochs of `SharePlan`'s order.
        share: see `penstock.plan.share_options.ShareOptions`.

    Raises:
        ConfigError, PartitionError: arguments that make no sense; or that need the number of samples, while that is not
            known.
    """

    def __init__(
        self, source: Any, *, window_shards: int, ahead: LookAhead | None = None, **share: Unpack[ShareOptions]
    ) -> None:
        self.window_shards = window_shards
        self._counting: int | None = None
        self.windows_until = 0
        """The epoch behind the last one that the job read in windows; 0 where it read none so."""
        if not source.complete:
            _check_countless(share)
        super().__init__(source, ahead=ahead, by_shards=True, **share)

    def length(self) -> int:
        """Return how many rows the source has; `UNKNOWN` while shards are not counted."""
        return len(self.source) if self.source.complete else UNKNOWN

    @property
    def fingerprint(self) -> str:
        """Identity of the rows; while shards are not counted that of their names."""
        return super().fingerprint if self.source.complete else str(self._windows_identity()["shards"])

    def is_known_as(self, fingerprint: Any) -> bool:
        """Return whether the data of a state may be these: nobody knows before all shards are counted."""
        return not self.source.complete or fingerprint in (self.fingerprint, self._windows_identity()["shards"])

    def __repr__(self) -> str:
        """Return order and share in words. Asking settles neither rank nor world size."""
        if self.shown.samples != UNKNOWN:
            return super().__repr__()
        world, shards = self.peek_world(), counted(self.window_shards, "shard")
        return (
            f"  order: windows of up to {shards} a rank, seed {self.seed}, epoch {self.shown.epoch}\n"
            f"  share: rank {world.rank} of {world.world_size}, of shards that are counted as they are read"
        )

    def shard_order(self, epoch: int) -> Order:
        """Return the order of the shards in an epoch of windows, all ranks together."""
        kind = "none" if self.shuffle == "none" else "global"
        return make_order(kind, len(self.source.urls), seed=mix(derive_key(self.seed, 0, "windows")), epoch=epoch)

    def window_order(self, epoch: int, window: _Window) -> WindowOrder:
        """Return the samples of a window."""
        stage = window.stage
        place = window_spans(stage, window.number, len(self.source.urls), self.window_shards)[0]
        key = None if self.shuffle == "none" else mix(derive_key(self.seed, epoch, "window"), place)
        first = (window.begin - stage.position) % stage.world_size
        counts = self.source.counts_of(window.shards)
        return WindowOrder(window.shards, counts, begin=window.begin, first=first, world_size=stage.world_size, key=key)

    def cursor_at(self, epoch: int, consumed: int, stage: Stage, window: int, begin: int) -> WindowCursor:
        """Return a cursor in an epoch of windows."""
        return WindowCursor(
            epoch=epoch,
            mini_epoch=0,
            consumed=consumed,
            plan=self._windows_identity(),
            place=MiniEpoch(epoch, 0, UNKNOWN),
            world_size=self.world.world_size,
            stage=stage,
            window=window,
            begin=begin,
        )

    def _windows_identity(self) -> State:
        names = "\n".join(url.rpartition("/")[2] for url in self.source.urls)
        return {
            "order_version": ORDER_VERSION,
            "order": "windows",
            "shards": xxhash.xxh3_128_hexdigest(names.encode("utf-8", "surrogateescape")),
            "shuffle": self.shuffle,
            "seed": self.seed,
            "remainder": self.remainder,
            "window_shards": self.window_shards,
        }

    # As a plan.

    def view(self, place: Any = None) -> EpochView:
        """Return the view at a place; of an epoch of windows it is for rows alone, and has a length once that is known.

        Safe in threads.
        """
        place = self.shown if place is None else place
        if isinstance(place, ShardSamples):
            return WindowView(self.seed, place)
        if place.samples != UNKNOWN:
            return super().view(place)
        if not self.source.complete:
            return WindowView(self.seed, place)
        return super().view(MiniEpoch(place.epoch, 0, self.samples))

    def prepare(self) -> None:
        """Have shards looked ahead for; those of an epoch of windows are, as it is read."""
        if self.shown.samples != UNKNOWN:
            super().prepare()

    def close(self) -> None:
        """End what looks ahead, until something is read again."""
        super().close()
        self.source.close()

    def bind(self, cursor: Cursor, entropy: Any) -> Any:
        """Return an epoch from a cursor on: in windows, if it began so, or shards are not counted."""
        self.source.join(self.world.world_size)
        if not isinstance(cursor, WindowCursor):
            self._note_windows(cursor)
            if self._counting is not None and cursor.epoch > self._counting:
                # A run that never stopped would have counted all of them by now, and told the other ranks.
                self.source.finish(*self.world)
            if self._place(cursor).samples != UNKNOWN:
                return super().bind(cursor, entropy)
            stage = Stage(0, 0, self.world.world_size)
            cursor = self.cursor_at(cursor.epoch, 0, stage, 0, 0)
        self._counting = cursor.epoch
        return WindowEpoch(self, cursor)

    def _place(self, cursor: Cursor) -> MiniEpoch:
        place = super()._place(cursor)
        if place.samples == UNKNOWN and self.source.complete and not isinstance(cursor, WindowCursor):
            return MiniEpoch(place.epoch, 0, self.samples)
        return place

    def again(self, run: ShareEpoch | WindowEpoch) -> Cursor:
        """Return where a run begins."""
        return run._start if isinstance(run, WindowEpoch) else super().again(run)

    def after(self, run: ShareEpoch | WindowEpoch, had: int) -> Cursor:
        """Return the next epoch."""
        return Cursor(epoch=run.epoch + 1) if isinstance(run, WindowEpoch) else super().after(run, had)

    def wish_at(self, cursor: ShareCursor) -> None:
        """Let readers begin at the cursor of a loaded state."""
        super().wish_at(cursor)
        self._note_windows(cursor)
        if isinstance(cursor, WindowCursor):
            self._wish = Wish(cursor, loaded=True)

    # States.

    def read(self, state: Mapping[str, Any]) -> ShareCursor:
        """Return the cursor that a state holds, at the same or at another world size.

        Raises:
            StateError: the state is of other shards, or of another order, or damaged.
            ShardError, StorageError: the state is of an epoch that began with all indexes, and a shard cannot be
                counted now.
        """
        if not isinstance(state, Mapping) or state.get("order") != "windows":
            # Only the counts of all shards tell where it is.
            self.source.finish(*self.world)
            return self._after_windows(super().read(state), state)
        of = "data set"
        check_state(state, {"version": STATE_VERSION, **self._windows_identity()}, of=of)
        epoch, consumed = (read_int(state, name, of=of) for name in ("epoch", "consumed"))
        shard, position, world_size = read_ints(state, "stage", 3, of=of)
        window, begin = read_ints(state, "window", 2, of=of)
        if world_size < 1 or position > begin or begin > consumed or shard > len(self.source.urls):
            raise StateError(f"this state is damaged: its window is {state['window']}, its stage {state['stage']}")
        stage = Stage(shard, position, world_size)
        if world_size != self.world.world_size and consumed == begin:
            # Nothing of the window was had: it is dealt anew.
            place = window_spans(stage, window, len(self.source.urls), self.window_shards)[0]
            stage, window = Stage(place, begin, self.world.world_size), 0
        return self.cursor_at(epoch, consumed, stage, window, begin)

    def read_grown(self, state: Mapping[str, Any]) -> ShareCursor:
        """Return the same over a source that has grown since, see `SharePlan.read_grown`."""
        return self._after_windows(super().read_grown(state), state)

    def write_layout(self, place: MiniEpoch) -> State:
        """Return the entries of a state for the nodes of an epoch's order, and for the epochs that were in windows."""
        until = {"windows": self.windows_until} if self.windows_until else {}
        return super().write_layout(place) | until

    def _note_windows(self, cursor: Cursor) -> None:
        """Remember what a state says of earlier epochs."""
        if isinstance(cursor, ShareCursor):
            self.windows_until = max(self.windows_until, cursor.changes.get("windows", 0))

    @staticmethod
    def _after_windows(cursor: ShareCursor, state: Mapping[str, Any]) -> ShareCursor:
        if "windows" not in state:
            return cursor
        return replace(cursor, changes=cursor.changes | {"windows": read_int(state, "windows", of="data set")})


def check_window_shards(value: Any) -> None:
    """Raise ConfigError where this is no number of shards."""
    if not isinstance(value, SupportsIndex) or value is True or operator.index(value) < 1:
        raise ConfigError(f"window_shards is a positive number of shards, or files, got {value!r}")


def _check_countless(share: Mapping[str, Any]) -> None:
    """Refuse options that need the number of samples."""
    for name, usual in (("mini_epochs", 1), ("group", None), ("exclude", None)):
        if share.get(name, usual) != usual:
            raise ConfigError(
                f"{name}= needs the number of samples, which nobody knows before the shards were read: {TO_BE_COUNTED}"
            )
