"""`StreamPlan`: the epochs of a data set that gives streams, for a loader's `PlanReader`. `Opening`: one of them.

Invariant: a plan of streams knows epochs alone. Where a stream is in its epoch, its own cursor says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from penstock.plan.cursor import Cursor, State, read_int, read_mapping
from penstock.plan.reader import Plan, Wish

if TYPE_CHECKING:
    from penstock.plan.stream import ResumableDataset

__all__ = ["Opening", "StreamPlan", "Told"]


@dataclass(frozen=True, kw_only=True)
class Opening(Cursor):
    """Which epoch the streams of a pass begin. Workers are told it.

    Attributes:
        chosen: whether somebody chose the epoch. If not, it comes by itself behind the one before.
        stream: cursor of a stream to go on from, that of a state that the data set has loaded; None begins the epoch.
    """

    chosen: bool = True
    stream: State | None = None

    def state(self) -> State:
        """Return it as a JSON-serialisable dict, which `StreamPlan.read` takes back."""
        state: State = {"epoch": self.epoch, "chosen": self.chosen}
        return state if self.stream is None else {**state, "cursor": self.stream}

    def cursor(self, count: int) -> Self:
        """Return the opening itself: what was had of a stream, its cursor says."""
        return self

    def exhaust(self) -> None:
        """Do nothing: its streams end with their iterator."""


Told = Opening | int | None
"""What workers are told as a pass begins: the opening of a data set of ours, the epoch that somebody chose for a user's
that has ``set_epoch``, or nothing.
"""


class StreamPlan(Plan[Opening]):
    """The epochs of a data set, one after the other."""

    def __init__(self, dataset: ResumableDataset) -> None:
        self._dataset = dataset

    @property
    def times_set(self) -> int:
        """How often the data set's user has chosen where to begin."""
        return self._dataset.times_set

    def wish(self) -> Wish:
        """Return where the data set's user wants the next reader to begin."""
        return self._dataset.wish

    def bind(self, cursor: Cursor, entropy: Any) -> Opening:
        """Return the opening of the cursor's epoch."""
        return cursor if isinstance(cursor, Opening) else Opening(epoch=cursor.epoch)

    def read(self, state: Mapping[str, Any]) -> Opening:
        """Return the opening that a state holds. A damaged one is a StateError."""
        of = "data set"
        stream = dict(read_mapping(state, "cursor", of=of)) if "cursor" in state else None
        return Opening(epoch=read_int(state, "epoch", of=of), chosen=state.get("chosen") is not False, stream=stream)

    def after(self, run: Opening, had: int) -> Opening:
        """Return the epoch behind an opening."""
        return Opening(epoch=run.epoch + 1, chosen=False)

    def show(self, cursor: Cursor, *, loaded: bool, running: bool) -> None:
        """Let the data set say the epoch that is read."""
        if running:
            self._dataset.show(cursor.epoch)
