"""`Plan`: the order of the samples, without a position. `PlanReader`: who reads one, and holds the position.

    plan      immutable; remembers one wish: the epoch or the loaded cursor that readers should begin with next
    reader    a loader's, or that of ``iter(sampler)``: the epoch plan that runs, and the cursor that comes next

Invariant: readers of one plan know nothing of each other. Each hears every wish once, and moves on by itself otherwise.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from penstock.errors import SamplerError
from penstock.plan.cursor import Cursor, checked_epoch

__all__ = ["Plan", "PlanReader", "Wish"]


class OneEpoch(Protocol):
    """One epoch of a plan, or the rest of one."""

    @property
    def epoch(self) -> int:
        """Which epoch it is."""

    def cursor(self, count: int) -> Cursor:
        """Return where its consumer is behind so many units."""

    def exhaust(self) -> None:
        """Give nothing more."""


E = TypeVar("E", bound=OneEpoch)


class Wish(NamedTuple):
    """Where the next reader that hears of it should begin.

    Attributes:
        cursor: the beginning of an epoch, or the cursor of a loaded state.
        loaded: whether it is that of a loaded state, which `set_epoch` with the same epoch keeps.
        later: whether it leaves a run alone that has begun, even if nothing was had of it. So does a sampler that
            counts its epochs by itself, when it is drawn from.
    """

    cursor: Cursor
    loaded: bool
    later: bool = False


class Plan(abc.ABC, Generic[E]):
    """The order of the samples of every epoch, for one rank.

    Subclasses answer for any epoch and position, and hold none.
    """

    advances: bool = True
    """Whether a loader with a seed goes on to the next epoch by itself. Not where the epoch is another library's."""

    @property
    def key_seed(self) -> int | None:
        """Seed of the samples' generators; None where order and generators follow torch's rules."""
        return None

    @property
    def draws_late(self) -> bool:
        """Whether reading the plan moves a generator that others may draw from, so that how far it is read ahead shows:
        it has to be as far as torch reads then.
        """
        return False

    @property
    @abc.abstractmethod
    def times_set(self) -> Any:
        """Changes with every wish. Readers look at it before each batch, so it costs little."""

    @abc.abstractmethod
    def wish(self) -> Wish:
        """Return where somebody wants the next reader to begin."""

    @abc.abstractmethod
    def bind(self, cursor: Cursor, entropy: Any) -> E:
        """Return the plan of the cursor's epoch, from the cursor on.

        Args:
            cursor: one of this plan's.
            entropy: from `draw`.
        """

    @abc.abstractmethod
    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor that a state holds; nothing changes.

        Raises:
            StateError: the state belongs to other data or to another order, or is damaged.
        """

    def read_grown(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor of a state over data to which rows were appended since, where the plan has such.

        Raises:
            StateError: as `read`.
        """
        return self.read(state)

    def is_known_as(self, fingerprint: Any) -> bool:
        """Return whether the data have this fingerprint, too, in states of an epoch that began before it was known."""
        return False

    def close(self) -> None:
        """End what runs in the background, until something is read again: a loader over the plan was closed."""

    def draw(self, cursor: Cursor, held: Any, seed: int | None) -> Any:
        """Return the source of chance of one epoch, which draws when it is asked, and once; None where there is none.

        Args:
            cursor: where the epoch is to begin. It holds what was drawn, if it is of a state.
            held: what this method returned before for an epoch that has not begun, or None.
            seed: of the reader. A plan that would draw from torch's global generator takes its draws from that.
        """
        return None

    def whole(self, cursor: Cursor) -> Cursor:
        """Return the beginning of the cursor's epoch."""
        return Cursor(epoch=cursor.epoch)

    def again(self, run: E) -> Cursor:
        """Return the beginning of the epoch of a plan that was bound."""
        return Cursor(epoch=run.epoch)

    def after(self, run: E, had: int) -> Cursor:
        """Return what comes after a bound plan: the next epoch.

        Args:
            run: the bound plan.
            had: units of it that its consumer has had. How far it was read ahead changes nothing.
        """
        return Cursor(epoch=run.epoch + 1)

    def chosen(self, cursor: Cursor) -> None:
        """Take note that the user of a reader chose this cursor there: samplers of other libraries are told."""

    def show(self, cursor: Cursor, *, loaded: bool, running: bool) -> None:
        """Take note of where a reader is, for programs that look. It changes no order.

        Args:
            cursor: where it is, or where it begins next.
            loaded: whether that is of a loaded state.
            running: whether it reads right now.
        """


class PlanReader(Generic[E]):
    """Where one consumer of a plan is.

    ``run`` is the epoch plan that was begun last. It is `current` until it was read to its end, or until somebody
    chooses something else, by `set_epoch`, by `choose` or by a wish on the plan.
    """

    def __init__(self, plan: Plan[E], *, seed: int | None = None) -> None:
        self.plan = plan
        self._seed = seed
        self.run: E | None = None
        self._run_entropy: Any = None
        self._next: Cursor | None = None
        self._loaded = False  # the next cursor is that of a state
        self._wished = False  # the next cursor is a wish
        self._entropy: Any = None  # of the next epoch plan, once somebody has asked
        self._heard: Any = _NOTHING
        self._attached = False

    def __getstate__(self) -> dict[str, Any]:
        # What runs belongs to this process. A copy begins the same epoch from its beginning, or at what was chosen.
        upcoming = self.plan.again(self.run) if self._next is None and self.run is not None else self._next
        rest = {"run": None, "_run_entropy": None, "_entropy": None, "_attached": False}
        return self.__dict__ | rest | {"_next": upcoming}

    @property
    def current(self) -> bool:
        """Whether ``run`` is under way, and nothing else was chosen since."""
        self._listen()
        return self._attached

    @property
    def wished(self) -> bool:
        """Whether a wish came while ``run`` was under way. If its consumer goes on, the wish is for the next run."""
        return self.run is not None and not self.current and self._wished

    @property
    def resumes(self) -> bool:
        """Whether the next run begins where a loaded state stood."""
        self._listen()
        return self._loaded

    @property
    def epoch(self) -> int:
        """The epoch that runs, or will run next."""
        return self.run.epoch if self.current and self.run is not None else self._upcoming().epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next run. The epoch of a state just loaded keeps its position.

        Raises:
            SamplerError: no integer, a negative epoch, or one of 2**62 or more.
        """
        epoch = checked_epoch(epoch, SamplerError)
        self._listen()
        if self._next is not None and self._loaded and self._next.epoch == epoch:
            return
        self.choose(Cursor(epoch=epoch))

    def choose(self, cursor: Cursor, *, loaded: bool = False) -> None:
        """Let the next run begin at a cursor, whatever was wished before."""
        self._choose(cursor, loaded=loaded)
        self.plan.chosen(cursor)
        self.plan.show(cursor, loaded=loaded, running=False)
        self._heard = self.plan.times_set

    def start(self, *, advance: bool, had: int = 0) -> E:
        """Begin a run: at what was chosen or wished, else at the next epoch (``advance``) or the same one again.

        Args:
            advance: whether to go on to the next epoch.
            had: units that the consumer has had of the run before.
        """
        self._listen()
        cursor = self._next
        if cursor is None:
            assert self.run is not None
            cursor = self.plan.after(self.run, had) if advance else self.plan.again(self.run)
        entropy = self.plan.draw(cursor, self._entropy, self._seed)
        run = self.plan.bind(cursor, entropy)
        self.run, self._run_entropy, self._attached = run, entropy, True
        self._next, self._loaded, self._wished, self._entropy = None, False, False, None
        self.plan.show(cursor, loaded=False, running=True)
        return run

    def goes_on(self, run: E, *, had: bool) -> bool:
        """Return whether a run that is asked for more goes on; False if another one is to begin in its place.

        A wish after ``iter()`` moves a run of which nothing was had yet (Lightning sets the epoch there). Later on it
        is for the next run, and one for the epoch that runs is fulfilled.
        """
        if self.run is not run or (self._attached and self.plan.times_set == self._heard) or self.current:
            return True
        upcoming = self._upcoming()
        if not self._loaded and _names(upcoming, self.plan.again(run)):
            self._next = None
        elif not had:
            run.exhaust()
            return False
        self._attached = True
        return True

    def finish(self, *, advance: bool, had: int = 0) -> None:
        """Take note that the run was read to its end, ``had`` units: what comes next is a whole one."""
        assert self.run is not None
        if self._next is None:
            self._choose(self.plan.after(self.run, had) if advance else self.plan.again(self.run))
            self.plan.show(self._upcoming(), loaded=False, running=False)
        self.run, self._run_entropy, self._attached = None, None, False

    def peek(self) -> E:
        """Return the run that is current, or else the next one, without beginning it."""
        if self.current and self.run is not None:
            return self.run
        cursor = self._upcoming()
        self._entropy = self.plan.draw(cursor, self._entropy, self._seed)
        return self.plan.bind(cursor, self._entropy)

    def preview(self) -> E:
        """Return the next run, with draws of its own: those of the run itself are left to that."""
        cursor = self._upcoming()
        return self.plan.bind(cursor, self.plan.draw(cursor, None, self._seed))

    def whole(self) -> E:
        """Return the same over the whole epoch, wherever the reader is in it."""
        if self.current and self.run is not None:
            return self.plan.bind(self.plan.again(self.run), self._run_entropy)
        cursor = self._upcoming()
        self._entropy = self.plan.draw(cursor, self._entropy, self._seed)
        return self.plan.bind(self.plan.whole(cursor), self._entropy)

    def cursor(self, count: int) -> Cursor:
        """Return where the consumer is that has had ``count`` units of the current run; else where the next begins."""
        return self.peek().cursor(count if self.current else 0)

    def _upcoming(self) -> Cursor:
        self._listen()
        if self._next is not None:
            return self._next
        assert self.run is not None
        return self.plan.again(self.run)

    def _listen(self) -> None:
        """Hear the plan's wish, if there is a new one."""
        times = self.plan.times_set
        if times == self._heard:
            # A loaded state is used once. If another reader has begun with it since, this one begins the whole epoch.
            if self._wished and self._loaded and not (wish := self.plan.wish()).loaded:
                self._choose(wish.cursor)
                self._wished = True
            return
        self._heard, wish = times, self.plan.wish()
        keeps = self._loaded and self._next is not None and not wish.loaded
        # A sampler that went on by itself, under another reader perhaps, is no choice against a loaded state.
        if keeps and (wish.later or _names(wish.cursor, self._upcoming())):
            return
        if wish.later and self._attached:
            self._next = wish.cursor
        else:
            self._choose(wish.cursor, loaded=wish.loaded)
            self._wished = True

    def _choose(self, cursor: Cursor, *, loaded: bool = False) -> None:
        self._next, self._loaded, self._attached, self._wished = cursor, loaded, False, False


_NOTHING = "nothing"
"""No wish is counted like this."""


def _names(wished: Cursor, place: Cursor) -> bool:
    """Return whether a place is in the epoch that was wished, and in the mini-epoch if one was named."""
    return wished.epoch == place.epoch and wished.mini_epoch in (None, place.mini_epoch)
