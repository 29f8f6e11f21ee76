"""Find the handles of many shards by their indexes, concurrently, and build missing indexes.

find_handles([("s3://bucket/000.tar", stat), ...], storage, None, copy=True)
build(handles)                                      index the shards that have no index
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.errors import ShardError, ShardIOError, StorageAuthError, StorageNotFoundError
from penstock.progress import progress_bar
from penstock.shards.handles import Handle, LocalShard, StoreShard, index_url
from penstock.shards.index import SUFFIX
from penstock.storage import RemoteSource, Storage, io_error, is_remote, write_atomically
from penstock.storage.backend import Cancel, Stat
from penstock.storage.parallel_requests import in_threads
from penstock.storage.urls import path_of

__all__ = ["build", "find_handles", "has_index", "open_handles", "write_beside", "write_indexes"]

_COPIES, _SHARDS = 4, 8  # shards copied at a time, and shards read while indexes are written into the store


def has_index(url: str, storage: Storage | None) -> bool:
    """Return whether a shard in a store has its index beside it there. Costs one request."""
    try:
        RemoteSource(index_url(url), storage)
    except (
        StorageNotFoundError,
        StorageAuthError,
    ):  # without list permission, stores answer "no access" for missing objects
        return False
    return True


def write_indexes(shards: Iterable[Handle], folder: Path) -> None:
    """Write the indexes of shards as ``NAME.pidx`` into a folder, to be copied beside the shards elsewhere.

    Raises:
        ShardError: two shards have the same name.
        ShardIOError: the folder cannot be written to.
    """
    written: set[str] = set()
    for shard in shards:
        name = os.path.basename(path_of(shard.url) or shard.url.partition("?")[0]) + SUFFIX
        if name in written:
            raise ShardError(
                f"two shards have an index named {name}: write the indexes of each folder into a separate one"
            )
        written.add(name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with write_atomically(folder / name) as file:
                file.write(shard.index().path.read_bytes())
        except OSError as error:
            raise ShardIOError(str(io_error(folder / name, error, "cannot write the index"))) from error


def find_handles(
    found: Sequence[tuple[str, Stat | None]], storage: Storage | None, cache_dir: str | None, *, copy: bool
) -> list[Handle]:
    """Return handles of shards, given with their versions if known; a shard without an index has no header."""

    def handle_of(url: str, stat: Stat | None) -> Handle:
        if not is_remote(url):
            return LocalShard(url, cache_dir)
        shard = StoreShard(url, storage, cache_dir, stat, copy=copy)
        if not shard.look_beside():
            shard.is_known()
        return shard

    remote = {url: stat for url, stat in found if is_remote(url)}
    made = dict(zip(remote, in_threads(lambda pair: handle_of(*pair), [*remote.items()]), strict=True))
    return [made[url] if url in made else handle_of(url, stat) for url, stat in found]


def open_handles(
    found: Sequence[tuple[str, Stat | None]],
    storage: Storage | None,
    cache_dir: str | None,
    *,
    copy: bool,
    progress: bool | None,
) -> list[Handle]:
    """Return the handles of shards, each with its header; shards without an index are indexed."""
    handles = find_handles(found, storage, cache_dir, copy=copy)
    build(handles, progress=progress)
    return handles


def build(shards: Sequence[Handle], *, progress: bool | None = None) -> None:
    """Index the shards without an index; remote ones are copied first, several at a time."""
    missing = [shard for shard in shards if shard.header is None]
    if not missing:
        return
    with progress_bar("indexing", sum(shard.size for shard in missing), progress) as advance:
        for local in [shard for shard in missing if isinstance(shard, LocalShard)]:
            local.build(advance)
        copied = [shard for shard in missing if isinstance(shard, StoreShard)]
        in_threads(lambda shard: shard.build(advance), copied, count=_COPIES)


def write_beside(shards: Sequence[StoreShard], *, force: bool = False, progress: bool | None = None) -> int:
    """Ensure that the store has indexes beside shards, several at a time; return how many were written.

    Raises:
        StorageError: the store fails; written indexes stay, and the next call continues.
        ShardError: a shard is damaged or compressed.
    """
    cancel, written = Cancel(), 0
    with (
        ThreadPoolExecutor(_SHARDS, "penstock-indexes") as pool,
        progress_bar("indexing", len(shards), progress, in_bytes=False) as advance,
    ):
        try:
            for is_written in pool.map(lambda shard: shard.write_beside(force=force, cancel=cancel), shards):
                written += is_written
                advance(1)
        except BaseException:
            cancel.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return written
