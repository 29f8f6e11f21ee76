"""Daemon threads that end before the interpreter does.

A daemon thread that is still inside native code when the interpreter goes away is unwound there, which C++ answers with
an abort. So ours are asked to stop at exit, and waited for, for a bounded time. Daemons they are all the same: a thread
that hangs must not keep a program from ending.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["Daemon"]

_PATIENCE = 10.0  # seconds that one is given at exit, all of them at the same time

_running: weakref.WeakSet[Daemon] = weakref.WeakSet()


class Daemon(threading.Thread):
    """A started daemon thread.

    Args:
        work: what it does; it should look at `stopping` now and then.
        name: of the thread.
        wake: called by `stop`, for threads that wait.
        patience: seconds that it is waited for at exit.
    """

    def __init__(
        self,
        work: Callable[[Daemon], None],
        *,
        name: str,
        wake: Callable[[], object] | None = None,
        patience: float = _PATIENCE,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.patience = patience
        self._work: Callable[[Daemon], None] | None = work
        self._wake = wake
        self.stopping = False
        _running.add(self)
        self.start()

    def run(self) -> None:
        """Do the work; it is let go of at once, since it may hold whatever holds this thread."""
        work, self._work = self._work, None
        if work is not None:
            work(self)

    def stop(self) -> None:
        """Ask it to end."""
        self.stopping = True
        if self._wake is not None:
            self._wake()


@atexit.register
def _end_all() -> None:
    threads = list(_running)
    for thread in threads:
        thread.stop()
    begun = time.monotonic()
    for thread in threads:
        thread.join(max(0.0, begun + thread.patience - time.monotonic()))
