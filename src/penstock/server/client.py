"""`Client`: read rows from one metadata server, or from several interchangeable ones.

    client = Client(["grpc://a:8815", "grpc://b:8815"], token="...")
    info = client.info("train")
    client.rows("train", info.fingerprint, [5, 3, 5])        one record batch of three rows, as they are stored
    for batch in client.batches("train", info.fingerprint, [[5, 3, 5], [8, 2]]): ...
    client.manifest("train")[5]                              Record(path='a/5.jpg', label=7, row=5, extra={})

The next rows of a job are known from its plan, so `batches` requests them before the current ones have arrived:

    order = make_order("global", info.rows, seed=0, epoch=2)
    pages = (order[np.arange(begin, min(begin + 16384, info.rows))] for begin in range(0, info.rows, 16384))
    for batch in client.batches("train", info.fingerprint, pages): ...

Promises: rows arrive complete and in order, each once, even if servers die, hang or restart meanwhile, since unanswered
requests are sent again; no wait exceeds ``timeout``; servers whose data differs from that at the start of the job are
not used. If no server answers for ``patience`` seconds, the error reports what each of them did.
"""

from __future__ import annotations

import json
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.flight as flight

from penstock.errors import ConfigError, PenstockError, ServerError, ServerUnavailableError
from penstock.order.permutation import Indices
from penstock.server.address import Address
from penstock.server.connections import FAILURES, Call, Released
from penstock.server.protocol import as_numbers, encode_key, encode_prefix, encode_rows
from penstock.server.servers import Access, Servers
from penstock.server.wire_format import KEY, WireFormat, restore

if TYPE_CHECKING:
    from penstock.server.remote_manifest import RemoteManifest

__all__ = ["Client", "DataSetInfo"]

T = TypeVar("T")
RowNumbers = Sequence[int] | npt.NDArray[np.integer[Any]]

_MESSAGE = 1 << 14
"""Rows of one message; longer requests are sent in parts."""

_FEW = 2048
"""Requests of up to this many rows are light: several of them are sent before the first one is answered."""

_WAITING = 32_000
"""Maximum bytes of the messages behind the first unanswered one.

They must fit gRPC's send window of 64 KiB: a server that writes an answer, which is not read yet, reads no messages.
"""

_FRAME = 64  # bytes of a message besides its row numbers, at most


@dataclass(frozen=True)
class DataSetInfo:
    """Facts about one version of a dataset.

    ``schema`` is the schema of the manifest's tables (path, label, ...), ``nbytes`` the size of its files.
    """

    name: str
    rows: int
    fingerprint: str
    schema: pa.Schema
    nbytes: int


class Client:
    """A client of metadata servers, see the module. Thread-safe; a pickled copy is a new client.

    Args:
        addresses: one or several of ``host:port``, ``grpc://host:port`` and ``grpc+tls://host:port``, which serve the
            same files. An address without a scheme uses TLS only if ``tls_roots`` or ``tls_cert`` is given.
        token, token_file: the servers' token, or a file that holds it; the file is read for each connection.
        timeout: seconds after which a call without an answer is abandoned, and another server is tried; 10 by default.
        patience: seconds for which `rows` and `batches` keep trying while no server answers; other calls use
            ``timeout``.
        tls_roots: PEM file of certificates to trust, instead of the system's.
        tls_cert, tls_key: PEM files of the client's own certificate, for servers that require one.

    Raises:
        ConfigError: invalid arguments.

    Each call may raise ServerUnavailableError, ServerAuthError, ServerTLSError, UnknownDataSetError, ServerChangedError
    (other data), TicketError, ServerLimitError, ServerForkError or ManifestError (a file changed under the server), all
    after every server was tried.

    Connections are opened at first use: one for each thread that calls `rows`, and up to two for a call of `batches`.
    Before a fork, all connections of the process are closed; parent and child open theirs again.
    """

    def __init__(self, addresses: str | Sequence[str], *, patience: float = 60.0, **access: Unpack[Access]) -> None:
        if not patience >= 0:
            raise ConfigError(f"patience must not be negative, got {patience}")
        self._begin(Servers(addresses, **access), patience)

    def _begin(self, servers: Servers, patience: float) -> None:
        self._servers, self.patience = servers, patience
        self.addresses, self.timeout = servers.addresses, servers.timeout
        self._local = threading.local()
        self._readers: weakref.WeakSet[_BatchReader] = weakref.WeakSet()
        self._lock = threading.Lock()  # a set must not grow while it is iterated

    def __getstate__(self) -> tuple[Servers, float]:
        return self._servers, self.patience

    def __setstate__(self, state: tuple[Servers, float]) -> None:
        self._begin(*state)

    def __repr__(self) -> str:
        return f"<Client of {self._servers}>"

    # ------------------------------------------------------------------ datasets

    def list(self) -> Sequence[DataSetInfo]:
        """Return the datasets, in the server's order."""
        return self._ask(lambda call: [_info(found)[0] for found in call.client.list_flights(options=call.options)])

    def info(self, name: str | None = None, fingerprint: str | None = None) -> DataSetInfo:
        """Return a dataset; by default the only one, and its newest version."""
        return _info(self._flight_info(name, fingerprint))[0]

    def manifest(self, name: str | None = None, fingerprint: str | None = None) -> RemoteManifest:
        """Return the dataset as a `Manifest`, whose rows are read from the servers."""
        from penstock.server.remote_manifest import RemoteManifest, RemoteRows

        found = self._flight_info(name, fingerprint)
        info, form = _info(found)
        return RemoteManifest(RemoteRows(self, info.name, form, found.schema.remove_metadata()))

    def health(self) -> dict[str, str]:
        """Return the state of each server: ``{address: "ok" | "stopping" | error}``. Calls them one by one."""
        states = {}
        for address in self.addresses:
            try:
                with self._servers.open(address) as call:
                    states[str(address)] = str(_act(call, "health", b"")["status"])
            except (*FAILURES, PenstockError) as error:
                states[str(address)] = str(self._servers.explain(error, address))
        return states

    def prefix_fingerprints(self, name: str, fingerprint: str, rows: int) -> Sequence[str]:
        """Return the fingerprints that a dataset may have had when it held ``rows`` rows, likeliest first.

        The server reads its file up to that row.
        """
        body = encode_prefix(name, fingerprint, rows)
        return self._ask(lambda call: [str(one) for one in _act(call, "prefix", body)])

    def _flight_info(self, name: str | None, fingerprint: str | None) -> flight.FlightInfo:
        descriptor = flight.FlightDescriptor.for_command(encode_key(name, fingerprint))
        return self._ask(lambda call: call.client.get_flight_info(descriptor, options=call.options))

    def _ask(self, ask: Callable[[Call], T]) -> T:
        def attempt(address: Address) -> T:
            with self._servers.open(address) as call:
                return ask(call)

        return self._servers.insist(attempt, min(self.timeout, self.patience))

    # ------------------------------------------------------------------ rows

    def rows(self, name: str, fingerprint: str, indices: RowNumbers) -> pa.RecordBatch:
        """Return rows by number, in this order, repeats allowed: one round trip for each 16,384 rows.

        Raises:
            TicketError: a row outside ``[0, rows)``.
        """
        command = encode_key(name, fingerprint)
        readers: dict[bytes, _BatchReader] = self._local.__dict__.setdefault("readers", {})
        reader = readers.get(command)
        if reader is None:
            reader = readers[command] = _BatchReader(command, self._servers)
            with self._lock:
                self._readers.add(reader)
        try:
            return self._answer(reader, reader.add(as_numbers(indices)), name, fingerprint)
        except BaseException:
            reader.close()
            raise

    def batches(
        self, name: str, fingerprint: str, requests: Iterable[RowNumbers], *, ahead: int = 4
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows by number, as `rows` does: one batch for each of ``requests``, in this order.

        Up to ``ahead`` requests are sent in advance, so that the server works while the consumer does; they are taken
        from the iterable that much earlier. Of requests of more than 2,048 rows, at most two are sent, on two calls.

        Raises:
            ConfigError: ``ahead`` is less than 1.
            TicketError: a row outside ``[0, rows)``, after the answers to the requests before it.

        Memory: ``ahead`` batches. To stop early, close the iterator or drop it.
        """
        if ahead < 1:
            raise ConfigError(f"ahead must be at least 1, not {ahead}")
        return self._batches(name, fingerprint, requests, ahead)

    def _batches(self, name: str, fingerprint: str, requests: Iterable[Any], ahead: int) -> Iterator[pa.RecordBatch]:
        # Long requests take turns on two calls: the server reads no request while it writes an answer.
        readers = [_BatchReader(encode_key(name, fingerprint), self._servers) for _ in range(2)]
        reads: deque[tuple[_BatchReader, int]] = deque()
        with closing(readers[0]), closing(readers[1]):
            for numbers in map(as_numbers, requests):
                if len(reads) == ahead:
                    yield self._answer(*reads.popleft(), name, fingerprint)
                if len(numbers) > _FEW:
                    readers.reverse()
                reads.append((readers[0], readers[0].add(numbers)))
            while reads:
                yield self._answer(*reads.popleft(), name, fingerprint)

    def _answer(self, reader: _BatchReader, reads: int, name: str, fingerprint: str) -> pa.RecordBatch:
        """Return the answer to a request as one batch."""
        batches: list[pa.RecordBatch] = []
        for _ in range(reads):
            batches += self._servers.insist(reader.read, self.patience, reader.asked)
        reader.push()  # so that the server works while the consumer does
        if not batches:
            schema = self._flight_info(name, fingerprint).schema.remove_metadata()
            return pa.record_batch([pa.array([], field.type) for field in schema], schema=schema)
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)

    # ------------------------------------------------------------------ connections

    def close(self) -> None:
        """Close the connections of `rows`. Idempotent; a client that is used again reconnects."""
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            reader.release()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _BatchReader:
    """Reads rows by number over one call. Answers arrive in the order of the requests.

    Any failure ends the call, but the unanswered requests are known, so the next `read` sends them again, to any
    server. A call has a deadline, and is replaced after half of its time. So neither side waits longer than
    ``timeout`` for a peer that is gone.

    Args:
        command: names the dataset, see `penstock.server.protocol.encode_key`.
        servers: opens calls.
    """

    def __init__(self, command: bytes, servers: Servers) -> None:
        self._command, self._servers = command, servers
        self._sent: deque[pa.Buffer] = deque()  # messages without an answer on the call
        self._unsent: deque[pa.Buffer] = deque()
        self._sent_bytes = 0
        self._call: Call | None = None

    def asked(self) -> Address | None:
        """Return the server that is being read from."""
        return None if self._call is None else self._call.address

    def add(self, numbers: Indices) -> int:
        """Add a request, which a later `push` or `read` sends; return the number of reads that answer it."""
        begins = range(0, len(numbers), _MESSAGE)
        for begin in begins:
            self._unsent.append(encode_rows(numbers[begin : begin + _MESSAGE]))
        return len(begins)

    def read(self, address: Address) -> list[pa.RecordBatch]:
        """Return the next batches that were requested, from the open call, or else from this server."""
        try:
            return self._read(address, sys.maxsize)
        except flight.FlightServerError:
            if len(self._unsent) == 1:
                raise
        # A refusal ends the call and its unread answers. Sending one message shows which one was refused.
        return self._read(address, 1)

    def _read(self, address: Address, most: int) -> list[pa.RecordBatch]:
        """Return the answer to the first message, with up to ``most`` messages in flight."""
        try:
            if self._call is not None and (self._call.is_closed or (not self._sent and self._is_late(self._call))):
                self._hang_up()
            if (call := self._call) is None:
                call = self._call = self._servers.open(address)
                call.exchange(self._command)
            if not self._sent or not self._is_late(call):
                self._send(call, most)
            batches = _receive(call, self._sent[0].size // 8)
        except BaseException as error:
            is_closed = self._call is not None and self._call.is_closed
            self._hang_up()
            if is_closed and isinstance(error, FAILURES):  # by another thread, and not by the server
                raise Released from None
            raise
        self._sent_bytes -= self._sent.popleft().size + _FRAME
        return batches

    def push(self) -> None:
        """Send messages, if a call is open. A failure shows at the next `read`."""
        call = self._call
        if self._unsent and call is not None and not self._is_late(call):
            try:
                self._send(call, sys.maxsize)
            except (*FAILURES, Released):
                self._hang_up()

    def _send(self, call: Call, most: int) -> None:
        """Send messages as far as they fit gRPC's window."""
        while self._unsent and len(self._sent) < most:
            size = self._unsent[0].size + _FRAME
            if self._sent and self._sent_bytes + size > _WAITING + self._sent[0].size + _FRAME:
                break
            call.send(self._unsent[0])
            self._sent.append(self._unsent.popleft())
            self._sent_bytes += size

    def _is_late(self, call: Call) -> bool:
        return monotonic() >= call.deadline - self._servers.timeout / 2

    def _hang_up(self) -> None:
        call, self._call = self._call, None
        self._unsent.extendleft(reversed(self._sent))
        self._sent.clear()
        self._sent_bytes = 0
        if call is not None:
            call.close()

    def release(self) -> None:
        """Close the call, from any thread: the reader continues with another call."""
        if (call := self._call) is not None:
            call.close()

    def close(self) -> None:
        """Close the call and forget unanswered requests. A reader that is used again opens another call."""
        self._hang_up()
        self._unsent.clear()


def _receive(call: Call, count: int) -> list[pa.RecordBatch]:
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


def _act(call: Call, name: str, body: bytes) -> Any:
    """Return the result of an action."""
    [result] = call.client.do_action(flight.Action(name, body), options=call.options)
    return json.loads(result.body.to_pybytes())


def _info(found: flight.FlightInfo) -> tuple[DataSetInfo, WireFormat]:
    form = restore((found.schema.metadata or {}).get(KEY, b"null"))
    name = found.descriptor.path[0].decode()
    schema = form.schema(found.schema.remove_metadata())
    return DataSetInfo(name, found.total_records, form.fingerprint, schema, form.nbytes), form
