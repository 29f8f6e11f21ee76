"""Read rows from one server: a slice as a stream, or rows by number, with one or several requests in flight.

Any failure ends a read, but its exact progress is known, so the caller can continue with another server. Calls have a
deadline: a call for a slice is reopened at the exact row when its time is over, a call for rows by number after half
of its time. So neither side waits longer than ``timeout`` for a peer that is gone.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.flight as flight

from penstock.errors import ServerError, ServerUnavailableError
from penstock.order.permutation import Indices
from penstock.server.address import Address
from penstock.server.connections import Call, Released
from penstock.server.protocol import Slice, encode, encode_rows

__all__ = ["BatchReader", "RowReader", "SliceReader"]

Open = Callable[[Address], Call]

_UNDER_WAY = 4096
"""Maximum rows of all requests in flight: 32 KiB of row numbers.

They must fit gRPC's send window: while the server writes an answer that is not read yet, it reads no requests.
"""


class SliceReader:
    """Reads a slice, from any server; ``at`` is the next row.

    Args:
        request: the slice.
        open: opens a call.
        timeout: the deadline of calls, in seconds.
    """

    def __init__(self, request: Slice, open: Open, timeout: float) -> None:
        self._request, self._open, self._timeout = request, open, timeout
        self.at, self.end = request.begin, request.stop
        self._call: Call | None = None
        self._received = False  # whether the call has returned rows

    @property
    def address(self) -> Address | None:
        """The server that is being read from."""
        return None if self._call is None else self._call.address

    def read(self, address: Address) -> pa.RecordBatch:
        """Return the next batch, from the open call, or else from this server."""
        try:
            if self._call is None:
                self._call, self._received = self._open(address), False
                self._call.get(encode(replace(self._request, begin=self.at, end=self.end)))
            batch = self._next(self._call)
            if batch is None:
                raise ServerUnavailableError(f"{address} ended the stream {self.end - self.at} rows too early")
            if batch.num_rows > self.end - self.at:
                raise ServerError(f"{address} sent {batch.num_rows} rows, but only {self.end - self.at} were left")
        except BaseException:
            self.close()
            raise
        self.at += batch.num_rows
        self._received = True
        return batch

    def _next(self, call: Call) -> pa.RecordBatch | None:
        asked = monotonic()
        try:
            return call.read()
        except flight.FlightTimedOutError:
            # The deadline also runs while the consumer works, so this is not the server's fault.
            if self._received and monotonic() - asked < self._timeout / 2:
                raise Released from None
            raise

    def close(self) -> None:
        """Close the call."""
        call, self._call = self._call, None
        if call is not None:
            call.close()


class _ThreadCalls(threading.local):
    def __init__(self) -> None:
        self.calls: dict[bytes, Call] = {}


class RowReader:
    """Reads rows by number, over one persistent call for each thread and dataset.

    Args:
        open: opens a call.
        timeout: the deadline of calls, in seconds.
    """

    def __init__(self, open: Open, timeout: float) -> None:
        self._open, self._timeout = open, timeout
        self._local = _ThreadCalls()
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._lock = threading.Lock()  # a set must not grow while it is iterated

    def read(self, command: bytes, numbers: npt.NDArray[np.int64], address: Address) -> list[pa.RecordBatch]:
        """Return the rows, in batches, from this server; ``command`` names the dataset."""
        call = self._call(address, command)
        try:
            call.send(encode_rows(numbers))
            return _answer(call, len(numbers))
        except BaseException:
            self._local.calls.pop(command).close()
            raise

    def _call(self, address: Address, command: bytes) -> Call:
        calls = self._local.calls
        call = calls.get(command)
        if call is not None and call.address == address and monotonic() < call.deadline - self._timeout / 2:
            return call
        if call is not None:
            del calls[command]
            call.close()
        call = self._open(address)
        try:
            call.exchange(command)
        except BaseException:
            call.close()
            raise
        calls[command] = call
        with self._lock:
            self._calls.add(call)
        return call

    def close(self) -> None:
        """Close the calls of all threads."""
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.close()


class BatchReader:
    """Reads rows by number, with several requests in flight. Answers arrive in order.

    Args:
        command: names the dataset.
        open: opens a call.
        timeout: the deadline of calls, in seconds.
    """

    def __init__(self, command: bytes, open: Open, timeout: float) -> None:
        self._command, self._open, self._timeout = command, open, timeout
        self._requests: deque[Indices] = deque()
        self._sent = 0  # requests sent on the call
        self._call: Call | None = None

    @property
    def address(self) -> Address | None:
        """The server that is being read from."""
        return None if self._call is None else self._call.address

    def __len__(self) -> int:
        return len(self._requests)

    def has_room(self, count: int, ahead: int) -> bool:
        """Return whether a request for ``count`` rows may be added, with at most ``ahead`` requests in flight."""
        rows = sum(map(len, self._requests)) + count
        return not self._requests or (len(self._requests) < ahead and rows <= _UNDER_WAY)

    def add(self, numbers: Indices) -> None:
        """Add a request. The next `read` sends it, and sends it again after a failure.

        The array is copied, since the caller may reuse it.
        """
        self._requests.append(numbers.copy())

    def read(self, address: Address) -> list[pa.RecordBatch]:
        """Return the answer to the first request, from the open call, or else from this server."""
        try:
            return self._read(address, len(self._requests))
        except flight.FlightServerError:
            if len(self._requests) == 1:
                raise
        return self._read(
            address, 1
        )  # a refusal ends the call and its unread answers; sending one request shows which it was

    def _read(self, address: Address, count: int) -> list[pa.RecordBatch]:
        """Return the answer to the first request, with ``count`` requests in flight."""
        try:
            call = self._call_for(address)
            if not self._sent or monotonic() < call.deadline - self._timeout / 2:
                for numbers in itertools.islice(self._requests, self._sent, count):
                    call.send(encode_rows(numbers))
                    self._sent += 1
            batches = _answer(call, len(self._requests[0]))
        except BaseException:
            self.close()
            raise
        self._sent -= 1
        self._requests.popleft()
        return batches

    def _call_for(self, address: Address) -> Call:
        call = self._call
        if call is not None and not self._sent and monotonic() >= call.deadline - self._timeout / 2:
            self.close()
        if self._call is None:
            self._call = self._open(address)
            self._call.exchange(self._command)
        return self._call

    def close(self) -> None:
        """Close the call. The next `read` sends unanswered requests again."""
        call, self._call, self._sent = self._call, None, 0
        if call is not None:
            call.close()


def _answer(call: Call, count: int) -> list[pa.RecordBatch]:
    """Return the batches that answer a request for ``count`` rows."""
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
