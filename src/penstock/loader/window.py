"""`Window`: numbered requests in, results out in order, whoever makes them.

    requests -> number 0, 1, 2 ... -> worker k mod n, where it matters who makes a batch
                                -> or the worker with the least to do
                at most `depth` are open
    answers -> the open batch with the smallest number, once it is done -> consumer        in_order=False: any

Invariant: a batch is handed out once, in its place, as a value or as its error. What the window itself raises belongs
to no batch. After an interruption anywhere but in a wait nothing more is handed out, since something may be half done.
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
from penstock.loader.interrupts import is_of_signal_handler
from penstock.loader.lookahead import Lookahead
from penstock.loader.messages import BatchRequest, BatchResult
from penstock.loader.snapshots import Snapshot

__all__ = ["ATTEMPTS", "CLOSED", "INTERRUPTED", "DispatchPolicy", "Window", "is_timeout", "timed_out"]

CLOSED = "this iterator ended before its pass was over, since its DataLoader was closed: begin a new one"
"""What a `WorkerError` tells a consumer whose loader was closed."""

ATTEMPTS = 3
"""How many workers may die at a sample."""

INTERRUPTED = "this iterator of the DataLoader was interrupted: begin a new one"
"""What it tells a consumer that was interrupted where something may be half done."""


class DispatchPolicy(NamedTuple):
    """How batches are handed out.

    Attributes:
        turns: batch k is made by worker k mod n: streams, and objects with a state of their own.
        stream: each worker holds an iterator, which is asked for what comes next.
        in_order: False hands out whatever is ready.
        timeout: seconds to wait for a batch; 0 for ever.
        restart: whether another worker takes the place of one that is gone.
    """

    turns: bool
    stream: bool
    in_order: bool
    timeout: float
    restart: bool = False


class Window:
    """The batches of one pass.

    Args:
        requests: batches to be made; pulled from in the consumer's thread. An error of theirs is raised behind the
            batches that were planned before it.
        executor: makes the batches.
        policy: how they are handed out.
        first: worker of the first batch, where workers take turns.

    Attributes:
        first_states: snapshots of users' objects right after their beginning, by worker: of those that have a state.
            Complete once a batch is handed out; whoever has noted them takes them out.
        ready_when_asked: batches that were made and not handed out when the consumer asked last.

    `close` and `end` may be called in any thread, while another one waits for a batch, too.
    """

    def __init__(
        self, requests: Iterator[BatchRequest], executor: Executor, policy: DispatchPolicy, *, first: int = 0
    ) -> None:
        self.executor = executor
        self._policy = policy
        self._requests = Lookahead(requests)
        self._turn = first
        self._ended: set[int] = set()  # workers whose streams have come to their end
        self._numbers = itertools.count()
        self._open: dict[int, PendingBatch] = {}  # in the order of their numbers
        self._again: deque[PendingBatch] = deque()  # open batches to be asked for once more
        self._ready = 0  # open batches that are done
        self._handed_out = 0
        self._over = False
        self._why: str | None = None  # it ended early
        self._begun: dict[int, Snapshot | None] = {}  # first snapshots, until a batch is handed out
        self._waits_for_begun = executor.tells_begin
        self.first_states: dict[int, Snapshot] = {}
        self.ready_when_asked = 0
        with executor.turn():
            if executor.depth:
                self._fill()
            else:  # it has begun its pass by now
                self._take_in(executor.arrived())
                self._note_first_states()

    # For the consumer.

    def next(self) -> BatchResult:
        """Return the next batch; or, as `BatchResult.error`, what was raised in its place.

        Raises:
            StopIteration: there are no more.
            WorkerError: no batch came in time, or none will come: workers have died, or the loader was closed.
            Exception: of the requests, behind the last batch.
        """
        if self._why is not None:
            raise WorkerError(self._why)
        if self._over:
            raise StopIteration
        if (error := self.executor.check()) is not None:
            raise error
        try:
            answer = self._advance() if self.executor.depth else self._make_next()
            if isinstance(answer, BatchResult):
                return answer
        except BaseException as broken:  # not ours: of a signal handler, or a breakdown
            if not self.executor.waiting:
                self._break_off(broken)
            self.executor.waiting = False
            raise
        try:
            raise answer
        finally:
            del answer  # its traceback holds this frame

    def poll(self) -> bool:
        """Return whether `next` would not wait, as the next batch is there. It is not where each is made when asked."""
        if self._why is not None or self._over or not self.executor.depth or self.executor.check() is not None:
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
        """Batches that may be in flight at the moment."""
        return self.executor.depth

    @property
    def processes(self) -> list[Any] | None:
        """The worker processes; None if there are none on this machine."""
        return self.executor.processes

    def close(self) -> None:
        """Want nothing more. Idempotent."""
        with self.executor.turn():
            self._close()

    def end(self, patience: float) -> None:
        """End the workers in so many seconds: the loader is closed. A consumer that waits gets a `WorkerError`."""
        if not self._over:
            self._why = self._why or CLOSED
        self.executor.close(patience)
        # Another thread may be inside, at something of the user's that takes its time: it ends when it is back.
        turn = self.executor.turn()
        if turn.acquire(blocking=False):
            try:
                self._close()
            finally:
                turn.release()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:  # modules may be empty by then
        if not _ending() and not getattr(self, "_over", True):
            self.close()

    def _advance(self) -> BatchResult | Exception:
        """Wait for the next batch. What is to be raised is returned: other exceptions interrupt."""
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
        """Have the next batch made, where each is made when it is asked for. What is to be raised is returned."""
        executor = self.executor
        with executor.turn():
            request = self._requests.next()
            if request is not None:
                batch = executor.pending(next(self._numbers), request)
                executor.submit([batch], 0)
                if self._over or self._why is not None:  # a handler of a signal has closed the loader meanwhile
                    return self._finish()
                if not (batch.ended and self._policy.stream):
                    return executor.collect(batch, batch.number)
                self._end_worker(0)
            return self._finish()

    def _look(self) -> None:
        """Note what has come while the consumer was busy. Behind the last batch, workers may have ended rightly."""
        if (self._open or not self._requests.over) and not self.executor.over:
            self._take_in(self.executor.arrived())
        self.ready_when_asked = self._ready

    def _end_early(self) -> WorkerError:
        """Hand out nothing more: a worker has died, or another thread has ended them all."""
        self._why = self._why or CLOSED
        self._close()
        return WorkerError(self._why)

    def _finish(self) -> Exception:
        if self._why is not None or self.executor.over:  # a handler of a signal has closed the loader
            return self._end_early()
        error, self._requests.error = self._requests.error, None
        self._close()
        return StopIteration() if error is None else error

    def _late(self) -> WorkerError:
        pending = list(self._open.values())
        first = pending[0] if pending else None
        return WorkerError(timed_out(self._policy.timeout) + self.executor.culprit(first, pending))

    def _break_off(self, error: BaseException) -> None:
        """Hand out nothing more after an interruption; what is open was not had.

        Raises:
            WorkerError: the loader was closed meanwhile, by a handler of a signal in this thread, too. The error comes
                of that.
        """
        closed = self._why is not None and isinstance(error, Exception) and not is_of_signal_handler(error)
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

    # Handing out.

    def _fill(self) -> None:
        """Have as many batches made as may be."""
        executor = self.executor
        while self._again and (worker := executor.choose(range(executor.workers), None)) is not None:
            self._take_in(executor.submit([self._again.popleft()], worker))
        most = executor.depth
        group = executor.group(most) if most > 1 else 1
        # Where workers take turns, each gets its own batches of so many rounds.
        together = group * executor.workers if self._policy.turns and group > 1 else group
        while len(self._open) < most and not self._requests.over and executor.has_room(len(self._open)):
            if group > 1 and self._open and len(self._open) + together > most:
                break  # a little later, then all together
            shares = self._next_batches(together, most)
            if not shares:
                break
            for worker, batches in shares.items():
                self._take_in(executor.submit(batches, worker))
        if executor.planned:
            self._requests.plan(executor.planned - len(self._open))

    def _next_batches(self, count: int, most: int) -> dict[int, list[PendingBatch]]:
        """Return the next batches, at most so many, by the worker that makes them. There is room for the first one."""
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
        """Return who makes the next batch; None if nobody should be given more."""
        executor, policy, count = self.executor, self._policy, self.executor.workers
        # Out of order, a worker that is stuck holds its share and no more.
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

    # Taking in.

    def _take_in(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Done):
                self._note_done(event.batch)
            elif isinstance(event, Began):
                self._begun[event.worker] = event.snapshot
            elif isinstance(event, Lost):
                self._lose(event)
            else:
                self._again += event.batches

    def _note_done(self, batch: PendingBatch) -> None:
        if self._open.get(batch.number) is not batch:
            return  # it was dropped meanwhile
        if batch.ended and self._policy.stream:
            del self._open[batch.number]
            self._end_worker(batch.worker)
        else:
            batch.done = True
            self._ready += 1

    def _end_worker(self, worker: int) -> None:
        """Ask a worker for nothing more: its stream has come to its end."""
        self._ended.add(worker)
        if len(self._ended) == self.executor.workers:
            self._requests.end()

    def _lose(self, lost: Lost) -> None:
        """Go on without a worker that is gone, if others can make what it owed."""
        if self._why is not None:
            return  # it ended with the others
        for batch, key, share in lost.blame:
            batch.blame[key] = batch.blame.get(key, 0) + share
        worn_out = [batch for batch in lost.batches if round(max(batch.blame.values(), default=0), 6) >= ATTEMPTS]
        if not self._policy.restart or (worn_out and not self.executor.isolates):
            self._why = f"{lost.why}{', as were workers before it' if worn_out else ''}."
            self.executor.abort()
            return
        for batch in worn_out:
            self.executor.isolate(batch)
            self._note_done(batch)
        self._again += self.executor.replace(lost)

    def _head(self) -> PendingBatch | None:
        """Return the batch to be handed out next, if it is done."""
        for batch in self._open.values():
            if batch.done:
                return batch if not self._waits_for_begun or self._all_begun(batch) else None
            if self._policy.in_order:
                break
        return None

    def _all_begun(self, batch: PendingBatch) -> bool:
        """Return whether a batch may be handed out. The first one of a worker with a state waits for the first
        snapshots of all workers: a state has to say where those are that nothing was had of.
        """
        begun = self._begun
        if batch.worker not in begun or (begun[batch.worker] is not None and len(begun) < self.executor.workers):
            return False
        self._note_first_states()
        return True

    def _note_first_states(self) -> None:
        self._waits_for_begun = False
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
    """Return torch's words."""
    return f"{_TIMED_OUT} {seconds} seconds"


def is_timeout(error: Exception) -> bool:
    """Return whether an error is that of `Window.next` when no batch came in time."""
    return isinstance(error, WorkerError) and str(error).startswith(_TIMED_OUT)
