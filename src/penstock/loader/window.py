"""`Window`: numbered requests in, results out in order, for every executor.

    requests -> number 0, 1, 2 ... -> worker k mod n, if the worker of a batch matters
                                -> or the worker with the least to do
                at most `Flow.ahead` are open
    results -> the open batch with the smallest number, once it is done -> consumer        in_order=False: any

Invariant: each batch is delivered once, in its place, as a value or as its error. Errors that the window itself raises
belong to no batch. After an interruption anywhere but in a wait nothing more is delivered, because the state may be
inconsistent.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.errors import PenstockError, WorkerError
from penstock.loader.config import LoaderConfig
from penstock.loader.executors.base import Began, Event, Executor, Lost, Start
from penstock.loader.flow import Flow
from penstock.loader.messages import BatchRequest, BatchResult
from penstock.loader.user_state import Snapshot
from penstock.plan.stream import EpochStart

__all__ = ["ATTEMPTS", "CLOSED", "INTERRUPTED", "SHUTDOWN_TIMEOUT_S", "DispatchPolicy", "Window", "is_timeout"]

CLOSED = "this iterator ended early because its DataLoader was closed: start a new one with iter(loader)"
"""Message of the `WorkerError` for a consumer whose loader was closed."""

ATTEMPTS = 3
"""Number of workers that may die at one sample."""

INTERRUPTED = "this iterator of the DataLoader was interrupted: start a new one with iter(loader)"
"""Message for a consumer that was interrupted where the state may be inconsistent."""

SHUTDOWN_TIMEOUT_S = 5.0
"""Seconds that all workers together have to end by themselves."""

_DEATH_CLOSE_TIMEOUT_S = 0.5
"""The same when an error must be reported at once."""

_LOOK_S = 1e-3
"""While the next batch is at hand, the executor is asked for others after so many seconds: that is a system call."""

_runs = itertools.count(1)


class DispatchPolicy(NamedTuple):
    """How batches are assigned to workers.

    Attributes:
        turns: worker k mod n makes batch k, for streams and for objects with a state.
        stream: each worker has an iterator and makes its next batch.
        restart: whether a lost worker is replaced.
        persistent: whether the workers stay after this iterator.
    """

    turns: bool
    stream: bool
    restart: bool = False
    persistent: bool = False


@dataclass(slots=True, eq=False)
class _Pending:
    """A batch in flight."""

    request: BatchRequest
    worker: int
    result: BatchResult | None = None
    blame: dict[int, float] = field(default_factory=dict)
    """Deaths of workers, by the key of the sample that may be the cause."""


class Window:
    """The batches of one epoch iterator.

    Args:
        requests: requests for batches, advanced in the consumer's thread. An exception from it is raised after the
            batches that were planned before it.
        executor: makes the batches.
        flow: how far ahead.
        policy: how batches are assigned to workers.
        epoch: the epoch for streams; None for other datasets.
        resume: returns the state that a worker's objects resume from; None if they start fresh.
        first: worker of the first batch, if workers take turns.
        restarted: called for each worker that is replaced.

    Attributes:
        first_states: snapshots of users' objects right after their initialization, by worker, for workers with a state.
            Complete when a batch is delivered; its reader removes the entries.
        ready_on_request: number of finished batches at the consumer's last request.
        depth: number of batches that may be in flight, 0 if each is made on demand.

    `close` and `end` may be called from any thread, even while another one waits for a batch.
    """

    def __init__(
        self,
        requests: Iterator[BatchRequest],
        executor: Executor,
        flow: Flow,
        policy: DispatchPolicy,
        *,
        epoch: EpochStart = None,
        resume: Callable[[int], Any] = lambda _: None,
        first: int = 0,
        restarted: Callable[[], object] = lambda: None,
    ) -> None:
        self.executor = executor
        self._flow = flow
        self._policy = policy
        self._epoch = epoch
        self._restarted = restarted
        self._run = next(_runs)
        self._requests: Iterator[BatchRequest] | None = requests  # None at its end
        self._error: Exception | None = None  # that ended the requests
        self._turn = first
        self._numbers = itertools.count()
        self._open: dict[int, _Pending] = {}  # batches in flight, ordered by number
        self._ready = 0  # number of open batches that are done
        self._load: list[int] = []  # number of unfinished batches of each worker
        self._ended: set[int] = set()  # workers whose streams have ended
        self._handed_out = 0
        self._over = False
        self._why: str | None = None  # why the iterator ended early
        self._following: Executor | None = None  # that makes what is not asked for yet
        # First snapshots by worker, until a batch is delivered.
        self._begun: dict[int, Snapshot | None] = {}
        self._waits_for_first_states = executor.tells_begin
        self.first_states: dict[int, Snapshot] = {}
        self.ready_on_request = 0
        self._looked = 0.0  # when the executor was last asked what has happened
        self._enough = 0  # batches in flight with which no others fit
        with executor.lock:
            # Workers that have died since the last run are replaced. What was made for that run is dropped.
            executor.wait(executor.run, 0.0)
            executor.resize(flow.config.workers)
            executor.run = self._run
            self._start_all(resume)
            flow.begin()
            self.depth = flow.ahead()[0]
            if self.depth:
                self._fill()
            # Inline and in threads, the first states are known by now.
            self._take_in(executor.wait(self._run, 0.0))
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
        if self._over and self._why is None:
            raise StopIteration
        executor = self.executor
        usual = executor.run == self._run and not executor.closed and self._why is None
        if not (usual and executor.pid == os.getpid()) and (error := self._why_not()) is not None:
            raise error
        try:
            if self._following is not None and not self._open:
                self.executor, self._following = self._following, None
                self.executor.run, self._load = self._run, [0]
                executor.close(SHUTDOWN_TIMEOUT_S)
            answer = self._advance()
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
        if self._over or not self.depth or self._why_not() is not None:
            return False
        try:
            with self.executor.lock:
                self._take_in(self.executor.wait(self._run, 0.0) if self._open else ())
                self.ready_on_request = self._ready
                return self._head() is not None
        except BaseException as broken:
            self._break_off(broken)
            raise

    def resize(self, config: LoaderConfig, inline: Executor | None = None) -> None:
        """Make the next batches with the number of workers of a config, for objects without states.

        Args:
            config: the loader's settings; the kind of executor stays.
            inline: makes them when the batches in flight have been delivered, if there are no workers any more.

        Raises:
            Exception: an error of starting workers. Those before go on.
        """
        executor = self.executor
        with executor.lock:
            if self._requests is None or self._over:
                return
            before = executor.workers
            if inline is None:
                try:
                    executor.resize(config.workers)
                except BaseException:
                    executor.resize(before)
                    raise
            self._flow.config, self._following = config, inline
            self.depth, self._enough = self._flow.ahead()[0], len(self._open)
            if inline is None:
                self._start_all(lambda worker: None)

    def close(self) -> None:
        """Stop making batches. Idempotent. Does nothing in a fork, where another thread may hold the lock forever."""
        if self.executor.pid != os.getpid():
            return
        with self.executor.lock:
            if self._over:
                return
            self._over = True
            self._requests = None
            self._open.clear()
            self._ready = 0
            executor, policy = self.executor, self._policy
            if executor.run == self._run and not (policy.persistent and policy.stream):
                executor.run = 0
            if not policy.persistent:
                executor.close(SHUTDOWN_TIMEOUT_S)

    def end(self, patience: float) -> None:
        """End the workers within ``patience`` seconds: the loader is closed. A waiting consumer gets `WorkerError`."""
        if not self._over:
            self._why = self._why or CLOSED
        self.executor.close(patience)
        # Another thread may be inside user code that takes long. It closes the window when it returns.
        lock = self.executor.lock
        if lock.acquire(blocking=False):
            try:
                self.close()
            finally:
                lock.release()

    # The default argument stays valid when modules are already cleared at exit.
    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ending() and not getattr(self, "_over", True):
            self.close()

    def _start_all(self, resume: Callable[[int], Any]) -> None:
        """Start the run in all workers; again in those that have started it."""
        executor, threads = self.executor, self._flow.config.threads
        for worker in range(executor.workers):
            executor.submit([Start(self._run, self._epoch, resume(worker), threads)], worker)
        self._load += [0] * (executor.workers - len(self._load))

    def _why_not(self) -> Exception | None:
        """Return why no more batches can be made; None if they can."""
        if self._why is not None:
            return WorkerError(self._why)
        executor = self.executor
        run, ended = executor.run, executor.closed and not self._policy.persistent
        # At the end of the program, nobody closes an executor, but no run is wanted.
        if executor.pid != os.getpid() or ended or (not run and not executor.closed):
            why = "it was closed, or this is a fork of its process"
            return WorkerError(f"the workers of this DataLoader have ended or were taken over: {why}")
        if run != self._run:
            return RuntimeError("a newer iterator of this DataLoader has taken over its workers")
        return None

    def _advance(self) -> BatchResult | Exception:
        """Wait for the next batch. Return an exception that `next` should raise; a raised one is an interruption."""
        executor, timeout, now = self.executor, self._flow.config.timeout, time.monotonic()
        deadline = now + timeout if timeout else None
        events: Sequence[Event] | None = None
        while True:
            with executor.lock:
                asked = events is not None or not self._ready or now - self._looked > _LOOK_S
                if events is not None:
                    self._take_in(events)
                else:
                    if asked:
                        self._looked = now
                    # After the last batch, workers may end normally. Without workers, there is no other news.
                    if asked and (self._open or (self.depth and self._requests is not None)):
                        self._take_in(executor.wait(self._run, 0.0))
                    self.ready_on_request = self._ready
                if self._why is not None or executor.closed:
                    return self._finish()
                if executor.run != self._run and (taken_over := self._why_not()) is not None:
                    return taken_over
                result = self._collect_head()
                late = result is None and asked and self._ready >= executor.workers
                if late and not all(self._load[: executor.workers]):
                    self._flow.stall()
                    self._enough = len(self._open)
                if len(self._open) <= self._enough and (self.depth or result is None):
                    self._fill()
                if not self._open and self._requests is None:
                    if result is None:
                        return self._finish()
                    if not self._policy.persistent:
                        # They end while the consumer uses the last batch.
                        executor.resize(0)
                if result is not None:
                    return result
                if events is not None and deadline is not None and time.monotonic() >= deadline:
                    return self._late()
            events = executor.wait(self._run, deadline)

    def _finish(self) -> Exception:
        """Stop delivering, at the end, or because a worker has died or the loader was closed."""
        if self.executor.closed:
            self._why = self._why or CLOSED
        self.close()
        if self._why is not None:
            return WorkerError(self._why)
        error, self._error = self._error, None
        return StopIteration() if error is None else error

    def _late(self) -> WorkerError:
        text = f"{_TIMED_OUT} {self._flow.config.timeout} seconds"
        for pending in self._open.values():
            if pending.result is None:
                worker, processes = pending.worker, self.executor.processes
                pid = f" (pid {processes[worker].pid})" if processes is not None and worker < len(processes) else ""
                where = self._whereabouts(worker)
                if where is None:
                    pending.request.unpack()
                    where = f"owes batch {pending.request.number}, samples {pending.request.indices[:8]}"
                return WorkerError(f"{text}: worker {worker}{pid} {where}")
        return WorkerError(text)

    def _whereabouts(self, worker: int) -> str | None:
        """Return the samples that a worker's threads are loading, or were loading when it died; None if unknown."""
        places, where = [], self.executor.where(worker)
        if where is None:
            return None
        for key, batch in where:
            pending = self._open.get(batch - 1)
            if pending is not None:
                pending.request.unpack()
            if pending is not None and key in pending.request.keys:
                index = pending.request.indices[pending.request.keys.index(key)]
                places.append(f"at sample {index!r}")
            elif batch:
                places.append(f"at batch {batch - 1} of this iterator")
        return f"was {' and '.join(places) or 'at no sample'}"

    def _break_off(self, error: BaseException) -> None:
        """Stop delivering after an interruption. Open batches count as undelivered.

        Raises:
            WorkerError: the loader was closed meanwhile, perhaps by a signal handler in this thread, which caused the
                error.
        """
        closed = self._why is not None and isinstance(error, Exception)
        self._why = self._why or (str(error) if isinstance(error, PenstockError) else INTERRUPTED)
        self.executor.close(_DEATH_CLOSE_TIMEOUT_S)
        self.close()
        if closed:
            raise WorkerError(self._why) from error

    # Submitting.

    def _fill(self) -> None:
        """Submit as many batches as are allowed; one, if each is made on demand."""
        workers = self.executor.workers
        most, group = self._flow.ahead() if self.depth else (1, 1)
        self.depth = self.depth and most
        group = max(1, min(group, most // (2 * workers))) if group > 1 and self._requests is not None else 1
        # If workers take turns, each gets a group of its own batches, from several rounds.
        together = group * workers if self._policy.turns and group > 1 else group
        while len(self._open) < most and self._requests is not None:
            if group > 1 and self._open and len(self._open) + together > most:
                # Wait until a whole group fits.
                break
            shares: dict[int, list[BatchRequest]] = {}
            worker, left = self._choose(most) if self.depth else 0, together
            while worker is not None and left and self._requests is not None:
                try:
                    request = next(self._requests, None)
                except Exception as error:
                    self._error, request = error, None
                if request is None:
                    self._requests = None
                    break
                request.run, request.number = self._run, next(self._numbers)
                self._open[request.number] = _Pending(request, worker)
                self._load[worker] += 1
                shares.setdefault(worker, []).append(request)
                left -= 1
                if self._policy.turns and left:
                    worker = self._choose(most)
            if not shares:
                break
            for worker, requests in shares.items():
                self.executor.submit(requests, worker)
        self._enough = max(0, most - together)

    def _choose(self, most: int) -> int | None:
        """Return the worker for the next batch; None if no worker should get more."""
        in_order, count = self._flow.config.in_order, self.executor.workers
        # Those that are to end may have batches left.
        load = self._load[:count]
        if not self._policy.turns:
            worker = load.index(min(load))
        elif in_order:
            for _ in range(count):
                worker, self._turn = self._turn % count, self._turn + 1
                if worker not in self._ended:
                    return worker
            return None
        else:
            workers = [n % count for n in range(self._turn, self._turn + count) if n % count not in self._ended]
            if not workers:
                return None
            worker = min(workers, key=load.__getitem__)
        # Out of order, a stuck worker must not hold more than its share.
        if not in_order and load[worker] >= max(1, most // count):
            return None
        self._turn = worker + 1
        return worker

    # Receiving.

    def _take_in(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, BatchResult):
                pending = self._open[event.number]
                self._load[pending.worker] -= 1
                if event.ended and self._policy.stream:
                    del self._open[event.number]
                    self._ended.add(pending.worker)
                    if len(self._ended) == self.executor.workers:
                        self._requests = None
                else:
                    pending.result = event
                    self._ready += 1
            elif isinstance(event, Began):
                self._begun[event.worker] = event.snapshot
            # After one that ended the iterator, others are not replaced.
            elif self._why is None:
                self._lose(event)

    def _lose(self, lost: Lost) -> None:
        """Continue without a lost worker if another one can make its batches."""
        worker, executor = lost.worker, self.executor
        mine = [pending for pending in self._open.values() if pending.worker == worker and pending.result is None]
        if worker in self._ended:
            # What it was asked for after the end of its stream has no answer.
            for pending in mine:
                del self._open[pending.request.number]
            return
        where = self._whereabouts(worker)
        why = lost.why if where is None else f"{lost.why} It {where}"
        at = [(self._open[batch - 1], key) for key, batch in executor.where(worker) or () if batch - 1 in self._open]
        # Its threads were loading several samples, one of which is the cause: each gets a share of the blame.
        for pending, key in at or [(pending, 0) for pending in mine]:
            pending.blame[key] = pending.blame.get(key, 0) + 1 / max(1, len(at))
        worn_out = any(round(max(pending.blame.values(), default=0), 6) >= ATTEMPTS for pending in mine)
        if not self._policy.restart or worn_out:
            self._why = f"{why}{', as were workers before it' if worn_out else ''}."
            executor.close(_DEATH_CLOSE_TIMEOUT_S)
            return
        self._restarted()
        executor.resize(executor.workers)
        heir = min(worker, executor.workers - 1)
        for pending in mine:
            self._load[pending.worker] -= 1
            self._load[heir] += 1
            pending.worker = heir
        start = Start(self._run, self._epoch, None, self._flow.config.threads)
        executor.submit([start, *(pending.request for pending in mine)], heir)

    def _head(self) -> BatchResult | None:
        """Return the next batch to deliver, if it is done."""
        for pending in self._open.values():
            if pending.result is not None:
                if self._waits_for_first_states:
                    # A state must include workers that have delivered nothing yet, so the first batch of a worker with
                    # a state waits for the first snapshots of all workers.
                    begun, worker = self._begun, pending.worker
                    if worker not in begun or (begun[worker] is not None and len(begun) < self.executor.workers):
                        return None
                    self._note_first_states()
                return pending.result
            if self._flow.config.in_order:
                break
        return None

    def _note_first_states(self) -> None:
        self._waits_for_first_states = False
        self.first_states = {worker: first for worker, first in self._begun.items() if first is not None}

    def _collect_head(self) -> BatchResult | None:
        """Return the next batch, if it is done."""
        if not self._ready or (result := self._head()) is None:
            return None
        del self._open[result.number]
        self._ready -= 1
        self._flow.learn(result)
        if self._policy.stream:
            # Their last requests have no batches.
            result = result._replace(number=self._handed_out)
            self._handed_out += 1
        return result


_TIMED_OUT = "DataLoader timed out after"
"""The beginning of torch's message for a timeout."""


def is_timeout(error: Exception) -> bool:
    """Return whether an error is the timeout of `Window.next`."""
    return isinstance(error, WorkerError) and str(error).startswith(_TIMED_OUT)
