"""`CacheClient`: read copies of objects from the caches of other machines, for `penstock.storage.Storage`.

    storage = Storage(peer=CacheClient("grpc://node-0:8815", token_file="token"))
    ShardDataset("s3://bucket/train-{000..999}.tar", storage=storage)

Promises: the bytes are of the requested version and complete. The other cache checks a copy against the hash of its
download, and this one each block against the hash in the answer. A server that is gone, hangs, fails or sends wrong
bytes costs ``timeout`` seconds and a warning; the store provides the rest, from the last complete block on. No URL or
secret of a store is sent.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from os import PathLike
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import xxhash

from penstock.errors import PenstockError, ServerError
from penstock.server.access import Access
from penstock.server.address import Address
from penstock.server.cache_service import hash_of
from penstock.server.connections import FAILURES, Call, Released
from penstock.server.failures import explain
from penstock.server.protocol import Block, encode_block
from penstock.storage.backend import Cancel
from penstock.storage.download import PIECE

__all__ = ["CacheClient"]

_log = logging.getLogger(__name__)
_Path = str | PathLike[str]

_REST = 60.0  # seconds for which a failed server is skipped


class CacheClient:
    """A client of other machines' caches, see the module. Safe in threads and forks; a pickled copy is a new client.

    Args:
        addresses: one or several servers (``penstock serve --cache``), tried in this order.
        token, token_file, tls_roots, tls_cert, tls_key: as for `penstock.server.Client`.
        timeout: seconds for 4 MiB; after that, the server counts as failed.

    Raises:
        ConfigError: invalid arguments.

    A failed server is skipped for a minute. Memory: a block and a connection for each concurrent request.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        token: str | None = None,
        token_file: _Path | None = None,
        timeout: float = 10.0,
        tls_roots: _Path | None = None,
        tls_cert: _Path | None = None,
        tls_key: _Path | None = None,
    ) -> None:
        self._access = Access(
            addresses,
            token=token,
            token_file=token_file,
            timeout=timeout,
            tls_roots=tls_roots,
            tls_cert=tls_cert,
            tls_key=tls_key,
        )
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._nodes = [_Node(self._access, address) for address in self._access.addresses]

    def __getstate__(self) -> dict[str, Any]:
        return {"_access": self._access}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __repr__(self) -> str:
        return f"<CacheClient of {', '.join(map(str, self._access.addresses))}>"

    def read(self, key: str, begin: int, target: memoryview, cancel: Cancel) -> int:
        """Fill a buffer with a copy's bytes from ``begin`` on; return the number of bytes read from the front.

        See `penstock.storage.peer.Peer`. Failures of servers never raise.
        """
        # In a forked child, a thread of the parent may hold the lock.
        if self._pid != os.getpid():
            self._begin()
        had = 0
        for node in self._nodes:
            had += node.read(key, begin + had, target[had:], cancel)
        return had

    def close(self) -> None:
        """Close the idle connections. Idempotent; a client that is used again reconnects."""
        if self._pid == os.getpid():
            for node in self._nodes:
                node.close()


class _Node:
    """One server."""

    def __init__(self, access: Access, address: Address) -> None:
        self._access, self._address = access, address
        self._idle: list[Call] = []
        self._lock = threading.Lock()
        self._rests_until = 0.0

    def read(self, key: str, begin: int, target: memoryview, cancel: Cancel) -> int:
        """Fill a buffer block by block as far as this server can; return the number of bytes."""
        had = 0
        while had < len(target) and not cancel.is_set() and time.monotonic() >= self._rests_until:
            number, skipped = divmod(begin + had, PIECE)
            try:
                block = self._block(Block(key, number), cancel)
            except (*FAILURES, PenstockError, ValueError) as error:
                if not cancel.is_set():
                    self._failed(error)
                break
            part = block[skipped : skipped + len(target) - had]
            if not part:  # the server has no such copy
                break
            target[had : had + len(part)] = part
            had += len(part)
        return had

    def _failed(self, error: BaseException) -> None:
        """Skip the server for a while."""
        with self._lock:
            now = time.monotonic()
            if now < self._rests_until:
                return  # a concurrent request has marked it
            self._rests_until = now + _REST
        self.close()
        tls = self._access.context() if self._address.tls else None
        reason = explain(error, self._address, tls) if isinstance(error, FAILURES) else error
        _log.warning("the cache at %s is left alone for %g s, the store is read: %s", self._address, _REST, reason)

    def _block(self, block: Block, cancel: Cancel) -> memoryview:
        """Return the bytes of a block; none if the server has no such copy.

        Raises: FAILURES, PenstockError, ValueError.
        """
        while True:
            with self._lock:
                idle = self._idle.pop() if self._idle else None
            call = idle or self._access.open(self._address)
            key = cancel.add(lambda call=call: call.close(0))  # type: ignore[misc]
            try:
                data = _receive(call, block)
            except (*FAILURES, PenstockError, ValueError, Released) as error:
                was_closed = call.is_closed
                call.close()
                if cancel.is_set():
                    raise ServerError("the read was cancelled") from None
                # A fork closes calls, and the server may have restarted since the last call.
                if not was_closed and (idle is None or isinstance(error, flight.FlightTimedOutError)):
                    raise
                self.close()
            except BaseException:
                call.close()
                raise
            else:
                with self._lock:
                    self._idle.append(call)
                return data
            finally:
                cancel.remove(key)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for call in idle:
            call.close(0)


def _receive(call: Call, block: Block) -> memoryview:
    """Request a block and receive all of it; no bytes if the copy does not exist.

    Raises: FAILURES, Released, ValueError; ServerError: the bytes have another hash, or are no single block.
    """
    expected = hash_of(call.get(encode_block(block)))
    values: list[pa.LargeBinaryScalar] = []
    while len(values) < 2 and (batch := call.read()) is not None:
        values += batch.column(0)
    if expected is None and not values:
        return memoryview(b"")
    buffer = values[0].as_buffer() if len(values) == 1 else None
    data = memoryview(b"" if buffer is None else buffer).cast("B")
    if len(data) > PIECE or xxhash.xxh3_64_hexdigest(data) != expected:
        raise ServerError(
            f"{call.address} sent other bytes than their hash says (copy {block.copy}, block {block.number}): its "
            "disk or the network is faulty; run penstock cache verify there"
        )
    return data
