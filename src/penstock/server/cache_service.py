"""`Copies`: the copies in a cache as a server gives them, block by block.

    copies = Copies(Cache())
    held = copies.find(block)       None where there is no such copy: the answer is an empty stream
    held.schema                     says that there is one, and the hash of the block if all of it is asked for
    held.batches()                  its bytes, as record batches of one large binary value

Promises: only complete copies are given, by the name that is a hash of address and version. No request carries an
address or a path, nothing is fetched for a client, and nothing of the cache changes but the time of a copy's last use.
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
"""What copies are counted as, beside the data sets of a server."""

TYPE = pa.large_binary()
_MESSAGE = 1 << 20  # bytes of a record batch
_ABOUT = b"penstock"  # where the schema's metadata says what the answer is


def _schema(about: dict[str, Any]) -> pa.Schema:
    return pa.schema([("data", TYPE)], {_ABOUT: json.dumps(about).encode()})


ABSENT = _schema({"held": False, "xxh3": None})
"""The schema of the answer where there is no copy."""


def read_answer(schema: pa.Schema) -> tuple[bool, str | None]:
    """Return whether an answer is of a copy that there is, and the hash of the block, if it has one.

    Raises:
        ValueError: it is no answer of ours.
    """
    metadata: Mapping[bytes, bytes] = schema.metadata or {}
    about = json.loads(metadata.get(_ABOUT, b"null"))
    if schema.types != [TYPE] or not isinstance(about, dict) or about.keys() != {"held", "xxh3"}:
        raise ValueError("that is no answer of a cache")
    return about["held"] is True, about["xxh3"]


class Copies:
    """What is in a cache. Safe in threads."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def find(self, block: Block) -> Held | None:
        """Return the copy of which a block is asked for, if there is one.

        Raises:
            TicketError: it has fewer bytes.
        """
        found = self._cache.find_key(block.copy)
        if found is None:
            return None
        file, hashes = found
        if block.end > file.size:
            raise TicketError(f"byte {block.end - 1} is asked for of a copy of {file.size} bytes")
        return Held(file, hashes, block)


class Held:
    """A block of a copy that there is. The file stays open, whatever the cache does."""

    def __init__(self, file: CachedFile, hashes: list[str], block: Block) -> None:
        number = block.begin // PIECE
        is_whole = block.begin % PIECE == 0 and block.end == min(block.begin + PIECE, file.size)
        self._file, self._block = file, block
        self.schema = _schema({"held": True, "xxh3": hashes[number] if is_whole and number < len(hashes) else None})

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the bytes, up to 1 MiB at a time.

        Raises:
            StorageError: the file was cut.
        """
        for begin in range(self._block.begin, self._block.end, _MESSAGE):
            size = min(_MESSAGE, self._block.end - begin)
            # Not mapped: a file that is cut would be a signal.
            data = os.pread(self._file.fileno(), size, begin)
            if len(data) < size:
                raise StorageError("a copy of the cache has fewer bytes than it should")
            buffers = [None, pa.py_buffer(_offsets(size)), pa.py_buffer(data)]
            yield pa.record_batch([pa.Array.from_buffers(TYPE, 1, buffers)], schema=self.schema)


def _offsets(size: int) -> bytes:
    """Return where the one value of a batch begins and ends."""
    return bytes(8) + size.to_bytes(8, "little")
