"""Ctrl-C while modules are imported: it ends the process at once, with the exit code of Ctrl-C.

KeyboardInterrupt does not come through every import: extension modules drop it, or turn it into another error. Nothing
has begun at that time, so there is nothing to clean up.
"""

from __future__ import annotations

import os
import signal
import threading
from types import TracebackType

__all__ = ["INTERRUPTED", "AtOnce", "end_at_once"]

INTERRUPTED = 130  # 128 and the number of SIGINT, as a shell has it


class AtOnce:
    """Have Ctrl-C end the process at once, until the block ends."""

    def __enter__(self) -> None:
        self._changed = end_at_once()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._changed:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def end_at_once() -> bool:
    """Have Ctrl-C end the process at once from now on; return whether that is a change.

    A shell has programs in the background ignore it, and a handler of somebody else's is there on purpose: both stay.
    Threads other than the main one get no Ctrl-C.
    """
    mine = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    mine = mine and threading.current_thread() is threading.main_thread()
    if mine:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    return mine
