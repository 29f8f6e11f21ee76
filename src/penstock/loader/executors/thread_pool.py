"""`ThreadPool`: daemon threads that take jobs from a queue and know their worker number.

``concurrent.futures`` is not used, since it joins its threads at interpreter exit.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from array import array
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from penstock.errors import WorkerError
from penstock.loader.window import CLOSED
from penstock.loader.workerinfo import thread_worker, worker_scope
from penstock.random import show_samples
from penstock.threads import Daemon

__all__ = ["Failure", "ThreadPool", "thread_number"]

Failure = tuple[BaseException, TracebackType | None]
"""An error and its traceback when caught; raising it repeatedly must not extend the traceback each time."""
_Job = Callable[[Failure | None], None]
_Jobs = queue.SimpleQueue[_Job | None]


class _Here(threading.local):
    number = -1


_here = _Here()


def thread_number() -> int:
    """Return the number of this thread in its pool; -1 for other threads."""
    return _here.number


class ThreadPool:
    """Threads that take jobs from a queue.

    Args:
        count: number of threads.
        init: called once in each thread with its number, before its first job.
        seed: the iterator's base seed: each thread is a worker with seed + number. None: the threads are not workers,
            or the process is the worker.
        dataset: the dataset in ``get_worker_info()``.
        lanes: give each thread its own queue, so that jobs can be assigned to threads. Else they share one queue.

    Attributes:
        infos: ``WorkerInfo`` of each thread, or None.
        boards: the key of the sample that each thread is loading.
        failures: errors of ``init`` by thread number; jobs of that thread raise them in the consumer.
    """

    def __init__(
        self,
        count: int,
        init: Callable[[int], object] | None = None,
        *,
        seed: int | None = None,
        dataset: Any = None,
        lanes: bool = False,
    ) -> None:
        self.count = count
        self.lanes = lanes
        self.pid = os.getpid()
        self.infos = [None if seed is None else thread_worker(n, count, seed + n, dataset) for n in range(count)]
        self.failures: dict[int, Failure] = {}
        self.boards = [memoryview(array("Q", [0])) for _ in range(count)]
        shared: _Jobs = queue.SimpleQueue()
        self._queues: list[_Jobs] = [queue.SimpleQueue() if lanes else shared for _ in range(count)]
        self._daemons: list[Daemon] = []
        for number, jobs in enumerate(self._queues):
            # Threads refer to the queue, not the pool, so that a garbage-collected pool ends its threads. They pop
            # their start arguments from a list, since the arguments of a running function stay alive.
            start = [(init, self.infos[number], self.boards[number], self.failures)]
            name = f"penstock-worker-{number}"
            self._daemons.append(Daemon(partial(_run, jobs, number, start), name=name, wake=partial(jobs.put, None)))
        self._lock = threading.RLock()  # a job queued after the end marker would never run
        self.close = weakref.finalize(self, _end, self._queues, self._lock, self.pid)
        self.close.atexit = False

    @property
    def alive(self) -> bool:
        """Whether all threads run."""
        return all(daemon.is_alive() for daemon in self._daemons)

    def submit(self, job: _Job, number: int = 0) -> None:
        """Have thread ``number`` (without lanes, any thread) call ``job(None)``; if no thread is left, call
        ``job(failure)`` now, in this thread.
        """
        if self.pid == os.getpid():
            with self._lock:
                if self.close.alive:
                    self._queues[number].put(job)
                    return
            job((WorkerError(CLOSED), None))
        else:
            job((RuntimeError("this is a fork of the process that has the threads of this DataLoader"), None))


def _run(jobs: _Jobs, number: int, start: list[Any], thread: Daemon) -> None:
    _begin(number, *start.pop())
    while not thread.stopping and (job := jobs.get()) is not None:
        job(None)
        del job  # it holds a batch; do not keep it while waiting for more


def _begin(
    number: int,
    init: Callable[[int], object] | None,
    info: Any,
    board: memoryview,
    failures: dict[int, Failure],
) -> None:
    _here.number = number
    show_samples(board)
    if init is not None:
        try:
            with worker_scope(info):
                init(number)
        except BaseException as error:
            # The thread must not refer to it: raised in the consumer, it refers to the consumer's frames and the pool.
            failures[number] = error, error.__traceback__


def _end(queues: list[_Jobs], lock: threading.RLock, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child has no such threads, and its copy of the lock may be held forever
    with lock:
        for jobs in queues:
            jobs.put(None)
