"""`Signals`: wait for signals in the main thread, whichever thread of the process receives them.

    with Signals(signal.SIGHUP) as signals:
        ...                             # a SIGHUP here is queued
        signals.catch(signal.SIGTERM)
        number = signals.wait()

No code runs in a handler: the interpreter writes the number of a signal to a socket, and `wait` reads it.
"""

from __future__ import annotations

import signal
import socket
from types import TracebackType
from typing import Any, Self

__all__ = ["Signals"]


class Signals:
    """Catches signals until the ``with`` block ends, then restores the old handlers. Use it in the main thread."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self.catch(*self._numbers)
        return self

    def catch(self, *numbers: signal.Signals) -> None:
        """Also catch these signals from now on."""
        for number in numbers:
            self._before[number] = signal.signal(number, lambda *_: None)

    def wait(self) -> signal.Signals:
        """Wait for the next signal and return it."""
        while True:
            number = self._reader.recv(1)[0]
            if number in self._before:  # other signals have their own handlers
                return signal.Signals(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._reader.close()
        self._writer.close()
