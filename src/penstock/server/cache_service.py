"""`Copies`: serve the copies in a cache, block by block.

    copies = Copies(Cache())
    held = copies.find(block)       None if the copy does not exist: the answer is an empty stream
    held.schema                     states that it exists, and the hash of the bytes
    held.batches()                  the bytes, as record batches of one large binary value

Promises: bytes are sent only of a copy that had the hash of its download when this process served it first. Only
complete copies are served, by a name that is a hash of URL and version. No request carries a URL or a path, nothing is
downloaded for a client, and the cache does not change, except for the time of a copy's last use.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import xxhash

from penstock.errors import StorageError, TicketError
from penstock.server.protocol import Block
from penstock.storage.download import hash_file
from penstock.storage.files import SourceFile
from penstock.storage.store import Cache

__all__ = ["ABSENT", "CACHE", "TYPE", "Copies", "Held", "read_answer"]

CACHE = "(cache)"
"""The name for counting copies, used like a dataset name."""

TYPE = pa.large_binary()
_MESSAGE = 1 << 20  # bytes of a record batch
_ABOUT = b"penstock"  # the key of the answer's facts in the schema's metadata


def _schema(about: dict[str, Any]) -> pa.Schema:
    return pa.schema([("data", TYPE)], {_ABOUT: json.dumps(about).encode()})


ABSENT = _schema({"held": False, "xxh3": None})
"""The schema of the answer if the copy does not exist."""


def read_answer(schema: pa.Schema) -> tuple[bool, str | None]:
    """Return whether the copy of an answer exists, and the hash of its bytes.

    Raises:
        ValueError: it is not an answer of this protocol.
    """
    metadata: Mapping[bytes, bytes] = schema.metadata or {}
    about = json.loads(metadata.get(_ABOUT, b"null"))
    if schema.types != [TYPE] or not isinstance(about, dict) or about.keys() != {"held", "xxh3"}:
        raise ValueError("this is not an answer of a cache server")
    return about["held"] is True, about["xxh3"]


class Copies:
    """The copies in a cache. Thread-safe."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._sound: set[tuple[str, int]] = set()  # keys and inodes of checked copies

    def find(self, block: Block) -> Held | None:
        """Return the copy of a requested block, or None if it does not exist.

        Raises:
            TicketError: the copy is shorter than the block's end.
            StorageError: its bytes are not those that were downloaded.

        The first request for a copy reads all of it, to check its hash.
        """
        found = self._cache.find_key(block.copy)
        if found is None:
            return None
        file, expected = found
        if block.end > file.size:
            raise TicketError(f"byte {block.end - 1} was requested of a copy of {file.size} bytes")
        version = block.copy, os.fstat(file.fileno()).st_ino
        if version not in self._sound:
            if hash_file(file.fileno(), file.size).hexdigest() != expected:
                raise StorageError(
                    f"the copy {block.copy} has other bytes than it downloaded: its disk is faulty; run penstock cache "
                    "verify there"
                )
            self._sound.add(version)
        return Held(file, block)


class Held:
    """The requested bytes of an existing copy, in memory: at most 4 MiB."""

    def __init__(self, file: SourceFile, block: Block) -> None:
        # Not mapped: a truncated file would kill the process by a signal.
        self._data = memoryview(os.pread(file.fileno(), block.end - block.begin, block.begin))
        self.schema = _schema({"held": True, "xxh3": xxhash.xxh3_64_hexdigest(self._data)})

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the bytes, up to 1 MiB at a time."""
        for begin in range(0, len(self._data), _MESSAGE):
            data = self._data[begin : begin + _MESSAGE]
            buffers = [None, pa.py_buffer(_offsets(len(data))), pa.py_buffer(data)]
            yield pa.record_batch([pa.Array.from_buffers(TYPE, 1, buffers)], schema=self.schema)


def _offsets(size: int) -> bytes:
    """Return the two offsets of a batch's only value."""
    return bytes(8) + size.to_bytes(8, "little")
