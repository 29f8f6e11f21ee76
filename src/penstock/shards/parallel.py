"""Run the same work on many shards in processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import TypeVar

from penstock.errors import WorkerError
from penstock.processes import process_pool
from penstock.shards.check import ShardReport, verify
from penstock.shards.entries import write_entries
from penstock.shards.index import load_or_build

__all__ = ["build_all", "index_images_of_all", "verify_all"]

T = TypeVar("T")


def build_all(paths: list[str], workers: int) -> Iterator[int]:
    """Index shards without an index; yield the sample count of each. Raises as `load_or_build`."""
    return _each(_count, paths, workers)


def index_images_of_all(paths: list[str], workers: int) -> Iterator[int]:
    """Write the entries of shards' images; yield the number of images of each. Raises as `write_entries`."""
    return _each(write_entries, paths, workers)


def verify_all(paths: list[str], workers: int, *, decode: bool) -> Iterator[ShardReport]:
    """Yield the `verify` report of each shard."""
    return _each(partial(verify, decode=decode), paths, workers)


def _count(path: str) -> int:
    return len(load_or_build(path))


def _each(work: Callable[[str], T], paths: list[str], workers: int) -> Iterator[T]:
    if min(workers, len(paths)) <= 1:
        yield from (work(path) for path in paths)
        return
    try:
        with process_pool(min(workers, len(paths))) as pool:
            yield from pool.map(work, paths)
    except BrokenProcessPool as error:
        raise WorkerError("a worker process was killed (out of memory?); try again with fewer workers") from error
