"""Where the files of an MDS data set are: the shard itself, or its compressed form, which is unpacked once.

Of a data set in an object store a file is fetched when a sample of it is first asked for, into the local cache that all
processes of the machine share; the compressed one, where there is one.

An unpacked shard goes into the user's cache folder (or ``cache_dir``) under a name made of the compressed file's path,
size and modification time. One process unpacks it while others wait, and it appears there whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from penstock.errors import ConfigError, ShardError, ShardIOError, StorageNotFoundError, TruncatedShardError
from penstock.shards.mds.compression import decompress
from penstock.shards.mds.index import Part, ShardInfo
from penstock.shards.mds.shard import shard_errors
from penstock.storage import Storage, cache_root, file_lock, io_error, write_atomically

__all__ = ["HASHES", "Files", "check_hash"]

_BLOCK = 1 << 20

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
"""The registry of hashes: a new one is a function that makes an object with ``update`` and ``hexdigest``."""


class Files:
    """The files of a data set as paths on this machine.

    Args:
        folder: of the index, a path or an address.
        storage: how the store is reached; None for a folder of this machine.
        cache_dir: where unpacked shards go, instead of the user's cache folder.
        validate_hash: the algorithm by which every file is checked before it is used; None checks sizes alone.

    Raises:
        ConfigError: an unknown algorithm.
    """

    def __init__(
        self, folder: str, storage: Storage | None, *, cache_dir: str | None, validate_hash: str | None
    ) -> None:
        if validate_hash is not None and validate_hash not in HASHES:
            raise ConfigError(f"unknown hash {validate_hash!r}: use one of {', '.join(HASHES)}")
        self.folder = folder
        self.storage = storage
        self.cache_dir = cache_dir
        self.validate_hash = validate_hash

    def shard(self, info: ShardInfo) -> str:
        """The path of a shard that is not compressed (any more), with its hash checked if that was asked for.

        Raises:
            ShardIOError: there is neither the shard nor its compressed form, or no room to unpack it.
            ShardError: a file that is broken, or has another hash than the index says.
        """
        if self.storage is not None and info.packed is not None:
            raw = None  # fetched only if the smaller one is not there
        else:
            raw = self._find(info.raw)
        if raw is None and info.packed is not None and info.compression is not None:
            packed = self._find(info.packed)
            if packed is not None:
                return self._unpacked(packed, info.packed, info.raw, info.compression)
            raw = self._find(info.raw)
        if raw is None:
            name = self._name(info.raw)
            if info.packed is None:
                raise ShardIOError(f"{name} is missing: copy it again, or take it out of the index")
            raise ShardIOError(f"both {name} and {info.packed.basename} are missing: copy one of them again")
        self._check(raw, info.raw)
        return raw

    def _name(self, part: Part) -> str:
        return (
            f"{self.folder}/{part.basename}" if self.storage is not None else os.path.join(self.folder, part.basename)
        )

    def _find(self, part: Part) -> str | None:
        """A file as a path on this machine, or None where it does not exist."""
        name = self._name(part)
        if self.storage is None:
            return name if os.path.exists(name) else None
        try:
            return self.storage.local_path(name, progress=False)
        except StorageNotFoundError:
            return None

    def _unpacked(self, packed: str, part: Part, raw: Part, compression: str) -> str:
        try:
            status = os.stat(packed)
            folder = Path(self.cache_dir) if self.cache_dir is not None else cache_root() / "mds"
            folder.mkdir(parents=True, exist_ok=True)
            key = f"{os.path.realpath(packed)}\0{status.st_size}\0{status.st_mtime_ns}\0{raw.size}"
            target = folder / f"{xxhash.xxh3_128_hexdigest(os.fsencode(key))}.mds"
            if not _has_size(target, raw.size):
                with file_lock(target):
                    if not _has_size(target, raw.size):
                        self._unpack(packed, part, raw, compression, target)
        except OSError as error:
            if isinstance(error, ShardError):
                raise
            with shard_errors():
                raise io_error(packed, error, "cannot unpack") from error
        return str(target)

    def _unpack(self, packed: str, part: Part, raw: Part, compression: str, target: Path) -> None:
        data = Path(packed).read_bytes()
        if len(data) < part.size:
            raise TruncatedShardError(
                f"{packed} ends at byte {len(data)}, and the index says that it has {part.size}: copy it again"
            )
        if len(data) > part.size:
            raise ShardError(f"{packed} has {len(data)} bytes, and the index says {part.size}: they are not of a kind")
        self._check(packed, part, data)
        content = decompress(compression, data, raw.size, name=packed)
        self._check(packed, raw, content)
        with write_atomically(target) as file:
            file.write(content)

    def _check(self, path: str, part: Part, content: bytes | None = None) -> None:
        if self.validate_hash is not None:
            check_hash(path, part.hashes, self.validate_hash, content)


def check_hash(path: str, hashes: dict[str, str], algorithm: str, content: bytes | None = None) -> None:
    """Compare a file (or the content that was read from it) with the hash in the index.

    Raises:
        ConfigError: the index has no such hash.
        ShardError: they differ.
        ShardIOError: the file cannot be read.
    """
    if algorithm not in hashes:
        there = f"those by {', '.join(sorted(hashes))}" if hashes else "none at all"
        raise ConfigError(f"the index has no hash by {algorithm} for {path}, it has {there}: see validate_hash=")
    digest = HASHES[algorithm]()
    if content is not None:
        digest.update(content)
    else:
        try:
            with open(path, "rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
        except OSError as error:
            with shard_errors():
                raise io_error(path, error) from error
    if digest.hexdigest() != hashes[algorithm].lower():
        raise ShardError(
            f"{path} has {algorithm} {digest.hexdigest()}, and the index says {hashes[algorithm]}: it is damaged, copy "
            "it again"
        )


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False
