"""`RayExecutor`: assigns batches to workers of the cluster, and handles lost and silent workers.

    any worker may make any batch, even again: sample keys are sent with it; streams: worker k mod n

lost     other workers make its batches; a batch that has lost three workers ends the epoch iterator with an error
silent   for longer than the deadline: treated as lost, since a broken network reports nothing
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

from ray import cloudpickle

from penstock.errors import RingError, WorkerError
from penstock.loader.exceptions import rebuild
from penstock.loader.executors.base import Began, Done, Event, Executor, Lost, PendingBatch
from penstock.loader.executors.ray.actors import Actors, Answer, RayWorker
from penstock.loader.executors.ray.receive_buffer import ReceiveBuffer
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult
from penstock.loader.sizes import RecentSizes

__all__ = ["Measured", "RayBatch", "RayExecutor"]

_QUICK_S = 10e-3
"""A batch that takes fewer seconds is quick: sending one takes three milliseconds of CPU time."""

_TOGETHER_S = 30e-3
"""Seconds of work that are sent together if batches are quick."""

_AT_WORK = 2
"""Calls that a worker may have started, see `Worker`."""


class Measured:
    """Measurements of recent batches, which stay between epoch iterators."""

    def __init__(self) -> None:
        self.sizes = RecentSizes()
        self.seconds: deque[float] = deque(maxlen=64)

    def together(self, most: int) -> int:
        """Return how many batches are requested together: one, unless sending costs more than making them."""
        seconds = statistics.median(self.seconds) if self.seconds else 0.0
        return max(1, min(most, int(_TOGETHER_S / seconds))) if 0 < seconds < _QUICK_S else 1


class RayBatch(PendingBatch):
    """A batch in progress."""

    __slots__ = ("_answer",)

    def __init__(self, number: int, request: BatchRequest) -> None:
        super().__init__(number, request)
        self._answer: tuple[str, Any, Any, list[Any]] = ("", None, None, [])

    def finish(self, kind: str, payload: Any = None, metrics: Any = None, buffers: list[Any] | None = None) -> None:
        """Record the answer."""
        self._answer = (kind, payload, metrics, buffers or [])

    def take(self) -> tuple[str, Any, Any, list[Any]]:
        """Return kind, payload, metrics and buffers of the answer, once, since buffers occupy the object store."""
        answer, self._answer = self._answer, ("", None, None, [])
        return answer


class RayExecutor(Executor):
    """Makes batches in the cluster.

    Args:
        actors: the workers.
        memory: receives batches.
        measured: measurements.
        turns: whether it matters which worker makes a batch.
        prefetch: batches in flight per worker.
        light: the same for quick batches.
        max_bytes: limit of the batches in flight.
    """

    def __init__(
        self,
        actors: Actors,
        memory: ReceiveBuffer,
        measured: Measured,
        *,
        turns: bool,
        prefetch: int,
        light: int,
        max_bytes: int,
    ) -> None:
        super().__init__()
        self._actors = actors
        self._memory = memory
        self._measured = measured
        self._turns = turns
        self._prefetch, self._light = prefetch, light
        self._max_bytes = max_bytes
        self._run = actors.run
        self._began: set[int] = set()  # workers whose start was reported
        self._asked = time.monotonic()  # when the consumer asked for a batch
        self.workers = actors.count
        self.tells_begin = turns
        self.planned = prefetch * self.workers

    def turn(self) -> Any:
        """Return the workers' lock."""
        return self._actors.turn()

    @property
    def waiting(self) -> bool:
        """Whether the executor only waits."""
        return self._actors.waiting

    @waiting.setter
    def waiting(self, value: bool) -> None:
        self._actors.waiting = value

    @property
    def over(self) -> bool:  # type: ignore[override]
        """Whether the workers were ended."""
        return self._actors.closed

    def check(self) -> Exception | None:
        """Return why no more batches can be submitted; None if they can."""
        if self._run != self._actors.run:
            return RuntimeError("a newer iterator of this DataLoader has taken over its workers")
        if self._actors.closed:
            return WorkerError(
                "the workers of this DataLoader have ended: it was closed, or this is a fork of its process"
            )
        return None

    # Requests.

    @property
    def depth(self) -> int:
        """Return how many batches may be in flight now: one per worker until their size is known."""
        ready, largest = max(1, len(self._actors.ready())), self._measured.sizes.largest
        if not largest:
            return ready
        each = self._light if self._measured.together(2) > 1 else self._prefetch
        return max(1, min(each * ready, self._max_bytes // largest))

    def has_room(self, pending: int) -> bool:
        """Return whether batches can be submitted: if workers take turns, all must be ready."""
        return not self._turns or len(self._actors.ready()) == self._actors.count

    def group(self, depth: int) -> int:
        """Return how many batches are requested together, so that each worker has two calls."""
        return 1 if self._turns else self._measured.together(depth // (2 * max(1, len(self._actors.ready()))))

    def choose(self, workers: Sequence[int], share: int | None) -> int | None:
        """Return the ready worker that owes the fewest batches; None if none is ready or all have their share."""
        ready = [worker for worker in self._actors.ready() if worker.number in workers]
        worker = min(ready, key=lambda worker: worker.owed, default=None)
        return None if worker is None or (share is not None and worker.owed >= share) else worker.number

    def pending(self, number: int, request: BatchRequest) -> PendingBatch:
        """Return a batch to submit."""
        return RayBatch(number, request)

    def submit(self, batches: Sequence[RayBatch], worker: int) -> list[Event]:
        """Request batches from a worker; batches that cannot be sent are done at once, with an error."""
        sent: list[RayBatch] = []
        requests: list[bytes] = []
        events: list[Event] = []
        for batch in batches:
            batch.worker = worker
            try:
                requests.append(cloudpickle.dumps(batch.request.packed()))
                sent.append(batch)
            except Exception as error:  # indices that cannot be pickled: raised in place of this batch
                batch.finish("raise", error)
                events.append(Done(batch))
        if sent:
            self._actors.ask(self._actors.workers[worker], sent, requests)
        return events

    # Answers.

    def arrived(self) -> list[Event]:
        """Return new events; called when the consumer asks for a batch."""
        self._asked = time.monotonic()
        events = self.receive(self._actors.wait(0))
        self._actors.waiting = False
        return events

    def wait(self, deadline: float | None) -> list[Any]:
        """Wait for answers, or until a worker has been silent for too long."""
        until = min([math.inf if deadline is None else deadline, *map(self._silent_until, self._actors.ready())])
        return self._actors.wait(None if until == math.inf else max(0.0, until - time.monotonic()))

    def receive(self, news: list[Any]) -> list[Event]:
        """Return the events of batches and workers."""
        events: list[Event] = []
        for answer in self._actors.receive(news):
            events += self._take_in(answer) if answer.error is None else [self._lose(answer)]
        begun = self._actors.begun
        events += [Began(worker, begun[worker]) for worker in begun if worker not in self._began]
        self._began.update(begun)
        now, limit = time.monotonic(), self._actors.options.deadline
        for worker in self._actors.ready():
            if now >= self._silent_until(worker) and not self._actors.closed:
                error = WorkerError(f"no answer for {limit} s, which is RayOptions(deadline=)")
                events.append(self._lose(Answer(worker, self._actors.replace(worker), None, error, lost=True)))
        return events

    def _silent_until(self, worker: RayWorker) -> float:
        """Return when a worker that does not answer counts as lost.

        While the consumer is busy, answers are not read.
        """
        limit = self._actors.options.deadline
        if limit is None or not worker.calls:
            return math.inf
        return max(worker.calls[0].sent, worker.last, self._asked) + limit

    def _take_in(self, answer: Answer) -> list[Event]:
        """Process the answer to a call."""
        (call,) = answer.calls
        packed, *buffers = answer.value
        rest = iter(buffers)
        for batch, said in zip(call.batches, cloudpickle.loads(packed), strict=True):
            kind, payload, metrics, seconds, count = said
            mine = list(islice(rest, count))
            batch.finish(kind, payload, BatchMetrics(*metrics), mine)
            batch.ended = kind == "end"
            if kind == "batch":
                nbytes = sum(buffer.nbytes for buffer in mine) + len(payload[0])
                self._measured.sizes.add(nbytes)
                self._measured.seconds.append(seconds)
                self._actors.count_batch(call.worker, seconds, metrics[0], nbytes)
        return [Done(batch) for batch in call.batches]

    def _lose(self, answer: Answer) -> Lost:
        """Return the event of a worker that does not answer: one of the batches it had started may be the cause."""
        worker, reason = answer.worker, " ".join(str(answer.error).split())
        why = f"worker {worker.number} on node {worker.node} was {'lost' if answer.lost else 'interrupted'} ({reason})"
        if self._turns:
            self._actors.close()
            why += (
                ", and with it the position of its copy of the dataset: an iterable dataset, or one with a state of "
                "its own, cannot go on without. Resume from the last state_dict()"
            )
            return Lost(worker.number, [], [], why)
        begun = [batch for call in answer.calls[:_AT_WORK] for batch in call.batches]
        most = max(sum(batch.blame.values()) for batch in begun)
        suspects = [batch for batch in begun if sum(batch.blame.values()) == most]
        why += " while it made " + " or ".join(f"batch {one.number}, samples {one.request.indices}" for one in suspects)
        return Lost(
            worker.number,
            [batch for call in answer.calls for batch in call.batches],
            [(batch, 0, 1.0) for batch in begun],
            why,
        )

    def replace(self, lost: Lost) -> list[PendingBatch]:
        """Return the batches that other workers must make; a replacement was already started."""
        return lost.batches

    def collect(self, batch: PendingBatch, number: int) -> BatchResult:
        """Return a batch in memory owned by the consumer; or its error.

        Raises:
            RingError: too little memory.
        """
        assert isinstance(batch, RayBatch)
        worker = batch.worker if self._turns else 0
        kind, payload, metrics, buffers = batch.take()
        if kind == "raise":
            return BatchResult(None, BatchMetrics(), number, worker, error=payload)
        if kind == "error":
            return BatchResult(None, BatchMetrics(), number, worker, error=rebuild(payload))
        start = time.perf_counter()
        data, state = payload
        try:
            value, way = self._memory.land(data, buffers)
        except RingError:
            raise
        except Exception as error:  # an object that cannot be unpickled
            return BatchResult(None, metrics, number, worker, error=error)
        metrics.hand_over += time.perf_counter() - start
        return BatchResult(value, metrics, number, worker, state, way)

    def culprit(self, first: PendingBatch | None, pending: Sequence[PendingBatch]) -> str:
        """Return the worker that has not answered, and its request."""
        for worker in self._actors.ready():
            if first is not None and any(first in call.batches for call in worker.calls):
                indices = first.request.indices[:8]
                return f": worker {worker.number} on node {worker.node} owes batch {first.number}, samples {indices}"
        return f": {len(self._actors.ready())} of {self._actors.count} workers have started"

    # The end.

    def drop(self, pending: Sequence[PendingBatch]) -> None:
        """End the epoch iterator and stop the workers."""
        if self._run == self._actors.run:
            self._actors.stop()

    def close(self, patience: float) -> None:
        """End the workers at once."""
        self._actors.close()
