"""How rows are read from one server: those of a slice as they come, or by their numbers.

Both are cut short by any failure, and say exactly how far they came, so that whoever calls them can go on elsewhere.
The time of a call is limited: a call for a slice is renewed at the exact row when its time is over, one for rows by
number when half of it is. So neither side ever waits for a peer that is gone for longer than ``timeout``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.flight as flight

from penstock.errors import ServerError, ServerUnavailableError
from penstock.server.connections import Call, Released
from penstock.server.failures import Address
from penstock.server.protocol import Slice, encode, encode_rows

__all__ = ["RowReader", "SliceReader"]

Open = Callable[[Address], Call]


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

    def read(self, command: bytes, numbers: npt.NDArray[np.int64], address: Address) -> list[pa.RecordBatch]:
        """The rows, in batches, from this server; ``command`` names the data set."""
        call = self._call(address, command)
        try:
            batch = call.ask(encode_rows(numbers))
            batches: list[pa.RecordBatch] = []
            missing = len(numbers)
            while missing > 0:
                if batch is None:
                    raise ServerUnavailableError(f"{address} ended the stream")
                batches.append(batch)
                missing -= batch.num_rows
                batch = call.read() if missing > 0 else None
        except BaseException:
            self._local.calls.pop(command).close()
            raise
        if missing:
            raise ServerError(f"{address} sent {-missing} rows more than the {len(numbers)} asked for")
        return batches

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
        self._calls.add(call)
        return call

    def close(self) -> None:
        """Close the calls of all threads."""
        for call in list(self._calls):
            call.close()
