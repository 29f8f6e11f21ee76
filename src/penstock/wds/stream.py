"""Epochs of pipelines and mixes: `EpochStream`, and the data sets that open them.

A stream at its end stays there: opened at its cursor it gives nothing. Its data set is between two epochs then, so its
state is where the next epoch begins.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from penstock import distributed
from penstock.plan.stream import ResumableDataset, Stream

__all__ = ["EpochDataset", "EpochStream"]


class EpochStream(Stream):
    """One epoch.

    Attributes:
        epoch: its number.
        over: whether the end was asked for.
        failed: whether a stage has raised an error. Nothing comes after it, but the cursor is behind it.
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
    """A data set whose streams are epochs."""

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or else the one that comes."""
        if self._loaded is not None:
            return int(self._loaded["epoch"])
        epoch, stream = self._epochs.current, self._stream
        chosen = self._times_set_at_start != self._epochs.times_set
        return epoch + (isinstance(stream, EpochStream) and stream.over and stream.epoch == epoch and not chosen)

    @property
    def _running(self) -> Stream | None:
        """The stream that a state is of; None between two epochs."""
        stream = super()._running
        return None if isinstance(stream, EpochStream) and stream.over else stream

    def _where(self) -> list[int]:
        """Return the rank and the worker whose stream is opened here."""
        return [*distributed.current(), *distributed.worker()]
