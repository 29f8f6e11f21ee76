"""Daemon threads that end before the interpreter does, and blocks of rows in threads.

If a daemon thread is inside native code when the interpreter shuts down, its stack is unwound there, and C++ code
aborts. So at exit these threads are asked to stop, and joined with a time limit. They are still daemons, so that a
hung thread cannot keep a program from ending.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from penstock.errors import ConfigError

__all__ = ["Daemon", "map_blocks"]

T = TypeVar("T")

_SHUTDOWN_TIMEOUT_S = 10.0  # at exit, for all threads together

_running: weakref.WeakSet[Daemon] = weakref.WeakSet()


class Daemon(threading.Thread):
    """A started daemon thread.

    Args:
        work: the function that the thread runs; it should check `stopping` now and then.
        name: the name of the thread.
        wake: called by `stop`, to wake a thread that waits.
        shutdown_timeout: seconds to wait for it at exit.
    """

    def __init__(
        self,
        work: Callable[[Daemon], None],
        *,
        name: str,
        wake: Callable[[], object] | None = None,
        shutdown_timeout: float = _SHUTDOWN_TIMEOUT_S,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.shutdown_timeout = shutdown_timeout
        self._work: Callable[[Daemon], None] | None = work
        self._wake = wake
        self.stopping = False
        _running.add(self)
        self.start()

    def run(self) -> None:
        """Run the work, and drop the reference to it first: it may refer back to the owner of this thread."""
        work, self._work = self._work, None
        if work is not None:
            work(self)

    def stop(self) -> None:
        """Ask the thread to end."""
        self.stopping = True
        if self._wake is not None:
            self._wake()


@atexit.register
def _end_all() -> None:
    threads = [thread for thread in _running if thread.is_alive()]  # in a forked child, those of its parent are not
    for thread in threads:
        thread.stop()
    begun = time.monotonic()
    for thread in threads:
        thread.join(max(0.0, begun + thread.shutdown_timeout - time.monotonic()))


def map_blocks(
    function: Callable[[range], T],
    rows: int,
    *,
    block: int,
    workers: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Iterator[T]:
    """Split ``range(rows)`` into blocks of `block` rows and yield ``function(part)`` of each, in order.

    `workers` threads run the calls (default: 4 per CPU, at most 32, because most of the time is spent on disk reads).
    They compute at most 4 * `workers` blocks ahead of the consumer. An exception of `function` is raised in place of
    its result. `progress` is called with the numbers of finished rows and of all rows, after the consumer has used a
    result. Raises `ConfigError` for less than one worker.

        >>> list(map_blocks(sum, 10, block=4, workers=2))
        [6, 22, 17]
    """
    if workers is None:
        workers = min(32, 4 * (os.cpu_count() or 1))
    if workers < 1:
        raise ConfigError(f"workers must be at least 1, not {workers}")
    parts = (range(start, min(start + block, rows)) for start in range(0, rows, block))
    waiting: deque[tuple[range, Future[T]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="penstock-files")
    try:
        while True:
            for part in islice(parts, 4 * workers + 1 - len(waiting)):
                waiting.append((part, pool.submit(function, part)))
            if not waiting:
                return
            part, task = waiting.popleft()
            yield task.result()
            if progress is not None:
                progress(part.stop, rows)
    finally:
        pool.shutdown(cancel_futures=True)
