"""`CacheClient`: read copies of objects from the caches of other machines, for `penstock.storage.Storage`.

    storage = Storage(peer=CacheClient("grpc://node-0:8815", token_file="token"))
    ShardDataset("s3://bucket/train-{000..999}.tar", storage=storage)

Promises: the bytes are of the requested version and complete. The other cache checks a copy against the hash of its
download, and this one the bytes against the hash in the answer. A server that is gone, hangs, fails or sends wrong
bytes costs ``timeout`` seconds and a warning; the store provides the rest, from the last complete block on. No URL or
secret of a store is sent.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from os import PathLike
from typing import Any

import pyarrow.flight as flight
import xxhash

from penstock.errors import PenstockError, ServerError
from penstock.server.access import Access
from penstock.server.address import Address
from penstock.server.cache_service import read_answer
from penstock.server.connections import FAILURES, Call, Released
from penstock.server.failures import explain
from penstock.server.protocol import Block, encode_block
from penstock.storage.backend import Cancel
from penstock.storage.download import PIECE

__all__ = ["CacheClient"]

_log = logging.getLogger(__name__)
_Path = str | PathLike[str]

_FIRST_REST, _LONGEST_REST = 30.0, 600.0  # seconds for which a failed server is skipped
_ABSENT = 10.0  # seconds for which a missing copy is not requested again
_REMEMBERED = 4096  # missing copies to remember
_MAX_IDLE = 16  # idle connections


class CacheClient:
    """A client of other machines' caches, see the module. Safe in threads and forks; a pickled copy is a new client.

    Args:
        addresses: one or several servers (``penstock serve --cache``), tried in this order.
        token, token_file, tls_roots, tls_cert, tls_key: as for `penstock.server.Client`.
        timeout: seconds for 4 MiB; after that, the server counts as failed.

    Raises:
        ConfigError: invalid arguments.

    A failed server is skipped for 30 s, then for twice as long after each failure, up to 10 minutes. A missing copy
    is not requested again for 10 s. Memory: a few KiB, and a connection for each concurrent request.
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
        self._idle: deque[Call] = deque()
        self._absent: dict[str, float] = {}
        self._lock = threading.Lock()
        self._failures = 0
        self._rests_until = 0.0

    def read(self, key: str, begin: int, target: memoryview, cancel: Cancel) -> int:
        """Fill a buffer block by block as far as this server can; return the number of bytes."""
        had = 0
        while had < len(target) and not cancel.is_set() and self._may_have(key):
            at = begin + had
            end = min(begin + len(target), (at // PIECE + 1) * PIECE)
            try:
                held = self._block(Block(copy=key, begin=at, end=end), target[had : end - begin], cancel)
            except (*FAILURES, PenstockError, ValueError) as error:
                if not cancel.is_set():
                    self._failed(error)
                break
            if not held:
                self._lacks(key)
                break
            had = end - begin
            self._failures = 0
        return had

    def _may_have(self, key: str) -> bool:
        now = time.monotonic()
        return now >= self._rests_until and now >= self._absent.get(key, 0.0)

    def _lacks(self, key: str) -> None:
        with self._lock:
            if len(self._absent) >= _REMEMBERED:
                self._absent.clear()
            self._absent[key] = time.monotonic() + _ABSENT

    def _failed(self, error: BaseException) -> None:
        """Mark the server as failed for a while."""
        with self._lock:
            now = time.monotonic()
            if now < self._rests_until:
                return  # a concurrent request has marked it
            rest = min(_FIRST_REST * 2.0**self._failures, _LONGEST_REST)
            self._rests_until, is_first = now + rest, not self._failures
            self._failures += 1
        self.close()
        if is_first:
            tls = self._access.context() if self._address.tls else None
            reason = explain(error, self._address, tls) if isinstance(error, FAILURES) else error
            _log.warning("the cache at %s is left alone for %g s, the store is read: %s", self._address, rest, reason)

    def _block(self, block: Block, target: memoryview, cancel: Cancel) -> bool:
        """Fill a buffer with a block; return False if the server has no such copy.

        Raises: FAILURES, PenstockError, ValueError.
        """
        while True:
            call, is_new = self._take()
            key = cancel.add(lambda call=call: call.close(0))  # type: ignore[misc]
            try:
                held = _receive(call, block, target)
            except (*FAILURES, PenstockError, ValueError, Released) as error:
                was_closed = call.is_closed
                call.close()
                if cancel.is_set():
                    raise ServerError("the read was cancelled") from None
                # A fork closes calls, and the server may have restarted since the last call.
                if not was_closed and (is_new or isinstance(error, flight.FlightTimedOutError)):
                    raise
                if not was_closed:
                    self.close()
            except BaseException:
                call.close()
                raise
            else:
                if len(self._idle) < _MAX_IDLE:
                    self._idle.append(call)
                else:
                    call.close()
                return held
            finally:
                cancel.remove(key)

    def _take(self) -> tuple[Call, bool]:
        """Return an open call, and whether it is new."""
        try:
            return self._idle.popleft(), False
        except IndexError:
            return self._access.open(self._address), True

    def close(self) -> None:
        while self._idle:
            try:
                self._idle.popleft().close(0)
            except IndexError:  # another thread closes them, too
                return


def _receive(call: Call, block: Block, target: memoryview) -> bool:
    """Request a block and receive all of it; return False if the copy does not exist.

    Raises: FAILURES, Released, ValueError; ServerError: the block has a wrong length or hash.
    """
    held, expected = read_answer(call.get(encode_block(block)))
    at = 0
    while (batch := call.read()) is not None:
        for value in batch.column(0):
            data = memoryview(value.as_buffer()).cast("B")
            if len(data) > len(target) - at:
                raise ServerError(f"{call.address} sent more than the requested {len(target)} bytes")
            target[at : at + len(data)] = data
            at += len(data)
    if held and at < len(target):
        raise ServerError(f"{call.address} sent {at} of the requested {len(target)} bytes")
    if held and xxhash.xxh3_64_hexdigest(target) != expected:
        raise ServerError(
            f"{call.address} sent other bytes than it has (copy {block.copy}, from byte {block.begin} on): the network "
            "is faulty"
        )
    return held
