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
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.flight as flight

from penstock.errors import ConfigError, PenstockError
from penstock.server.access import Access
from penstock.server.address import Address
from penstock.server.catalog import LAYOUT
from penstock.server.connections import FAILURES, Call
from penstock.server.failover import Servers
from penstock.server.layout import Layout, restore
from penstock.server.protocol import as_numbers, encode_key, encode_prefix
from penstock.server.reading import FEW, BatchReader

if TYPE_CHECKING:
    from penstock.server.remote_manifest import RemoteManifest

__all__ = ["Client", "DataSetInfo"]

T = TypeVar("T")
_Path = str | PathLike[str]


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


class _ThreadReaders(threading.local):
    def __init__(self) -> None:
        self.readers: dict[bytes, BatchReader] = {}


class Client:
    """A client of metadata servers, see the module. Thread-safe; a pickled copy is a new client.

    Args:
        addresses: one or several of ``host:port``, ``grpc://host:port`` and ``grpc+tls://host:port``, which serve the
            same files. An address without a scheme uses TLS only if ``tls_roots`` or ``tls_cert`` is given.
        token, token_file: the servers' token, or a file that holds it; the file is read for each connection.
        timeout: seconds after which a call without an answer is abandoned, and another server is tried.
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

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        token: str | None = None,
        token_file: _Path | None = None,
        timeout: float = 10.0,
        patience: float = 60.0,
        tls_roots: _Path | None = None,
        tls_cert: _Path | None = None,
        tls_key: _Path | None = None,
    ) -> None:
        if not patience >= 0:
            raise ConfigError(f"timeout must be positive and patience not negative, got {timeout=}, {patience=}")
        self._access = Access(
            addresses,
            token=token,
            token_file=token_file,
            timeout=timeout,
            tls_roots=tls_roots,
            tls_cert=tls_cert,
            tls_key=tls_key,
        )
        self.addresses, self.timeout, self.patience = self._access.addresses, timeout, patience
        self._begin()

    def _begin(self) -> None:
        self._servers = Servers(self.addresses, self._access.context)
        self._local = _ThreadReaders()
        self._readers: weakref.WeakSet[BatchReader] = weakref.WeakSet()
        self._lock = threading.Lock()  # a set must not grow while it is iterated

    def __getstate__(self) -> dict[str, Any]:
        own = ("_servers", "_local", "_readers", "_lock")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __repr__(self) -> str:
        return f"<Client of {', '.join(map(str, self.addresses))}>"

    # ------------------------------------------------------------------ datasets

    def list(self) -> Sequence[DataSetInfo]:
        """Return the datasets, in the server's order."""

        return self._ask(lambda call: [_info(found)[0] for found in call.client.list_flights(options=call.options)])

    def info(self, name: str | None = None, fingerprint: str | None = None) -> DataSetInfo:
        """Return a dataset; by default the only one, and its newest version."""
        return _info(self._flight_info(name, fingerprint))[0]

    def manifest(self, name: str | None = None, fingerprint: str | None = None) -> RemoteManifest:
        """Return the dataset as a `Manifest`, whose rows are read from the servers."""
        from penstock.server.remote_manifest import RemoteManifest

        found = self._flight_info(name, fingerprint)
        info, layout = _info(found)
        return RemoteManifest(self, info.name, layout, found.schema.remove_metadata())

    def health(self) -> dict[str, str]:
        """Return the state of each server: ``{address: "ok" | "stopping" | error}``. Calls them one by one."""
        return {str(address): self._health(address) for address in self.addresses}

    def _health(self, address: Address) -> str:
        try:
            with self._access.open(address) as call:
                [result] = call.client.do_action(flight.Action("health", b""), options=call.options)
                return str(json.loads(result.body.to_pybytes())["status"])
        except (*FAILURES, PenstockError) as error:
            return str(self._servers.explain(error, address))

    def prefix_fingerprints(self, name: str, fingerprint: str, rows: int) -> Sequence[str]:
        """Return the fingerprints that a dataset may have had when it held ``rows`` rows, likeliest first.

        The server reads its file up to that row.
        """
        action = flight.Action("prefix", encode_prefix(name, fingerprint, rows))

        def ask(call: Call) -> Sequence[str]:
            [result] = call.client.do_action(action, options=call.options)
            return [str(one) for one in json.loads(result.body.to_pybytes())]

        return self._ask(ask)

    def _flight_info(self, name: str | None, fingerprint: str | None) -> flight.FlightInfo:
        descriptor = flight.FlightDescriptor.for_command(encode_key(name, fingerprint))
        return self._ask(lambda call: call.client.get_flight_info(descriptor, options=call.options))

    def _ask(self, ask: Callable[[Call], T]) -> T:
        def attempt(address: Address) -> T:
            with self._access.open(address) as call:
                return ask(call)

        return self._servers.insist(attempt, min(self.timeout, self.patience))

    # ------------------------------------------------------------------ rows

    def rows(
        self, name: str, fingerprint: str, indices: Sequence[int] | npt.NDArray[np.integer[Any]]
    ) -> pa.RecordBatch:
        """Return rows by number, in this order, repeats allowed: one round trip for each 16,384 rows.

        Raises:
            TicketError: a row outside ``[0, rows)``.
        """
        reader = self._reader(encode_key(name, fingerprint))
        try:
            return self._answer(reader, reader.add(as_numbers(indices)), name, fingerprint)
        except BaseException:
            reader.close()
            raise

    def batches(
        self,
        name: str,
        fingerprint: str,
        requests: Iterable[Sequence[int] | npt.NDArray[np.integer[Any]]],
        *,
        ahead: int = 4,
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
        readers = [BatchReader(encode_key(name, fingerprint), self._access.open, self.timeout) for _ in range(2)]
        reads: deque[tuple[BatchReader, int]] = deque()
        with closing(readers[0]), closing(readers[1]):
            for numbers in map(as_numbers, requests):
                if len(reads) == ahead:
                    yield self._answer(*reads.popleft(), name, fingerprint)
                if len(numbers) > FEW:
                    readers.reverse()
                reads.append((readers[0], readers[0].add(numbers)))
            while reads:
                yield self._answer(*reads.popleft(), name, fingerprint)

    def _answer(self, reader: BatchReader, reads: int, name: str, fingerprint: str) -> pa.RecordBatch:
        """Return the answer to a request as one batch."""
        batches: list[pa.RecordBatch] = []
        for _ in range(reads):
            batches += self._servers.insist(reader.read, self.patience, lambda: reader.address)
        reader.push()  # so that the server works while the consumer does
        if not batches:
            return _empty(self._flight_info(name, fingerprint).schema.remove_metadata())
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)

    def _reader(self, command: bytes) -> BatchReader:
        """Return this thread's reader of a dataset."""
        readers = self._local.readers
        reader = readers.get(command)
        if reader is None:
            reader = readers[command] = BatchReader(command, self._access.open, self.timeout)
            with self._lock:
                self._readers.add(reader)
        return reader

    # ------------------------------------------------------------------ connections

    def close(self) -> None:
        """Close the connections of `rows`. Idempotent; a client that is used again reconnects."""
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            reader.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _info(found: flight.FlightInfo) -> tuple[DataSetInfo, Layout]:
    layout = restore((found.schema.metadata or {}).get(LAYOUT, b"null"))
    name = found.descriptor.path[0].decode()
    schema = layout.schema(found.schema.remove_metadata())
    return DataSetInfo(name, found.total_records, layout.fingerprint, schema, layout.nbytes), layout


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.record_batch([pa.array([], field.type) for field in schema], schema=schema)
