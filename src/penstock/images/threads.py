"""Process blocks of rows in parallel threads, with results in order and a bounded number of pending blocks."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from penstock.errors import ConfigError

__all__ = ["map_blocks"]

T = TypeVar("T")


def map_blocks(
    function: Callable[[range], T], rows: int, *, block: int, workers: int | None = None
) -> Iterator[tuple[range, T]]:
    """Split ``range(rows)`` into blocks of `block` rows and yield ``(part, function(part))`` in order.

    `workers` threads run the calls (default: 4 per CPU, at most 32, because most of the time is spent on disk reads).
    They compute at most 4 * `workers` blocks ahead of the consumer. An exception of `function` is raised in place of
    its result. Raises `ConfigError` for less than one worker.

        >>> [total for _, total in map_blocks(sum, 10, block=4, workers=2)]
        [6, 22, 17]
    """
    if workers is None:
        workers = min(32, 4 * (os.cpu_count() or 1))
    if workers < 1:
        raise ConfigError(f"workers must be at least 1, not {workers}")
    waiting: deque[tuple[range, Future[T]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="penstock-files")
    try:
        for start in range(0, rows, block):
            part = range(start, min(start + block, rows))
            waiting.append((part, pool.submit(function, part)))
            if len(waiting) > 4 * workers:
                done, task = waiting.popleft()
                yield done, task.result()
        while waiting:
            done, task = waiting.popleft()
            yield done, task.result()
    finally:
        pool.shutdown(cancel_futures=True)
