"""`Plan`: the order of the samples, without a position. `PlanReader`: one reader of a plan, with its position.

    plan        an immutable order: bind(cursor, draws) -> one epoch
    bookmark    one cell of a sampler or dataset: where readers begin next. `set_epoch` and `load_state_dict` write it
    reader      of a loader, or of ``iter(sampler)``: the current epoch plan, and the cursor of the next one

Invariant: readers of one plan do not affect each other. Each follows every write of the bookmark once. Without a new
one, it advances from epoch to epoch by itself.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from penstock.errors import SamplerError
from penstock.plan.cursor import Cursor, checked_epoch
from penstock.plan.epoch import OneEpoch

__all__ = ["Bookmark", "Draws", "OuterPlan", "Plan", "PlanReader"]


E = TypeVar("E", bound=OneEpoch)


class Bookmark:
    """Where readers of a sampler or dataset begin next.

    Attributes:
        version: changes when the user chooses where to begin. Readers compare it.
        moved: the last version that chose another epoch or mini-epoch than the version before.
        cursor: the start of an epoch, or the cursor of a loaded state.
        loaded: whether the cursor is of a loaded state that no reader has used yet. `set_epoch` with its epoch keeps
            it.
        advances: whether a loader with a seed advances the epoch by itself. False if another library counts the epochs.
        by_itself: whether another library's sampler moved to this epoch by itself while it was read. An epoch that has
            begun then continues.
        epoch: the epoch that programs see: the one set or begun last.
    """

    def __init__(self) -> None:
        self.version = self.moved = 0
        self.cursor = Cursor()
        self.loaded = self.by_itself = False
        self.advances = True
        self.epoch = 0

    def write(self, cursor: Cursor, *, loaded: bool = False) -> None:
        """Choose where to begin: at the start of an epoch, or at the cursor of a loaded state."""
        self.version += 1
        if (cursor.epoch, cursor.mini_epoch) != (self.cursor.epoch, self.cursor.mini_epoch):
            self.moved = self.version
        self.cursor, self.loaded, self.by_itself, self.epoch = cursor, loaded, False, cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose an epoch. The epoch of a loaded state keeps the position of the state."""
        keeps = self.loaded and self.cursor.epoch == epoch
        self.write(self.cursor if keeps else Cursor(epoch=epoch), loaded=keeps)


@dataclass
class Draws:
    """The random draw of one epoch, made when a plan is bound: once, however often the epoch is bound.

    Attributes:
        seed: seed of the reader; None for torch's draws.
        held: what the plan has drawn.
        fixed: whether the held draw counts at every cursor.
    """

    seed: int | None = None
    held: Any = None
    fixed: bool = False

    def again(self) -> Draws:
        """Return the same draw, for another part of the same epoch."""
        return replace(self, fixed=True)


class Plan(abc.ABC, Generic[E]):
    """The order of the samples of every epoch, for one rank.

    A plan can return any epoch and position, but holds no position itself.

    Attributes:
        bookmark: where readers begin next.
    """

    bookmark: Bookmark

    @property
    def key_seed(self) -> int | None:
        """Seed of the samples' generators; None if order and generators follow torch's rules."""
        return None

    @abc.abstractmethod
    def bind(self, cursor: Cursor, draws: Draws) -> E:
        """Return the plan of the cursor's epoch, from the cursor on.

        Args:
            cursor: of this plan.
            draws: keeps the epoch's random draw, if the plan makes one.
        """

    @abc.abstractmethod
    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state, without changing the plan.

        Raises:
            StateError: the state belongs to other data or to another order, or is damaged.
        """

    def chosen(self, cursor: Cursor) -> None:
        """Handle a cursor that the user of a reader chose: sets the epoch of another library's sampler."""

    def show(self, cursor: Cursor, *, loaded: bool, running: bool) -> None:
        """Record the position of a reader, to be shown to programs. A loaded state is used once.

        Args:
            cursor: where the reader is, or where it begins next.
            loaded: whether the cursor is of a loaded state.
            running: whether the reader is reading.
        """
        mark = self.bookmark
        mark.epoch = cursor.epoch
        if running and mark.loaded and cursor is mark.cursor:
            mark.cursor, mark.loaded = cursor.whole(), False


class OuterPlan(Plan[E]):
    """A plan over the epochs and cursors of an inner plan. Subclasses implement `inner` and `bind`."""

    @property
    @abc.abstractmethod
    def inner(self) -> Plan[Any]:
        """The inner plan."""

    @property
    def bookmark(self) -> Bookmark:  # type: ignore[override]
        """Where readers begin next."""
        return self.inner.bookmark

    @property
    def key_seed(self) -> int | None:
        """Seed of the samples' generators."""
        return self.inner.key_seed

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state of the inner plan."""
        return self.inner.read(state)

    def chosen(self, cursor: Cursor) -> None:
        """Pass on a cursor that the user of a reader chose."""
        self.inner.chosen(cursor)

    def show(self, cursor: Cursor, *, loaded: bool, running: bool) -> None:
        """Record the position of a reader with the inner plan."""
        self.inner.show(cursor, loaded=loaded, running=running)


class PlanReader(Generic[E]):
    """One reader of a plan, with its position.

    ``run`` is the epoch plan begun last. It is `current` until it is read to its end, or until the user chooses another
    start with `set_epoch`, `choose`, or the plan's `Bookmark`.
    """

    def __init__(self, plan: Plan[E], *, seed: int | None = None) -> None:
        self.plan = plan
        self._seed = seed
        self.run: E | None = None
        self._run_draws = Draws(seed)
        # Where the next epoch plan begins, if that was chosen.
        self._next: Cursor | None = None
        self.requested = False
        """Whether the bookmark chose that, perhaps while ``run`` was read. It counts when it is followed."""
        self.loaded = False
        """Whether the next run begins at a loaded state. The bookmark counts when it is followed."""
        # The random draw of the next epoch plan.
        self._draws = Draws(seed)
        # The version of the bookmark that was followed.
        self._followed = -1
        self.attached = False
        """Whether no other start was chosen here since `run` began. The bookmark counts when it is followed."""

    def __getstate__(self) -> dict[str, Any]:
        # The current epoch plan stays in this process. A copy begins at that epoch's start, or at the chosen position.
        upcoming = self.run.start if self._next is None and self.run is not None else self._next
        rest = {"run": None, "_run_draws": Draws(self._seed), "_draws": Draws(self._seed), "attached": False}
        return self.__dict__ | rest | {"_next": upcoming}

    @property
    def current(self) -> bool:
        """Whether ``run`` is being read and no other start has been chosen since."""
        self.follow()
        return self.attached

    @property
    def epoch(self) -> int:
        """The epoch of the current run, or else of the next one."""
        return self.run.epoch if self.current and self.run is not None else self.next_start().epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next run. After loading a state, its own epoch keeps the state's position.

        Raises:
            SamplerError: the epoch is not an integer from 0 to 2**62 - 1.
        """
        epoch = checked_epoch(epoch, SamplerError)
        self.follow()
        if self._next is not None and self.loaded and self._next.epoch == epoch:
            return
        self.choose(Cursor(epoch=epoch))

    def over(self, plan: Plan[E]) -> PlanReader[E]:
        """Return a copy that reads another plan of the same order, and follows later writes of that one's bookmark."""
        self.follow()
        other = copy.copy(self)
        other.plan = plan
        if plan.bookmark is not self.plan.bookmark:
            other._followed = plan.bookmark.version
        return other

    def choose(self, cursor: Cursor, *, loaded: bool = False) -> None:
        """Begin the next run at a cursor. This replaces what the bookmark says."""
        self._choose(cursor, loaded=loaded)
        self.plan.chosen(cursor)
        self.plan.show(cursor, loaded=loaded, running=False)
        self._followed = self.plan.bookmark.version

    def next_start(self, *, advance: bool = False, delivered: int = 0) -> Cursor:
        """Return where `start` would begin."""
        self.follow()
        if self._next is not None:
            return self._next
        assert self.run is not None
        return self.run.after(delivered) if advance else self.run.start

    def start(self, *, advance: bool, delivered: int = 0) -> E:
        """Begin and return a run: where the user chose, else the next epoch (``advance``) or the same one again.

        Args:
            advance: whether to begin the next epoch.
            delivered: number of units of the last run that were delivered to the consumer.
        """
        cursor = self.next_start(advance=advance, delivered=delivered)
        run = self.plan.bind(cursor, self._draws)
        self.run, self._run_draws, self.attached = run, self._draws, True
        self._next, self.loaded, self.requested, self._draws = None, False, False, Draws(self._seed)
        self.plan.show(cursor, loaded=False, running=True)
        return run

    def undo(self, before: dict[str, Any]) -> None:
        """Undo a `start`, because nothing could be read. ``before`` is a copy of the attributes before it."""
        # Its random draw is not made again.
        draws = self._draws if self.run is before["run"] else self._run_draws
        vars(self).update(before, _draws=draws)
        # If the bookmark had a loaded state, the start has used it up there.
        self.requested = self.requested and not self.loaded
        if self._next is not None:
            self.plan.show(self._next, loaded=self.loaded, running=False)

    def continues(self, run: E, *, delivered: bool) -> bool:
        """Return whether a run continues; False if the caller must begin another run instead.

        A bookmark written after ``iter()`` replaces a run of which nothing was delivered yet (Lightning sets the
        epoch there). A later one is for the next run. The epoch of the run itself changes nothing.
        """
        if self.run is not run or self.current:
            return True
        upcoming = self.next_start()
        if not self.loaded and _is_in(upcoming, run.start):
            self._next = None
        elif not delivered:
            run.exhaust()
            return False
        self.attached = True
        return True

    def finish(self, *, advance: bool, delivered: int = 0) -> None:
        """Record that the run was read to its end, after ``delivered`` units: the next run is a whole epoch."""
        upcoming = self.next_start(advance=advance, delivered=delivered)
        if self._next is None:
            self._choose(upcoming)
            self.plan.show(upcoming, loaded=False, running=False)
        self.run, self._run_draws, self.attached = None, Draws(self._seed), False

    def peek(self) -> E:
        """Return the current run, or else the next one without beginning it."""
        if self.current and self.run is not None:
            return self.run
        return self.plan.bind(self.next_start(), self._draws)

    def preview(self) -> E:
        """Return a copy of the next run with a separate random draw, which does not affect the draw of the run."""
        return self.plan.bind(self.next_start(), Draws(self._seed))

    def whole(self) -> E:
        """Return the whole epoch of the current or next run, from its start."""
        run = self.peek()  # makes the draw, which the start of the epoch does not hold
        return self.plan.bind(run.start, (self._run_draws if self.attached else self._draws).again())

    def cursor(self, count: int) -> Cursor:
        """Return the cursor after ``count`` delivered units of the current run; else the start of the next run."""
        return self.peek().cursor(count if self.current else 0)

    def follow(self) -> None:
        """Follow the plan's bookmark, if it was written."""
        mark = self.plan.bookmark
        if mark.version == self._followed:
            # A loaded state is used once. If another reader has used it, this reader begins the whole epoch.
            if self.requested and self.loaded and not mark.loaded:
                self._choose(mark.cursor)
                self.requested = True
            return
        moved_once, self._followed = mark.moved <= self._followed + 1, mark.version
        # The epoch of a loaded state keeps the position of the state, unless another one was set in between. A sampler
        # that advanced by itself, perhaps under another reader, does not replace a loaded state.
        keeps = self.loaded and self._next is not None and not mark.loaded
        if keeps and (mark.by_itself or (moved_once and _is_in(mark.cursor, self.next_start()))):
            return
        if mark.by_itself and self.attached:
            self._next = mark.cursor
        else:
            self._choose(mark.cursor, loaded=mark.loaded)
            self.requested = True

    def _choose(self, cursor: Cursor, *, loaded: bool = False) -> None:
        self._next, self.loaded, self.attached, self.requested = cursor, loaded, False, False


def _is_in(requested: Cursor, place: Cursor) -> bool:
    """Return whether a cursor is in the requested epoch, and in the requested mini-epoch if there is one."""
    return requested.epoch == place.epoch and requested.mini_epoch in (None, place.mini_epoch)
