"""`WindowPlan`: the order of remote shards whose numbers of samples are unknown. `WindowEpoch`: one epoch of it.

    shards permuted by (seed, epoch)  ->  windows (`penstock.order.windows`)  ->  samples, when a window is counted

An epoch that begins while indexes are missing reads the shards in windows to its end, even if all indexes are known
before. Every other epoch has the order of `SharePlan`. The number of samples of an epoch in windows is known only when
its last window has been counted.

Invariant: a state contains the place of one window, the number of samples before it, the number of samples consumed,
and 8 characters for the content of each shard of the window. So it is small, and loads on any number of ranks: they
finish the window with its old partition, and split the remaining shards again. If a shard of the window was replaced,
its samples would have another order, so that is an error.
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
from penstock.errors import ConfigError, StateError, StorageChangedError
from penstock.hashing import derive_key, mix
from penstock.order import ORDER_VERSION, Order, make_order
from penstock.order.permutation import Indices
from penstock.order.windows import WindowOrder, WindowStage, window_spans
from penstock.plan.cursor import STATE_VERSION, Cursor, State, check_state, read_int, read_ints
from penstock.plan.epoch import COUNTING_ADVICE, EpochPlan, unknown_length
from penstock.plan.reader import StartRequest
from penstock.plan.share import EpochView, LookAhead, MiniEpoch, ShareCursor, ShareEpoch, SharePlan
from penstock.plan.share_options import ShareOptions
from penstock.storage.urls import shown
from penstock.wording import counted

__all__ = [
    *("UNKNOWN", "Arriving", "Need", "ShardSamples", "WindowCursor", "WindowEpoch", "WindowPlan"),
    *("check_window_shards", "pack_rows", "split_rows"),
]

UNKNOWN = -1
"""`MiniEpoch.samples` of an epoch in windows."""

_DIGITS = 8
"""Characters of a state for the content of a shard."""

_SHIFT = 40
"""Bits of a sample's number within its shard."""


class ShardSamples(NamedTuple):
    """The place of a batch in an epoch in windows. Its indices are rows of `pack_rows`.

    Attributes:
        epoch: the number of the epoch.
        versions: descriptions of the batch's shards, for processes that did not count them.
    """

    epoch: int
    versions: tuple[Any, ...]


class Need(NamedTuple):
    """A shard that this rank needs, and when it is read.

    Attributes:
        shard: number of the shard.
        first: number of this rank's samples in the current run before the first possible sample of the shard.
        last: number of this rank's samples up to the last one of the shard; None while it is unknown.
    """

    shard: int
    first: int
    last: int | None


class Arriving(Protocol):
    """Shards whose samples are counted while they are downloaded. See `penstock.shards.arriving_source`."""

    urls: list[str]

    @property
    def complete(self) -> bool:
        """Whether all shards are counted."""

    def join(self, world_size: int) -> None:
        """Set the number of ranks that share the shards."""

    def expect(self, needs: Sequence[Need], *, position: int = 0) -> None:
        """Start to download the shards needed next, in this order; cancel others whose download has not started."""

    def advance(self, position: int) -> None:
        """Record the number of samples that the consumer has received."""

    def close(self) -> None:
        """Stop background work until the next `expect`."""

    def counts_of(self, shards: Sequence[int]) -> list[int]:
        """Return the numbers of samples of shards. Waits for the shards."""

    def identities(self, shards: Sequence[int]) -> list[str]:
        """Return 8 characters for the content of each of some counted shards."""

    def finish(self, rank: int, world_size: int) -> None:
        """Count all shards that are not counted yet, together with the other ranks."""

    def versions(self, shards: Sequence[int]) -> tuple[Any, ...]:
        """Return descriptions of counted shards that other processes need to read them."""


def pack_rows(shards: Indices, samples: Indices) -> Indices:
    """Return one number for each pair of a shard and a sample in it: int64."""
    return (shards << _SHIFT) | samples


def split_rows(rows: Indices) -> tuple[Indices, Indices]:
    """Return the shards and the samples of `pack_rows`."""
    return rows >> _SHIFT, rows & ((1 << _SHIFT) - 1)


@dataclass(frozen=True, kw_only=True)
class WindowCursor(ShareCursor):
    """A cursor in an epoch in windows; ``consumed`` counts samples of the whole job.

    Attributes:
        stage: the stage of the window, which has the number of ranks.
        window: number of the window in the stage.
        begin: number of samples of the epoch before the window.
        contents: 8 characters for each shard of the window; empty at its start.
    """

    stage: WindowStage
    window: int
    begin: int
    contents: str = ""

    @property
    def data(self) -> str:
        """Hash of the shards' names. It never changes, while ranks learn the full fingerprint at different times."""
        return str(self.plan["shards"])

    def state(self) -> State:
        """Return the cursor as a JSON-serialisable dict, which `WindowPlan.read` accepts."""
        return {
            "version": STATE_VERSION,
            **self.plan,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "stage": list(self.stage),
            "window": [self.window, self.begin],
            "contents": self.contents,
        }


class WindowView(EpochView):
    """The samples of a rank in an epoch read in windows, for reading batches. Indices are rows of `pack_rows`."""

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
        """Return the rows of samples, which are the same as their indices."""
        return local

    def locate(self, index: int) -> tuple[int, int]:
        raise unknown_length()

    def positions_of(self, local: Indices) -> Indices:
        raise unknown_length()


class WindowEpoch(EpochPlan):
    """One epoch read in windows on one rank, from a cursor on. It must be read forward. `reach` waits for samples."""

    grows = True

    def __init__(self, plan: WindowPlan, cursor: WindowCursor) -> None:
        self._plan, self._start = plan, cursor
        self.seed, self.epoch = plan.seed, cursor.epoch
        self._world = plan.world
        self._order = plan.shard_order(cursor.epoch)
        self._windows: list[_Window] = []
        # The shards of each window that this rank reads.
        self._read_here: list[list[int]] = []
        # Number of samples of the epoch up to the end of the last opened window.
        self._known = cursor.begin
        self._upcoming = cursor.stage, cursor.window
        self._orders: dict[int, WindowOrder] = {}
        self._reading: list[int] = []
        # Number of samples that the consumer has received from this epoch plan.
        self._had = 0

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
        """Return the number of this rank's samples that are known: at least ``count``, or all.

        Waits for windows: for the download of this rank's shards, and for the counts from the other ranks.

        Raises:
            ShardError, StorageError: a shard is damaged or cannot be read; the message names it.
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
        """Descriptions, for workers, of the shards in the last result of `indices`."""
        return ShardSamples(self.epoch, self._plan.source.versions(self._reading))

    def cursor(self, count: int) -> WindowCursor:
        """Return the cursor of the job when every rank has received ``count`` samples, the same on all ranks.

        The cursor is in the window of the last sample, which every rank has opened, or at the start of the next window.
        """
        consumed = self._start.consumed + count * self._world.world_size
        if self._over:
            consumed = min(consumed, self._known)
        number = bisect_left(self._windows, consumed, key=lambda window: window.end)
        if consumed <= self._start.consumed or number == len(self._windows):
            return self._start
        window = self._windows[number]
        if consumed < window.end:
            place = window.stage, window.number, window.begin
            return self._plan.cursor_at(self.epoch, consumed, *place, window.contents)
        return self._plan.cursor_at(self.epoch, consumed, *self._following(window), consumed)

    def exhaust(self) -> None:
        """Record that the plan will not be read further, and cancel downloads."""
        self._plan.source.expect([])

    # Windows.

    @property
    def _over(self) -> bool:
        """Whether all windows are opened."""
        begin, end = self._span(*self._upcoming)
        return begin == end

    def _span(self, stage: WindowStage, number: int) -> tuple[int, int]:
        return window_spans(stage, number, len(self._order), self._plan.window_shards)

    def _rounds(self) -> int:
        """Return the number of samples of each rank in the opened windows, while the end is unknown."""
        return max(0, self._known - self._start.consumed) // self._world.world_size

    def _open_next(self) -> None:
        """Open the next window: wait until its shards are counted."""
        stage, number = self._upcoming
        shards = self._shards(stage, number)
        samples = sum(self._plan.source.counts_of(shards))
        contents = "".join(self._plan.source.identities(shards))
        if not self._windows and self._start.contents:
            self._check_contents(shards, contents)
        self._windows.append(_Window(stage, number, shards, self._known, self._known + samples, contents))
        self._known += samples
        self._read_here.append(self._shards_read(len(self._windows) - 1))
        self._upcoming = self._following(self._windows[-1])

    def _check_contents(self, shards: list[int], contents: str) -> None:
        """Check that the shards of the window of a loaded state are those with which it was begun."""
        for number, shard in enumerate(shards):
            place = slice(number * _DIGITS, (number + 1) * _DIGITS)
            if contents[place] != self._start.contents[place]:
                raise StorageChangedError(
                    f"{shown(self._plan.source.urls[shard])} was replaced since the state was saved, within a window "
                    "of shards that are mixed: other samples would be lost or repeated. Restore the object, or begin "
                    f"another epoch (set_epoch({self.epoch + 1}))"
                )

    def _following(self, window: _Window) -> tuple[WindowStage, int]:
        """Return the stage and number of the next window. A new stage begins if the number of ranks has changed."""
        stage, number = window.stage, window.number
        if stage.world_size == self._world.world_size:
            return stage, number + 1
        return WindowStage(self._span(stage, number)[1], window.end, self._world.world_size), 0

    def _shards(self, stage: WindowStage, number: int) -> list[int]:
        begin, end = self._span(stage, number)
        shards: list[int] = self._order[np.arange(begin, end)].tolist() if end > begin else []
        return shards

    def delivered(self, count: int) -> None:
        """Record that the consumer has received the first ``count`` samples."""
        self._had = count
        self._plan.source.advance(count)

    def _expect(self) -> None:
        """Request the shards of the next two windows, and of open windows that are still being read.

        The place of the second window does not depend on counts, even if a new stage begins with it.
        """
        stage, number = self._upcoming
        after = (stage, number + 1)
        if stage.world_size != self._world.world_size:
            after = WindowStage(self._span(stage, number)[1], 0, self._world.world_size), 0
        needs = [need for number in range(len(self._windows)) for need in self._needs(number)]
        for turn, place in enumerate(((stage, number), after)):
            first = self._rounds() + turn
            needs += [Need(shard, first, None) for shard in self._own(self._shards(*place), self._world)]
        self._plan.source.expect(needs, position=self._had)

    def _needs(self, number: int) -> list[Need]:
        """Return this rank's needs for the shards of an opened window; none if the window has been read."""
        window, world, base = self._windows[number], self._world.world_size, self._start.consumed
        first, last = ((place - base) // world for place in (window.begin, window.end))
        if last < self._had:
            return []
        return [Need(shard, max(0, first), last) for shard in self._read_here[number]]

    def _shards_read(self, number: int) -> list[int]:
        """Return the shards of a window that this rank reads: its own, and those that pass samples to it."""
        window = self._windows[number]
        if window.stage.world_size != self._world.world_size:
            return window.shards
        own, read = self._own(window.shards, self._world), self._window_order(number).of_rank(self._world.rank)[0]
        return own + sorted(set(np.unique(read).tolist()).difference(own))

    @staticmethod
    def _own(shards: list[int], world: World) -> list[int]:
        """Return the shards of a window that belong to a rank, which also counts them for all ranks."""
        return shards[world.rank :: world.world_size]

    def _window_of(self, positions: Indices) -> Indices:
        ends = np.array([window.end for window in self._windows], dtype=np.int64)
        return np.searchsorted(ends, positions, "right")

    def _folded(self, positions: Indices) -> Indices:
        """Return positions, with padding after the end replaced by repeats of the last window."""
        if not self._over or not len(positions) or positions[-1] < self._known:
            return positions
        last = next(window for window in reversed(self._windows) if window.end > window.begin)
        behind = positions >= self._known
        return np.where(behind, last.begin + (positions - self._known) % (last.end - last.begin), positions)

    def _window_order(self, number: int) -> WindowOrder:
        found = self._orders.get(number)
        if found is None:
            window = self._windows[number]
            # Two orders are enough: the plan is read forward, and padding repeats the last window.
            self._orders = {n: order for n, order in self._orders.items() if n >= number - 1}
            found = self._orders[number] = self._plan.window_order(self.epoch, window)
        return found


class _Window(NamedTuple):
    """A window whose shards are counted."""

    stage: WindowStage
    number: int
    shards: list[int]
    begin: int
    end: int
    contents: str


class WindowPlan(SharePlan):
    """The order of remote shards: as `SharePlan` if all shards have indexes when an epoch begins, else in windows.

    Args:
        source: the shards.
        window_shards: the largest number of shards per rank that are mixed in an epoch in windows.
        ahead: fetches data ahead in epochs of `SharePlan`'s order.
        share: see `penstock.plan.share_options.ShareOptions`.

    Raises:
        ConfigError, PartitionError: an argument is invalid, or needs the number of samples while it is unknown.
    """

    def __init__(
        self, source: Any, *, window_shards: int, ahead: LookAhead | None = None, **share: Unpack[ShareOptions]
    ) -> None:
        self.window_shards = window_shards
        self._counting: int | None = None
        self.windows_until = 0
        """The epoch after the last one that the job read in windows; 0 if it read none in windows."""
        if not source.complete:
            _check_countless(share)
        super().__init__(source, ahead=ahead, by_shards=True, **share)

    def length(self) -> int:
        """Return the number of rows of the source; `UNKNOWN` while shards are not counted."""
        return len(self.source) if self.source.complete else UNKNOWN

    @property
    def fingerprint(self) -> str:
        """Identity of the rows; a hash of the shards' names while shards are not counted."""
        return super().fingerprint if self.source.complete else str(self._windows_identity()["shards"])

    def is_known_as(self, fingerprint: Any) -> bool:
        """Return whether a state may belong to these data; always True until all shards are counted."""
        return not self.source.complete or fingerprint in (self.fingerprint, self._windows_identity()["shards"])

    def __repr__(self) -> str:
        """Return a description of the order and the share, without fixing rank and world size."""
        if self.shown.samples != UNKNOWN:
            return super().__repr__()
        shards = counted(self.window_shards, "shard")
        return (
            f"  order: windows of up to {shards} per rank, seed {self.seed}, epoch {self.shown.epoch}\n"
            f"  share: {self._world}, of shards that are counted as they are read"
        )

    def shard_order(self, epoch: int) -> Order:
        """Return the order of the shards in an epoch in windows, over all ranks."""
        kind = "none" if self.shuffle == "none" else "global"
        return make_order(kind, len(self.source.urls), seed=mix(derive_key(self.seed, 0, "windows")), epoch=epoch)

    def window_order(self, epoch: int, window: _Window) -> WindowOrder:
        """Return the order of the samples in a window."""
        stage = window.stage
        place = window_spans(stage, window.number, len(self.source.urls), self.window_shards)[0]
        key = None if self.shuffle == "none" else mix(derive_key(self.seed, epoch, "window"), place)
        first = (window.begin - stage.position) % stage.world_size
        counts = self.source.counts_of(window.shards)
        return WindowOrder(window.shards, counts, begin=window.begin, first=first, world_size=stage.world_size, key=key)

    def cursor_at(
        self, epoch: int, consumed: int, stage: WindowStage, window: int, begin: int, contents: str = ""
    ) -> WindowCursor:
        """Return a cursor in an epoch in windows."""
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
            contents=contents,
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
        """Return the view at a place. Thread-safe.

        In an epoch in windows, a view only reads rows, and has no length until all shards are counted.
        """
        place = self._shown_to_caller() if place is None else place
        if isinstance(place, ShardSamples):
            return WindowView(self.seed, place)
        if place.samples != UNKNOWN:
            return super().view(place)
        if not self.source.complete:
            return WindowView(self.seed, place)
        return super().view(MiniEpoch(place.epoch, 0, self.samples))

    def prepare(self) -> None:
        """Fetch shards ahead. An epoch in windows does so itself as it is read."""
        if self.shown.samples != UNKNOWN:
            super().prepare()

    def close(self) -> None:
        """Stop fetching ahead until the plan is read again."""
        super().close()
        self.source.close()

    def bind(self, cursor: Cursor, entropy: Any) -> Any:
        """Return an epoch starting at a cursor: in windows if it began in windows, or if shards are not counted."""
        self.source.join(self.world.world_size)
        if not isinstance(cursor, WindowCursor):
            self._note_windows(cursor)
            if self._counting is not None and cursor.epoch > self._counting:
                # A run that never stopped would have counted all shards by now, and informed the other ranks.
                self.source.finish(*self.world)
            if self._place(cursor).samples != UNKNOWN:
                return super().bind(cursor, entropy)
            stage = WindowStage(0, 0, self.world.world_size)
            cursor = self.cursor_at(cursor.epoch, 0, stage, 0, 0)
        self._counting = cursor.epoch
        return WindowEpoch(self, cursor)

    def _place(self, cursor: Cursor) -> MiniEpoch:
        place = super()._place(cursor)
        if place.samples == UNKNOWN and self.source.complete and not isinstance(cursor, WindowCursor):
            return MiniEpoch(place.epoch, 0, self.samples)
        return place

    def restart(self, run: ShareEpoch | WindowEpoch) -> Cursor:
        """Return the cursor at the start of an epoch plan."""
        return run._start if isinstance(run, WindowEpoch) else super().restart(run)

    def after(self, run: ShareEpoch | WindowEpoch, delivered: int) -> Cursor:
        """Return the start of the next epoch."""
        return Cursor(epoch=run.epoch + 1) if isinstance(run, WindowEpoch) else super().after(run, delivered)

    def request_resume(self, cursor: ShareCursor) -> None:
        """Request that every reader begins at the cursor of a loaded state."""
        super().request_resume(cursor)
        self._note_windows(cursor)
        if isinstance(cursor, WindowCursor):
            self._request = StartRequest(cursor, loaded=True)

    # States.

    def read(self, state: Mapping[str, Any]) -> ShareCursor:
        """Return the cursor in a state of the same or of another world size.

        Raises:
            StateError: the state belongs to other shards or to another order, or is damaged.
            ShardError, StorageError: the state is from an epoch that began with all indexes, and a shard cannot be
                counted now.
        """
        if not isinstance(state, Mapping) or state.get("order") != "windows":
            # This position is defined only by the counts of all shards.
            self.source.finish(*self.world)
            return self._after_windows(super().read(state), state)
        of = "dataset"
        check_state(state, {"version": STATE_VERSION, **self._windows_identity()}, of=of)
        epoch, consumed = (read_int(state, name, of=of) for name in ("epoch", "consumed"))
        shard, position, world_size = read_ints(state, "stage", 3, of=of)
        window, begin = read_ints(state, "window", 2, of=of)
        if world_size < 1 or position > begin or begin > consumed or shard > len(self.source.urls):
            raise StateError(f"this state is damaged: its window is {state['window']}, its stage {state['stage']}")
        stage = WindowStage(shard, position, world_size)
        first, last = window_spans(stage, window, len(self.source.urls), self.window_shards)
        contents = state.get("contents", "")
        if not isinstance(contents, str) or len(contents) not in (0, _DIGITS * (last - first)):
            raise StateError(f"this state is damaged: it names the contents {contents!r} of {last - first} shards")
        if world_size != self.world.world_size and consumed == begin:
            # No sample of the window was consumed, so it is split again.
            stage, window, contents = WindowStage(first, begin, self.world.world_size), 0, ""
        return self.cursor_at(epoch, consumed, stage, window, begin, contents)

    def read_grown(self, state: Mapping[str, Any]) -> ShareCursor:
        """Return the cursor in a state of the same source before rows were appended, see `SharePlan.read_grown`."""
        return self._after_windows(super().read_grown(state), state)

    def write_layout(self, place: MiniEpoch) -> State:
        """Return the entries of a state for the nodes of an epoch's order, and for the epochs read in windows."""
        until = {"windows": self.windows_until} if self.windows_until else {}
        return super().write_layout(place) | until

    def _note_windows(self, cursor: Cursor) -> None:
        """Update `windows_until` from the cursor of a state."""
        if isinstance(cursor, ShareCursor):
            self.windows_until = max(self.windows_until, cursor.changes.get("windows", 0))

    @staticmethod
    def _after_windows(cursor: ShareCursor, state: Mapping[str, Any]) -> ShareCursor:
        if "windows" not in state:
            return cursor
        return replace(cursor, changes=cursor.changes | {"windows": read_int(state, "windows", of="dataset")})


def check_window_shards(value: Any) -> None:
    """Raise a ConfigError if the value is not a positive number of shards."""
    if not isinstance(value, SupportsIndex) or value is True or operator.index(value) < 1:
        raise ConfigError(f"window_shards must be a positive number of shards, or files, got {value!r}")


def _check_countless(share: Mapping[str, Any]) -> None:
    """Raise for options that need the number of samples."""
    for name, usual in (("mini_epochs", 1), ("group", None), ("exclude", None)):
        if share.get(name, usual) != usual:
            raise ConfigError(
                f"{name}= needs the number of samples, which is unknown before the shards are read: {COUNTING_ADVICE}"
            )
