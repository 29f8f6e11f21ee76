"""Copies of objects in the caches of other machines: `CacheClient` reads them, and a server answers by `Copies`.

    storage = Storage(peer=CacheClient("grpc://node-0:8815", token_file="token"))
    ShardDataset("s3://bucket/train-{000..999}.tar", storage=storage)

A copy is read block by block, by a name that is a hash of URL and version. No request carries a URL, a path or a secret
of a store, nothing is downloaded for a client, and the server's cache does not change, except for the time of a copy's
last use. Only complete copies are served.

Promises: the bytes are of the requested version and complete. The server checks a copy against the hash of its
download before it sends the first byte, and the client each block against the hash in the answer. A server that is
gone, hangs, fails or sends wrong bytes costs ``timeout`` seconds and a warning; the store provides the rest, from the
last complete block on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Unpack

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import xxhash

from penstock.errors import PenstockError, ServerError, ServerUnavailableError, StorageError, UnknownDataSetError
from penstock.manifest.lines import TooMuch
from penstock.order.permutation import MAX_N, Indices
from penstock.server.address import Address
from penstock.server.connections import FAILURES, Call, Released
from penstock.server.protocol import encode_key, encode_rows
from penstock.server.servers import Access, Servers
from penstock.storage.cache import Cache
from penstock.storage.download import PIECE, hash_file
from penstock.storage.files import File
from penstock.storage.transfer import Cancel, submit

__all__ = ["CACHE", "CacheClient", "Copies", "Copy"]

CACHE = "(cache)"
"""The name of the dataset whose versions are the copies."""

_log = logging.getLogger(__name__)
_CHECK_WAIT = 5.0  # seconds for which a request waits for the check of a copy, less than the client waits
_REST = 60.0  # seconds for which a failed server is skipped
_BLOCKS = pa.schema([("data", pa.large_binary()), ("xxh3", pa.string())])


class Copies:
    """The copies in a server's cache, if it has one. Thread-safe."""

    def __init__(self, cache: Cache | None) -> None:
        self._cache = cache
        self._checks: dict[tuple[str, int], Future[bool]] = {}  # whether a copy is sound, by key and inode
        self._lock = threading.Lock()

    def find(self, key: str) -> Copy:
        """Return the copy of a name, see `penstock.storage.Cache.key`; UnknownDataSetError without a cache."""
        if self._cache is None:
            raise UnknownDataSetError("this server has no cache: run penstock serve --cache, or --cache-folder DIR")
        file, expected = self._cache.find_key(key) or (None, "")
        return Copy(file, lambda: file is not None and self._is_sound(key, file, expected))

    def _is_sound(self, key: str, file: File, expected: str) -> bool:
        """Return whether a copy has the bytes that were downloaded; False while that is not known.

        Raises:
            StorageError: it has others.

        The first request for a copy begins to check its hash.
        """
        version = key, os.fstat(file.fileno()).st_ino
        with self._lock:
            check = self._checks.get(version)
            if check is None:
                check = submit(lambda: hash_file(file.fileno(), file.size).hexdigest() == expected)
                self._checks[version] = check
        wait([check], _CHECK_WAIT)
        if not check.done():
            return False
        if check.exception() is not None or not check.result():
            self._checks.pop(version, None)  # the next request checks again
        if not check.result():
            raise StorageError(
                f"the copy {key} has other bytes than it downloaded: its disk is faulty; run penstock cache "
                "verify there"
            )
        return True


class Copy:
    """A copy in a cache, as a version of the dataset `CACHE`: its rows are its blocks of 4 MiB, with their hashes.

    Of a copy that does not exist, any row may be requested, and the answer has no rows.
    """

    name, wire_schema = CACHE, _BLOCKS

    def __init__(self, file: File | None, is_sound: Callable[[], bool]) -> None:
        self._file, self._is_sound = file, is_sound
        self.rows = MAX_N if file is None else -(-file.size // PIECE)

    def gather(self, numbers: Indices, most: int | None = None) -> pa.RecordBatch:
        """Return blocks; TooMuch if they may have more than ``most`` bytes.

        Raises:
            StorageError: the bytes of the copy are not those that were downloaded.
        """
        if most is not None and len(numbers) * PIECE > most:
            raise TooMuch
        blocks: list[bytes] = []
        if self._file is not None and self._is_sound():
            # Not mapped: a truncated file would kill the process by a signal.
            file, size = self._file.fileno(), self._file.size
            blocks = [os.pread(file, min(PIECE, size - at), at) for at in (numbers * PIECE).tolist()]
        bounds = np.cumsum([0, *map(len, blocks)])
        # pa.array would copy the bytes.
        buffers = [None, pa.py_buffer(bounds), pa.py_buffer(b"".join(blocks) if len(blocks) != 1 else blocks[0])]
        data = pa.Array.from_buffers(pa.large_binary(), len(blocks), buffers)
        return pa.record_batch([data, pa.array(map(xxhash.xxh3_64_hexdigest, blocks), pa.string())], schema=_BLOCKS)


class CacheClient:
    """A client of other machines' caches, see the module. Safe in threads and forks; a pickled copy is a new client.

    Args:
        addresses: one or several servers (``penstock serve --cache``), tried in this order.
        token, token_file, tls_roots, tls_cert, tls_key: as for `penstock.server.Client`.
        timeout: seconds for 4 MiB, 10 by default; after that, the server counts as failed.

    Raises:
        ConfigError: invalid arguments.

    A failed server is skipped for a minute. Memory: a block and a connection for each concurrent request.
    """

    def __init__(self, addresses: str | Sequence[str], **access: Unpack[Access]) -> None:
        self._begin(Servers(addresses, **access))

    def _begin(self, servers: Servers) -> None:
        self._servers, self._pid = servers, os.getpid()
        self._nodes = [_Node(servers, address) for address in servers.addresses]

    def __getstate__(self) -> Servers:
        return self._servers

    def __setstate__(self, state: Servers) -> None:
        self._begin(state)

    def __repr__(self) -> str:
        return f"<CacheClient of {self._servers}>"

    def read(self, key: str, begin: int, target: memoryview, cancel: Cancel) -> int:
        """Fill a buffer with a copy's bytes from ``begin`` on; return the number of bytes read from the front.

        See `penstock.storage.remote.Peer`. Failures of servers never raise.
        """
        # In a forked child, a thread of the parent may hold the lock.
        if self._pid != os.getpid():
            self._begin(self._servers)
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

    def __init__(self, servers: Servers, address: Address) -> None:
        self._servers, self._address = servers, address
        self._idle: list[Call] = []
        self._lock = threading.Lock()
        self._rests_until = 0.0

    def read(self, key: str, begin: int, target: memoryview, cancel: Cancel) -> int:
        """Fill a buffer block by block as far as this server can; return the number of bytes."""
        had = 0
        while had < len(target) and not cancel.is_set() and time.monotonic() >= self._rests_until:
            number, skipped = divmod(begin + had, PIECE)
            try:
                block = self._block(key, number, cancel)
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
        reason = self._servers.explain(error, self._address) if isinstance(error, FAILURES) else error
        _log.warning("the cache at %s is left alone for %g s, the store is read: %s", self._address, _REST, reason)

    def _block(self, copy: str, number: int, cancel: Cancel) -> memoryview:
        """Return the bytes of a block; none if the server has no such copy."""
        while True:
            with self._lock:
                idle = self._idle.pop() if self._idle else None
            call = idle or self._servers.open(self._address)
            key = cancel.add(lambda call=call: call.close(0))  # type: ignore[misc]
            try:
                data = _receive(call, copy, number)
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


def _receive(call: Call, copy: str, number: int) -> memoryview:
    """Request a block and receive all of it; no bytes if the copy does not exist."""
    call.ask(encode_key(CACHE, copy), encode_rows(np.array([number])))
    batch = call.read()
    if batch is None:
        raise ServerUnavailableError(f"{call.address} ended the stream")
    if batch.schema != _BLOCKS or batch.num_rows > 1 or call.read() is not None:
        raise ValueError("this is not an answer of a cache server")
    if not batch.num_rows:
        return memoryview(b"")
    block, digest = batch.column(0)[0].as_buffer(), batch.column(1)[0].as_py()
    data = memoryview(b"" if block is None else block).cast("B")
    if len(data) > PIECE or xxhash.xxh3_64_hexdigest(data) != digest:
        raise ServerError(
            f"{call.address} sent other bytes than their hash says (copy {copy}, block {number}): its "
            "disk or the network is faulty; run penstock cache verify there"
        )
    return data
