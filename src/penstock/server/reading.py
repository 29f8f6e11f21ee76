"""How rows are read from one server: those of a slice as they come, or by their numbers, one request after the other
or several under way at a time.

All are cut short by any failure, and say exactly how far they came, so that whoever calls them can go on elsewhere.
The time of a call is limited: a call for a slice is renewed at the exact row when its time is over, one for rows by
number when half of it is. So neither side ever waits for a peer that is gone for longer than ``timeout``.
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
"""Rows that several requests under way ask for in all: 32 KiB. They must fit into what gRPC takes from a sender before
the other side reads, for while the server writes an answer that nobody reads yet it reads no request."""


class SliceReader:
    """A slice that is being read, from whichever server; ``at`` is the row that comes next.

    Args:
        request: the slice.
        open: opens a call.
        timeout: of calls.
    """

    def __init__(self, request: Slice, open: Open, timeout: float) -> None:
        self._request, self._open, self._timeout = request, open, timeout
        self.at, self.end = request.begin, request.stop
        self._call: Call | None = None
        self._came = False  # the call has brought rows

    @property
    def address(self) -> Address | None:
        """The server that is being read from."""
        return None if self._call is None else self._call.address

    def read(self, address: Address) -> pa.RecordBatch:
        """The next batch; from this server, if no call is open."""
        try:
            if self._call is None:
                self._call, self._came = self._open(address), False
                self._call.get(encode(replace(self._request, begin=self.at, end=self.end)))
            batch = self._next(self._call)
            if batch is None:
                raise ServerUnavailableError(f"{address} ended the stream {self.end - self.at} rows too early")
            if batch.num_rows > self.end - self.at:
                raise ServerError(f"{address} sent {batch.num_rows} rows, and {self.end - self.at} were to come")
        except BaseException:
            self.close()
            raise
        self.at += batch.num_rows
        self._came = True
        return batch

    def _next(self, call: Call) -> pa.RecordBatch | None:
        asked = monotonic()
        try:
            return call.read()
        except flight.FlightTimedOutError:
            # The time of a call runs while the consumer is at work, too. That is no fault of the server's.
            if self._came and monotonic() - asked < self._timeout / 2:
                raise Released from None
            raise

    def close(self) -> None:
        """Close the call."""
        call, self._call = self._call, None
        if call is not None:
            call.close()


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.calls: dict[bytes, Call] = {}


class RowReader:
    """Rows by number, over one call for each thread and data set that is kept open.

    Args:
        open: opens a call.
        timeout: of calls.
    """

    def __init__(self, open: Open, timeout: float) -> None:
        self._open, self._timeout = open, timeout
        self._local = _OfThread()
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._lock = threading.Lock()  # a set must not grow while it is gone through

    def read(self, command: bytes, numbers: npt.NDArray[np.int64], address: Address) -> list[pa.RecordBatch]:
        """The rows, in batches, from this server; ``command`` names the data set."""
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
    """Requests for rows by number that are under way at the same time. The answers come in order.

    Args:
        command: names the data set.
        open: opens a call.
        timeout: of calls.
    """

    def __init__(self, command: bytes, open: Open, timeout: float) -> None:
        self._command, self._open, self._timeout = command, open, timeout
        self._requests: deque[Indices] = deque()
        self._sent = 0  # requests that the call has
        self._call: Call | None = None

    @property
    def address(self) -> Address | None:
        """The server that is being read from."""
        return None if self._call is None else self._call.address

    def __len__(self) -> int:
        return len(self._requests)

    def has_room(self, count: int, ahead: int) -> bool:
        """Whether a request for so many rows may join the others, of which there are to be no more than ``ahead``."""
        rows = sum(map(len, self._requests)) + count
        return not self._requests or (len(self._requests) < ahead and rows <= _UNDER_WAY)

    def add(self, numbers: Indices) -> None:
        """One more request. It is sent by the next `read`, and again after a failure: until then the array may have
        become the caller's next request, so it is copied."""
        self._requests.append(numbers.copy())

    def read(self, address: Address) -> list[pa.RecordBatch]:
        """The answer to the first request; from this server, if no call is open."""
        try:
            return self._read(address, len(self._requests))
        except flight.FlightServerError:
            if len(self._requests) == 1:
                raise
        return self._read(address, 1)  # a refusal ends a call, and what was not read of it; of which request was it?

    def _read(self, address: Address, count: int) -> list[pa.RecordBatch]:
        """The same, with so many requests under way."""
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
        """Close the call. Requests without an answer are sent again by the next `read`."""
        call, self._call, self._sent = self._call, None, 0
        if call is not None:
            call.close()


def _answer(call: Call, count: int) -> list[pa.RecordBatch]:
    """The batches that answer a request for so many rows."""
    batches: list[pa.RecordBatch] = []
    missing = count
    while missing > 0:
        batch = call.read()
        if batch is None:
            raise ServerUnavailableError(f"{call.address} ended the stream")
        batches.append(batch)
        missing -= batch.num_rows
    if missing:
        raise ServerError(f"{call.address} sent {-missing} rows more than the {count} asked for")
    return batches
