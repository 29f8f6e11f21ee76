"""`Server`: serve manifests and the copies of a cache over Arrow Flight, without state.

    with Server({"train": "train.txt"}) as server:
        print(server.address)           # grpc://127.0.0.1:43121
        server.wait()

Its calls, for any Flight client:

==================  ==================================================================================================
``do_exchange``     command: a dataset's name and version; each message holds row numbers, its answer the rows. A copy
                    in the cache is a version of the dataset `CACHE`, see `Copy`
``list_flights``    the datasets; ``get_flight_info``, ``get_schema``: one of them, by name (path) or by command
``do_action``       ``health``, and ``prefix``: the dataset's fingerprints before rows were appended to it
==================  ==================================================================================================

Promises: an answer depends only on the request and the file, so any number of jobs can share a server, and servers are
interchangeable; memory is bounded by the limits for any request; a request that cannot be answered is refused with a
reason, without effect on other clients.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import stat
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from penstock.errors import ConfigError, PenstockError, ServerLimitError, ServerUnavailableError, TicketError
from penstock.manifest import Manifest
from penstock.manifest.lines import TooMuch
from penstock.order.permutation import Indices
from penstock.server.auth import TLS, BearerToken, check_exposure, check_token
from penstock.server.catalog import Catalog, Served, Version
from penstock.server.connections import process
from penstock.server.copies import CACHE, Copies, Copy
from penstock.server.protocol import decode_key, decode_prefix, decode_rows, encode_error
from penstock.storage import Cache

__all__ = ["Limits", "Observer", "Server"]

_log = logging.getLogger(__name__)

_ACTIONS = {
    "health": "whether the server takes calls, and how many datasets it has",
    "prefix": "the fingerprints that a dataset may have had with its first rows alone",
}
_SINGLES = 8  # up to this many rows are read with the GIL held
_FEW = 1024  # up to this many rows, waking a thread would take longer
_GATHERERS = 8  # threads; more than cores, since some wait for the disk
_WAIT = 0.1  # seconds to wait for a free thread
_STOP = 0.2  # seconds for the last streams to end
_CUT = 5.0  # seconds for calls whose connection was closed


@dataclass(frozen=True)
class Limits:
    """The limits of a server.

    ``streams``: concurrent calls, each with a thread; ``page_rows``: rows of one message with row numbers;
    ``message_bytes``: bytes of one record batch, unless it is a single row.
    """

    streams: int = 1024
    page_rows: int = 1 << 18
    message_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if min(self.streams, self.page_rows, self.message_bytes) < 1:
            raise ConfigError(f"limits must be positive: {self}")


class Observer:
    """Receives events of a server, and does nothing. Subclasses are called in the server's threads: they must be quick.

    ``peer`` is gRPC's text, such as ``ipv4:127.0.0.1:5000``; ``kind`` is the name of a class in `penstock.errors`, or
    ``InternalError``.
    """

    def stream_started(self, name: str, peer: str) -> None:
        """A client began to read a dataset."""

    def rows(self, name: str, count: int, nbytes: int) -> None:
        """``count`` rows were sent, in ``nbytes`` bytes."""

    def stream_ended(self, name: str, peer: str, error: str | None) -> None:
        """A stream ended; ``error`` is the reason if it ended early."""

    def error(self, name: str | None, kind: str) -> None:
        """A call failed; ``name`` is the dataset, if it is known."""


class Server:
    """A metadata server that runs in its own threads until `close`. A context manager.

    Args:
        manifests: the datasets to serve, by name: files, or opened manifests if they need options.
        cache: also serve its complete copies, to clients that know URL and version of an object.
        host, port: the address to listen on; port 0 selects a free port, see `address`.
        token: clients must send it. Without a token, only loopback addresses are allowed, unless ``insecure``.
        tls: certificate and key; for mutual TLS also the roots of client certificates.
        insecure: listen on any address, without a token.
        limits: see `Limits`.
        observer: receives events of streams, rows and errors.

    Raises:
        ConfigError: invalid arguments, or an address that is in use or not of this machine.
        ManifestError: a file that cannot be opened.

    Memory: one answer for each stream, see `Limits`; files are mapped and shared with all processes of the machine.
    """

    def __init__(
        self,
        manifests: Mapping[str, str | Path | Manifest],
        *,
        cache: Cache | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        tls: TLS | None = None,
        insecure: bool = False,
        limits: Limits | None = None,
        observer: Observer | None = None,
    ) -> None:
        host = host.removeprefix("[").removesuffix("]")  # as in addresses, for IPv6
        check_exposure(host, token, tls, insecure)
        observer = Observer() if observer is None else observer
        if not manifests and cache is None:
            raise ConfigError("nothing to serve: pass at least one manifest, or a cache")
        self._catalog = Catalog(manifests)
        options: dict[str, Any] = {} if tls is None else tls.options()
        if token is not None:
            refused = partial(observer.error, None, "ServerAuthError")
            options["middleware"] = {"token": BearerToken(check_token(token), refused)}
        scheme = "grpc" if tls is None else "grpc+tls"
        shown = f"[{host}]" if ":" in host else host
        try:
            location = f"{scheme}://{shown}:{port}"
            flight_server = _Flight(self._catalog, Copies(cache), limits or Limits(), observer, location, options)
        except (pa.ArrowException, flight.FlightError, OSError) as error:
            reason = _refusal(host, port) or str(error).partition(". Detail")[0]
            raise ConfigError(f"cannot listen on {shown}:{port}: {reason}") from error
        self.address = f"{scheme}://{shown}:{flight_server.port}"
        """The address it listens on: ``grpc://host:port``, or ``grpc+tls://host:port``."""
        self._flight: _Flight | None = flight_server
        self._streams = flight_server.streams
        process.servers += 1
        self._closing = threading.Lock()
        self._closed = threading.Event()

    @property
    def datasets(self) -> list[Served]:
        """Return the datasets being served."""
        return self._catalog.served()

    @property
    def streams(self) -> int:
        """The number of open streams."""
        return self._streams.count

    @property
    def stopping(self) -> bool:
        """Whether new calls are refused, because `close` has begun."""
        return self._streams.draining

    def reload(self) -> list[str]:
        """Reopen all files and return the names whose content changed. Running jobs keep their version.

        Raises:
            ManifestError: a file that cannot be opened; its old version stays. The others are reloaded.
        """
        return self._catalog.reload()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until another thread has completed `close`; return False on a timeout."""
        return self._closed.wait(timeout)

    def close(self, *, grace: float = 10.0) -> None:
        """Refuse new calls, let streams finish for ``grace`` seconds, then end the rest. Idempotent.

        Clients continue with another server, or with this one when it is back.
        """
        with self._closing:
            server, self._flight = self._flight, None  # gRPC runs as long as this object exists
            if server is None:
                return
            self._streams.drain(grace)
            stopper = threading.Thread(target=server.stop, name="penstock-server-stop", daemon=True)
            stopper.start()
            stopper.join(_STOP)
            if stopper.is_alive():
                _cut_connections(server.port)
                stopper.join(_CUT)
            process.servers -= 1
            self._closed.set()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _refusal(host: str, port: int) -> str | None:
    """Return why the system refuses to listen on an address, which gRPC does not report; None if it accepts."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as trial:
            trial.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "another program listens there already: choose another port, or 0 for any that is free"
        return error.strerror or str(error)
    return None


class _Flight(flight.FlightServerBase):  # type: ignore[misc]
    """Answers the calls."""

    def __init__(
        self,
        catalog: Catalog,
        copies: Copies,
        limits: Limits,
        observer: Observer,
        location: str,
        options: dict[str, Any],
    ) -> None:
        # Calls may arrive before the base class's constructor returns.
        self._catalog, self._copies, self._limits, self._observer = catalog, copies, limits, observer
        self.streams = _Streams(limits.streams)
        # Threads that request the GIL repeatedly within a few rows' work wait longer than threads that take turns.
        self._turn = threading.Lock()
        self._threads = ThreadPoolExecutor(_GATHERERS, "penstock-gather")
        super().__init__(location, **options)

    def stop(self) -> None:
        """Wait for the calls, then stop."""
        self.shutdown()
        self._threads.shutdown()

    # ------------------------------------------------------------------ datasets

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[flight.FlightInfo]:
        with self._refusing():
            if criteria:
                raise TicketError("list_flights does not support criteria: it lists all datasets")
            return iter([_info(version) for version in self._catalog.newest()])

    def get_flight_info(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        with self._refusing():
            return _info(self._catalog.find(*_key(descriptor)))

    def get_schema(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.SchemaResult:
        with self._refusing():
            return flight.SchemaResult(self._catalog.find(*_key(descriptor)).schema)

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        return list(_ACTIONS.items())

    def do_action(self, context: Any, action: flight.Action) -> Iterator[bytes]:
        with self._refusing():
            answer: Any
            match action.type:
                case "health":
                    status = "stopping" if self.streams.draining else "ok"
                    answer = {"status": status, "datasets": len(self._catalog.newest())}
                case "prefix":
                    name, fingerprint, rows = decode_prefix(action.body.to_pybytes())
                    with self.streams.one(), self.streams:
                        answer = self._catalog.find(name, fingerprint).manifest.prefix_fingerprints(rows)
                case _:
                    raise TicketError(f"unknown action {action.type!r:.80}; use one of {', '.join(_ACTIONS)}")
            return iter([json.dumps(answer).encode()])

    # ------------------------------------------------------------------ rows

    def do_exchange(self, context: Any, descriptor: flight.FlightDescriptor, reader: Any, writer: Any) -> None:
        with self._refusing() as about:
            name, fingerprint = _key(descriptor)
            version: Version | Copy
            if name == CACHE and fingerprint is not None:
                version = self._copies.find(fingerprint)
            else:
                version = self._catalog.find(name, fingerprint)
            about.name = version.name
            with self._counted(version.name, context.peer()):
                writer.begin(version.wire_schema)
                while not self.streams.draining:
                    try:
                        request = reader.read_chunk().app_metadata
                    except (StopIteration, flight.FlightCancelledError, flight.FlightTimedOutError):
                        return
                    with self.streams:
                        numbers = decode_rows(request, version.rows)
                        if len(numbers) > self._limits.page_rows:
                            raise ServerLimitError(
                                f"{len(numbers)} rows were requested at once, but this server allows "
                                f"{self._limits.page_rows}"
                            )
                        self._send(version, numbers, writer)

    def _send(self, version: Version | Copy, numbers: Indices, writer: Any) -> None:
        """Send rows in batches of at most ``message_bytes`` bytes; a single row may exceed it."""
        count, limit = len(numbers), self._limits.message_bytes
        most = limit if count > 1 else None
        try:
            if count > _FEW:
                batch = self._in_a_thread(version, numbers, most)
            elif count > _SINGLES or isinstance(version, Copy):
                batch = version.gather(numbers, most)
            else:
                with self._turn:
                    batch = version.gather(numbers, most)
            nbytes = batch.get_total_buffer_size()  # the same as nbytes for a batch of its own, and quicker
        except TooMuch:  # a request may repeat the longest row of a file many times
            nbytes = limit + 1
        if nbytes <= limit or count == 1:
            self._observer.rows(version.name, count, nbytes)
            writer.write_batch(batch)
        else:
            self._send(version, numbers[: count // 2], writer)
            self._send(version, numbers[count // 2 :], writer)

    def _in_a_thread(self, version: Version | Copy, numbers: Indices, most: int | None) -> pa.RecordBatch:
        """Gather rows in a shared thread: one for each stream would hold several times the memory of its answer."""
        try:
            future = self._threads.submit(version.gather, numbers, most)
        except RuntimeError as error:  # at interpreter shutdown, or with too many threads
            raise ServerUnavailableError(f"the server is stopping, or out of threads: {error}") from None
        try:
            return future.result(_WAIT)
        except TimeoutError:  # all threads wait for a disk
            return version.gather(numbers, most) if future.cancel() else future.result()

    # ------------------------------------------------------------------ errors and counts

    @contextmanager
    def _counted(self, name: str, peer: str) -> Iterator[None]:
        with self.streams.one():
            error: str | None = None
            self._observer.stream_started(name, peer)
            _log.debug("%s reads %s", peer, name)
            try:
                yield
            except GeneratorExit:
                raise  # the client is done, or gone
            except BaseException as problem:
                error = f"{type(problem).__name__}: {problem}"
                raise
            finally:
                self._observer.stream_ended(name, peer, error)
                _log.debug("%s has ended reading %s: %s", peer, name, error or "done")

    @contextmanager
    def _refusing(self) -> Iterator[SimpleNamespace]:
        """Send errors to the client: Penstock's with kind and message, others without their text."""
        about = SimpleNamespace(name=None)
        try:
            yield about
        except PenstockError as error:
            self._observer.error(about.name, type(error).__name__)
            _log.debug("refused: %s: %r", type(error).__name__, str(error))
            unavailable = isinstance(error, ServerUnavailableError)
            kind = flight.FlightUnavailableError if unavailable else flight.FlightServerError
            raise kind(str(error), encode_error(error)) from None
        except (GeneratorExit, flight.FlightError, flight.FlightCancelledError, flight.FlightTimedOutError):
            raise
        except Exception as error:
            self._observer.error(about.name, "InternalError")
            _log.exception("a call failed")
            raise flight.FlightInternalError(f"the server failed ({type(error).__name__}); its log has more") from None


def _key(descriptor: flight.FlightDescriptor) -> tuple[str | None, str | None]:
    """Return name and version of the dataset that a call is about."""
    if descriptor.descriptor_type == flight.DescriptorType.CMD:
        return decode_key(descriptor.command)
    path = [part.decode("utf-8", "replace") for part in descriptor.path or []]
    if len(path) != 1:
        raise TicketError(f"request a dataset by its name alone, got the path {'/'.join(path)!r:.80}")
    return path[0], None


def _info(version: Version) -> flight.FlightInfo:
    descriptor = flight.FlightDescriptor.for_path(version.name)
    return flight.FlightInfo(version.schema, descriptor, [], version.rows, version.manifest.nbytes)


class _Streams:
    """Counts streams. Thread-safe. ``with streams`` answers a request, which draining waits for."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0
        """The number of open streams."""
        self._changed = threading.Condition()
        self._busy = 0
        self.draining = False
        """Whether new streams are refused."""

    @contextmanager
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


def _cut_connections(port: int) -> None:
    """Close the connections that this process has accepted on a port.

    A Flight server waits for its calls when it stops, and nothing else can wake a call that waits for its client's next
    message. If the system does not list a process's files, this does nothing, and the client's deadline ends the call.
    """
    folder = Path("/proc/self/fd")
    for name in os.listdir(folder) if folder.is_dir() else []:
        with suppress(OSError):  # not a socket, or closed meanwhile
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                tcp = found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6)
                if tcp and found.getsockname()[1] == port:
                    found.shutdown(socket.SHUT_RDWR)
