"""The interface of executors: they make batches somewhere, and say when they are finished.

    window  -- submit(start or requests, worker) -->  executor
            <-- wait: results, Began, Lost ----------    |

An executor lives as long as its workers: as long as its loader if they are persistent, and otherwise for one epoch
iterator. Each epoch iterator is a *run* with a number, which its requests and their answers carry. So an iterator that
starts while an older one is in progress takes over the workers: what the older one asked for is dropped where it is.

The window numbers and orders batches, and handles time-outs and lost workers. `Flow` says how far ahead.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.loader.messages import BatchRequest, BatchResult
from penstock.loader.user_state import Snapshot
from penstock.plan.stream import EpochStart

__all__ = ["Began", "Event", "Executor", "Lost", "Start"]


class Start(NamedTuple):
    """The start of a run in one worker, before its first request.

    Attributes:
        run: the number of the run.
        epoch: the epoch for streams; None for other datasets.
        state: the state that the worker's objects resume from; None if they start fresh.
        threads: number of threads of a worker process.
    """

    run: int
    epoch: EpochStart
    state: Any
    threads: int = 1


class Began(NamedTuple):
    """A worker has started a run; with a snapshot of its objects, None if they have no state."""

    run: int
    worker: int
    snapshot: Snapshot | None


class Lost(NamedTuple):
    """A worker has died. Its unanswered requests will not be answered.

    Attributes:
        worker: its number.
        why: how it died, as a sentence.
    """

    worker: int
    why: str


Event = BatchResult | Began | Lost


class Executor(ABC):
    """Makes batches for a `Window`.

    Callers hold `lock`, except while they `wait`. `close` may be called without it, from any thread.

    Attributes:
        workers: number of workers.
        lock: see above.
        pid: the process whose workers these are. The copy in a forked process has none.
        run: the number of the run whose requests are wanted; 0 for none. Workers drop other requests.
        closed: whether the workers were told to end, so that `submit` and `wait` must not be called any more.
        waiting: whether it is only waiting, so that an interruption does no harm.
        tells_begin: whether each worker reports `Began` for each run.
        processes: the worker processes; None if there are none on this machine.
        max_bytes: bytes that batches in flight may have; None if only memory limits them.
    """

    workers: int
    lock: threading.RLock
    pid: int
    run = 0
    closed = False
    waiting = False
    tells_begin = True
    processes: list[Any] | None = None
    max_bytes: int | None = None

    @abstractmethod
    def submit(self, requests: Sequence[Start | BatchRequest], worker: int) -> None:
        """Let a worker start a run, or make batches. It answers them in order."""

    @abstractmethod
    def wait(self, run: int, deadline: float | None) -> list[Event]:
        """Return what has happened in a run; wait for it until ``deadline`` (monotonic clock; None waits for ever).

        Returns early if another run has begun meanwhile, whose events are not this one's, or after `close`.
        """

    @abstractmethod
    def resize(self, workers: int) -> None:
        """Start workers until there are so many, replacing lost ones; or let the last ones end, without waiting.

        A worker that is to end answers its requests before.
        """

    @abstractmethod
    def close(self, patience: float) -> None:
        """End the workers within ``patience`` seconds, and wake who waits. Idempotent."""

    def where(self, worker: int) -> list[tuple[int, int]] | None:
        """Return the key of the sample that each thread of a worker loads, and the number of its batch + 1.

        For messages: None if it is not known.
        """
        return None
