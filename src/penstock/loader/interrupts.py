"""Signals: Ctrl-C while worker processes start, and errors that handlers raise."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType

__all__ = ["holding_back_interrupts", "is_of_signal_handler"]


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


def is_of_signal_handler(error: BaseException) -> bool:
    """Return whether a handler of a signal has raised an error, wherever it struck: then it is no error of a sample."""
    if threading.current_thread() is not threading.main_thread():
        return False  # handlers run in the main thread
    codes = {code for number in signal.valid_signals() if (code := _code_of(signal.getsignal(number))) is not None}
    before = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # A handler may have put another one in its place before it raised.
        if frame.f_code in codes or (before is not None and _is_called_for_signal(frame, before)):
            return True
        before = frame
    return False


def _is_called_for_signal(frame: FrameType, caller: FrameType) -> bool:
    """Return whether a function was given what handlers are: the number of a signal, and the frame that it struck."""
    values = list(frame.f_locals.values())
    values += [each for value in values if type(value) is tuple for each in value]
    numbers = signal.valid_signals()
    return any(value is caller for value in values) and any(
        isinstance(value, int) and value in numbers for value in values
    )


def _code_of(handler: object) -> CodeType | None:
    """Return the code that a handler runs; None for what is no function of Python's."""
    while isinstance(handler, partial):
        handler = handler.func
    if not callable(handler):
        return None
    code = getattr(handler, "__code__", None) or getattr(getattr(handler, "__call__", None), "__code__", None)  # noqa: B004
    return code if isinstance(code, CodeType) else None
