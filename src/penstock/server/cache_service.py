"""`Copies`: serve the copies in a cache, block by block.

    copies = Copies(Cache())
    held = copies.find(block)       None if the copy does not exist: the answer is an empty stream
    held.schema                     states that it exists, and the hash of a whole block
    held.batches()                  its bytes, as record batches of one large binary value

Promises: only complete copies are served, by a name that is a hash of URL and version. No request carries a URL or a
path, nothing is downloaded for a client, and the cache does not change, except for the time of a copy's last use.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from penstock.errors import StorageError, TicketError
from penstock.server.protocol import Block
from penstock.storage.cache_entry import CachedFile
from penstock.storage.download import PIECE
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
    """Return whether the copy of an answer exists, and the hash of the block, if given.

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

    def find(self, block: Block) -> Held | None:
        """Return the copy of a requested block, or None if it does not exist.

        Raises:
            TicketError: the copy is shorter than the block's end.
        """
        found = self._cache.find_key(block.copy)
        if found is None:
            return None
        file, hashes = found
        if block.end > file.size:
            raise TicketError(f"byte {block.end - 1} was requested of a copy of {file.size} bytes")
        return Held(file, hashes, block)


class Held:
    """A block of an existing copy. Its file stays open even if the cache evicts it."""

    def __init__(self, file: CachedFile, hashes: list[str], block: Block) -> None:
        number = block.begin // PIECE
        is_whole = block.begin % PIECE == 0 and block.end == min(block.begin + PIECE, file.size)
        self._file, self._block = file, block
        self.schema = _schema({"held": True, "xxh3": hashes[number] if is_whole and number < len(hashes) else None})

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the bytes, up to 1 MiB at a time.

        Raises:
            StorageError: the file was truncated.
        """
        for begin in range(self._block.begin, self._block.end, _MESSAGE):
            size = min(_MESSAGE, self._block.end - begin)
            # Not mapped: a truncated file would kill the process by a signal.
            data = os.pread(self._file.fileno(), size, begin)
            if len(data) < size:
                raise StorageError("a copy in the cache is truncated")
            buffers = [None, pa.py_buffer(_offsets(size)), pa.py_buffer(data)]
            yield pa.record_batch([pa.Array.from_buffers(TYPE, 1, buffers)], schema=self.schema)


def _offsets(size: int) -> bytes:
    """Return the two offsets of a batch's only value."""
    return bytes(8) + size.to_bytes(8, "little")
