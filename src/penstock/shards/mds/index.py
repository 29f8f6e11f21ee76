"""The index of an MDS dataset: ``index.json``, version 2, read once into a compact form.

    {"version": 2, "shards": [{"column_names": [...], "column_encodings": [...], "column_sizes": [8, null, ...],
                               "compression": "zstd:7", "format": "mds", "version": 2, "samples": 1000,
                               "raw_data": {"basename": "shard.00000.mds", "bytes": ..., "hashes": {"sha1": ...}},
                               "zip_data": {"basename": "shard.00000.mds.zstd", ...}}, ...]}

A merged index has folders in its ``basename``. Everything that reading relies on is checked here, so a damaged index is
a `ShardError` that names the shard and the entry.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ShardError
from penstock.shards.mds.encodings import encoding_size
from penstock.storage.urls import is_inside

__all__ = ["COMPRESSIONS", "Columns", "Index", "MDSFile", "ShardInfo", "fingerprint", "parse_index"]

COMPRESSIONS = {"br": "brotli", "bz2": "bz2", "gz": "gzip", "snappy": "snappy", "zstd": "zstd"}
"""The compressions of shards, and Arrow's names for them."""

_MAX_BYTES = 1 << 32  # offsets are 32 bits


class Columns(NamedTuple):
    """The columns of a shard, in the order of their values in a sample."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]


class MDSFile(NamedTuple):
    """A file of a shard: plain or compressed."""

    basename: str
    size: int
    hashes: dict[str, str]


class ShardInfo(NamedTuple):
    """The index entry of one shard."""

    samples: int
    columns: Columns
    raw: MDSFile
    packed: MDSFile | None
    compression: str | None
    """The algorithm of ``packed``, without a level."""


class Index(NamedTuple):
    """A parsed index; ``starts`` holds the first sample number of each shard, and the number of all samples."""

    shards: list[ShardInfo]
    starts: npt.NDArray[np.int64]
    fingerprint: str
    """The identity of the samples, 32 hex digits: a hash of sizes, columns and hashes of all uncompressed shards.

    It does not depend on paths, so a copy elsewhere has the same one.
    """


def parse_index(text: bytes, path: str) -> Index:
    """Parse the content of an ``index.json``; ``path`` is for messages.

    Raises:
        ShardError: it is not an MDS index of version 2, or damaged.

    Memory: a few hundred bytes a shard; shards with the same columns share them.
    """
    try:
        index = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShardError(f"{path} is not JSON: {error}. Write it again with the shards") from None
    if not isinstance(index, dict) or "shards" not in index:
        raise ShardError(f"{path} is not an MDS index: it has no 'shards'")
    _check_version(index, path)
    if not isinstance(index["shards"], list):
        raise ShardError(f"{path}: 'shards' is not a list")
    known: dict[str, Columns] = {}
    shards = [_shard(entry, f"{path}, shard {number}", known) for number, entry in enumerate(index["shards"])]
    starts = np.cumsum([0, *(shard.samples for shard in shards)], dtype=np.int64)
    return Index(shards, starts, fingerprint(shards))


def _check_version(entry: dict[str, Any], where: str) -> None:
    version = entry.get("version")
    if version != 2 or isinstance(version, bool):
        raise ShardError(f"{where} has version {version!r}, but only version 2 is supported")


def _shard(entry: Any, where: str, known: dict[str, Columns]) -> ShardInfo:
    if not isinstance(entry, dict):
        raise ShardError(f"{where} is not an object")
    if entry.get("format") != "mds":
        raise ShardError(f"{where} has format {entry.get('format')!r}: only 'mds' is supported")
    _check_version(entry, where)
    samples = _count(entry.get("samples"), _MAX_BYTES // 4, where, "'samples'")
    raw = _part(entry.get("raw_data"), where, "raw_data")
    packed = None if entry.get("zip_data") is None else _part(entry["zip_data"], where, "zip_data")
    compression = entry.get("compression")
    if compression is not None:
        if not isinstance(compression, str):
            raise ShardError(f"{where}: 'compression' is {compression!r}, not a name")
        algorithm, _, level = compression.partition(":")
        if algorithm not in COMPRESSIONS or (level and not level.isdigit()):
            raise ShardError(f"{where}: unknown compression {compression!r}: MDS has {', '.join(COMPRESSIONS)}")
        compression = algorithm
    elif packed is not None:
        raise ShardError(f"{where} has zip_data, but no compression")
    lists = [entry.get(f"column_{name}") for name in ("names", "encodings", "sizes")]
    key = repr(lists)
    if key not in known:  # nearly all shards have the columns of the first
        known[key] = _columns(lists, where)
    return ShardInfo(samples, known[key], raw, packed, compression)


def _columns(lists: list[Any], where: str) -> Columns:
    if not all(isinstance(values, list) for values in lists):
        raise ShardError(f"{where}: column_names, column_encodings and column_sizes must be lists")
    names, encodings, sizes = lists
    if not len(names) == len(encodings) == len(sizes) or not names:
        raise ShardError(
            f"{where} has {len(names)} column_names, {len(encodings)} column_encodings and {len(sizes)} column_sizes"
        )
    if not all(isinstance(value, str) for value in (*names, *encodings)):
        raise ShardError(f"{where}: names and encodings of columns must be text")
    if len(set(names)) != len(names):
        raise ShardError(f"{where} has two columns of the same name")
    for name, encoding, size in zip(names, encodings, sizes, strict=True):
        column = f"{where}, column {name!r}"
        try:
            fixed = encoding_size(encoding)
        except ShardError as error:
            raise ShardError(f"{column}: {error}") from None
        if size is not None:
            _count(size, _MAX_BYTES, column, "size")
        if fixed is not None and size not in (None, fixed):
            raise ShardError(f"{column}: a value of encoding {encoding} has {fixed} bytes, not {size}")
    return Columns(tuple(names), tuple(encodings), tuple(sizes))


def _part(entry: Any, where: str, name: str) -> MDSFile:
    if not isinstance(entry, dict):
        raise ShardError(f"{where}, {name} is not an object")
    basename, hashes = entry.get("basename"), entry.get("hashes") or {}
    if not isinstance(basename, str) or not is_inside(basename):
        raise ShardError(f"{where}, {name}: basename {basename!r} is not a file within the folder of the index")
    if not isinstance(hashes, dict) or not all(isinstance(value, str) for value in hashes.values()):
        raise ShardError(f"{where}, {name}: 'hashes' must map algorithms to texts")
    return MDSFile(basename, _count(entry.get("bytes"), _MAX_BYTES, where, f"{name}: 'bytes'"), hashes)


def _count(value: Any, limit: int, where: str, what: str) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise ShardError(f"{where}: {what} is {value!r}: it must be an integer from 0 to {limit}")
    return value


def fingerprint(shards: Sequence[ShardInfo]) -> str:
    """Return the fingerprint of shards, see `Index`."""
    digest = xxhash.xxh3_128()
    before = None
    for shard in shards:
        if shard.columns is not before:  # nearly all shards share one object
            before = shard.columns
            digest.update(json.dumps(before).encode())
        digest.update(json.dumps([shard.samples, shard.raw.size, sorted(shard.raw.hashes.items())]).encode())
    return digest.hexdigest()
