"""Decompress whole MDS shards.

Invariant: the output has the size given in the index, or a `ShardError` is raised. That size also limits the output
while it is produced, so a small file cannot fill the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pyarrow as pa

from penstock.errors import ShardError

__all__ = ["COMPRESSIONS", "algorithm_of", "decompress"]


def algorithm_of(compression: str) -> str:
    """Return the algorithm of ``compression``, which is ``algorithm`` or ``algorithm:level``.

    Raises:
        ShardError: an unknown algorithm.

    >>> algorithm_of("zstd:7")
    'zstd'
    """
    algorithm, _, level = compression.partition(":")
    if algorithm not in COMPRESSIONS or (level and not level.isdigit()):
        raise ShardError(f"unknown compression {compression!r}: MDS has {', '.join(COMPRESSIONS)}")
    return algorithm


def decompress(algorithm: str, data: bytes, size: int, *, name: str) -> bytes:
    """Return the content of a compressed file.

    Args:
        algorithm: a key of `COMPRESSIONS`.
        data: the whole file.
        size: bytes of the content.
        name: the name of the file, for messages.

    Raises:
        ShardError: the file is damaged, or its content has another size.
    """
    try:
        content = COMPRESSIONS[algorithm](data, size)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ShardError(f"{name} cannot be decompressed as {algorithm}: {error}. Copy it again") from error
    if len(content) != size:
        found = f"more than {size}" if len(content) > size else str(len(content))
        raise ShardError(f"{name} has {found} bytes when decompressed, but {size} in the index: copy it again")
    return content


def _stream(codec: str, data: bytes, size: int) -> bytes:
    """Decompress one or several streams, up to a byte more than the size."""
    content: bytes = pa.CompressedInputStream(pa.BufferReader(data), codec).read(size + 1)
    return content


def _snappy(data: bytes, size: int) -> bytes:
    """Decompress the raw block format, which begins with the size of the content, 7 bits a byte."""
    known = shift = 0
    for byte in data[:5]:
        known |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if known != size:  # Arrow would leave the rest uninitialised
        raise ValueError(f"its block holds {known} bytes")
    content: bytes = pa.Codec("snappy").decompress(data, decompressed_size=size, asbytes=True)
    return content


COMPRESSIONS: dict[str, Callable[[bytes, int], bytes]] = {
    "br": partial(_stream, "brotli"),
    "bz2": partial(_stream, "bz2"),
    "gz": partial(_stream, "gzip"),
    "snappy": _snappy,
    "zstd": partial(_stream, "zstd"),
}
"""The compressions: functions ``(file, size of the content) -> content`` by name."""
