"""Streams: iterators that say where they are, and data sets that open them there again.

    stream = dataset.open(epoch=3)         an iterator over one epoch, for this rank and worker
    next(stream), next(stream)
    cursor = stream.cursor()               JSON: where the stream goes on behind the item given last
    rest = dataset.open(cursor)            in another process

Invariants: a position is in a stream and nowhere else; a data set remembers wishes: an epoch, or a loaded state. A
cursor is a function of the items given, whatever was read ahead, and its size does not grow with them.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from torch.utils.data import IterableDataset, get_worker_info

from penstock.errors import ConfigError
from penstock.plan.cursor import State, checked_epoch
from penstock.plan.opening import Opening
from penstock.plan.reader import Wish
from penstock.plan.shared_epoch import SharedEpoch

__all__ = ["ResumableDataset", "Stream", "is_opened"]


class Stream(Iterator[Any]):
    """An iterator with a position."""

    @abstractmethod
    def __next__(self) -> Any:
        """Return the next item."""

    @abstractmethod
    def cursor(self) -> Any:
        """Return the position behind the item given last, as JSON.

        Ask once a batch at most, and less often if the answer is large. Nothing that follows changes it.
        """


class ResumableDataset(IterableDataset[Any]):
    """An iterable data set whose iterators are streams.

    A subclass defines `first_cursor`, `check_cursor` and `open_at`. Every iteration is a new epoch, in worker processes
    too, unless `set_epoch` chose one. Each of our loaders counts the epochs that it reads itself, and takes from here
    its user's `wish` alone. ``state_dict`` and ``load_state_dict`` are for the loaders of other libraries.
    """

    own_items = False
    """Whether a subclass has an ``__iter__`` or a ``set_epoch`` of its own, past which `open` goes."""

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
        """Begin with no epoch, no state and no stream, as a new data set does."""
        self._epochs = SharedEpoch()
        self._stream: Stream | None = None
        self._heard = 0  # how often the epoch had been set when that stream began
        self._loaded: State | None = None
        self._wished, self.times_set = 0, 0

    # What a subclass defines.

    def first_cursor(self, epoch: int) -> State:
        """Return the cursor at the beginning of an epoch."""
        raise NotImplementedError

    def check_cursor(self, cursor: Mapping[str, Any]) -> None:
        """Refuse a cursor that does not belong here. Raises StateError."""
        raise NotImplementedError

    def open_at(self, cursor: State) -> Stream:
        """Return a stream from a cursor on that was checked. It must not hold the data set, which remembers it."""
        raise NotImplementedError

    # Iteration.

    def open(self, cursor: Mapping[str, Any] | None = None, *, epoch: int | None = None) -> Stream:
        """Return a stream of this rank and worker. The data set does not remember it.

        Args:
            cursor: of a stream of this data set; the new stream goes on there. None begins an epoch.
            epoch: which one begins; by default the next one.

        Raises:
            ConfigError: both a cursor and an epoch, or a negative epoch.
            StateError: the cursor is of another data set, or of another rank or worker.
        """
        if cursor is None:
            return self.open_at(self.first_cursor(self._epochs.next if epoch is None else checked_epoch(epoch)))
        if epoch is not None:
            raise ConfigError("open() takes a cursor, which has its epoch, or an epoch, not both")
        self.check_cursor(cursor)
        return self.open_at(copy.deepcopy(dict(cursor)))

    def open_behind(self, last: Stream | None, opening: Opening) -> Stream:
        """Return the stream of an epoch of a loader, as `open`.

        Args:
            last: the loader's stream before; None for none. Some streams go on behind it.
            opening: says the epoch.
        """
        return self.open(opening.stream) if opening.stream is not None else self.open(epoch=opening.epoch)

    def __iter__(self) -> Stream:
        cursor, self._loaded = self._loaded, None
        self._stream = None  # the old stream closes its files first
        if cursor is None:
            cursor = self.first_cursor(self._epochs.next)
        else:
            self.check_cursor(cursor)  # a loader of torch's gives what was loaded to each of its workers
        return self._begin(cursor)

    def _begin(self, cursor: State) -> Stream:
        """Return a stream that the data set remembers."""
        self._epochs.begin(int(cursor["epoch"]))
        self._heard = self._epochs.times_set
        self._stream = self.open_at(cursor)
        return self._stream

    @property
    def epoch(self) -> int:
        """The epoch that is read, or was last, by whoever began one last; before the first one: the next epoch."""
        return self._epochs.current if self._loaded is None else int(self._loaded["epoch"])

    @property
    def wish(self) -> Wish:
        """Where its user wants the next pass of each loader to begin: at an epoch, or at a loaded state."""
        if self._loaded is not None:
            return Wish(Opening(epoch=self._wished, stream=self._loaded), loaded=True)
        return Wish(Opening(epoch=self._wished, chosen=self.times_set > 0), loaded=False)

    def show(self, epoch: int) -> None:
        """Let `epoch` be that of a loader that begins a pass, which has used a loaded state."""
        self._loaded = None
        self._epochs.show(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, in all processes. That of a state just loaded keeps its position.

        Raises:
            ConfigError: a negative epoch, or none at all.
        """
        epoch = checked_epoch(epoch)
        if self._loaded is None or epoch != self._loaded["epoch"]:
            self._loaded = None
            self._wish(epoch)
            self._epochs.set(epoch)

    def _wish(self, epoch: int) -> None:
        self._wished, self.times_set = epoch, self.times_set + 1

    # State.

    @property
    def _running(self) -> Stream | None:
        """The stream that a state is of: the last one, unless somebody has chosen an epoch since.

        In a worker that choice is for the next pass, and the stream goes on.
        """
        heard = get_worker_info() is not None or self._heard == self._epochs.times_set
        return self._stream if heard else None

    def state_dict(self) -> State:
        """Return the cursor of the iterator that was made last in this process."""
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        stream = self._running
        state: State = self.first_cursor(self._epochs.next) if stream is None else stream.cursor()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next iteration; it is used once.

        Raises:
            StateError: the state is of another data set, or of another rank or worker.
        """
        self.check_cursor(state)
        self._loaded = copy.deepcopy(dict(state))
        self._wish(int(self._loaded["epoch"]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stream": None}


def is_opened(dataset: Any) -> TypeGuard[ResumableDataset]:
    """Return whether others may read a data set by streams of their own: no subclass does more than `open` does."""
    return isinstance(dataset, ResumableDataset) and not dataset.own_items
