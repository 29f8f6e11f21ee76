"""`Copies`: serve the copies in a cache, block by block.

    answer = Copies(Cache()).read(block)        a record batch: one large binary value, or none
    hash_of(answer.schema)                      the hash of the block's bytes; None if the copy does not exist

Bytes are sent only of a copy that had the hash of its download when this process served it first. Only complete copies
are served, by a name that is a hash of URL and version. No request carries a URL or a path, nothing is downloaded for a
client, and the cache does not change, except for the time of a copy's last use.
"""

from __future__ import annotations

import os
import threading

import pyarrow as pa
import xxhash

from penstock.errors import StorageError, TicketError
from penstock.server.protocol import Block
from penstock.storage.download import PIECE, hash_file
from penstock.storage.store import Cache

__all__ = ["CACHE", "Copies", "hash_of"]

CACHE = "(cache)"
"""The name for counting copies, used like a dataset name."""

_HASH = b"penstock-xxh3"  # the key of the hash in the metadata of the answer's schema


def hash_of(schema: pa.Schema) -> str | None:
    """Return the hash of an answer's bytes; None if the copy does not exist.

    Raises:
        ValueError: it is not an answer of this protocol.
    """
    metadata = schema.metadata or {}
    if schema.types != [pa.large_binary()] or metadata.keys() != {_HASH}:
        raise ValueError("this is not an answer of a cache server")
    return metadata[_HASH].decode() or None


class Copies:
    """The copies in a cache. Thread-safe."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._sound: set[tuple[str, int]] = set()  # keys and inodes of checked copies
        self._checks: dict[tuple[str, int], threading.Lock] = {}

    def read(self, block: Block) -> pa.RecordBatch:
        """Return the bytes of a block, at most 4 MiB; no value if the copy does not exist.

        Raises:
            TicketError: the copy has no such block.
            StorageError: its bytes are not those that were downloaded.

        The first request for a copy reads all of it, to check its hash.
        """
        found = self._cache.find_key(block.copy)
        if found is None:
            return _answer([], "")
        file, expected = found
        first = block.number * PIECE
        if first >= file.size:
            raise TicketError(f"block {block.number} was requested of a copy of {file.size} bytes")
        version = block.copy, os.fstat(file.fileno()).st_ino
        if version not in self._sound:
            with self._checks.setdefault(version, threading.Lock()):  # the requests that arrive meanwhile wait
                if version not in self._sound and hash_file(file.fileno(), file.size).hexdigest() != expected:
                    raise StorageError(
                        f"the copy {block.copy} has other bytes than it downloaded: its disk is faulty; run penstock "
                        "cache verify there"
                    )
                self._sound.add(version)
        # Not mapped: a truncated file would kill the process by a signal.
        data = os.pread(file.fileno(), min(PIECE, file.size - first), first)
        return _answer([data], xxhash.xxh3_64_hexdigest(data))


def _answer(values: list[bytes], digest: str) -> pa.RecordBatch:
    schema = pa.schema([("data", pa.large_binary())], {_HASH: digest.encode()})
    return pa.record_batch([pa.array(values, pa.large_binary())], schema=schema)
