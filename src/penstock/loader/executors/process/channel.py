"""Pipes between the consumer and its workers: frames of a message and raw buffers.

    | length of the message, u64 | number of buffers, u32 | their sizes, u64 each | message | buffers |

The consumer's ends never block: a worker that does not read, or stops within a frame, cannot delay the consumer beyond
its deadline. Workers may block, since they have nothing else to do.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Frame", "Inbox", "Outbox", "frame", "write"]

_HEADER = struct.Struct("<QI")
_READ = 1 << 16


class Frame(NamedTuple):
    """A message and its buffers: writable uint8 arrays that own their memory."""

    message: bytes
    buffers: list[Any]


def frame(message: bytes, sizes: Sequence[int] = ()) -> bytes:
    """Return the bytes of a frame before its buffers."""
    return b"".join((_HEADER.pack(len(message), len(sizes)), struct.pack(f"<{len(sizes)}Q", *sizes), message))


def write(fd: int, message: bytes, buffers: Sequence[memoryview] = ()) -> None:
    """Write a frame with its buffers, blocking until all of it is in the pipe.

    Raises:
        BrokenPipeError: the reader is gone.
    """
    head = memoryview(frame(message, [buffer.nbytes for buffer in buffers]))
    for rest in (head, *buffers):
        while rest.nbytes:
            rest = rest[os.write(fd, rest) :]


class Inbox:
    """Reads frames from a non-blocking pipe.

    Attributes:
        ended: whether the other end was closed. Earlier frames are delivered; a partial frame is lost.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.ended = False
        self._data = bytearray()
        self._message = b""
        self._buffers: list[Any] = []
        self._holes: deque[memoryview] = deque()  # parts of buffers that are still missing

    def receive(self) -> list[Frame]:
        """Read everything from the pipe and return the complete frames."""
        frames: list[Frame] = []
        try:
            while not self.ended and (self._fill_hole(frames) if self._holes else self._read(frames)):
                pass
        except BlockingIOError:
            pass
        return frames

    def _read(self, frames: list[Frame]) -> bool:
        """Read once; return whether more data may be available."""
        data = os.read(self.fd, _READ)
        self.ended = not data
        self._data += data
        self._parse(frames)
        return len(data) == _READ or bool(self._holes)

    def _fill_hole(self, frames: list[Frame]) -> bool:
        count = os.readv(self.fd, [self._holes[0]])
        self.ended = not count
        self._filled(count, frames)
        return not self.ended

    def _filled(self, count: int, frames: list[Frame]) -> None:
        hole = self._holes.popleft()[count:]
        if hole:
            self._holes.appendleft(hole)
        elif not self._holes:
            self._complete(frames)

    def _complete(self, frames: list[Frame]) -> None:
        frames.append(Frame(self._message, self._buffers))
        self._message, self._buffers = b"", []  # the receiver owns their memory now

    def _parse(self, frames: list[Frame]) -> None:
        data = self._data
        begin = 0
        while len(data) - begin >= _HEADER.size:
            length, count = _HEADER.unpack_from(data, begin)
            start = begin + _HEADER.size + 8 * count
            if len(data) < start + length:
                break
            message = bytes(data[start : start + length])
            sizes = struct.unpack_from(f"<{count}Q", data, begin + _HEADER.size)
            begin = start + length
            self._message, self._buffers = message, [np.empty(size, np.uint8) for size in sizes]
            self._holes = deque(memoryview(buffer) for buffer in self._buffers if buffer.size)
            if not self._holes:
                self._complete(frames)
            while self._holes and begin < len(data):
                size = min(len(self._holes[0]), len(data) - begin)
                self._holes[0][:size] = data[begin : begin + size]
                begin += size
                self._filled(size, frames)
            if self._holes:
                break
        del data[:begin]


class Outbox:
    """Writes frames to a non-blocking pipe, and buffers what the pipe does not accept."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._pending: deque[memoryview] = deque()

    @property
    def waiting(self) -> bool:
        """Whether data is buffered, so that `flush` should be called when the pipe is writable."""
        return bool(self._pending)

    def send(self, message: bytes) -> None:
        """Write or buffer a frame. A dead reader is detected elsewhere."""
        self._pending.append(memoryview(frame(message)))
        self.flush()

    def flush(self) -> None:
        """Write as much as the pipe accepts now."""
        while self._pending:
            data = self._pending[0]
            try:
                written = os.write(self.fd, data)
            except BlockingIOError:
                return
            except BrokenPipeError:  # the worker's sentinel reports its death
                self._pending.clear()
                return
            if written == len(data):
                self._pending.popleft()
            else:
                self._pending[0] = data[written:]
