"""Signal handling: Ctrl-C during the start of workers, and exceptions that signal handlers raise."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType

__all__ = ["holding_back_interrupts", "raised_by_signal_handler"]


@contextmanager
def holding_back_interrupts(method: str) -> Iterator[bool]:
    """Delay Ctrl-C while a worker is started with this method. Yield whether the worker has to unblock the signal.

    Ctrl-C reaches all processes of the group. A worker would print a traceback before it can set a handler, so it
    starts with the signal blocked, like this thread. Another thread may receive the signal meanwhile, and Python would
    raise KeyboardInterrupt in this thread with a half-started worker. So the handler is replaced, too. Afterwards a
    delayed signal is raised.
    """
    if method == "forkserver":
        # The fork server would pass a blocked signal on to everything else that it starts.
        yield False
        return
    if method == "spawn":
        from multiprocessing import resource_tracker

        # It unblocks the signal when it starts.
        resource_tracker.ensure_running()
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


def raised_by_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised an exception. Such an exception is not the fault of a sample."""
    if threading.current_thread() is not threading.main_thread():
        # Signal handlers run in the main thread.
        return False
    codes = {code for number in signal.valid_signals() if (code := _code_of(signal.getsignal(number))) is not None}
    before = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # The handler may have installed another one before it raised.
        if frame.f_code in codes or (before is not None and _is_called_for_signal(frame, before)):
            return True
        before = frame
    return False


def _is_called_for_signal(frame: FrameType, caller: FrameType) -> bool:
    """Return whether a function received a signal handler's arguments: a signal number and the interrupted frame."""
    values = list(frame.f_locals.values())
    values += [each for value in values if type(value) is tuple for each in value]
    numbers = signal.valid_signals()
    return any(value is caller for value in values) and any(
        isinstance(value, int) and value in numbers for value in values
    )


def _code_of(handler: object) -> CodeType | None:
    """Return the code object of a handler; None if it is not a Python function."""
    while isinstance(handler, partial):
        handler = handler.func
    if not callable(handler):
        return None
    code = getattr(handler, "__code__", None) or getattr(getattr(handler, "__call__", None), "__code__", None)  # noqa: B004
    return code if isinstance(code, CodeType) else None
