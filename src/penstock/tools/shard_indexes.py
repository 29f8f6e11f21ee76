"""Write the indexes of shards into their store, or into a folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.errors import ShardError
from penstock.progress import progress_bar
from penstock.shards.index import SUFFIX
from penstock.shards.tar_shard import TarShard
from penstock.storage import write_atomically
from penstock.storage.files import SHARD
from penstock.storage.transfer import Cancel
from penstock.storage.urls import path_of

__all__ = ["write_beside", "write_indexes"]

_SHARDS = 8  # read at a time


def write_beside(shards: Sequence[TarShard], *, force: bool = False, progress: bool | None = None) -> int:
    """Ensure that the store has indexes beside shards, several at a time; return how many were written.

    ``force`` writes them again.

    Raises:
        StorageError: the store fails; written indexes stay, and the next call continues.
        ShardError: a shard is damaged or compressed.
    """
    cancel, written = Cancel(), 0

    def write(shard: TarShard) -> bool:
        if not force and shard.look_beside():
            return False
        shard.obtain(cancel=cancel)
        shard.put_index(shard.index())
        return True

    with (
        ThreadPoolExecutor(_SHARDS, "penstock-indexes") as pool,
        progress_bar("indexing", len(shards), progress, in_bytes=False) as advance,
    ):
        try:
            for is_written in pool.map(write, shards):
                written += is_written
                advance(1)
        except BaseException:
            cancel.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return written


def write_indexes(shards: Iterable[TarShard], folder: Path) -> None:
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
            raise SHARD.error(folder / name, error, "cannot write the index") from error
