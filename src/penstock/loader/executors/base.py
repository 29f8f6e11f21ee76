"""What an executor is: it makes batches and reports what became of them. Order, patience and faults are the window's.

window  -- submit(batches, worker) -->  executor
        <-- Done, Began, Lost      --      |
        -- collect(batch) ----------> batch, in memory that is the consumer's
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.loader.messages import BatchRequest, BatchResult
from penstock.loader.snapshots import Snapshot

__all__ = ["Again", "Began", "Done", "Event", "Executor", "Lost", "PendingBatch"]


class PendingBatch:
    """A batch under way. Executors derive from it what they need.

    Args:
        number: of the batch in its pass.
        request: the batch to be made.

    Attributes:
        worker: that was asked for it.
        done: whether the window knows that it is finished.
        ended: whether there is no such batch, since the worker's stream has come to its end.
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
    """A batch is made, or has failed."""

    batch: PendingBatch


class Began(NamedTuple):
    """A worker has begun its pass; the first snapshot of its objects, None if they have no state."""

    worker: int
    snapshot: Snapshot | None


class Lost(NamedTuple):
    """A worker is gone.

    Attributes:
        worker: its number.
        batches: of this pass that it had to make, in part or whole.
        blame: samples that may be the cause: batch, key, and share of the blame.
        why: how it ended and where it was, as a sentence without its full stop.
    """

    worker: int
    batches: list[PendingBatch]
    blame: list[tuple[PendingBatch, int, float]]
    why: str


class Again(NamedTuple):
    """Batches have to be asked for once more, through no fault of theirs."""

    batches: list[PendingBatch]


Event = Done | Began | Lost | Again


class Executor(ABC):
    """Makes the batches of one pass for a `Window`.

    All but `wait`, `close` and `turn` is called by whoever has the turn.

    Attributes:
        workers: how many there are. Where it matters who makes a batch, they take turns.
        tells_begin: whether each worker reports `Began` before its first batch.
        planned: requests that are pulled, handed out or not; fewer only behind the last one.
        isolates: whether `isolate` finds the sample that is at fault.
        over: whether somebody has ended the workers: nothing here may be used any more.
        waiting: whether nothing but waiting is under way, so that an interruption does no harm.
        ahead: batches that may be begun beyond the usual number, since one of them keeps workers idle.
    """

    workers = 1
    tells_begin = True
    planned = 0
    isolates = False
    waiting = False
    over = False
    ahead = 0

    def __init__(self) -> None:
        self._turn = threading.RLock()

    def turn(self) -> Any:
        """Return the lock held by whoever uses this executor, and by whoever ends it; not while waiting."""
        return self._turn

    @property
    @abstractmethod
    def depth(self) -> int:
        """Batches that may be in flight at the moment; 0 if `submit` makes each, when it is asked for."""

    @property
    def processes(self) -> list[Any] | None:
        """The worker processes; None if there are none on this machine."""
        return None

    @property
    def idle(self) -> bool:
        """Whether a worker has nothing to do."""
        return False

    def check(self) -> Exception | None:
        """Return why nobody can be asked any more; None if that is not so."""
        return None

    def has_room(self, pending: int) -> bool:
        """Return whether one more batch can be asked for beside so many that are under way."""
        return True

    def group(self, depth: int) -> int:
        """Return how many batches are asked for together, of so many in flight."""
        return 1

    def pending(self, number: int, request: BatchRequest) -> PendingBatch:
        """Return a batch that can be submitted here."""
        return PendingBatch(number, request)

    @abstractmethod
    def choose(self, workers: Sequence[int], share: int | None) -> int | None:
        """Return the worker that should make the next batch; None if all have enough to do.

        Args:
            workers: to choose from; the first one of those that have equally much to do.
            share: batches that a worker may have to do; None for no limit.
        """

    @abstractmethod
    def submit(self, batches: Sequence[Any], worker: int) -> list[Event]:
        """Have batches made by a worker; return what became of them at once, if anything did."""

    def drained(self) -> None:  # noqa: B027
        """Hear that nothing more will be asked for: the last batch is being handed out."""

    def arrived(self) -> list[Event]:
        """Return what has come since, without waiting; the consumer has just asked."""
        return []

    @abstractmethod
    def wait(self, deadline: float | None) -> Any:
        """Wait for news, for `receive`, until ``deadline`` on the monotonic clock. Nothing else is done here."""

    @abstractmethod
    def receive(self, news: Any) -> list[Event]:
        """Return what became of batches and workers."""

    @abstractmethod
    def collect(self, batch: PendingBatch, number: int) -> BatchResult:
        """Return a finished batch under the number that its consumer counts by; or its error."""

    def replace(self, lost: Lost) -> list[PendingBatch]:
        """Have another worker in the place of one that is gone. Return the batches that have to be asked for again."""
        raise NotImplementedError

    def isolate(self, batch: PendingBatch) -> None:
        """Have a batch that several workers died over made sample by sample; it is done when it is collected."""
        raise NotImplementedError

    def culprit(self, first: PendingBatch | None, pending: Sequence[PendingBatch]) -> str:
        """Return who is late, as the end of a sentence.

        Args:
            first: the batch that the consumer waits for.
            pending: all batches under way.
        """
        return ""

    @abstractmethod
    def drop(self, pending: Sequence[PendingBatch]) -> None:
        """End the pass: these batches are not wanted any more, and no others will be asked for."""

    def abort(self) -> None:  # noqa: B027
        """End the workers at once: something may be half done. `drop` follows."""

    def close(self, patience: float) -> None:  # noqa: B027
        """End the workers in so many seconds. Called in any thread, with or without the turn; wakes whoever waits."""
