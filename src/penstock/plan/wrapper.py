"""`OuterPlan`: a plan over a plan, such as batches over samples. Whatever it does not change is the inner plan's."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, TypeVar

from penstock.plan.cursor import Cursor
from penstock.plan.epoch import BatchEpochPlan, EpochPlan
from penstock.plan.reader import Plan, Wish

__all__ = ["OuterPlan"]

E = TypeVar("E", bound=EpochPlan | BatchEpochPlan)


class OuterPlan(Plan[E]):
    """A plan whose epochs, cursors, wishes and chance are those of the plan inside.

    Subclasses implement `inner`, `inside` and `bind`.
    """

    @property
    @abc.abstractmethod
    def inner(self) -> Plan[Any]:
        """The plan inside."""

    @abc.abstractmethod
    def inside(self, run: E) -> Any:
        """Return the inner plan's epoch plan that a bound plan of this one is made of."""

    @property
    def advances(self) -> bool:  # type: ignore[override]
        """Whether a loader goes on to the next epoch by itself."""
        return self.inner.advances

    @property
    def key_seed(self) -> int | None:
        """Seed of the samples' generators."""
        return self.inner.key_seed

    @property
    def draws_late(self) -> bool:
        """Whether reading the plan moves a generator that others draw from."""
        return self.inner.draws_late

    @property
    def times_set(self) -> Any:
        """Changes with every wish."""
        return self.inner.times_set

    def wish(self) -> Wish:
        """Return where the next reader should begin."""
        return self.inner.wish()

    def draw(self, cursor: Cursor, held: Any, seed: int | None) -> Any:
        """Return the source of chance of the plan inside."""
        return self.inner.draw(cursor, held, seed)

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor that a state of the plan inside holds."""
        return self.inner.read(state)

    def read_grown(self, state: Mapping[str, Any]) -> Cursor:
        """Return the same over data to which rows were appended since."""
        return self.inner.read_grown(state)

    def whole(self, cursor: Cursor) -> Cursor:
        """Return the beginning of the cursor's epoch."""
        return self.inner.whole(cursor)

    def again(self, run: E) -> Cursor:
        """Return the beginning of the epoch of a plan that was bound."""
        return self.inner.again(self.inside(run))

    def after(self, run: E, had: int) -> Cursor:
        """Return what comes after it, as the plan inside has it."""
        return self.inner.after(self.inside(run), had)

    def chosen(self, cursor: Cursor) -> None:
        """Take note that the user of a reader chose this cursor."""
        self.inner.chosen(cursor)

    def show(self, cursor: Cursor, *, loaded: bool, running: bool) -> None:
        """Take note of where a reader is."""
        self.inner.show(cursor, loaded=loaded, running=running)
