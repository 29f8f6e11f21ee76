"""`WindowPlan`: the order of shards in a store that may not be counted. `WindowEpoch`: their first epoch, in windows.

    shards permuted by (seed, epoch)  ->  windows (`epoch_windows`)  ->  samples, when a window is counted

An epoch that begins while indexes are missing reads the shards in windows to its end, even if all indexes are known
before. Every other epoch has the order of `SharePlan`. The number of samples of an epoch in windows is known only when
its last window has been counted. So it is a `ForwardEpoch`: a loader reads it by a generator, and no other plan knows.

Invariant: a state contains the place of one window, the number of samples before it, the number of samples consumed,
and 8 characters for the content of each shard of the window. So it is small, and loads on the same number of ranks. If
a shard of the window was replaced, its samples would have another order, so that is an error.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, Unpack

import numpy as np
import xxhash

from penstock.errors import ConfigError, LengthUnknownError, StateError, StorageChangedError
from penstock.hashing import derive_key, mix
from penstock.order import ORDER_VERSION, make_order
from penstock.order.permutation import Indices
from penstock.plan.cursor import Cursor, State, check_state, read_int, read_ints
from penstock.plan.epoch import ForwardEpoch
from penstock.plan.reader import Draws
from penstock.plan.share import EpochView, LookAhead, MiniEpoch, ShareCursor, SharePlan
from penstock.plan.share_options import ShareOptions
from penstock.shards.arrivals import Arrivals, Need
from penstock.shards.epoch_windows import WindowOrder, window_span
from penstock.shards.exchange import Facts
from penstock.shards.opened import pack_rows, split_rows
from penstock.storage.urls import shown
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.order.mixture import WeightStage

__all__ = ["ShardSamples", "WindowCursor", "WindowEpoch", "WindowPlan", "check_window_shards", "unknown_length"]

_ADVICE = (
    "put indexes beside tar shards (penstock shards index); or open ShardDataset(ShardSet(...)), of JSON "
    "lines TableDataset(JsonFiles(...)), which read all of them before they begin"
)
"""Advice of errors that need the number of samples in shards."""

_UNKNOWN = -1
"""`MiniEpoch.samples` of an epoch in windows."""

_DIGITS = 8
"""Characters of a state for the content of a shard."""


class ShardSamples(NamedTuple):
    """The place of a batch in an epoch in windows.

    Attributes:
        epoch: the number of the epoch.
        facts: numbers and facts of the batch's shards, for processes that did not count them; the indices of the batch
            are rows of `pack_rows`. None if all shards were counted before: the indices are rows of the source.
    """

    epoch: int
    facts: tuple[tuple[int, Facts], ...] | None


@dataclass(frozen=True, kw_only=True)
class WindowCursor(ShareCursor):
    """A cursor in an epoch in windows; ``consumed`` counts samples of the whole job.

    Attributes:
        window: number of the window.
        begin: number of samples of the epoch before the window.
        contents: 8 characters for each shard of the window; empty at its start.
    """

    window: int
    begin: int
    contents: str = ""


class _BatchView(EpochView):
    """The samples of a batch in an epoch in windows. Indices are rows."""

    place: Any

    def __init__(self, seed: int, place: ShardSamples) -> None:
        self.seed, self.place, self.epoch = seed, place, place.epoch

    def local(self, indices: Sequence[int]) -> Indices:
        return np.asarray(indices, dtype=np.int64)

    def rows(self, local: Indices) -> Indices:
        return local


class _Window(NamedTuple):
    """A window whose shards are counted: its number, its positions in the epoch, and as in `WindowCursor`."""

    number: int
    begin: int
    end: int
    contents: str
    needs: list[Need]


class WindowEpoch(ForwardEpoch):
    """One epoch read in windows on one rank, from a cursor on."""

    def __init__(self, plan: WindowPlan, start: WindowCursor) -> None:
        self._plan, self._start = plan, start
        self.seed, self.epoch = plan.seed, start.epoch
        self._rank, self._ranks = plan.world
        kind = "none" if plan.shuffle == "none" else "global"
        # The order of the shards, over all ranks.
        self._order = make_order(
            kind, len(plan.source.urls), seed=mix(derive_key(plan.seed, 0, "windows")), epoch=self.epoch
        )
        self._arrivals: Arrivals | None = None
        self._facts: dict[int, Any] = {}
        self._windows: list[_Window] = []
        # Number of samples of the epoch in the opened windows and before them.
        self._known = start.begin
        # The order of the last window that has samples.
        self._last: WindowOrder | None = None

    @property
    def start(self) -> Cursor:
        """Where the epoch was bound."""
        return self._start

    def __len__(self) -> int:
        total = self._total
        if total is None:
            raise unknown_length()
        return max(0, self._rounds(total) - self._done)

    def read(self, size: int) -> Iterator[tuple[Indices, Indices]]:
        """Yield indices, and positions in the epoch, of ``size`` samples at a time: int64 of shape (size,).

        Waits for windows: for the download of this rank's shards, and for the counts from the other ranks. Downloads
        stop when the generator ends, unless another one has begun.

        Raises:
            ShardError, StorageError: a shard is damaged or cannot be read; the message names it.
        """
        plan = self._plan
        plan.windows_until = self.epoch + 1
        turn = plan.reads = plan.reads + 1
        at, rows = self._done, np.empty(0, np.int64)
        # If all shards were counted before, nothing is fetched here.
        if not plan.source.complete:
            self._arrivals = plan.source.arrivals(self._ranks)
            self._arrivals.advance(0)
        try:
            while True:
                # Padding and remainders are only at the end: until then, all ranks have equally many samples.
                while not self._over and self._known // self._ranks < at + size:
                    self._expect()
                    rows = np.append(rows, self._open_next(at))
                    self._expect()
                end = self._rounds(self._known) if self._over else self._known // self._ranks
                count = min(size, end - at)
                if count <= 0:
                    return
                positions = self._rank + self._ranks * np.arange(at, at + count, dtype=np.int64)
                if len(rows) < count:
                    rows = np.append(rows, self._padding(int(positions[-1])))
                yield self._located(rows[:count]), positions
                at, rows = at + count, rows[count:]
        finally:
            if self._arrivals is not None and plan.reads == turn:
                self._arrivals.close()

    def cursor(self, count: int) -> WindowCursor:
        """Return the cursor of the job when every rank has received ``count`` samples, the same on all ranks.

        The cursor is in the window of the last sample, which every rank has opened, or at the start of the next window.
        """
        consumed, total = self._start.consumed + count * self._ranks, self._total
        consumed = consumed if total is None else min(consumed, total)
        if consumed <= self._start.consumed:
            return self._start
        place = bisect_left(self._windows, consumed, key=lambda window: window.end)
        if place == len(self._windows):
            raise unknown_length()
        window = self._windows[place]
        if consumed == window.end:
            return self._plan.cursor_at(self.epoch, consumed, window.number + 1, consumed)
        return self._plan.cursor_at(self.epoch, consumed, window.number, window.begin, window.contents)

    @property
    def _total(self) -> int | None:
        """Number of samples of the epoch; None while it is unknown."""
        if self._over:
            return self._known
        return len(self._plan.source) if self._plan.source.complete else None

    @property
    def _done(self) -> int:
        """Number of samples that each rank consumed before the start."""
        return -(-self._start.consumed // self._ranks)

    def _rounds(self, total: int) -> int:
        """Return the number of this rank's samples in an epoch of ``total`` samples."""
        if self._plan.remainder == "drop":
            return total // self._ranks
        return -(-(total - (self._rank if self._plan.remainder == "uneven" else 0)) // self._ranks)

    # Windows.

    @property
    def _next(self) -> int:
        """Number of the next window to open."""
        return self._windows[-1].number + 1 if self._windows else self._start.window

    @property
    def _over(self) -> bool:
        """Whether all windows are opened."""
        begin, end = self._plan.span(self._next)
        return begin == end

    def _shards(self, number: int) -> list[int]:
        """Return the shards of a window."""
        shards: list[int] = self._order[np.arange(*self._plan.span(number))].tolist()
        return shards

    def _open_next(self, at: int) -> Indices:
        """Open the next window: wait until its shards are counted. Return this rank's rows of it from ``at`` on."""
        plan, number, begin = self._plan, self._next, self._known
        shards = self._shards(number)
        facts = plan.source.facts(shards) if self._arrivals is None else self._arrivals.wait(shards)
        contents = "".join(one.identity for one in facts)
        if not self._windows and self._start.contents:
            self._check_contents(shards, contents)
        self._facts |= zip(shards, facts, strict=True)
        key = None if plan.shuffle == "none" else mix(derive_key(plan.seed, self.epoch, "window"), plan.span(number)[0])
        counts = [one.samples for one in facts]
        order = WindowOrder(shards, counts, begin=begin, world_size=self._ranks, key=key)
        theirs, samples = order.of_rank(self._rank)
        self._known += len(order)
        self._last = order if len(order) else self._last
        # Its own shards, which it also counts for all ranks, and those that pass samples to it.
        own = shards[self._rank :: self._ranks]
        read = own + sorted(set(theirs.tolist()).difference(own))
        first, last = (max(0, end // self._ranks - self._done) for end in (begin, self._known))
        needs = [Need(shard, first, last) for shard in read]
        self._windows.append(_Window(number, begin, self._known, contents, needs))
        before = -(-(begin - self._rank) // self._ranks)
        return pack_rows(theirs, samples)[max(0, at - before) :]

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

    def _expect(self) -> None:
        """Request the shards of open windows that the consumer still reads, and of the next two windows."""
        arrivals, known = self._arrivals, max(0, self._known // self._ranks - self._done)
        if arrivals is None:
            return
        opened = [need for window in self._windows for need in window.needs]
        needs = [need for need in opened if need.last is None or need.last >= arrivals.position]
        for turn in (0, 1):
            own = self._shards(self._next + turn)[self._rank :: self._ranks]
            needs += [Need(shard, known + turn, None) for shard in own]
        arrivals.expect(needs)

    def _padding(self, position: int) -> int:
        """Return the row of a position after the end, which repeats the last window."""
        order = self._last
        assert order is not None
        again = (position - self._known) % len(order)
        shards, samples = order.of_rank((order.begin + again) % self._ranks)
        return int(pack_rows(shards, samples)[again // self._ranks])

    def _located(self, rows: Indices) -> Indices:
        """Return the indices of rows of `pack_rows`, and set the place that workers need to read them."""
        shards, samples = split_rows(rows)
        if self._arrivals is None:
            self.place = ShardSamples(self.epoch, None)
            return np.asarray(self._plan.source.starts)[shards] + samples
        self.place = ShardSamples(self.epoch, tuple((n, self._facts[n]) for n in np.unique(shards).tolist()))
        return rows


class WindowPlan(SharePlan):
    """The order of remote shards: as `SharePlan` if all shards have indexes when an epoch begins, else in windows.

    Args:
        source: the shards: an `ArrivingSource`, or a source that is counted, with ``urls`` and ``facts`` of files.
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
        # The last epoch that began in windows.
        self._counting: int | None = None
        self.windows_until = self.reads = 0
        """The epoch after the last one that the job read in windows, 0 without one; and the times that one was read."""
        if not source.complete:
            _check_countless(share)
        super().__init__(source, ahead=ahead, **share)

    @property
    def samples(self) -> int:
        """Number of rows after filtering; -1 while shards are not counted."""
        return super().samples if self.source.complete else _UNKNOWN

    @property
    def fingerprint(self) -> str:
        """Identity of the rows; a hash of the shards' names while shards are not counted."""
        return super().fingerprint if self.source.complete else str(self._windows_identity()["shards"])

    def __repr__(self) -> str:
        """Return a description of the order and the share, without fixing rank and world size."""
        if self.shown.samples != _UNKNOWN:
            return super().__repr__()
        shards = counted(self.window_shards, "shard")
        return (
            f"  order: windows of up to {shards} per rank, seed {self.seed}, epoch {self.shown.epoch}\n"
            f"  share: {self._world}, of shards that are counted as they are read"
        )

    def span(self, window: int) -> tuple[int, int]:
        """Return the first and the last shard (exclusive) of a window, see `window_span`."""
        return window_span(window, len(self.source.urls), self.window_shards, self.world.world_size)

    def cursor_at(self, epoch: int, consumed: int, window: int, begin: int, contents: str = "") -> WindowCursor:
        """Return a cursor in an epoch in windows."""
        entries = {
            **self._windows_identity(),
            "epoch": epoch,
            "consumed": consumed,
            "world_size": self.world.world_size,
            "window": [window, begin],
            "contents": contents,
        }
        return WindowCursor(
            epoch=epoch,
            mini_epoch=0,
            consumed=consumed,
            place=MiniEpoch(epoch, 0, _UNKNOWN),
            entries=entries,
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

        Raises:
            LengthUnknownError: the place is not that of a batch, and shards are not counted.
        """
        place = self._shown_to_caller() if place is None else place
        if isinstance(place, ShardSamples):
            return _BatchView(self.seed, place)
        place = self._known(place)
        if place.samples == _UNKNOWN:
            raise unknown_length()
        return super().view(place)

    def prepare(self) -> None:
        """Fetch shards ahead. An epoch in windows does so itself as it is read."""
        if self.shown.samples != _UNKNOWN:
            super().prepare()

    def bind(self, cursor: Cursor, draws: Draws) -> Any:
        """Return an epoch starting at a cursor: in windows if it began in windows, or if shards are not counted."""
        if isinstance(cursor, ShareCursor):
            self.windows_until = max(self.windows_until, cursor.entries.get("windows", 0))
        if not isinstance(cursor, WindowCursor):
            if self._counting is not None and cursor.epoch > self._counting:
                # A run that never stopped would have counted all shards by now, and informed the other ranks.
                self._count_all()
            if self._place(cursor).samples != _UNKNOWN:
                return super().bind(cursor, draws)
            cursor = self.cursor_at(cursor.epoch, 0, 0, 0)
        self._counting = cursor.epoch
        return WindowEpoch(self, cursor)

    def advance(self, place: Any, count: int) -> None:
        """Record that the consumer has received ``count`` samples from an epoch plan."""
        if not isinstance(place, ShardSamples):
            super().advance(place, count)
        elif place.facts is not None:
            self.source.arrivals(self.world.world_size).advance(count)

    def _count_all(self) -> None:
        """Count all shards that are not counted yet, together with the other ranks."""
        if not self.source.complete:
            self.source.finish(*self.world)

    def _place(self, cursor: Cursor) -> MiniEpoch:
        place = super()._place(cursor)
        return place if isinstance(cursor, WindowCursor) else self._known(place)

    def _known(self, place: MiniEpoch) -> MiniEpoch:
        """Return a place with the number of samples, if that is known by now."""
        grows = place.samples == _UNKNOWN and self.source.complete
        return MiniEpoch(place.epoch, 0, self.samples) if grows else place

    # States.

    def read(self, state: Mapping[str, Any], *, allow_growth: bool = False) -> ShareCursor:
        """Return the cursor in a state: of an epoch in windows of the same world size, or of another epoch.

        Raises:
            StateError: the state belongs to other shards or to another order, or is damaged.
            ShardError, StorageError: the state is from an epoch that began with all indexes, and a shard cannot be
                counted now.
        """
        if not isinstance(state, Mapping) or state.get("order") != "windows":
            # This position is defined only by the counts of all shards.
            self._count_all()
            cursor = super().read(state, allow_growth=allow_growth)
            if "windows" not in state:
                return cursor
            return replace(cursor, entries={"windows": read_int(state, "windows", of="dataset")})
        of, ranks = "dataset", self.world.world_size
        check_state(state, self._windows_identity(), of=of)
        epoch, consumed, there = (read_int(state, name, of=of) for name in ("epoch", "consumed", "world_size"))
        if there != ranks:
            raise StateError(
                f"this state is of epoch {epoch}, the first one over shards without indexes, which continues only on "
                f"the same number of ranks: {there} in the state and {ranks} here. Resume on {counted(there, 'rank')} "
                f"until the epoch ends (states of the next epochs load on any number), or begin epoch {epoch + 1} "
                f"without the state (set_epoch({epoch + 1})). To have no such epoch, {_ADVICE}"
            )
        window, begin = read_ints(state, "window", 2, of=of)
        first, last = self.span(window)
        contents = state.get("contents", "")
        if begin > consumed or not isinstance(contents, str) or len(contents) not in (0, _DIGITS * (last - first)):
            raise StateError(
                f"this state is damaged: it has consumed {consumed} samples, its window is {state['window']}, and it "
                f"names the contents {contents!r} of {counted(last - first, 'shard')}"
            )
        return self.cursor_at(epoch, consumed, window, begin, contents)

    def write_changes(self, changes: tuple[WeightStage, ...]) -> State:
        """Return the entries of a state that may change during a job, and for the epochs read in windows."""
        until = {"windows": self.windows_until} if self.windows_until else {}
        return super().write_changes(changes) | until


def unknown_length() -> LengthUnknownError:
    """Return the error for code that needs the number of samples while it is unknown."""
    return LengthUnknownError(
        "the number of samples in these shards is unknown until all of them have been read once, because they have no "
        f"indexes in the store: read them through a DataLoader; or {_ADVICE}"
    )


def check_window_shards(value: Any) -> None:
    """Raise a ConfigError if the value is not a positive number of shards."""
    if not isinstance(value, SupportsIndex) or value is True or operator.index(value) < 1:
        raise ConfigError(f"window_shards must be a positive number of shards, or files, got {value!r}")


def _check_countless(share: Mapping[str, Any]) -> None:
    """Raise for options that need the number of samples."""
    for name, usual in (("mini_epochs", 1), ("group", None), ("exclude", None)):
        if share.get(name, usual) != usual:
            raise ConfigError(
                f"{name}= needs the number of samples, which is unknown before the shards are read: {_ADVICE}"
            )
