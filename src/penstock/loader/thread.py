"""The thread executor: all threads work on the *next* batch first, each on a chunk of its samples.

    tasks ->  [chunk|chunk|chunk] [chunk|chunk|chunk] ...   at most `depth` batches begun
                  |      |     |
               thread thread thread                         the last one to finish a batch collates it
                  `------+-----'
              batches, in order

Chunks, not samples, are handed out, so the cost of a hand-over is shared by many samples. Threads are daemons of our
own: ``concurrent.futures`` would join them at interpreter exit. All threads share one data set.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from penstock.loader.delivery import timed_out
from penstock.loader.fetch import Fetch, Task
from penstock.threads import Daemon

__all__ = ["ThreadBatches", "ThreadPool"]

_Work = Callable[[BaseException | None], None]


class ThreadPool:
    """Daemon threads that take work from one queue.

    Args:
        count: number of threads.
        init: called once in each thread with its number; if it fails, everything that thread is given fails with the
            same error, so that whoever waits is told.
    """

    def __init__(self, count: int, init: Callable[[int], object] | None) -> None:
        self.count = count
        self.pid = os.getpid()
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        for number in range(count):
            # Threads know the queue, not the pool: a pool that nobody holds any more ends its threads.
            run = partial(_run, self._queue, number, init)
            Daemon(run, name=f"penstock-worker-{number}", wake=partial(self._queue.put, None))
        self.close = weakref.finalize(self, _end, self._queue, count)
        self.close.atexit = False

    def submit(self, work: _Work) -> None:
        """Have some thread call ``work(None)``, or ``work(error)`` if its ``init`` failed or no thread is left."""
        if self.close.alive and self.pid == os.getpid():
            self._queue.put(work)
        else:
            work(
                RuntimeError(
                    "the threads of this DataLoader have ended: it was closed, or this is a fork of its process"
                )
            )


def _run(
    work_queue: queue.SimpleQueue[_Work | None], number: int, init: Callable[[int], object] | None, thread: Daemon
) -> None:
    failure: BaseException | None = None
    if init is not None:
        try:
            init(number)
        except BaseException as error:  # told to whoever waits for this thread's work
            failure = error
    while not thread.stopping and (work := work_queue.get()) is not None:
        work(failure)
        del work  # the closure holds a batch; do not keep it while waiting for more


def _end(work_queue: queue.SimpleQueue[_Work | None], count: int) -> None:
    for _ in range(count):
        work_queue.put(None)


class _Batch:
    """A batch in the making."""

    def __init__(self, task: Task, chunks: int, fetch: Fetch, ready: queue.SimpleQueue[_Batch] | None) -> None:
        self.done = threading.Event()
        self._task = task
        self._fetch = fetch
        self._ready = ready
        self._parts: list[list[Any]] = [[] for _ in range(chunks)]
        self._errors: dict[int, BaseException] = {}
        self._left = chunks
        self._lock = threading.Lock()
        self._result: Any = None
        self.cancelled = False

    def make(self, number: int, begin: int, end: int, failure: BaseException | None) -> None:
        """Make one chunk; whoever makes the last one collates."""
        if not self.cancelled:
            try:
                if failure is not None:
                    raise failure
                self._parts[number] = self._fetch.samples(self._task.part(begin, end))
            except BaseException as error:  # raised again in the consumer, in the place of this batch
                self._errors[number] = error
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._finish()

    def _finish(self) -> None:
        if not self._errors and not self.cancelled:
            try:
                self._result = self._fetch.collate([sample for part in self._parts for sample in part], self._task)
            except BaseException as error:  # as above
                self._errors[0] = error
        self._parts.clear()
        self.done.set()
        if self._ready is not None:
            self._ready.put(self)

    def result(self) -> Any:
        """The batch, or the error of its first sample that failed."""
        if self._errors:
            raise self._errors[min(self._errors)]
        return self._result


class ThreadBatches:
    """Batches of the tasks, made by a pool, in order.

    Args:
        tasks: what is to be made; pulled from in the consumer's thread.
        fetch: makes it.
        pool: does the work.
        depth: batches begun at any time.
        timeout: seconds to wait for a batch, 0 for ever; then RuntimeError in torch's words.
        in_order: False hands out whatever is ready first.
    """

    def __init__(
        self, tasks: Iterator[Task], fetch: Fetch, pool: ThreadPool, *, depth: int, timeout: float, in_order: bool
    ) -> None:
        self._tasks = tasks
        self._fetch = fetch
        self._pool = pool
        self._depth = depth
        self._timeout = timeout or None
        self._in_order = in_order
        self._begun: deque[_Batch] = deque()
        self._ready: queue.SimpleQueue[_Batch] = queue.SimpleQueue()
        self._fill()

    def __iter__(self) -> ThreadBatches:
        return self

    def __next__(self) -> Any:
        self._fill()
        if not self._begun:
            raise StopIteration
        batch = self._next_in_order() if self._in_order else self._next_ready()
        self._fill()
        return batch.result()

    def close(self) -> None:
        """Have what was begun come to nothing; chunks that run end in their own time."""
        for batch in self._begun:
            batch.cancelled = True
        self._begun.clear()
        self._tasks = iter(())

    def __del__(self) -> None:
        self.close()

    def _next_in_order(self) -> _Batch:
        if not self._begun[0].done.wait(self._timeout):
            raise RuntimeError(timed_out(self._timeout))
        return self._begun.popleft()

    def _next_ready(self) -> _Batch:
        try:
            batch = self._ready.get(timeout=self._timeout)
        except queue.Empty:
            raise RuntimeError(timed_out(self._timeout)) from None
        self._begun.remove(batch)
        return batch

    def _fill(self) -> None:
        while len(self._begun) < self._depth:
            task = next(self._tasks, None)
            if task is None:
                return
            size = len(task.indices)
            chunks = max(1, min(self._pool.count, size)) if self._fetch.divisible else 1
            batch = _Batch(task, chunks, self._fetch, None if self._in_order else self._ready)
            self._begun.append(batch)
            for number in range(chunks):
                self._pool.submit(_chunk(batch, number, number * size // chunks, (number + 1) * size // chunks))


def _chunk(batch: _Batch, number: int, begin: int, end: int) -> _Work:
    return lambda failure: batch.make(number, begin, end, failure)


def read_ahead(batches: Iterator[Any], pool: ThreadPool, *, depth: int, timeout: float) -> Iterator[Any]:
    """Another iterator's batches, fetched ahead by one thread of a pool of one."""
    tasks = (Task([number], []) for number in itertools.count())
    return _ReadAhead(ThreadBatches(tasks, _Next(batches), pool, depth=depth, timeout=timeout, in_order=True))


_END = object()


class _Next(Fetch):
    """A fetch that ignores what it is asked for and takes the next batch."""

    def __init__(self, batches: Iterator[Any]) -> None:
        super().__init__(None, _only, batched=False, seed_globals=False)
        self._batches = batches

    def samples(self, task: Task) -> list[Any]:
        return [next(self._batches, _END)]


def _only(sample: Any) -> Any:
    return sample


class _ReadAhead:
    def __init__(self, batches: ThreadBatches) -> None:
        self._batches = batches

    def __iter__(self) -> _ReadAhead:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        if batch is _END:
            self._batches.close()
            raise StopIteration
        return batch
