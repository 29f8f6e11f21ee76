"""The interface of executors: they make batches and report results. The window handles order, time-outs and failures.

window  -- submit(batches, worker) -->  executor
        <-- Done, Began, Lost      --      |
        -- collect(batch) ----------> batch, in memory owned by the consumer
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.loader.messages import BatchRequest, BatchResult
from penstock.loader.snapshots import Snapshot

__all__ = ["Began", "Done", "Event", "Executor", "Lost", "PendingBatch"]


class PendingBatch:
    """A submitted batch. Executors subclass it.

    Args:
        number: the number of the batch in its epoch iterator.
        request: the batch to make.

    Attributes:
        worker: the worker that makes it.
        done: whether the window knows that it is finished.
        ended: whether there is no such batch, because the worker's stream has ended.
        blame: deaths of workers, by the key of the sample that may be the cause.
    """

    __slots__ = ("blame", "done", "ended", "number", "request", "worker")

    def __init__(self, number: int, request: BatchRequest) -> None:
        self.number = number
        self.request = request
        self.worker = 0
        self.done = False
        self.ended = False
        self.blame: dict[int, float] = {}


class Done(NamedTuple):
    """A batch is finished, or has failed."""

    batch: PendingBatch


class Began(NamedTuple):
    """A worker has started its epoch; holds the first snapshot of its objects, None if they have no state."""

    worker: int
    snapshot: Snapshot | None


class Lost(NamedTuple):
    """A worker has died.

    Attributes:
        worker: its number.
        batches: its unfinished batches of this epoch iterator.
        blame: samples that may be the cause: batch, key, and share of the blame.
        why: how and where the worker died, as a sentence without a full stop.
    """

    worker: int
    batches: list[PendingBatch]
    blame: list[tuple[PendingBatch, int, float]]
    why: str


Event = Done | Began | Lost


class Executor(ABC):
    """Makes the batches of one epoch iterator for a `Window`.

    Callers hold the lock `turn` for all methods but `wait`, `close` and `turn`.

    Attributes:
        workers: number of workers. If it matters which worker makes a batch, they take turns.
        tells_begin: whether each worker reports `Began` before its first batch.
        planned: number of requests to plan ahead; fewer only after the last one.
        over: whether the workers were ended, so that this executor must not be used again.
        waiting: whether it is only waiting, so that an interruption does no harm.
        ahead: extra batches that may be started while a slow one leaves workers idle.
    """

    workers = 1
    tells_begin = True
    planned = 0
    waiting = False
    over = False
    ahead = 0

    def __init__(self) -> None:
        self._turn = threading.RLock()

    def turn(self) -> Any:
        """Return the lock that callers of this executor hold, except while waiting; closing takes it, too."""
        return self._turn

    @property
    @abstractmethod
    def depth(self) -> int:
        """Return how many batches may be in flight now; 0 if `submit` makes each batch on demand."""

    @property
    def processes(self) -> list[Any] | None:
        """Return the worker processes; None if there are none on this machine."""
        return None

    @property
    def idle(self) -> bool:
        """Return whether a worker is idle."""
        return False

    def check(self) -> Exception | None:
        """Return why no more batches can be submitted; None if they can."""
        return None

    def has_room(self, pending: int) -> bool:
        """Return whether one more batch can be submitted, with ``pending`` in flight."""
        return True

    def group(self, depth: int) -> int:
        """Return how many batches are submitted together, with ``depth`` in flight."""
        return 1

    def pending(self, number: int, request: BatchRequest) -> PendingBatch:
        """Return a batch to submit."""
        return PendingBatch(number, request)

    @abstractmethod
    def choose(self, workers: Sequence[int], share: int | None) -> int | None:
        """Return the worker for the next batch; None if all are busy enough.

        Args:
            workers: the candidates; the first one wins among equally busy ones.
            share: maximum number of batches per worker; None for no limit.
        """

    @abstractmethod
    def submit(self, batches: Sequence[Any], worker: int) -> list[Event]:
        """Submit batches to a worker; return events that occur at once."""

    def drained(self) -> None:  # noqa: B027
        """Note that no more batches will be submitted, since the consumer is taking the last one."""

    def arrived(self) -> list[Event]:
        """Return new events without waiting; called when the consumer asks for a batch."""
        return []

    @abstractmethod
    def wait(self, deadline: float | None) -> Any:
        """Wait for news until ``deadline`` (monotonic clock); return it for `receive` without processing it."""

    @abstractmethod
    def receive(self, news: Any) -> list[Event]:
        """Return the events of batches and workers."""

    @abstractmethod
    def collect(self, batch: PendingBatch, number: int) -> BatchResult:
        """Return a finished batch, or its error, with the number that the consumer uses."""

    def replace(self, lost: Lost) -> list[PendingBatch]:
        """Replace a dead worker; return the batches that must be submitted again."""
        raise NotImplementedError

    def culprit(self, first: PendingBatch | None, pending: Sequence[PendingBatch]) -> str:
        """Return which worker is late, as the end of a sentence.

        Args:
            first: the batch that the consumer waits for.
            pending: all batches in flight.
        """
        return ""

    @abstractmethod
    def drop(self, pending: Sequence[PendingBatch]) -> None:
        """End the epoch iterator: drop these batches; no others will be submitted."""

    def abort(self) -> None:  # noqa: B027
        """End the workers at once, since their work may be incomplete. `drop` follows."""

    def close(self, patience: float) -> None:  # noqa: B027
        """End the workers within ``patience`` seconds. Any thread may call it, without the lock; wakes waiters."""
