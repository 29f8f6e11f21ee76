"""`Stream`: an iterator with a position. `ResumableDataset`: an iterable dataset that opens streams at a position.
`StreamPlan`: its epochs, for the `PlanReader` of a loader.

    stream = dataset.open(epoch=3)         an iterator over one epoch, for this rank and worker
    next(stream), next(stream)
    cursor = stream.cursor()               JSON: the position after the last item
    rest = dataset.open(cursor)            in another process

Invariants: only a stream holds a position; a dataset holds only a bookmark, where the user begins next: an epoch, or a
loaded state. A cursor depends only on the items that were yielded, not on items read ahead, and its size does not grow.
A plan knows only epochs.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeGuard

from torch.utils.data import IterableDataset, get_worker_info

from penstock.errors import ConfigError
from penstock.plan.cursor import Cursor, State, checked_epoch, pack, read_int, read_mapping, unpack
from penstock.plan.reader import Bookmark, Draws, Plan
from penstock.plan.shared import SharedEpoch

__all__ = ["EpochStart", "ResumableDataset", "Stream", "StreamPlan", "StreamStart", "UserEpochs", "is_opened"]


class Stream(Iterator[Any]):
    """An iterator with a position."""

    @abstractmethod
    def cursor(self) -> Any:
        """Return the position after the last item, as JSON. Later items do not change the returned object.

        Call this at most once per batch, and less often if the cursor is large.
        """


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


class ResumableDataset(IterableDataset[Any]):
    """An iterable dataset whose iterators are streams.

    A subclass defines `first_cursor`, `check_cursor` and `open_at`. Every iteration is a new epoch, also in worker
    processes, unless `set_epoch` chose one. A Penstock loader counts its own epochs, and reads only `bookmark` here.
    ``state_dict`` and ``load_state_dict`` are for the loaders of other libraries.
    """

    own_items = False
    """Whether a subclass overrides ``__iter__`` or ``set_epoch``, which `open` would bypass."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "open_at" in cls.__dict__:
            cls.own_items = False
        elif cls.__dict__.keys() & {"__iter__", "set_epoch"}:
            cls.own_items = True

    def __init__(self) -> None:
        super().__init__()
        self._forget()

    def _forget(self) -> None:
        """Reset epoch, state and stream, as in a new dataset."""
        self._epochs = SharedEpoch()
        self._stream: Stream | None = None
        # `times_set` of the shared epoch when that stream began.
        self._times_set_at_start = 0
        self.bookmark = Bookmark()
        """Where each loader begins next: at an epoch, or at a loaded state."""
        self.bookmark.cursor = StreamStart(chosen=False)

    @property
    def _loaded(self) -> State | None:
        """A loaded state that was not used yet."""
        cursor = self.bookmark.cursor
        return cursor.stream if self.bookmark.loaded and isinstance(cursor, StreamStart) else None

    def drop_loaded(self) -> None:
        """Drop a loaded state: a loader or an iterator has used it."""
        mark = self.bookmark
        if mark.loaded:
            mark.cursor, mark.loaded = StreamStart(epoch=mark.cursor.epoch), False

    # Defined by subclasses.

    def first_cursor(self, epoch: int) -> State:
        """Return the cursor at the start of an epoch."""
        raise NotImplementedError

    def check_cursor(self, cursor: Mapping[str, Any]) -> None:
        """Raise a StateError if a cursor does not belong to this dataset."""
        raise NotImplementedError

    def open_at(self, cursor: State) -> Stream:
        """Return a stream that starts at a checked cursor. It must not refer to the dataset, which refers to it."""
        raise NotImplementedError

    # Iteration.

    def open(self, cursor: Mapping[str, Any] | None = None, *, epoch: int | None = None) -> Stream:
        """Return a new stream of this rank and worker. `state_dict` does not see it.

        Args:
            cursor: of a stream of this dataset, at which the new stream continues. None begins an epoch.
            epoch: the epoch to begin; by default the next one.

        Raises:
            ConfigError: both a cursor and an epoch were passed, or the epoch is negative.
            StateError: the cursor belongs to another dataset, rank or worker.
        """
        if cursor is None:
            return self.open_at(self.first_cursor(self._epochs.next if epoch is None else checked_epoch(epoch)))
        if epoch is not None:
            raise ConfigError("open() takes either a cursor, which contains its epoch, or an epoch, not both")
        self.check_cursor(cursor)
        return self.open_at(copy.deepcopy(dict(cursor)))

    def open_behind(self, last: Stream | None, opening: StreamStart) -> Stream:
        """Return the stream of a loader's next epoch, as `open`.

        Args:
            last: the loader's last stream, or None. Some streams continue where it ended.
            opening: the epoch to begin.
        """
        return self.open(opening.stream) if opening.stream is not None else self.open(epoch=opening.epoch)

    def __iter__(self) -> Stream:
        cursor = self._loaded
        self.drop_loaded()
        # The old stream must close its files first.
        self._stream = None
        if cursor is None:
            cursor = self.first_cursor(self._epochs.next)
        else:
            # torch's loader copies a loaded state to each of its workers, which it may not fit.
            self.check_cursor(cursor)
        self._epochs.begin(int(cursor["epoch"]))
        self._times_set_at_start = self._epochs.times_set
        self._stream = self.open_at(cursor)
        return self._stream

    @property
    def epoch(self) -> int:
        """The epoch that was begun last; before the first one, the next epoch."""
        return self._epochs.current if self._loaded is None else int(self._loaded["epoch"])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, in all processes.

        After `load_state_dict`, setting the state's own epoch keeps the position of the state.

        Raises:
            ConfigError: the epoch is not an integer from 0 to 2**62 - 1.
        """
        epoch = checked_epoch(epoch)
        if self._loaded is None or epoch != self._loaded["epoch"]:
            self.bookmark.write(StreamStart(epoch=epoch))
            self._epochs.set_next(epoch)

    # State.

    @property
    def _running(self) -> Stream | None:
        """The stream of `state_dict`: the last one, unless `set_epoch` was called since.

        In a worker, `set_epoch` is for the next iteration, so the stream stays the current one.
        """
        current = get_worker_info() is not None or self._times_set_at_start == self._epochs.times_set
        return self._stream if current else None

    def state_dict(self) -> State:
        """Return the position of the iterator made last in this process, as text under one key."""
        return pack(self._last_cursor())

    def _last_cursor(self) -> State:
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        stream = self._running
        state: State = self.first_cursor(self._epochs.next) if stream is None else stream.cursor()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state at the next iteration. The state is used once.

        Raises:
            StateError: the state belongs to another dataset, rank or worker.
        """
        cursor = copy.deepcopy(unpack(state, of=type(self).__name__))
        self.check_cursor(cursor)
        self.bookmark.write(StreamStart(epoch=int(cursor["epoch"]), stream=cursor), loaded=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stream": None, "bookmark": copy.copy(self.bookmark)}


def is_opened(dataset: Any) -> TypeGuard[ResumableDataset]:
    """Return whether a dataset may be read through `open`: no subclass overrides its iteration."""
    return isinstance(dataset, ResumableDataset) and not dataset.own_items


class StreamPlan(Plan[Any]):
    """The epochs of an iterable dataset of Penstock, in sequence."""

    def __init__(self, dataset: ResumableDataset) -> None:
        self._dataset = dataset

    @property
    def bookmark(self) -> Bookmark:  # type: ignore[override]
        """Where readers begin next."""
        return self._dataset.bookmark

    def show(self, cursor: Cursor, *, loaded: bool, running: bool) -> None:
        """Show the epoch that a loader begins, also to workers. This uses up a loaded state."""
        if running:
            self._dataset.drop_loaded()
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
