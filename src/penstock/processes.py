"""Worker processes that end when their parent ends, even if it was killed.

    with process_pool(8) as pool:
        results = list(pool.map(work, items))

A killed process cannot stop its workers. So each worker has a thread that waits for the end of the parent, whether the
worker is busy or idle. The fork server and the resource tracker of `multiprocessing` end with the last worker.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import Any, TypeVar

from penstock.errors import WorkerError

__all__ = ["end_with_parent", "map_in_processes", "process_pool"]

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def process_pool(
    workers: int, begin: Callable[..., object] | None = None, *arguments: Any
) -> Iterator[ProcessPoolExecutor]:
    """Yield an executor with this many processes; they end when the block ends.

    A fork server starts them, so they can only run functions of importable modules.

    Args:
        workers: number of processes.
        begin: called first in each process, with ``arguments``.
    """
    context = get_context("forkserver")
    initial = os.getpid(), begin, arguments
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=initial)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def map_in_processes(work: Callable[[Item], Result], items: Sequence[Item], workers: int) -> Iterator[Result]:
    """Yield ``work(item)`` for each item, in order; in this process if there is one item or worker.

    Raises:
        WorkerError: a process was killed.
    """
    workers = min(workers, len(items))
    if workers <= 1:
        yield from map(work, items)
        return
    try:
        with process_pool(workers) as pool:
            yield from pool.map(work, items)
    except BrokenProcessPool as error:
        raise WorkerError(
            "a worker process was killed (out of memory?): run it again, with fewer workers; finished files stay"
        ) from error


def _begin(parent: int, begin: Callable[..., object] | None, arguments: tuple[Any, ...]) -> None:
    end_with_parent(parent)
    if begin is not None:
        begin(*arguments)


def end_with_parent(parent: int, *, grace: float = 0.0) -> None:
    """Start a thread that ends this process when its parent has ended.

    Args:
        parent: pid of the process that requested this one; its parent in the system may be a fork server.
        grace: seconds that this process gets to end by itself.
    """
    threading.Thread(target=_outlive, args=(parent, grace), name="penstock-watch", daemon=True).start()


def _outlive(parent: int, grace: float) -> None:
    if _wait_for_end(parent):
        time.sleep(grace)
        os._exit(1)


def _wait_for_end(parent: int) -> bool:
    """Wait until a process has ended; return False if the system cannot report that."""
    known = parent_process()
    # End of file on a pipe would also show it, but forks of the parent keep the pipe open, so prefer pidfd_open.
    # PR_SET_PDEATHSIG does not work: it fires when the *thread* that started this process ends.
    sentinel = known.sentinel if known is not None and known.pid == parent else None
    if hasattr(os, "pidfd_open"):
        try:
            watched = os.pidfd_open(parent)
        except ProcessLookupError:
            return True
        except OSError:  # not permitted
            pass
        else:
            if sentinel is not None and wait([sentinel], 0):
                return True  # it had ended before, and its pid may have been reused
            poller = select.poll()
            poller.register(watched, select.POLLIN)
            poller.poll()
            return True
    return sentinel is not None and bool(wait([sentinel]))
