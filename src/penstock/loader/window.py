"""`Window`: numbered requests in, results out in order, for every executor.

    requests -> number 0, 1, 2 ... -> worker k mod n, if the worker of a batch matters
                                -> or the worker with the least to do
                at most `depth` are open
    answers -> the open batch with the smallest number, once it is done -> consumer        in_order=False: any

Invariant: each batch is delivered once, in its place, as a value or as its error. Errors that the window itself raises
belong to no batch. After an interruption anywhere but in a wait nothing more is delivered, because the state may be
inconsistent.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from penstock.errors import PenstockError, WorkerError
from penstock.loader.executors.base import Began, Done, Event, Executor, Lost, PendingBatch
from penstock.loader.lookahead import Lookahead
from penstock.loader.messages import BatchRequest, BatchResult
from penstock.loader.snapshots import Snapshot

__all__ = ["ATTEMPTS", "CLOSED", "INTERRUPTED", "DispatchPolicy", "Window", "is_timeout", "timed_out"]

CLOSED = "this iterator ended early because its DataLoader was closed: start a new one with iter(loader)"
"""Message of the `WorkerError` for a consumer whose loader was closed."""

ATTEMPTS = 3
"""Number of workers that may die at one sample."""

INTERRUPTED = "this iterator of the DataLoader was interrupted: start a new one with iter(loader)"
"""Message for a consumer that was interrupted where the state may be inconsistent."""


class DispatchPolicy(NamedTuple):
    """How batches are assigned and delivered.

    Attributes:
        turns: worker k mod n makes batch k, for streams and for objects with a state.
        stream: each worker has an iterator and makes its next batch.
        in_order: False delivers any finished batch.
        timeout: seconds to wait for a batch; 0 waits forever.
        restart: whether a lost worker is replaced.
    """

    turns: bool
    stream: bool
    in_order: bool
    timeout: float
    restart: bool = False


class Window:
    """The batches of one epoch iterator.

    Args:
        requests: requests for batches, advanced in the consumer's thread. An exception from it is raised after the
            batches that were planned before it.
        executor: makes the batches.
        policy: how they are assigned and delivered.
        first: worker of the first batch, if workers take turns.

    Attributes:
        first_states: snapshots of users' objects right after their initialization, by worker, for workers with a state.
            Complete when a batch is delivered; its reader removes the entries.
        ready_on_request: number of finished batches at the consumer's last request.

    `close` and `end` may be called from any thread, even while another one waits for a batch.
    """

    def __init__(
        self, requests: Iterator[BatchRequest], executor: Executor, policy: DispatchPolicy, *, first: int = 0
    ) -> None:
        self.executor = executor
        self._policy = policy
        self._requests = Lookahead(requests)
        self._turn = first
        # Workers whose streams have ended.
        self._ended: set[int] = set()
        self._numbers = itertools.count()
        # Batches in flight, ordered by number.
        self._open: dict[int, PendingBatch] = {}
        # Open batches to submit again.
        self._again: deque[PendingBatch] = deque()
        # Number of open batches that are done.
        self._ready = 0
        self._handed_out = 0
        self._over = False
        # Why the iterator ended early.
        self._why: str | None = None
        # First snapshots by worker, until a batch is delivered.
        self._begun: dict[int, Snapshot | None] = {}
        self._waits_for_first_states = executor.tells_begin
        self.first_states: dict[int, Snapshot] = {}
        self.ready_on_request = 0
        # Whether batches are made ahead of their request. The depth itself changes, and costs more to compute.
        self._ahead = executor.depth > 0
        with executor.turn():
            if self._ahead:
                self._fill()
            else:
                # An inline executor has already started its epoch.
                self._take_in(executor.arrived())
            if len(self._begun) == executor.workers:
                self._note_first_states()

    # Interface for the consumer.

    def next(self) -> BatchResult:
        """Return the next batch, or the exception raised in its place as `BatchResult.error`.

        Raises:
            StopIteration: there are no more batches.
            WorkerError: no batch arrived in time, or none will: workers have died, or the loader was closed.
            Exception: an error of the requests, after the last batch.
        """
        if self._why is not None:
            raise WorkerError(self._why)
        if self._over:
            raise StopIteration
        if (error := self.executor.check()) is not None:
            raise error
        try:
            answer = self._advance() if self._ahead else self._make_next()
            if isinstance(answer, BatchResult):
                return answer
        # An exception of a signal handler, or an unexpected failure.
        except BaseException as broken:
            if not self.executor.waiting:
                self._break_off(broken)
            self.executor.waiting = False
            raise
        try:
            raise answer
        finally:
            # The traceback of the exception refers to this frame.
            del answer

    def poll(self) -> bool:
        """Return whether `next` would return at once. False if batches are made on request."""
        if self._why is not None or self._over or not self._ahead or self.executor.check() is not None:
            return False
        try:
            with self.executor.turn():
                self._look()
                return self._head() is not None
        except BaseException as broken:
            self._break_off(broken)
            raise

    @property
    def depth(self) -> int:
        """Maximum number of batches in flight at the moment."""
        return self.executor.depth

    @property
    def processes(self) -> list[Any] | None:
        """The worker processes; None if this machine runs none."""
        return self.executor.processes

    def close(self) -> None:
        """Stop making batches. Idempotent."""
        with self.executor.turn():
            self._close()

    def end(self, patience: float) -> None:
        """End the workers within ``patience`` seconds: the loader is closed. A waiting consumer gets `WorkerError`."""
        if not self._over:
            self._why = self._why or CLOSED
        self.executor.close(patience)
        # Another thread may be inside user code that takes long. It closes the window when it returns.
        turn = self.executor.turn()
        if turn.acquire(blocking=False):
            try:
                self._close()
            finally:
                turn.release()

    # The default argument stays valid when modules are already cleared at exit.
    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ending() and not getattr(self, "_over", True):
            self.close()

    def _advance(self) -> BatchResult | Exception:
        """Wait for the next batch. Return an exception that `next` should raise; a raised one is an interruption."""
        executor, timeout = self.executor, self._policy.timeout
        deadline = time.monotonic() + timeout if timeout else None
        turn, news, waited = executor.turn(), None, False
        while True:
            with turn:
                if not waited:
                    self._look()
                elif not executor.over:
                    self._take_in(executor.receive(news))
                if self._why is not None or executor.over:
                    return self._end_early()
                result = self._collect_head()
                if result is None and self._ready >= executor.workers and executor.idle:
                    executor.ahead += executor.workers
                self._fill()
                if not self._open and self._requests.over:
                    if result is None:
                        return self._finish()
                    executor.drained()
                if result is not None:
                    return result
                if waited and deadline is not None and time.monotonic() >= deadline:
                    return self._late()
            news, waited = executor.wait(deadline), True

    def _make_next(self) -> BatchResult | Exception:
        """Make the next batch with an inline executor. Return an exception that `next` should raise."""
        executor = self.executor
        with executor.turn():
            request = self._requests.next()
            if request is not None:
                batch = executor.pending(next(self._numbers), request)
                executor.submit([batch], 0)
                # A signal handler may have closed the loader meanwhile.
                if self._over or self._why is not None:
                    return self._finish()
                if not (batch.ended and self._policy.stream):
                    return executor.collect(batch, batch.number)
                self._end_worker(0)
            return self._finish()

    def _look(self) -> None:
        """Take in results that arrived while the consumer was busy. After the last batch, workers may end normally."""
        if (self._open or not self._requests.over) and not self.executor.over:
            self._take_in(self.executor.arrived())
        self.ready_on_request = self._ready

    def _end_early(self) -> WorkerError:
        """Stop delivering, because a worker has died or another thread has ended all workers."""
        self._why = self._why or CLOSED
        self._close()
        return WorkerError(self._why)

    def _finish(self) -> Exception:
        # A signal handler has closed the loader.
        if self._why is not None or self.executor.over:
            return self._end_early()
        error, self._requests.error = self._requests.error, None
        self._close()
        return StopIteration() if error is None else error

    def _late(self) -> WorkerError:
        pending = list(self._open.values())
        first = pending[0] if pending else None
        return WorkerError(timed_out(self._policy.timeout) + self.executor.culprit(first, pending))

    def _break_off(self, error: BaseException) -> None:
        """Stop delivering after an interruption. Open batches count as undelivered.

        Raises:
            WorkerError: the loader was closed meanwhile, perhaps by a signal handler in this thread, which caused the
                error.
        """
        closed = self._why is not None and isinstance(error, Exception)
        self._why = self._why or (str(error) if isinstance(error, PenstockError) else INTERRUPTED)
        self.executor.abort()
        self.close()
        if closed:
            raise WorkerError(self._why) from error

    def _close(self) -> None:
        if self._over:
            return
        self._over = True
        self._requests.end()
        pending = list(self._open.values())
        self._open.clear()
        self._again.clear()
        self._ready = 0
        self.executor.drop(pending)

    # Submitting.

    def _fill(self) -> None:
        """Submit as many batches as are allowed."""
        executor = self.executor
        while self._again and (worker := executor.choose(range(executor.workers), None)) is not None:
            self._take_in(executor.submit([self._again.popleft()], worker))
        most = executor.depth
        group = executor.group(most) if most > 1 else 1
        # If workers take turns, each gets a group of its own batches, from several rounds.
        together = group * executor.workers if self._policy.turns and group > 1 else group
        while len(self._open) < most and not self._requests.over and executor.has_room(len(self._open)):
            if group > 1 and self._open and len(self._open) + together > most:
                # Wait until a whole group fits.
                break
            shares = self._next_batches(together, most)
            if not shares:
                break
            for worker, batches in shares.items():
                self._take_in(executor.submit(batches, worker))
        if executor.planned:
            self._requests.plan(executor.planned - len(self._open))

    def _next_batches(self, count: int, most: int) -> dict[int, list[PendingBatch]]:
        """Return the next batches by worker, at most ``count``. There must be room for the first one."""
        executor, turns = self.executor, self._policy.turns
        shares: dict[int, list[PendingBatch]] = {}
        worker = self._choose(most)
        while worker is not None and (request := self._requests.next()) is not None:
            batch = executor.pending(next(self._numbers), request)
            batch.worker = worker
            self._open[batch.number] = batch
            shares.setdefault(worker, []).append(batch)
            count -= 1
            if not count or not executor.has_room(len(self._open)):
                break
            if turns:
                worker = self._choose(most)
        return shares

    def _choose(self, most: int) -> int | None:
        """Return the worker for the next batch; None if no worker should get more."""
        executor, policy, count = self.executor, self._policy, self.executor.workers
        # Out of order, a stuck worker must not hold more than its share.
        share = None if policy.in_order else max(1, most // count)
        if not policy.turns:
            return executor.choose(range(count), share)
        if not policy.in_order:
            workers = [n % count for n in range(self._turn, self._turn + count) if n % count not in self._ended]
            worker = executor.choose(workers, share) if workers else None
            self._turn = self._turn if worker is None else worker + 1
            return worker
        for _ in range(count):
            worker, self._turn = self._turn % count, self._turn + 1
            if worker not in self._ended:
                return worker
        return None

    # Receiving.

    def _take_in(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Done):
                self._note_done(event.batch)
            elif isinstance(event, Began):
                self._begun[event.worker] = event.snapshot
            else:
                self._lose(event)

    def _note_done(self, batch: PendingBatch) -> None:
        if self._open.get(batch.number) is not batch:
            # The batch was dropped meanwhile.
            return
        if batch.ended and self._policy.stream:
            del self._open[batch.number]
            self._end_worker(batch.worker)
        else:
            batch.done = True
            self._ready += 1

    def _end_worker(self, worker: int) -> None:
        """Submit nothing more to a worker whose stream has ended."""
        self._ended.add(worker)
        if len(self._ended) == self.executor.workers:
            self._requests.end()

    def _lose(self, lost: Lost) -> None:
        """Continue without a lost worker if others can make its batches."""
        if self._why is not None:
            # It ended together with the others.
            return
        for batch, key, share in lost.blame:
            batch.blame[key] = batch.blame.get(key, 0) + share
        worn_out = [batch for batch in lost.batches if round(max(batch.blame.values(), default=0), 6) >= ATTEMPTS]
        if worn_out or not self._policy.restart:
            self._why = f"{lost.why}{', as were workers before it' if worn_out else ''}."
            self.executor.abort()
            return
        self._again += self.executor.replace(lost)

    def _head(self) -> PendingBatch | None:
        """Return the next batch to deliver, if it is done."""
        for batch in self._open.values():
            if batch.done:
                return batch if not self._waits_for_first_states or self._may_deliver(batch) else None
            if self._policy.in_order:
                break
        return None

    def _may_deliver(self, batch: PendingBatch) -> bool:
        """Return whether a batch may be delivered.

        The first batch of a worker with a state waits for the first snapshots of all workers, because a state must
        include workers that have delivered nothing yet.
        """
        begun = self._begun
        if batch.worker not in begun or (begun[batch.worker] is not None and len(begun) < self.executor.workers):
            return False
        self._note_first_states()
        return True

    def _note_first_states(self) -> None:
        self._waits_for_first_states = False
        self.first_states = {worker: first for worker, first in self._begun.items() if first is not None}

    def _collect_head(self) -> BatchResult | None:
        """Return the next batch, if it is done."""
        if not self._ready or (batch := self._head()) is None:
            return None
        del self._open[batch.number]
        self._ready -= 1
        number = self._handed_out if self._policy.stream else batch.number
        self._handed_out += 1
        return self.executor.collect(batch, number)


_TIMED_OUT = "DataLoader timed out after"


def timed_out(seconds: float) -> str:
    """Return torch's message for a timeout."""
    return f"{_TIMED_OUT} {seconds} seconds"


def is_timeout(error: Exception) -> bool:
    """Return whether an error is the timeout of `Window.next`."""
    return isinstance(error, WorkerError) and str(error).startswith(_TIMED_OUT)
