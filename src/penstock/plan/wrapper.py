"""`OuterPlan`: a plan over another plan, such as batches over samples."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, TypeVar

from penstock.plan.cursor import Cursor
from penstock.plan.epoch import BatchEpochPlan, EpochPlan
from penstock.plan.reader import Plan, StartRequest

__all__ = ["OuterPlan"]

E = TypeVar("E", bound=EpochPlan | BatchEpochPlan)


class OuterPlan(Plan[E]):
    """A plan that takes epochs, cursors, requests (`StartRequest`) and random draws from an inner plan.

    Subclasses implement `inner`, `inside` and `bind`.
    """

    @property
    @abc.abstractmethod
    def inner(self) -> Plan[Any]:
        """The inner plan."""

    @abc.abstractmethod
    def inside(self, run: E) -> Any:
        """Return the inner plan's epoch plan that an epoch plan of this plan wraps."""

    @property
    def advances(self) -> bool:  # type: ignore[override]
        """Whether a loader advances the epoch by itself."""
        return self.inner.advances

    @property
    def key_seed(self) -> int | None:
        """Seed of the samples' generators."""
        return self.inner.key_seed

    @property
    def times_set(self) -> Any:
        """A value that changes with every `StartRequest`."""
        return self.inner.times_set

    def start_request(self) -> StartRequest:
        """Return where the next reader should begin."""
        return self.inner.start_request()

    def draw(self, cursor: Cursor, held: Any, seed: int | None) -> Any:
        """Return the random draw of the inner plan's epoch."""
        return self.inner.draw(cursor, held, seed)

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state of the inner plan."""
        return self.inner.read(state)

    def read_grown(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state of the same data before rows were appended."""
        return self.inner.read_grown(state)

    def whole(self, cursor: Cursor) -> Cursor:
        """Return the start of the cursor's epoch."""
        return self.inner.whole(cursor)

    def restart(self, run: E) -> Cursor:
        """Return the start of the epoch of a bound plan."""
        return self.inner.restart(self.inside(run))

    def after(self, run: E, delivered: int) -> Cursor:
        """Return the start of the epoch after a bound plan."""
        return self.inner.after(self.inside(run), delivered)

    def chosen(self, cursor: Cursor) -> None:
        """Pass on a cursor that the user of a reader chose."""
        self.inner.chosen(cursor)

    def show(self, cursor: Cursor, *, loaded: bool, running: bool) -> None:
        """Record the position of a reader."""
        self.inner.show(cursor, loaded=loaded, running=running)
