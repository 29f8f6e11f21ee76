"""The files of an MDS dataset: plain shards, or compressed ones, which are decompressed once.

A file in an object store is fetched when one of its samples is first read, into the local cache that all processes of
the machine share; the compressed form is preferred.

Decompressed shards are in the same cache, under a name derived from the compressed file's URL and version, and count
towards the same limit. One process decompresses a shard while others wait; it appears atomically, and stays readable
for processes that have it open when it is evicted.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import xxhash

from penstock.errors import (
    ConfigError,
    ShardError,
    ShardIOError,
    StorageError,
    StorageNotFoundError,
    StorageUnavailableError,
    TruncatedShardError,
)
from penstock.shards.mds.index import COMPRESSIONS, MDSFile, ShardInfo
from penstock.shards.shard_file import StoredShard
from penstock.storage import Cache, File, RemoteSource, Storage
from penstock.storage.files import SHARD
from penstock.storage.stream import in_threads
from penstock.storage.transfer import Stat, Write

__all__ = ["HASHES", "MDSFiles", "decompress"]

_LONGEST = 3600.0  # seconds for which other processes wait while a shard is decompressed

HASHES: dict[str, Callable[[], Any]] = {
    **{
        name: partial(hashlib.new, name, usedforsecurity=False)
        for name in (
            *("blake2b", "blake2s", "md5", "sha1", "sha224", "sha256", "sha384", "sha512"),
            *("sha3_224", "sha3_256", "sha3_384", "sha3_512"),
        )
    },
    "xxh32": xxhash.xxh32,
    "xxh64": xxhash.xxh64,
    "xxh128": xxhash.xxh3_128,
    "xxh3_64": xxhash.xxh3_64,
    "xxh3_128": xxhash.xxh3_128,
}
"""The hashes: functions that return an object with ``update`` and ``hexdigest``, by name."""


class MDSFiles:
    """The files of a dataset as local files; ``storage`` is None for a local folder. Options: see `MDSFolder`."""

    def __init__(
        self, folder: str, storage: Storage | None, *, cache_dir: Cache | str | None, validate_hash: str | None
    ) -> None:
        if validate_hash is not None and validate_hash not in HASHES:
            raise ConfigError(f"unknown hash {validate_hash!r}: use one of {', '.join(HASHES)}")
        self.folder, self.storage, self.cache_dir, self.validate_hash = folder, storage, cache_dir, validate_hash
        self.versions: dict[str, Stat] = {}
        """The known versions of files by URL, for copies of this object in other processes."""
        self._listed: set[str] = set()

    def open(self, info: ShardInfo) -> File:
        """Return an open, decompressed shard, with its hash checked if ``validate_hash`` is set."""
        name = self._name(info.raw)
        source: File | RemoteSource | None = None
        if info.packed is not None and (self.storage is not None or not os.path.exists(name)):
            packed = self._source(info.packed)
            if packed is not None:
                cache = self.cache_dir or (self.storage or Storage()).the_cache()
                cache = Cache(cache) if isinstance(cache, str) else cache
                whole = _Unpacked(name, info.raw.size, packed, partial(self._unpack, packed, info))
                source = cache.open(whole, progress=False)
        source = source or self._source(info.raw)
        if source is None:
            if info.packed is None:
                raise ShardIOError(f"{name} is missing: copy it again, or remove it from the index")
            raise ShardIOError(f"both {name} and {info.packed.basename} are missing: copy one of them again")
        file = (source if isinstance(source, File) else source.local(progress=False)).of(SHARD)
        self._check(file.path, info.raw, file.map or b"")
        return file

    def stored(self, shards: Sequence[ShardInfo]) -> list[StoredShard]:
        """Return the shards that are fetched from a store uncompressed; see `MDSFolder.stored`."""
        how = self.storage
        if how is None:
            return []
        plain = [(number, info.raw, self._name(info.raw)) for number, info in enumerate(shards) if info.packed is None]
        in_threads(self._source, [part for _, part, name in plain if self._version(name) is None])
        versions = [(number, name, self.versions.get(name)) for number, _, name in plain]
        return [
            StoredShard(number, RemoteSource(name, how, stat)) for number, name, stat in versions if stat is not None
        ]

    def _name(self, part: MDSFile) -> str:
        remote = self.storage is not None
        return f"{self.folder}/{part.basename}" if remote else os.path.join(self.folder, part.basename)

    def _source(self, part: MDSFile) -> File | RemoteSource | None:
        """Return a file of the folder, in a store in the version first seen; None if it is missing."""
        name = self._name(part)
        if self.storage is None:
            return File(name, SHARD) if os.path.exists(name) else None
        try:
            found = RemoteSource(name, self.storage, self._version(name))
        except StorageNotFoundError:
            return None
        self.versions[name] = found.stat
        return found

    def _version(self, name: str) -> Stat | None:
        """Return the version of a file, perhaps from a listing of its folder; None if it must be looked up."""
        pattern = f"{self.folder}/{'**' if '/' in name[len(self.folder) + 1 :] else '*'}"
        if self.storage is not None and name not in self.versions and pattern not in self._listed:
            self._listed.add(pattern)
            try:
                self.versions = dict(self.storage.list_objects(pattern)) | self.versions
            except StorageUnavailableError:
                raise
            except StorageError:  # web servers cannot be listed, and some stores do not allow it
                pass
        return self.versions.get(name)

    def _unpack(self, source: File | RemoteSource, info: ShardInfo) -> bytes:
        packed = info.packed
        assert packed is not None
        assert info.compression is not None
        if source.size < packed.size:
            raise TruncatedShardError(
                f"{source.url} ends at byte {source.size}, but has {packed.size} bytes in the index: copy it again"
            )
        if source.size > packed.size:
            raise ShardError(
                f"{source.url} has {source.size} bytes, but {packed.size} in the index: they do not belong together"
            )
        whole = source if isinstance(source, File) else source.local(progress=False)
        data = whole.read_at(0, source.size)
        self._check(source.url, packed, data)
        content = decompress(info.compression, data, info.raw.size, name=source.url)
        self._check(source.url, info.raw, content)
        return content

    def _check(self, path: str, part: MDSFile, content: bytes | mmap.mmap) -> None:
        """Check a file's content against the hash in the index, if ``validate_hash`` is set."""
        algorithm, hashes = self.validate_hash, part.hashes
        if algorithm is None:
            return
        if algorithm not in hashes:
            there = f"those by {', '.join(sorted(hashes))}" if hashes else "none at all"
            raise ConfigError(f"the index has no {algorithm} hash for {path}, it has {there}: see validate_hash=")
        digest = HASHES[algorithm]()
        digest.update(content)
        if digest.hexdigest() != hashes[algorithm].lower():
            raise ShardError(
                f"{path} has {algorithm} {digest.hexdigest()}, but {hashes[algorithm]} in the index: it is damaged, "
                "copy it again"
            )


class _Unpacked(RemoteSource):
    """The content of a compressed shard as an object for the cache, produced locally."""

    def __init__(self, name: str, size: int, packed: File | RemoteSource, make: Callable[[], bytes]) -> None:
        where = packed.url if isinstance(packed, RemoteSource) else f"file://{os.path.realpath(packed.url)}"
        url = where[: len(where) - len(os.path.basename(where))] + os.path.basename(name)
        super().__init__(url, Storage(deadline=_LONGEST), Stat(size, ranged=False))
        self.fingerprint = f"unpacked {where} {packed.fingerprint} {size}"
        self._make = make

    def fetch_into(self, write: Write, begin: int, end: int) -> None:
        """Write the whole content."""
        write(begin, self._make())


def decompress(algorithm: str, data: bytes, size: int, *, name: str) -> bytes:
    """Return the content of a compressed file; `ShardError` if it is damaged.

    ``size``, the bytes of the content by the index, also limits the output, so a small file cannot fill the memory.
    """
    try:
        if algorithm == "snappy":
            known = _snappy_size(data)
            if known != size:  # Arrow would leave the rest uninitialised
                raise ValueError(f"its block holds {known} bytes")
            content: bytes = pa.Codec(algorithm).decompress(data, decompressed_size=size, asbytes=True)
        else:
            content = pa.CompressedInputStream(pa.BufferReader(data), COMPRESSIONS[algorithm]).read(size + 1)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ShardError(f"{name} cannot be decompressed as {algorithm}: {error}. Copy it again") from error
    if len(content) != size:
        found = f"more than {size}" if len(content) > size else str(len(content))
        raise ShardError(f"{name} has {found} bytes when decompressed, but {size} in the index: copy it again")
    return content


def _snappy_size(data: bytes) -> int:
    """Return the size of the content of a raw block, with which it begins, 7 bits a byte."""
    size = shift = 0
    for byte in data[:5]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return size
