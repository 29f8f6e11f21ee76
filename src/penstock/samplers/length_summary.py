"""`LengthSummary`: a hash and the distinct values of sample lengths, cached so that all lengths are read only once.

The user's cache has a small file for each file of lengths, and for each filter of known lengths: 80 bytes, and 8 per
distinct length. The file holds a hash of itself and identifies its source: the size, the modification time and parts of
the content of the file of lengths, or the digests of the lengths and of the filtered rows. If one of these differs, the
summary is computed again. One process of a machine computes it while the others wait.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from penstock.order.permutation import Indices
from penstock.storage import UNWRITABLE, file_lock, kept_path, write_kept
from penstock.storage.mapped import MappedFiles

__all__ = ["LengthSummary", "chunks_of", "distinct_in", "summary_of", "summary_of_file", "summary_of_some"]

_MAGIC = b"PSTKLEN1"
_HEADER = struct.Struct("<8s32s16s16sQ")  # magic, source, digest, hash, count
_CHUNK = 1 << 18
_TABLE = 1 << 20
"""Lengths below this are marked in a table; larger ones are sorted, which takes longer."""
_KEPT_FROM = 1 << 16
"""Fewer lengths than this are read as fast as a cached file."""


class Lengths(Protocol):
    """Sample lengths, whose slices are int64 arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Indices: ...


class LengthSummary(NamedTuple):
    """A summary of sample lengths.

    Attributes:
        digest: a hash of all lengths.
        distinct: the distinct lengths, ascending: int64.
    """

    digest: str
    distinct: Indices


def chunks_of(lengths: Lengths) -> Iterable[Indices]:
    """Return all lengths, in chunks that fit the CPU's cache."""
    return (lengths[begin : begin + _CHUNK] for begin in range(0, len(lengths), _CHUNK))


class _Distinct:
    """Collects the distinct lengths of the arrays added to it."""

    def __init__(self) -> None:
        self._marked = np.zeros(_TABLE, np.bool_)
        self._others = np.empty(0, np.int64)

    def add(self, lengths: Indices) -> None:
        """Add lengths."""
        outside = (lengths < 0) | (lengths >= _TABLE)
        if outside.any():
            self._others = np.union1d(self._others, lengths[outside])
            lengths = lengths[~outside]
        self._marked[lengths] = True

    def found(self) -> Indices:
        """Return the distinct lengths, ascending."""
        below = int(self._others.searchsorted(0))
        return np.concatenate([self._others[:below], np.flatnonzero(self._marked), self._others[below:]])


def distinct_in(chunks: Iterable[Indices]) -> Indices:
    """Return the distinct lengths in some arrays, ascending.

    >>> distinct_in([np.array([3, 1, 3]), np.array([2])]).tolist()
    [1, 2, 3]
    """
    distinct = _Distinct()
    for chunk in chunks:
        distinct.add(chunk)
    return distinct.found()


def summary_of(lengths: Lengths) -> LengthSummary:
    """Return the summary of lengths, in one pass."""
    # The same hash as `digest_of` an array.
    digest, distinct = xxhash.xxh3_128(str(np.dtype(np.int64)).encode()), _Distinct()
    for chunk in chunks_of(lengths):
        digest.update(np.ascontiguousarray(chunk).view(np.uint8).data)
        distinct.add(chunk)
    return LengthSummary(digest.hexdigest(), distinct.found())


def summary_of_file(lengths: Lengths, files: MappedFiles) -> LengthSummary:
    """Return the summary of the lengths in a file, the only one of ``files``; cached in the user's cache."""
    file = files.files[0]
    source = xxhash.xxh3_128_digest(files.version(0).encode()) + bytes.fromhex(files.fingerprint(0))
    return _kept(
        lengths, source, name=xxhash.xxh3_128_hexdigest(file.path.encode()), what=f"the lengths in {file.path}"
    )


def summary_of_some(lengths: Lengths, *, every: str, rows: str) -> LengthSummary:
    """Return the summary of the lengths of some rows; cached in the user's cache.

    Args:
        lengths: of these rows.
        every: the digest of the lengths of all rows.
        rows: the fingerprint of the rows, 32 hexadecimal digits.
    """
    source = bytes.fromhex(every) + bytes.fromhex(rows)
    return _kept(lengths, source, name=xxhash.xxh3_128_hexdigest(source), what="the lengths of a filter")


def _kept(lengths: Lengths, source: bytes, *, name: str, what: str) -> LengthSummary:
    """Return the summary from the user's cache; compute and store it if it is missing.

    If the cache cannot be written, each process reads the lengths, with a warning.
    """
    if len(lengths) < _KEPT_FROM:
        return summary_of(lengths)
    path = kept_path("lengths", f"{name}.summary")
    found = _read(path, source)
    if found is not None:
        return found
    try:
        path.parent.mkdir(exist_ok=True)
        with file_lock(path):
            return _read(path, source) or _written(path, source, lengths)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        warnings.warn(
            f"{path}: the summary of {what} cannot be stored there: {error.strerror}. Until then, each process reads "
            "all of them. Free space, or set XDG_CACHE_HOME to another folder",
            stacklevel=2,
        )
        return summary_of(lengths)


def _written(path: Path, source: bytes, lengths: Lengths) -> LengthSummary:
    summary = summary_of(lengths)
    with write_kept(path) as out:
        out.write(_header(source, summary))
        out.write(summary.distinct.tobytes())
    return summary


def _header(source: bytes, summary: LengthSummary) -> bytes:
    digest = bytes.fromhex(summary.digest)
    hashed = xxhash.xxh3_128_digest(digest + summary.distinct.tobytes())
    return _HEADER.pack(_MAGIC, source, digest, hashed, len(summary.distinct))


def _read(path: Path, source: bytes) -> LengthSummary | None:
    """Return the summary in a file; None if the file is missing, damaged, or made from another source."""
    try:
        told = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(told) < _HEADER.size or (len(told) - _HEADER.size) % 8:
        return None
    digest = _HEADER.unpack(told[: _HEADER.size])[2]
    summary = LengthSummary(digest.hex(), np.frombuffer(told[_HEADER.size :], np.int64))
    return summary if told[: _HEADER.size] == _header(source, summary) else None
