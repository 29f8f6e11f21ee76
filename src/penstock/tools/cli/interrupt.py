"""Ctrl-C during imports: end the process at once, with exit code 130.

Some extension modules swallow a KeyboardInterrupt during their import, or turn it into another error. No work has
started at that point, so there is nothing to clean up.
"""

from __future__ import annotations

import os
import signal
import threading
from types import TracebackType

__all__ = ["INTERRUPTED", "AtOnce", "end_at_once"]

INTERRUPTED = 130  # 128 + the number of SIGINT, as in shells


class AtOnce:
    """Context manager: Ctrl-C ends the process at once until the block ends."""

    def __enter__(self) -> None:
        self._changed = end_at_once()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._changed:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def end_at_once() -> bool:
    """Make Ctrl-C end the process at once from now on; return whether this changed the handler.

    Programs in the background of a shell ignore Ctrl-C, and a custom handler was set on purpose: neither is changed.
    Outside the main thread, nothing changes, because only the main thread can set a handler.
    """
    mine = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    mine = mine and threading.current_thread() is threading.main_thread()
    if mine:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    return mine
