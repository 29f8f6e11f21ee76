"""`Streams`: count and limit the concurrent calls of a server, and drain them at shutdown."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import ServerUnavailableError

__all__ = ["Streams", "cut_connections"]


class Streams:
    """Counts streams. Thread-safe. ``with streams`` answers a request, which draining waits for."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0
        """The number of open streams."""
        self._changed = threading.Condition()
        self._busy = 0
        self.draining = False
        """Whether new streams are refused."""

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Count as one stream within a ``with`` block.

        Raises:
            ServerUnavailableError: the server is stopping, or has too many streams.
        """
        with self._changed:
            if self.draining:
                raise ServerUnavailableError("the server is stopping")
            if self.count >= self._limit:
                raise ServerUnavailableError(f"the server is busy: it has {self.count} streams, its limit")
            self.count += 1
        try:
            yield
        finally:
            with self._changed:
                self.count -= 1

    def drain(self, grace: float) -> bool:
        """Refuse new streams and wait for busy ones; return whether all ended within ``grace`` seconds."""
        with self._changed:
            self.draining = True
            return self._changed.wait_for(lambda: self._busy == 0, grace)

    def __enter__(self) -> None:
        with self._changed:
            self._busy += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._busy -= 1
            if self.draining:
                self._changed.notify_all()


def cut_connections(port: int) -> None:
    """Close the connections that this process has accepted on a port.

    A Flight server waits for its calls when it stops, and nothing else can wake a call that waits for its client's next
    message. If the system does not list a process's files, this does nothing, and the client's deadline ends the call.
    """
    folder = Path("/proc/self/fd")
    for name in os.listdir(folder) if folder.is_dir() else []:
        with contextlib.suppress(OSError):  # not a socket, or closed meanwhile
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                tcp = found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6)
                if tcp and found.getsockname()[1] == port:
                    found.shutdown(socket.SHUT_RDWR)
