"""The inline executor: a batch is made where it is asked for, in the consumer's thread."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from penstock.loader.executors.base import Began, Done, Event, Executor, PendingBatch
from penstock.loader.fetch import Maker, preserved_generators
from penstock.loader.interrupts import is_of_signal_handler
from penstock.loader.messages import Made, Work
from penstock.loader.stream import StreamFetch
from penstock.plan.opening import Told

__all__ = ["InlineExecutor"]


class InlineExecutor(Executor):
    """Makes one batch at a time.

    Args:
        maker: makes it; where it seeds the global generators, they are afterwards what they were before.
        epoch: given to the maker, which begins a pass here: an iterable data set's ``__iter__`` is called now.
    """

    depth = 0

    def __init__(self, maker: Maker, epoch: Told = None) -> None:
        super().__init__()
        self._maker = maker
        self._stream = isinstance(maker, StreamFetch)
        self._seeds = bool(getattr(maker, "seed_globals", False))
        self._asked: PendingBatch | None = None
        self._made: Made | None = None
        self._events: list[Event] = [Began(0, maker.begin(epoch))]

    def choose(self, workers: Sequence[int], share: int | None) -> int:
        """Return the only worker there is."""
        return 0

    def submit(self, batches: Sequence[PendingBatch], worker: int) -> list[Event]:
        """Note the batch; `receive` makes it."""
        (self._asked,) = batches
        return []

    def wait(self, deadline: float | None) -> None:
        """Return at once."""

    def arrived(self) -> list[Event]:
        """Return that the pass has begun, once."""
        events, self._events = self._events, []
        return events

    def receive(self, news: None) -> list[Event]:
        """Make the batch that was asked for."""
        events = self.arrived()
        batch, self._asked = self._asked, None
        if batch is not None:
            self._made = self._make(batch)
            events.append(Done(batch))
        return events

    def _make(self, batch: PendingBatch) -> Made:
        """Return the batch, or what was raised in its place.

        Raises:
            Exception: of a signal handler that struck meanwhile.
        """
        work = Work()
        try:
            with preserved_generators() if self._seeds else nullcontext():
                return Made(self._maker(batch.task, work), work, 0, state=self._maker.state_dict())
        except StopIteration as error:
            batch.ended = self._stream
            return Made(None, work, 0, error=error)
        except BaseException as error:  # Ctrl-C too: the batch is missing then, and the next call goes on behind it
            if isinstance(error, Exception) and is_of_signal_handler(error):
                raise
            try:
                return Made(None, work, 0, state=self._maker.state_after_error(), error=error)
            except Exception as another:
                return Made(None, work, 0, error=another)

    def collect(self, batch: PendingBatch, number: int) -> Made:
        """Return the batch that was made last."""
        made, self._made = self._made, None
        assert made is not None
        return Made(made.batch, made.work, number, 0, made.state, made.way, made.error)  # quicker than `_replace`

    def drop(self, pending: Sequence[PendingBatch]) -> None:
        """Make nothing more."""
        self._asked = self._made = None
