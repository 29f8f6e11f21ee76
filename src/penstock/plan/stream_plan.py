"""`StreamPlan`: the epochs of an iterable dataset, for a loader's `PlanReader`. `StreamStart`: the start of one epoch.

Invariant: a plan of streams knows only epochs. The position in an epoch is in the cursor of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from penstock.plan.cursor import Cursor, State, read_int, read_mapping
from penstock.plan.reader import Bookmark, Draws, Plan

if TYPE_CHECKING:
    from penstock.plan.stream import ResumableDataset

__all__ = ["EpochStart", "StreamBookmark", "StreamPlan", "StreamStart", "UserEpochs"]


@dataclass(frozen=True, kw_only=True)
class StreamStart(Cursor):
    """The epoch that a loader's streams begin. It is sent to the workers.

    Attributes:
        chosen: whether the user chose the epoch. If not, it just follows the last one.
        stream: the cursor of a stream in a state that the dataset has loaded; None begins the epoch at its start.
    """

    chosen: bool = True
    stream: State | None = None

    def state(self) -> State:
        """Return the opening as a JSON-serialisable dict, which `StreamPlan.read` accepts."""
        state: State = {"epoch": self.epoch, "chosen": self.chosen}
        return state if self.stream is None else {**state, "cursor": self.stream}

    @property
    def start(self) -> Cursor:
        """The start of the epoch."""
        return self.whole()

    def after(self, count: int) -> Self:
        """Return the opening of the next epoch."""
        return type(self)(epoch=self.epoch + 1, chosen=False)

    def cursor(self, count: int) -> Self:
        """Return the opening itself: the position is in the cursor of the stream."""
        return self

    def exhaust(self) -> None:
        """Do nothing: streams end with their iterator."""


EpochStart = StreamStart | None
"""Message to workers at the start of an epoch. None leaves the epoch to the dataset."""


class StreamBookmark(Bookmark):
    """Where each loader over an iterable dataset begins next."""

    cursor: StreamStart

    def __init__(self) -> None:
        super().__init__()
        self.cursor = StreamStart(chosen=False)

    def leave(self) -> None:
        """Drop a loaded state: a loader or an iterator has used it."""
        if self.loaded:
            self.cursor, self.loaded = StreamStart(epoch=self.cursor.epoch), False


class StreamPlan(Plan[StreamStart]):
    """The epochs of an iterable dataset of Penstock, in sequence."""

    def __init__(self, dataset: ResumableDataset) -> None:
        self._dataset = dataset

    @property
    def bookmark(self) -> StreamBookmark:  # type: ignore[override]
        """Where readers begin next."""
        return self._dataset.bookmark

    def show(self, cursor: Cursor, *, loaded: bool, running: bool) -> None:
        """Show the epoch that a loader begins, also to workers. This uses up a loaded state."""
        if running:
            self.bookmark.leave()
            self._dataset._epochs.show(cursor.epoch)

    def bind(self, cursor: Cursor, draws: Draws) -> StreamStart:
        """Return the opening of the cursor's epoch."""
        return cursor if isinstance(cursor, StreamStart) else StreamStart(epoch=cursor.epoch)

    def read(self, state: Mapping[str, Any]) -> StreamStart:
        """Return the opening in a state.

        Raises:
            StateError: the state is damaged.
        """
        of = "dataset"
        stream = dict(read_mapping(state, "cursor", of=of)) if "cursor" in state else None
        return StreamStart(
            epoch=read_int(state, "epoch", of=of), chosen=state.get("chosen") is not False, stream=stream
        )


class UserEpochs(StreamPlan):
    """The epochs of a user's iterable dataset, in sequence. Each is set with the dataset's ``set_epoch``."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self._bookmark = Bookmark()

    @property
    def bookmark(self) -> Bookmark:  # type: ignore[override]
        """Where the reader begins next."""
        return self._bookmark

    def chosen(self, cursor: Cursor) -> None:
        """Set an epoch that the user chose."""
        self._dataset.set_epoch(cursor.epoch)

    show = Plan.show
