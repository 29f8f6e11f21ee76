"""Threads: the thread executor, and the threads inside of a worker.

    batch ->  [part|part|part]  [part|part|part] ...
                |    |    |
             thread thread thread                         the last thread of a batch collates it

All threads work on the *next* batch first, each on a part of its samples, so many samples share the cost of a
hand-over. Batches that cannot be divided go to one thread each. Streams are not divided: each thread has its own
iterator and its own jobs.

In the thread executor all threads share one dataset, and each is a worker: ``get_worker_info()`` returns its number.
"""

from __future__ import annotations

import copy
import os
import queue
import threading
import time
import traceback
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from penstock.errors import WorkerError
from penstock.loader.collate import Arena, SharedRows
from penstock.loader.executors.base import Began, Event, Executor, Start
from penstock.loader.make import Fetcher, Maker
from penstock.loader.messages import BatchRequest, BatchResult
from penstock.loader.stream import StreamFetch
from penstock.loader.workerinfo import enter, thread_worker
from penstock.random import show_samples
from penstock.threads import Daemon

__all__ = ["MOST_THREADS", "ThreadExecutor", "ThreadPool"]

_Job = Callable[[memoryview], object]
_Jobs = queue.SimpleQueue[_Job | None]

MOST_THREADS = 1 << 10
"""Maximum number of threads of an executor, or of a single worker process, that show what they load."""


class ThreadPool:
    """Threads that take jobs from a queue. They end when `close` is called, or when the pool is dropped.

    Args:
        count: number of threads.
        boards: two numbers for each thread, which shows there the key of the sample that it loads, and the number of
            its batch + 1.
        first: number of the first thread.
        begin: called once in each thread with its number, before its first job. It must not refer to the pool.
        crash: called if a job raises: its answer is missing.
    """

    def __init__(
        self,
        count: int,
        *,
        boards: memoryview,
        first: int = 0,
        begin: Callable[[int], object] | None = None,
        crash: Callable[[], object] | None = None,
    ) -> None:
        self._count = 0
        self._boards = boards
        self._first = first
        self._begin = begin
        self._crash = crash
        self._jobs: _Jobs = queue.SimpleQueue()
        self._daemons: list[Daemon] = []
        self.close = weakref.finalize(self, _end, self._jobs, self._daemons)
        self.close.atexit = False
        self.resize(count)

    def resize(self, count: int) -> None:
        """Start threads until there are so many, or let some end after the present jobs."""
        for number in range(self._first + self._count, self._first + count):
            board = self._boards[2 * number : 2 * number + 2]
            run = partial(_run, self._jobs, board, number, [self._begin], self._crash)
            wake = partial(self._jobs.put, None)
            self._daemons.append(Daemon(run, name=f"penstock-worker-{number}", wake=wake))
        for _ in range(count, self._count):
            self._jobs.put(None)
        self._count = count

    def submit(self, job: _Job) -> None:
        """Have a thread call ``job(board)``, with its two numbers.

        Raises:
            WorkerError: the threads have ended.
        """
        # Any of them may have ended after `resize`.
        if sum(map(Daemon.is_alive, self._daemons)) < self._count:
            raise WorkerError(
                "the threads of this DataLoader are gone: it was closed, this is a fork of the process that has "
                "them, or the interpreter is about to exit"
            )
        self._jobs.put(job)

    def make(
        self,
        maker: Maker,
        request: BatchRequest,
        done: Callable[[BatchResult | None], object],
        *,
        wanted: Callable[[int], bool],
        arena: Arena | None = None,
    ) -> None:
        """Make a batch in the threads, all of them on the first batch that is not finished.

        Args:
            maker: the worker that makes it.
            request: the batch.
            done: called in the last thread with the result; with None if the batch was not wanted any more.
            wanted: whether a run is still wanted, by its number.
            arena: memory for its tensors.
        """
        request.unpack()
        size = len(request.indices)
        parts = left = max(1, min(self._count, size)) if maker.fetcher.divisible else 1
        rows, loaded = SharedRows(size, arena), list[Any]([None] * parts)
        lock, dropped = threading.Lock(), False

        def make(part: int, board: memoryview) -> None:
            """Load a part of the samples; the last thread to do so makes the batch."""
            nonlocal left, dropped
            if not wanted(request.run):
                dropped = True
            else:
                board[1] = request.number + 1
                if parts > 1:
                    begin, end = part * size // parts, (part + 1) * size // parts
                    loaded[part] = maker.load(request.part(begin, end), partial(rows.part, begin, end))
            with lock:
                left -= 1
                last = left == 0
            if last:
                # In no variable: the traceback of an error refers to this frame.
                done(None if dropped else maker.make(request, arena, loaded if parts > 1 else None))
            board[1] = 0

        for part in range(parts):
            self.submit(partial(make, part))


def _run(
    jobs: _Jobs,
    board: memoryview,
    number: int,
    begin: list[Callable[[int], object] | None],
    crash: Callable[[], object] | None,
    thread: Daemon,
) -> None:
    """Run a thread of a pool. It refers to the queue, not to the pool."""
    show_samples(board)
    # Not kept: it refers to the first errors, whose tracebacks refer to the consumer.
    if (first := begin.pop()) is not None:
        first(number)
    del first
    while not thread.stopping and (job := jobs.get()) is not None:
        try:
            job(board)
        except BaseException:
            if crash is not None:
                traceback.print_exc()
                crash()
            raise
        del job  # it holds a batch; do not keep it while waiting for more


def _end(jobs: _Jobs, threads: list[Daemon]) -> None:
    for _ in threads:
        jobs.put(None)


class ThreadExecutor(Executor):
    """Makes batches in threads of this process.

    Args:
        fetcher: copied to each thread for a stream, shared by all for a map-style dataset.
        threads: number of threads.
        init: ``worker_init_fn``, called in each thread.
        seed: the base seed: thread n is a worker with seed + n.
    """

    def __init__(self, fetcher: Fetcher, threads: int, init: Callable[[int], object] | None, seed: int) -> None:
        self.workers, self.lock, self.pid = threads, threading.RLock(), os.getpid()
        self._run = 0
        self._start: Start | None = None
        self._boards = memoryview(array("Q", [0] * 2 * MOST_THREADS))
        self._events: deque[Began | BatchResult] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._stream = isinstance(fetcher, StreamFetch)
        # A Penstock stream, which the next iterator may continue, has one thread.
        fetchers = [fetcher, *(copy.copy(fetcher) for _ in range(threads - 1 if self._stream else 0))]
        self._makers = [Maker(one, number, catches=BaseException) for number, one in enumerate(fetchers)]
        begin = partial(_begin_worker, threads, seed, fetcher.dataset, init, self._makers)
        each = 1 if self._stream else threads
        self._pools = [ThreadPool(each, boards=self._boards, first=one.worker, begin=begin) for one in self._makers]

    @property
    def run(self) -> int:
        """The number of the run whose requests are wanted."""
        return self._run

    @run.setter
    def run(self, run: int) -> None:
        self._run = run
        # The consumer of an older iterator may wait in another thread.
        self._put(None)

    def submit(self, requests: Sequence[Start | BatchRequest], worker: int) -> None:
        """See `Executor`. An error of loading a state is raised at once."""
        if self.closed:
            # By a user's sampler.
            return
        place = worker if self._stream else 0
        maker, pool = self._makers[place], self._pools[place]
        for request in requests:
            if isinstance(request, BatchRequest):
                self._begin_late()
                pool.make(maker, request, self._put, wanted=lambda run: run == self._run)
            elif self._stream:
                pool.submit(partial(self._begin, maker, request))
            elif not worker:
                if request.state is not None:
                    maker.fetcher.load_state_dict(request.state)
                self._start = request

    def _begin(self, maker: Maker, start: Start, board: memoryview) -> None:
        self._put(maker.begin(start))

    def _begin_late(self) -> None:
        """Start the run of a map-style dataset, whose first state may contain a generator, after the sampler's draw."""
        start, self._start = self._start, None
        if start is not None:
            first = self._makers[0].fetcher.begin(start.epoch)
            for worker in range(self.workers):
                self._put(Began(start.run, worker, None if worker else first))

    def _put(self, event: Began | BatchResult | None) -> None:
        """Report an event, unless its run is over. None only wakes the consumer."""
        if event is not None and event.run == self._run:
            self._events.append(event)
        self._bell.put(None)

    def wait(self, run: int, deadline: float | None) -> list[Event]:
        """See `Executor`.

        A signal may arrive anywhere, so waiting takes no event out, and no lock implemented in Python is held.
        """
        self.waiting = True
        if not self._events:
            with suppress(queue.Empty):
                self._bell.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        self.waiting = False
        with self.lock:
            if run != self.run:
                # The bell may have been for the other run.
                self._bell.put(None)
                return []
            with suppress(queue.Empty):
                while True:
                    self._bell.get_nowait()
            events: list[Event] = []
            while self._events:
                event = self._events.popleft()
                if event.run == run:
                    events.append(event)
            return events

    def resize(self, workers: int) -> None:
        """See `Executor`. The threads of a stream cannot become more."""
        if not self._stream:
            self._pools[0].resize(workers)
            self.workers = workers

    def close(self, patience: float) -> None:
        """Ask the threads to end; they end by themselves."""
        self.closed = True
        self.run = 0
        for pool in self._pools:
            pool.close()

    def where(self, worker: int) -> list[tuple[int, int]]:
        """See `Executor`. Threads that share a dataset work on the same batches."""
        shown = self._boards[: 2 * self.workers].tolist()
        pairs = list(zip(shown[::2], shown[1::2], strict=True))
        return [pair for pair in (pairs[worker : worker + 1] if self._stream else pairs) if pair[1]]


def _begin_worker(
    threads: int, seed: int, dataset: Any, init: Callable[[int], object] | None, makers: list[Maker], number: int
) -> None:
    """Make this thread a worker."""
    enter(thread_worker(number, max(threads, number + 1), seed + number, dataset))
    makers[number % len(makers)].init(init, number)
