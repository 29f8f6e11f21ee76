"""Worker processes that end with the process that started them, however that one ended.

    with process_pool(8) as pool:
        results = list(pool.map(work, items))

A process that is killed cannot tell its workers. Each of them has a thread that waits for its end, so neither work nor
waiting for work keeps one alive. The fork server and the resource tracker of `multiprocessing` end with the last one.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import Any

__all__ = ["end_with_parent", "process_pool"]


@contextmanager
def process_pool(
    workers: int, begin: Callable[..., object] | None = None, *arguments: Any
) -> Iterator[ProcessPoolExecutor]:
    """Give an executor of so many processes, and end them with the block.

    They are started by a fork server, so what they run is a function of a module.

    Args:
        workers: processes.
        begin: called in each of them first, with ``arguments``.
    """
    context = get_context("forkserver")
    told = os.getpid(), begin, arguments
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=told)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(parent: int, begin: Callable[..., object] | None, arguments: tuple[Any, ...]) -> None:
    end_with_parent(parent)
    if begin is not None:
        begin(*arguments)


def end_with_parent(parent: int, *, grace: float = 0.0) -> None:
    """Start a thread that ends this process once its parent is gone, whatever this process is doing.

    Args:
        parent: the process that started this one, which need not be its parent to the system: a fork server may be.
        grace: seconds in which it may end by itself.
    """
    threading.Thread(target=_outlive, args=(parent, grace), name="penstock-watch", daemon=True).start()


def _outlive(parent: int, grace: float) -> None:
    if _wait_for_end(parent):
        time.sleep(grace)
        os._exit(1)


def _wait_for_end(parent: int) -> bool:
    """Wait until a process has ended; whether this can be known here."""
    known = parent_process()
    # The end of a pipe says so as well. But forks of the parent hold the pipe open, so it is not enough where the
    # system has something better. Not the death signal of Linux: it comes when the thread that started us ends.
    sentinel = known.sentinel if known is not None and known.pid == parent else None
    if hasattr(os, "pidfd_open"):
        try:
            watched = os.pidfd_open(parent)
        except ProcessLookupError:
            return True
        except OSError:  # not allowed here
            pass
        else:
            if sentinel is not None and wait([sentinel], 0):
                return True  # it ended before we looked, and its number may be another process's by now
            poller = select.poll()
            poller.register(watched, select.POLLIN)
            poller.poll()
            return True
    return sentinel is not None and bool(wait([sentinel]))
