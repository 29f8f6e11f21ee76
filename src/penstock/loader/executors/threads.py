"""Threads: the thread executor, and the threads inside of a worker.

    batch ->  [part|part|part]  [part|part|part] ...
                |    |    |
             thread thread thread                         the last thread of a batch collates it

All threads work on the *next* batch first, each on a part of its samples, so many samples share the cost of a
hand-over. Batches that cannot be divided go to one thread each. Streams are not divided: each thread has its own lane,
with its own iterator.

In the thread executor all threads share one dataset, and each is a worker: ``get_worker_info()`` returns its number.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from penstock.errors import WorkerError
from penstock.loader.arena import Arena, Shared, collating_into
from penstock.loader.executors.base import Began, Event, Executor, Start
from penstock.loader.make import Fetcher, Maker, Part
from penstock.loader.messages import BatchRequest, BatchResult
from penstock.loader.stream import StreamFetch
from penstock.loader.workerinfo import enter, thread_worker
from penstock.random import show_samples
from penstock.threads import Daemon

__all__ = ["ThreadExecutor", "ThreadPool"]

_Job = Callable[[], object]
_Jobs = queue.SimpleQueue[_Job | None]


class _Here(threading.local):
    """Where a thread of a pool shows what it loads."""

    board = memoryview(array("Q", [0, 0]))


_here = _Here()


class ThreadPool:
    """Threads that take jobs from a queue.

    Args:
        count: number of threads.
        lanes: give each thread its own queue, so that jobs can be assigned to threads. Else they share one queue.
        boards: two numbers for each thread, which shows there the key of the sample that it loads, and the number of
            its batch + 1.
        begin: called once in each thread with its number, before its first job. It must not refer to the pool, which
            ends its threads when it is dropped.
        crash: called if a job raises: its answer is missing.
    """

    def __init__(
        self,
        count: int,
        *,
        lanes: bool,
        boards: memoryview,
        begin: Callable[[int], object] | None = None,
        crash: Callable[[], object] | None = None,
    ) -> None:
        self._count = 0
        self._boards = boards
        self._start = begin, crash
        shared: _Jobs = queue.SimpleQueue()
        self._new_queue: Callable[[], _Jobs] = queue.SimpleQueue if lanes else lambda: shared
        self._queues: list[_Jobs] = []
        self._daemons: list[Daemon] = []
        self._lock = threading.Lock()  # a job queued after the end marker would never run
        self.close = weakref.finalize(self, _end, self._queues, self._lock, os.getpid())
        self.close.atexit = False
        self.resize(count)

    @property
    def count(self) -> int:
        """Number of threads."""
        return self._count

    def resize(self, count: int) -> None:
        """Start threads until there are so many, or let some end after their jobs."""
        for number in range(self._count, count):
            jobs, board = self._new_queue(), self._boards[2 * number : 2 * number + 2]
            run = partial(_run, jobs, number, board, [*self._start])
            self._daemons.append(Daemon(run, name=f"penstock-worker-{number}", wake=partial(jobs.put, None)))
            self._queues.append(jobs)
            self._count += 1
        for jobs in self._queues[count:]:
            jobs.put(None)
        del self._queues[count:]
        self._count = count

    def submit(self, job: _Job, number: int = 0) -> None:
        """Have thread ``number`` (without lanes, any thread) call ``job()``.

        Raises:
            WorkerError: the threads have ended.
        """
        with self._lock:
            # Of threads with one queue, any may have ended after `resize`.
            if not self.close.alive or sum(map(Daemon.is_alive, self._daemons)) < self._count:
                raise WorkerError(
                    "the threads of this DataLoader are gone: it was closed, this is a fork of the process that has "
                    "them, or the interpreter is about to exit"
                )
            self._queues[number].put(job)

    def make(
        self,
        maker: Maker,
        request: BatchRequest,
        done: Callable[[BatchResult | None], object],
        *,
        wanted: Callable[[int], bool],
        arena: Arena | None = None,
        lane: int = 0,
    ) -> None:
        """Make a batch in the threads, all of them on the first batch that is not finished.

        Args:
            maker: the worker that makes it.
            request: the batch.
            done: called in the last thread with the result; with None if the batch was not wanted any more.
            wanted: whether a run is still wanted, by its number.
            arena: memory for its tensors.
            lane: the thread of a batch that is not divided.
        """
        size = len(request.indices)
        parts = min(self._count, size) if getattr(maker.fetcher, "divisible", False) else 1
        if parts < 2:
            self.submit(partial(_make_whole, maker, request, done, wanted, arena), lane)
            return
        divided = _Divided(maker, request, parts, done, wanted, arena)
        for part in range(parts):
            self.submit(partial(divided.make, part, part * size // parts, (part + 1) * size // parts))


def _run(
    jobs: _Jobs,
    number: int,
    board: memoryview,
    start: list[Callable[..., object] | None],
    thread: Daemon,
) -> None:
    """Run a thread of a pool. It refers to the queue, not to the pool."""
    _here.board = board
    show_samples(board)
    crash = start.pop()
    # Not kept: it refers to the first errors, whose tracebacks refer to the consumer.
    if (begin := start.pop()) is not None:
        begin(number)
    del begin
    while not thread.stopping and (job := jobs.get()) is not None:
        try:
            job()
        except BaseException:
            if crash is not None:
                crash()
            raise
        del job  # it holds a batch; do not keep it while waiting for more


def _end(queues: list[_Jobs], lock: threading.Lock, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child has no such threads, and its copy of the lock may be held forever
    with lock:
        for jobs in queues:
            jobs.put(None)


def _make_whole(
    maker: Maker,
    request: BatchRequest,
    done: Callable[[BatchResult | None], object],
    wanted: Callable[[int], bool],
    arena: Arena | None,
) -> None:
    if not wanted(request.run):
        done(None)
        return
    board = _here.board
    board[1] = request.number + 1
    # In no variable: the traceback of an error refers to this frame.
    done(maker.make(request, arena))
    board[1] = 0


class _Divided:
    """A batch of which several threads load the samples. The last one collates them."""

    def __init__(
        self,
        maker: Maker,
        request: BatchRequest,
        parts: int,
        done: Callable[[BatchResult | None], object],
        wanted: Callable[[int], bool],
        arena: Arena | None,
    ) -> None:
        self._maker = maker
        self._request = request
        self._done = done
        self._wanted = wanted
        self._arena = arena
        self._memory = Shared(len(request.indices), arena)
        self._parts: list[Part | None] = [None] * parts
        self._left = parts
        self._lock = threading.Lock()

    def make(self, number: int, begin: int, end: int) -> None:
        """Load a part of the samples; the last thread to do so makes the batch."""
        board, request = _here.board, self._request
        if self._wanted(request.run):
            board[1] = request.number + 1
            with collating_into(self._memory.rows(begin, end)):
                self._parts[number] = self._maker.load(request.part(begin, end))
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            complete = None not in self._parts
            loaded = [part for part in self._parts if part is not None]
            self._parts.clear()
            self._done(self._maker.make(request, self._arena, loaded) if complete else None)
        board[1] = 0


class _News:
    """Events that threads report and the consumer waits for.

    A signal may arrive anywhere, so waiting takes no event out, and no lock implemented in Python is held.

    Args:
        run: the number of the run whose events are wanted, alone in a list.
    """

    def __init__(self, run: list[int]) -> None:
        self._run = run
        self._events: deque[BatchResult | Began] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self, event: BatchResult | Began | None) -> None:
        """Report an event, unless its run is over. None only wakes the consumer."""
        if event is not None and event.run == self._run[0]:
            self._events.append(event)
        self._bell.put(None)

    def wait(self, seconds: float | None) -> None:
        """Wait for an event; None waits for ever."""
        if not self._events:
            with suppress(queue.Empty):
                self._bell.get(timeout=seconds)

    def take(self) -> list[BatchResult | Began]:
        """Return and remove the new events."""
        while not self._bell.empty():
            self._bell.get_nowait()
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events


class ThreadExecutor(Executor):
    """Makes batches in threads of this process.

    Args:
        fetcher: copied to each thread for a stream, shared by all for a map-style dataset.
        threads: number of threads.
        init: ``worker_init_fn``, called in each thread.
        seed: the base seed: thread n is a worker with seed + n.
    """

    def __init__(self, fetcher: Fetcher, threads: int, init: Callable[[int], object] | None, seed: int) -> None:
        super().__init__(threads)
        self._lanes = isinstance(fetcher, StreamFetch)
        if isinstance(fetcher, StreamFetch):
            self._makers = [Maker(fetcher.copy(), number, catches=BaseException) for number in range(threads)]
        else:
            self._makers = [Maker(fetcher, catches=BaseException)] * threads
        self._start: Start | None = None
        # In a list that jobs refer to, so that this object can end while threads work.
        self._run = [0]
        self._news = _News(self._run)
        self._boards = memoryview(array("Q", [0] * 2 * _MOST))
        begin = partial(_begin_worker, threads, seed, fetcher.dataset, init, self._makers)
        self._pool = ThreadPool(threads, lanes=self._lanes, boards=self._boards, begin=begin)

    @property
    def run(self) -> int:
        """The number of the run whose requests are wanted."""
        return self._run[0]

    @run.setter
    def run(self, run: int) -> None:
        self._run[0] = run
        # The consumer of an older iterator may wait in another thread.
        self._news.put(None)

    def submit(self, requests: Sequence[Start | BatchRequest], worker: int) -> None:
        """See `Executor`. An error of loading a state is raised at once."""
        if self.closed:
            # By a user's sampler.
            return
        for request in requests:
            if isinstance(request, BatchRequest):
                self._begin_late()
                self._pool.make(self._makers[worker], request, self._news.put, wanted=_is(self._run), lane=worker)
                continue
            maker, start = self._makers[worker], request._replace(state=None)
            if request.state is not None and (self._lanes or not worker):
                maker.fetcher.load_state_dict(request.state)
            if self._lanes:
                self._pool.submit(partial(_begin_lane, maker, start, self._news), worker)
            elif not worker:
                self._start = start

    def _begin_late(self) -> None:
        """Start the run of a map-style dataset, whose first state may contain a generator, after the sampler's draw."""
        start, self._start = self._start, None
        if start is not None:
            first = self._makers[0].fetcher.begin(start.epoch)
            for worker in range(self.workers):
                self._news.put(Began(start.run, worker, None if worker else first))

    def wait(self, run: int, deadline: float | None) -> list[Event]:
        """See `Executor`."""
        self.waiting = True
        self._news.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        self.waiting = False
        with self.lock:
            if run != self.run:
                # The bell may have been for the other run.
                self._news.put(None)
                return []
            return [event for event in self._news.take() if event.run == run]

    def resize(self, workers: int) -> None:
        """See `Executor`. The threads of a stream cannot become more."""
        self._makers += self._makers[:1] * (workers - len(self._makers))
        self._pool.resize(workers)
        self.workers = workers

    def close(self, patience: float) -> None:
        """Ask the threads to end; they end by themselves."""
        self.closed = True
        self.run = 0
        self._pool.close()
        self._news.put(None)

    def where(self, worker: int) -> list[tuple[int, int]]:
        """See `Executor`. Threads that share a dataset work on the same batches."""
        shown = self._boards[: 2 * self.workers].tolist()
        pairs = list(zip(shown[::2], shown[1::2], strict=True))
        return [pair for pair in (pairs[worker : worker + 1] if self._lanes else pairs) if pair[1]]


_MOST = 1 << 10
"""Maximum number of threads that show what they load."""


def _begin_worker(
    threads: int, seed: int, dataset: Any, init: Callable[[int], object] | None, makers: list[Maker], number: int
) -> None:
    """Make this thread a worker."""
    enter(thread_worker(number, max(threads, number + 1), seed + number, dataset))
    if init is not None:
        try:
            init(number)
        except BaseException as error:
            makers[number].fail(error)


def _begin_lane(maker: Maker, start: Start, news: _News) -> None:
    news.put(maker.begin(start))


def _is(run: list[int]) -> Callable[[int], bool]:
    """Return whether a number is that of the present run."""
    return lambda number: number == run[0]
