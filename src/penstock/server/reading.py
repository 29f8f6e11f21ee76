"""`BatchReader`: read rows by number from one server at a time, with several requests in flight.

Any failure ends a call, but the unanswered requests are known, so the next `read` sends them again, to any server. A
call has a deadline, and is replaced after half of its time. So neither side waits longer than ``timeout`` for a peer
that is gone.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from time import monotonic

import pyarrow as pa
import pyarrow.flight as flight

from penstock.errors import ServerError, ServerUnavailableError
from penstock.order.permutation import Indices
from penstock.server.address import Address
from penstock.server.connections import FAILURES, Call, Released
from penstock.server.protocol import encode_rows

__all__ = ["FEW", "BatchReader"]

FEW = 2048
"""Requests of up to this many rows are light: several of them are sent before the first one is answered."""

_MESSAGE = 1 << 14
"""Rows of one message; longer requests are sent in parts."""

_WAITING = 32_000
"""Maximum bytes of the messages behind the first unanswered one.

They must fit gRPC's send window of 64 KiB: a server that writes an answer, which is not read yet, reads no messages.
"""

_FRAME = 64  # bytes of a message besides its row numbers, at most


class BatchReader:
    """Reads rows by number over one call. Answers arrive in the order of the requests.

    Args:
        command: names the dataset, see `penstock.server.protocol.encode_key`.
        open: opens a call.
        timeout: the deadline of calls, in seconds.
    """

    def __init__(self, command: bytes, open: Callable[[Address], Call], timeout: float) -> None:
        self._command, self._open, self._timeout = command, open, timeout
        self._messages: deque[Indices] = deque()
        self._sent = 0  # messages sent on the call
        self._call: Call | None = None

    @property
    def address(self) -> Address | None:
        """The server that is being read from."""
        return None if self._call is None else self._call.address

    def add(self, numbers: Indices) -> int:
        """Add a request, which a later `push` or `read` sends; return the number of reads that answer it.

        The array is copied, since the caller may reuse it.
        """
        numbers, before = numbers.copy(), len(self._messages)
        self._messages += [numbers[begin : begin + _MESSAGE] for begin in range(0, len(numbers), _MESSAGE)]
        return len(self._messages) - before

    def read(self, address: Address) -> list[pa.RecordBatch]:
        """Return the next batches that were requested, from the open call, or else from this server."""
        try:
            return self._read(address, len(self._messages))
        except flight.FlightServerError:
            if len(self._messages) == 1:
                raise
        # A refusal ends the call and its unread answers. Sending one message shows which one was refused.
        return self._read(address, 1)

    def _read(self, address: Address, most: int) -> list[pa.RecordBatch]:
        """Return the answer to the first message, with up to ``most`` messages in flight."""
        try:
            if self._call is not None and not self._sent and self._is_late(self._call):
                self._hang_up()
            if (call := self._call) is None:
                call = self._call = self._open(address)
                call.exchange(self._command)
            if not self._sent or not self._is_late(call):
                self._send(call, most)
            batches = _answer(call, len(self._messages[0]))
        except BaseException:
            self._hang_up()
            raise
        self._sent -= 1
        self._messages.popleft()
        return batches

    def push(self) -> None:
        """Send messages, if a call is open. A failure shows at the next `read`."""
        call = self._call
        if call is not None and self._sent < len(self._messages) and not self._is_late(call):
            try:
                self._send(call, len(self._messages))
            except (*FAILURES, Released):
                self._hang_up()

    def _send(self, call: Call, most: int) -> None:
        """Send messages as far as they fit gRPC's window."""
        waiting = sum(numbers.nbytes + _FRAME for numbers in itertools.islice(self._messages, 1, self._sent))
        for numbers in itertools.islice(self._messages, self._sent, most):
            waiting += numbers.nbytes + _FRAME
            if self._sent and waiting > _WAITING:
                break
            call.send(encode_rows(numbers))
            self._sent += 1

    def _is_late(self, call: Call) -> bool:
        return monotonic() >= call.deadline - self._timeout / 2

    def _hang_up(self) -> None:
        call, self._call, self._sent = self._call, None, 0
        if call is not None:
            call.close()

    def close(self) -> None:
        """Close the call and forget unanswered requests. A reader that is used again opens another call."""
        self._hang_up()
        self._messages.clear()


def _answer(call: Call, count: int) -> list[pa.RecordBatch]:
    """Return the batches that answer a message for ``count`` rows."""
    batches: list[pa.RecordBatch] = []
    missing = count
    while missing > 0:
        batch = call.read()
        if batch is None:
            raise ServerUnavailableError(f"{call.address} ended the stream")
        batches.append(batch)
        missing -= batch.num_rows
    if missing:
        raise ServerError(f"{call.address} sent {-missing} rows more than the requested {count}")
    return batches
