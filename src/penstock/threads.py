"""Daemon threads that end before the interpreter does.

If a daemon thread is inside native code when the interpreter shuts down, its stack is unwound there, and C++ code
aborts. So at exit these threads are asked to stop, and joined with a time limit. They are still daemons, so that a
hung thread cannot keep a program from ending.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["Daemon"]

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
