"""`EpochStream`: a stream that is one epoch. `EpochDataset`: an iterable dataset whose streams are epochs.

A stream opened at the end of its epoch yields nothing. Its dataset is then between two epochs, so the state of the
dataset is the beginning of the next epoch.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from penstock import distributed
from penstock.plan.stream import ResumableDataset, Stream, StreamStart

__all__ = ["EpochDataset", "EpochStream"]


class EpochStream(Stream):
    """One epoch.

    Attributes:
        epoch: its number.
        over: whether the end has been reached.
        failed: whether a stage has raised an error. The stream yields nothing more, but its cursor is after the error.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.over = self.failed = False

    def __next__(self) -> Any:
        if self.over or self.failed:
            raise StopIteration
        try:
            return self.next_item()
        except StopIteration:
            self.over = True
            raise
        except Exception:
            self.failed = True
            raise

    @abstractmethod
    def next_item(self) -> Any:
        """Return the next item. Raises StopIteration at the end of the epoch."""


class EpochDataset(ResumableDataset):
    """A dataset whose streams are epochs."""

    def __init__(self, *, of: str = "pipeline") -> None:
        super().__init__()
        self._world = distributed.LateWorld(of=of)

    @property
    def epoch(self) -> int:
        """The epoch being read, or else the next one."""
        if self._loaded is not None:
            return int(self._loaded["epoch"])
        epoch, stream = self._epochs.current, self._stream
        chosen = self._times_set_at_start != self._epochs.times_set
        return epoch + (isinstance(stream, EpochStream) and stream.over and stream.epoch == epoch and not chosen)

    @property
    def _running(self) -> Stream | None:
        """The stream that a state describes; None between two epochs."""
        stream = super()._running
        return None if isinstance(stream, EpochStream) and stream.over else stream

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. Choosing the epoch of a state just loaded keeps its position.

        Raises:
            ConfigError: a negative epoch.
        """
        super().set_epoch(epoch)
        if self._loaded is None:
            self._choose(epoch)

    def open_behind(self, last: Stream | None, opening: StreamStart) -> Stream:
        """Return the stream of a loader's epoch. Sources get the epoch if `set_epoch` chose it."""
        if opening.chosen and opening.stream is None:
            self._choose(opening.epoch)
        return super().open_behind(last, opening)

    def _choose(self, epoch: int) -> None:
        """Choose the next epoch of sources that count their epochs themselves."""

    def _where(self) -> list[int]:
        """Return [rank, ranks, worker, workers] of this process."""
        return [*self._world.get(), *distributed.worker()]
