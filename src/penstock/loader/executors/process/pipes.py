"""Pipes between the consumer and its workers: pickled messages, each after its length.

The consumer's ends never block: a worker that does not read, or stops within a message, cannot delay the consumer
beyond its deadline. Workers may block, since they have nothing else to do.
"""

from __future__ import annotations

import os
import pickle
import struct
from typing import Any

__all__ = ["Inbox", "Outbox", "framed", "write"]

_LENGTH = struct.Struct("<Q")
_READ = 1 << 18


def framed(message: Any) -> bytes:
    """Return a message as bytes for a pipe.

    Raises:
        Exception: it cannot be pickled.
    """
    data = pickle.dumps(message, 5)
    return _LENGTH.pack(len(data)) + data


def write(fd: int, message: Any) -> None:
    """Write a message, blocking until all of it is in the pipe.

    Raises:
        BrokenPipeError: the reader is gone.
    """
    data = memoryview(framed(message))
    while data:
        data = data[os.write(fd, data) :]


class Inbox:
    """Reads messages from a pipe.

    Attributes:
        ended: whether the other end was closed. Earlier messages are delivered; an incomplete one is lost.
        empty: whether there was nothing to read.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.ended = self.empty = False
        self._parts: list[bytes] = []
        self._missing = 0

    def receive(self) -> list[Any]:
        """Read once, and return the messages that are complete now. It waits if the pipe blocks and is empty."""
        messages: list[Any] = []
        try:
            data = os.read(self.fd, _READ)
        except BlockingIOError:
            self.empty = True
            return messages
        self.ended = self.empty = not data
        # The parts of a long message are joined once, when it is complete.
        self._parts.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return messages
        data = b"".join(self._parts)
        begin, missing = 0, _LENGTH.size - len(data)
        while missing <= 0:
            end = begin + _LENGTH.size + _LENGTH.unpack_from(data, begin)[0]
            missing = end - len(data)
            if missing <= 0:
                messages.append(pickle.loads(memoryview(data)[begin + _LENGTH.size : end]))
                begin, missing = end, end + _LENGTH.size - len(data)
        self._parts, self._missing = [data[begin:]], missing
        return messages


class Outbox:
    """Writes messages to a pipe that does not block, and keeps what it does not accept.

    Attributes:
        waiting: what `flush` has to write when the pipe is writable.
        closed: whether the pipe was closed, so that its number may be another file's.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.waiting = b""
        self.closed = False

    def send(self, data: bytes) -> None:
        """Write or keep a message of `framed`."""
        self.waiting += data
        self.flush()

    def flush(self) -> None:
        """Write as much as the pipe accepts now. A dead reader is noticed elsewhere."""
        try:
            while self.waiting and not self.closed:
                self.waiting = self.waiting[os.write(self.fd, self.waiting) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.waiting = b""
