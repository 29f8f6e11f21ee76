"""Ctrl-C while worker processes start."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["holding_back_interrupts"]


@contextmanager
def holding_back_interrupts(method: str) -> Iterator[bool]:
    """Hold Ctrl-C back while a worker is started by this method; tell whether the worker is to unblock it.

    It reaches all processes of the group. A worker would print a traceback before it can set a handler, so it begins
    with the signal blocked, as this thread has it. Another thread may get it meanwhile and have KeyboardInterrupt
    raised in this one, with a worker half started: so there is another handler, too. Afterwards the signal is raised.
    """
    if method == "forkserver":
        yield False  # the server would hand a blocked signal on to whatever else it starts
        return
    if method == "spawn":
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()  # when it starts, it unblocks
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if in_main else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    came: list[int] = []
    try:
        if callable(handler):
            signal.signal(signal.SIGINT, lambda number, _: came.append(number))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield signal.SIGINT not in before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
