"""`WindowPlan`: the order of shards in a store that may not be counted. `WindowEpoch`: their first epoch, in windows.

    shards permuted by (seed, epoch)  ->  windows (`window_span`)  ->  samples, when a window is counted (`WindowOrder`)

    shards in the epoch's order    | window 0 | window 1      | window 2                      | ...
    rank of each shard             | 0 1 2    | 0 1 2 0 1 2   | 0 1 2 0 1 2 0 1 2 0 1 2       |
    samples of a window            ranks with too many samples pass some to others; then each rank shuffles its samples

The first window has one shard per rank, so that the first batch is ready soon. Each next window has twice as many, up
to a limit. Positions of the epoch are split among ranks in strides: a window of n samples has n positions, and its
first position determines how many of them each rank gets. If a rank's shards have more samples than the rank has
positions, the last ones go to ranks with fewer, in the order of the ranks. So few shards are read by two ranks.

An epoch that begins while indexes are missing reads the shards in windows to its end, even if all indexes are known
before. Every other epoch has the order of `SharePlan`. The number of samples of an epoch in windows is known only when
its last window has been counted. So it is a `ForwardEpoch`: a loader reads it by a generator, and no other plan knows.

Invariant: the order of a window depends only on the counts of *its* shards, and on the number of samples before it. So
a state contains the place of one window, the number of samples before it, the number of samples consumed, and 8
characters for the content of each shard of the window. It is small, and loads on the same number of ranks. If a shard
of the window was replaced, its samples would have another order, so that is an error.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, Unpack

import numpy as np
import xxhash

from penstock.errors import ConfigError, StateError, StorageChangedError
from penstock.hashing import derive_key, mix
from penstock.order import ORDER_VERSION, make_order
from penstock.order.permutation import Indices, Permutation
from penstock.plan.cursor import Cursor, State, check_state, read_int, read_ints
from penstock.plan.epoch import ForwardEpoch
from penstock.plan.reader import Draws
from penstock.plan.share import EpochView, LookAhead, MiniEpoch, ShareCursor, SharePlan
from penstock.plan.share_options import ShareOptions
from penstock.shards.arriving import ADVICE, Arrivals, unknown_length
from penstock.shards.shard_file import Facts, pack_rows, split_rows
from penstock.storage.planned_use import NEVER
from penstock.storage.urls import shown
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.order.mixture import WeightStage

__all__ = ["ShardSamples", "WindowEpoch", "WindowOrder", "WindowPlan", "check_window_shards", "window_span"]

_UNKNOWN = -1
"""`MiniEpoch.samples` of an epoch in windows."""

_DIGITS = 8
"""Characters of a state for the content of a shard."""


def window_span(number: int, shards: int, most: int, world_size: int) -> tuple[int, int]:
    """Return the first and the last shard (exclusive) of a window, by their places in the epoch's order.

    Args:
        number: number of the window.
        shards: number of shards of the epoch.
        most: the largest number of shards per rank in a window.
        world_size: number of ranks.

    Window k has 2**k shards per rank, until that is more than ``most``. Spans after the last window are empty.

    >>> [window_span(number, 20, 4, world_size=2) for number in range(5)]
    [(0, 2), (2, 6), (6, 14), (14, 20), (20, 20)]
    """
    doubled = min(number, most.bit_length())
    before = (1 << doubled) - 1 + (number - doubled) * most
    size = min(1 << doubled, most)
    begin = before * world_size
    return min(begin, shards), min(begin + size * world_size, shards)


class WindowOrder:
    """The order of the samples in one window, as numbers of `pack_rows`.

    Args:
        shards: numbers of the window's shards, in the epoch's order.
        counts: number of samples of each shard.
        begin: the position of the window's first sample in the epoch.
        world_size: number of ranks.
        key: key of the shuffle; None keeps the samples of a rank in the order of its shards.

    >>> order = WindowOrder([7, 3], [3, 1], begin=0, world_size=2, key=None)
    >>> [list(zip(*map(list, split_rows(order.of_rank(rank))))) for rank in range(2)]
    [[(7, 0), (7, 1)], [(3, 0), (7, 2)]]
    """

    def __init__(
        self, shards: Sequence[int], counts: Sequence[int], *, begin: int, world_size: int, key: int | None
    ) -> None:
        self._shards = np.asarray(shards, dtype=np.int64)
        self._counts = np.asarray(counts, dtype=np.int64)
        self.begin, self._ranks, self._key = begin, world_size, key
        self._samples = int(self._counts.sum())
        # For each rank: its positions, and the samples in its shards.
        self._quotas = np.maximum(0, -(-(self._samples - (np.arange(world_size) - begin) % world_size) // world_size))
        places = np.arange(len(counts)) % world_size
        self._own = np.bincount(places, self._counts, world_size).astype(np.int64)

    def __len__(self) -> int:
        return self._samples

    def of_rank(self, rank: int) -> Indices:
        """Return the samples of a rank in order. Cost: O(samples of the rank) time and memory."""
        quota, own = int(self._quotas[rank]), int(self._own[rank])
        parts = [self._part(rank, 0, min(own, quota))]
        if quota > own:
            # The samples that ranks pass to others follow each other in the order of the ranks.
            start = int(np.maximum(self._quotas - self._own, 0)[:rank].sum())
            stop = start + quota - own
            spare = np.maximum(self._own - self._quotas, 0)
            ends = np.cumsum(spare)
            begins = ends - spare
            for giver in np.flatnonzero((ends > start) & (begins < stop)).tolist():
                behind = int(self._quotas[giver] - begins[giver])
                parts.append(
                    self._part(giver, max(start, begins[giver]) + behind, min(stop, ends[giver]) + behind),
                )
        rows = np.concatenate(parts)
        if self._key is None or not quota:
            return rows
        shuffled: Indices = rows[Permutation(quota, mix(self._key, rank))[np.arange(quota, dtype=np.int64)]]
        return shuffled

    def _part(self, rank: int, start: int, stop: int) -> Indices:
        """Return samples ``start`` to ``stop`` of a rank's own shards, in the order of the shards."""
        counts, shards = self._counts[rank :: self._ranks], self._shards[rank :: self._ranks]
        places = np.arange(start, stop, dtype=np.int64)
        starts = np.cumsum(counts) - counts
        at = np.searchsorted(starts, places, "right") - 1
        return pack_rows(shards[at], places - starts[at])


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
class _WindowCursor(ShareCursor):
    """A cursor in an epoch in windows; ``consumed`` counts samples of the whole job."""


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
    """A window whose shards are counted: its number, its positions in the epoch, and the shards that this rank reads.

    ``contents`` has 8 characters for each of its shards.
    """

    number: int
    begin: int
    end: int
    contents: str
    order: WindowOrder
    shards: list[int]


class WindowEpoch(ForwardEpoch):
    """One epoch read in windows on one rank, from a cursor on."""

    def __init__(self, plan: WindowPlan, start: _WindowCursor) -> None:
        self._plan, self._start = plan, start
        self.seed, self.epoch = plan.seed, start.epoch
        self._rank, self._ranks = plan.world
        # The order of the shards, over all ranks.
        kind = "none" if plan.shuffle == "none" else "global"
        seed = mix(derive_key(plan.seed, 0, "windows"))
        count = len(plan.source.urls)
        self._order = make_order(kind, count, seed=seed, epoch=self.epoch)[np.arange(count)]
        # Samples that each rank consumed before the start.
        self._done = -(-start.consumed // self._ranks)
        self._windows: list[_Window] = []
        # The next window to open, and the number of samples of the epoch before it.
        window: list[int] = start.entries["window"]
        self._next, self._known = window
        self._arrivals: Arrivals | None = None
        self._facts: dict[int, Any] = {}

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

    def cursor(self, count: int) -> _WindowCursor:
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
    def _over(self) -> bool:
        """Whether all windows are opened."""
        return not self._shards(self._next)

    @property
    def _total(self) -> int | None:
        """Number of samples of the epoch; None while it is unknown."""
        if self._over:
            return self._known
        return len(self._plan.source) if self._plan.source.complete else None

    def _rounds(self, total: int) -> int:
        """Return the number of this rank's samples in an epoch of ``total`` samples."""
        if self._plan.remainder == "drop":
            return total // self._ranks
        return -(-(total - (self._rank if self._plan.remainder == "uneven" else 0)) // self._ranks)

    def _shards(self, number: int) -> list[int]:
        """Return the shards of a window."""
        return list(self._order[slice(*self._plan.span(number))].tolist())

    def _open_next(self, at: int) -> Indices:
        """Open the next window: wait until its shards are counted. Return this rank's rows of it from ``at`` on."""
        plan, number, begin = self._plan, self._next, self._known
        shards = self._shards(number)
        facts = plan.source.facts(shards) if self._arrivals is None else self._arrivals.wait(shards)
        contents = "".join(one.identity for one in facts)
        # The shards of the window of a loaded state have to be those with which it was begun.
        begun_with = "" if self._windows else self._start.entries["contents"]
        for place, shard in enumerate(shards if begun_with else ()):
            part = slice(place * _DIGITS, (place + 1) * _DIGITS)
            if contents[part] != begun_with[part]:
                raise StorageChangedError(
                    f"{shown(plan.source.urls[shard])} was replaced since the state was saved, within a window "
                    "of shards that are mixed: other samples would be lost or repeated. Restore the object, or begin "
                    f"another epoch (set_epoch({self.epoch + 1}))"
                )
        self._facts |= zip(shards, facts, strict=True)
        key = None if plan.shuffle == "none" else mix(derive_key(plan.seed, self.epoch, "window"), plan.span(number)[0])
        counts = [one.samples for one in facts]
        order = WindowOrder(shards, counts, begin=begin, world_size=self._ranks, key=key)
        rows = order.of_rank(self._rank)
        # Its own shards, which it also counts for all ranks, and those that pass samples to it.
        own = shards[self._rank :: self._ranks]
        read = own + sorted(set(split_rows(rows)[0].tolist()).difference(own))
        self._next, self._known = number + 1, begin + len(order)
        self._windows.append(_Window(number, begin, self._known, contents, order, read))
        before = -(-(begin - self._rank) // self._ranks)
        return rows[max(0, at - before) :]

    def _expect(self) -> None:
        """Request the shards of open windows that the consumer still reads, and of the next two windows."""
        arrivals = self._arrivals
        if arrivals is None:
            return
        needs = []
        for window in self._windows:
            first, last = (max(0, end // self._ranks - self._done) for end in (window.begin, window.end))
            if last >= arrivals.position:
                needs += [(shard, first, last) for shard in window.shards]
        known = max(0, self._known // self._ranks - self._done)
        for turn in (0, 1):
            own = self._shards(self._next + turn)[self._rank :: self._ranks]
            needs += [(shard, known + turn, NEVER - 1) for shard in own]
        arrivals.expect(needs)

    def _padding(self, position: int) -> int:
        """Return the row of a position after the end, which repeats the last window with samples."""
        order = next(window.order for window in reversed(self._windows) if len(window.order))
        again = (position - self._known) % len(order)
        return int(order.of_rank((order.begin + again) % self._ranks)[again // self._ranks])

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
        for name, usual in () if source.complete else (("mini_epochs", 1), ("group", None), ("exclude", None)):
            if share.get(name, usual) != usual:
                raise ConfigError(
                    f"{name}= needs the number of samples, which is unknown before the shards are read: {ADVICE}"
                )
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

    def cursor_at(self, epoch: int, consumed: int, window: int, begin: int, contents: str = "") -> _WindowCursor:
        """Return a cursor in an epoch in windows.

        Args:
            epoch, consumed: the epoch, and how many samples of it the job has consumed.
            window: number of the window.
            begin: number of samples of the epoch before the window.
            contents: 8 characters for each shard of the window; empty at its start.
        """
        entries = {
            **self._windows_identity(),
            "epoch": epoch,
            "consumed": consumed,
            "world_size": self.world.world_size,
            "window": [window, begin],
            "contents": contents,
        }
        place = MiniEpoch(epoch, 0, _UNKNOWN)
        return _WindowCursor(epoch=epoch, mini_epoch=0, consumed=consumed, place=place, entries=entries)

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
        if not isinstance(cursor, _WindowCursor):
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
        return place if isinstance(cursor, _WindowCursor) else self._known(place)

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
                f"without the state (set_epoch({epoch + 1})). To have no such epoch, {ADVICE}"
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


def check_window_shards(value: Any) -> None:
    """Raise a ConfigError if the value is not a positive number of shards."""
    if not isinstance(value, SupportsIndex) or value is True or operator.index(value) < 1:
        raise ConfigError(f"window_shards must be a positive number of shards, or files, got {value!r}")
