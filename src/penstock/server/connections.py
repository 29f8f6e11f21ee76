"""`Call`: one call to a server, on its own connection; and how forks are made safe.

gRPC does not work in a process that was forked while its parent used it: the child hangs, since it has none of gRPC's
threads. So before a fork, all calls of the process are closed, and gRPC ends its threads. The child restarts gRPC;
code that used a call in the parent gets `Released`, and opens another call at the exact row of the first one. If
something else keeps gRPC running (a server in the same process, another library), the child raises `ServerForkError`
instead of hanging.

Invariant: only the process that opened a call uses it, in one thread at a time.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from penstock.errors import ServerForkError
from penstock.server.address import Address

__all__ = ["FAILURES", "Call", "Released", "process"]

FAILURES = (flight.FlightError, pa.ArrowException, OSError)
"""The exceptions that Flight raises, including those for deadlines and cancelled calls."""

_FORK_TIMEOUT_S = 2.0  # how long a fork waits for gRPC to end
_THREADS = ("event_engine", "grpc_global_tim", "lifeguard", "grpc")  # prefixes of gRPC's thread names
_SHOWS_RUN_TIME = Path("/proc/self/schedstat").is_file()  # whether the system shows how long a thread has run
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a new connection does not inherit the back-off of a failed one
    ("grpc.max_receive_message_length", -1),
]


class Released(Exception):
    """The call was closed, by this thread or before a fork. Open a new one."""


class Call:
    """One call and its connection.

    Args:
        address: the server.
        tls: TLS arguments of a Flight client.
        token: the bearer token.
        timeout: seconds until the deadline of the call.

    Use one of `exchange`, `ask` and `client`, once; `ask` may be called again after the end of its stream, with a new
    deadline. All methods may raise `FAILURES` and `Released`.
    """

    def __init__(self, address: Address, tls: dict[str, Any], token: str | None, timeout: float) -> None:
        headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        self.options = flight.FlightCallOptions(timeout=timeout, headers=headers)
        self.address = address
        self.deadline = time.monotonic() + timeout
        self.is_closed = False
        """Whether closing has begun: later failures are not the server's fault."""
        self.client: Any = None
        """The Flight client, for calls that end when they return."""
        self._reader: Any = None
        self._writer: Any = None
        self._lock = threading.Lock()  # held while the call is used
        with process.opening(self):
            self.client = flight.FlightClient(str(address), generic_options=_OPTIONS, **tls)

    def exchange(self, command: bytes) -> None:
        """Open a stream of requests."""
        with self._lock:
            descriptor = flight.FlightDescriptor.for_command(command)
            if self.client is None:
                raise Released
            self._writer, self._reader = self.client.do_exchange(descriptor, self.options)

    def send(self, request: pa.Buffer) -> None:
        """Send a request on an exchange."""
        with self._lock:
            if self._writer is None:
                raise Released
            self._writer.write_metadata(request)

    def ask(self, command: bytes, request: pa.Buffer) -> None:
        """Open an exchange of a single request."""
        self.exchange(command)
        self.send(request)
        with self._lock:
            if self._writer is None:
                raise Released
            self._writer.done_writing()

    def read(self) -> pa.RecordBatch | None:
        """Return the next batch, or None after the last."""
        with self._lock:
            if self._reader is None:
                raise Released
            try:
                batch: pa.RecordBatch = self._reader.read_chunk().data
            except StopIteration:
                return None
            return batch

    def close(self, patience: float = -1) -> bool:
        """Cancel the call and release its resources, at the latest when another thread's read has ended.

        Returns whether that happened within ``patience`` seconds. Idempotent.
        """
        self.is_closed = True
        if (reader := self._reader) is not None:
            with contextlib.suppress(*FAILURES):
                reader.cancel()
        del reader
        if not self._lock.acquire(timeout=patience):
            return False
        try:
            for part in (self._writer, self.client):
                if part is not None:
                    with contextlib.suppress(*FAILURES):
                        part.close()
            self._reader = self._writer = self.client = None
        finally:
            self._lock.release()
        return True

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:  # at exit, module globals may be gone
        if not _ending():
            self.close(0)  # left open, such as by a thread that has ended

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Process:
    """The open calls of this process."""

    def __init__(self) -> None:
        self.servers = 0
        """The servers of this package in this process. They use gRPC, too."""
        self._forked_unsafely = False
        self._begin()
        atexit.register(self._close_all, 1.0)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before, after_in_parent=self._after_in_parent, after_in_child=self._after_in_child
            )

    def _begin(self) -> None:
        self.calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._lock = threading.Lock()  # held while a call is opened, and during a fork
        self._used = False  # whether there were calls since the last fork

    @contextlib.contextmanager
    def opening(self, call: Call) -> Iterator[None]:
        """Register a call while its connection is opened; forks wait meanwhile."""
        if self._forked_unsafely:
            raise ServerForkError(
                "this process was forked while gRPC was running in its parent (a penstock Server there, or another "
                "library that uses gRPC), and would hang: start workers with multiprocessing_context='forkserver' or "
                "'spawn'"
            )
        with self._lock:
            self.calls.add(call)
            self._used = True
            yield

    def _close_all(self, patience: float) -> list[Call]:
        """Close all calls; return those that could not be closed within ``patience`` seconds."""
        until = time.monotonic() + patience
        return [call for call in list(self.calls) if not call.close(max(0.0, until - time.monotonic()))]

    def _before(self) -> None:
        until = time.monotonic() + _FORK_TIMEOUT_S
        self._locked = self._lock.acquire(timeout=_FORK_TIMEOUT_S)
        self._left = self._close_all(_FORK_TIMEOUT_S)
        can_end = self._locked and self._used and not self._left and not self.servers
        while (running := _is_grpc_running()) is not False and can_end and time.monotonic() < until:
            time.sleep(0.001)  # gRPC ends in its own thread, which cannot be joined
        self._running = running is True

    def _after_in_parent(self) -> None:
        self._left = []
        self._used = self._running
        if self._locked:
            self._lock.release()

    def _after_in_child(self) -> None:
        self._forked_unsafely = self._forked_unsafely or self._running
        self.servers = 0
        _leaked.extend(self._left)
        self._begin()


_leaked: list[Call] = []
"""Calls of the parent process: releasing objects of its gRPC could hang, too."""


def _is_grpc_running(tasks: Path = Path("/proc/self/task")) -> bool | None:
    """Return whether a thread of gRPC exists; None if a thread has not run yet, so that it has no name, or has ended.

    If the system cannot tell, assume that only our calls use gRPC.
    """
    found: bool | None = False
    for task in tasks.iterdir() if tasks.is_dir() else ():
        try:
            if (task / "comm").read_text().startswith(_THREADS):
                return True
            if _SHOWS_RUN_TIME and (task / "schedstat").read_text().startswith("0 "):
                found = None
        except OSError:
            found = None
    return found


process = _Process()
"""The open calls of this process."""
