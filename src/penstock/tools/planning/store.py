"""A job's downloads from an object store, epoch by epoch: shards in the real order, with a cache on each node.

    order -> first and last position of each shard, on each node -> copies fetched, kept and evicted -> bytes, requests

Three ways are compared. "plain" splits rows among all ranks in each epoch, with a cache that knows the order
(`penstock.storage.planned_use`, `penstock.tools.planning.eviction`). "plain, LRU" is the same with a cache that evicts
the least recently used shard. "by node" is the order of ``locality="node"``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.hashing import mix
from penstock.order import NodeShuffle, Order, make_order
from penstock.order.shuffle import DEFAULT_BLOCK_SIZE, DEFAULT_WINDOW
from penstock.storage.planned_use import NEVER, all_fit, bytes_for_copies, choose_copies
from penstock.storage.stream import BLOCK
from penstock.tools.planning.eviction import KnownOrder, LeastRecentlyUsed

__all__ = ["WAYS", "Fetched", "StoreJob", "StorePlan", "Uses", "plan_store", "uses_of"]

WAYS = ("plain, LRU", "plain", "by node")
_ROWS = 2_000_000  # most simulated rows of an epoch; larger shards and blocks are scaled down
_CHUNK = 1 << 18

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class StoreJob:
    """A job that reads shards from a store.

    Args:
        samples, sizes: rows and bytes of each shard, int64 of shape (shards,).
        nodes: number of nodes, each with ``ranks / nodes`` ranks and its own cache.
        ranks: number of ranks of the job; by default one for each node.
        cache_bytes: size of the cache of each node.
        epochs: number of epochs to plan.
        shuffle, block_size, window, seed: the order, see `penstock.order.make_order`: ``"block"`` or ``"global"``. "by
            node" has no ``window``.
        request_bytes: bytes of one request of a copy, as in `penstock.storage.Storage`.

    Raises:
        ConfigError: a number outside its range, another shuffle, or nodes that do not divide the ranks.
    """

    samples: Ints
    sizes: Ints
    nodes: int = 1
    ranks: int | None = None
    cache_bytes: int = 0
    epochs: int = 3
    shuffle: str = "block"
    block_size: int = DEFAULT_BLOCK_SIZE
    window: int = DEFAULT_WINDOW
    seed: int = 0
    request_bytes: int = BLOCK

    def __post_init__(self) -> None:
        for name in ("nodes", "epochs", "block_size", "window", "request_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if (
            not len(self.samples)
            or len(self.samples) != len(self.sizes)
            or min(self.samples) < 0
            or min(self.sizes) < 0
        ):
            raise ConfigError("samples and sizes need a number, 0 or more, for each of one or more shards")
        if self.world_size < 1 or self.world_size % self.nodes:
            raise ConfigError(f"each node must have equally many ranks, got {self.ranks} ranks on {self.nodes} nodes")
        if self.cache_bytes < 0:
            raise ConfigError(f"cache_bytes must be 0 or more, got {self.cache_bytes}")
        if self.shuffle not in ("block", "global"):
            raise ConfigError(f"a plan with shards needs shuffle 'block' or 'global', not {self.shuffle!r}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes if self.ranks is None else self.ranks


class Fetched(NamedTuple):
    """Downloads of all nodes in an epoch.

    Attributes:
        bytes, requests: from the store, without requests that list shards or read their indexes.
        hits: share of the nodes' samples that were in their caches before the epoch.
    """

    bytes: int
    requests: int
    hits: float

    def cost(self, *, gb_price: float, request_price: float) -> float:
        """Return the cost, from the price of a GB (10**9 bytes) and of 1,000 requests."""
        return self.bytes / 1e9 * gb_price + self.requests / 1e3 * request_price


@dataclass(frozen=True)
class StorePlan:
    """The downloads of a job.

    Attributes:
        shards, samples, bytes: of the data.
        nodes, ranks, cache_bytes: of the job.
        ways: downloads of each epoch, by name of the way (`WAYS`).
    """

    shards: int
    samples: int
    bytes: int
    nodes: int
    ranks: int
    cache_bytes: int
    ways: dict[str, tuple[Fetched, ...]]


class Uses(NamedTuple):
    """A node's uses of each shard in an epoch, as the node's own positions: int64 of shape (shards,).

    Attributes:
        first, last: positions of the first and the last use; `NEVER` and -1 without a use.
        rows: number of rows of the shard that the node needs.
        end: number of positions.
    """

    first: Ints
    last: Ints
    rows: Ints
    end: int


def plan_store(job: StoreJob) -> StorePlan:
    """Plan a job's downloads from a store.

    Cost: about 0.2 s for each epoch and way, with at most two million simulated rows, and O(shards) memory.

    >>> job = StoreJob(samples=np.full(80, 100), sizes=np.full(80, 10**6), nodes=4, cache_bytes=10**7, block_size=100)
    >>> ways = plan_store(job).ways
    >>> [round(way[-1].hits, 2) for way in ways.values()]
    [0.02, 0.11, 0.36]
    """
    small = _thinned(job)
    starts = np.concatenate([[0], np.cumsum(small.samples)]).astype(np.int64)
    plain = [_epoch_uses(small, _plain(small, epoch), starts) for epoch in range(job.epochs + 1)]
    by_node = [_epoch_uses(small, _by_node(small, epoch), starts) for epoch in range(job.epochs + 1)]
    ways = {
        "plain, LRU": _least_recent(job, plain),
        "plain": _known(job, small, plain),
        "by node": _known(job, small, by_node),
    }
    return StorePlan(
        shards=len(job.sizes),
        samples=int(job.samples.sum()),
        bytes=int(job.sizes.sum()),
        nodes=job.nodes,
        ranks=job.world_size,
        cache_bytes=job.cache_bytes,
        ways=ways,
    )


def _thinned(job: StoreJob) -> StoreJob:
    """Return a job with the same number of shards and fewer rows."""
    factor = -(-int(job.samples.sum()) // _ROWS)
    if factor <= 1:
        return job
    samples = np.where(job.samples > 0, np.maximum(job.samples // factor, 1), 0)
    return replace(job, samples=samples, block_size=max(1, job.block_size // factor))


def _plain(job: StoreJob, epoch: int) -> Order:
    sizes = {"block_size": job.block_size, "window": job.window}
    return make_order(job.shuffle, int(job.samples.sum()), seed=job.seed, epoch=epoch, **sizes)


def _by_node(job: StoreJob, epoch: int) -> Order:
    block_size = job.block_size if job.shuffle == "block" else None
    return NodeShuffle(int(job.samples.sum()), seed=job.seed, epoch=epoch, block_size=block_size)


def _epoch_uses(job: StoreJob, order: Order, starts: Ints) -> list[Uses]:
    here = job.world_size // job.nodes
    return [uses_of(order, range(node * here, (node + 1) * here), job.world_size, starts) for node in range(job.nodes)]


def uses_of(order: Order, ranks: range, world_size: int, starts: Ints) -> Uses:
    """Return a node's uses of each shard.

    Args:
        order: of the epoch.
        ranks: ranks of the node.
        world_size: number of ranks of the job.
        starts: the first row of each shard, and the number of rows.
    """
    n, shards = len(order), len(starts) - 1
    first, last, rows = np.full(shards, NEVER), np.full(shards, -1), np.zeros(shards, np.int64)
    rounds = -(-n // world_size)  # the last round repeats the first positions, like padding
    for begin in range(0, rounds, _CHUNK):
        steps = np.arange(begin, min(begin + _CHUNK, rounds), dtype=np.int64)
        positions = steps[:, None] * world_size + np.array(ranks)
        numbers = (starts.searchsorted(order[positions.reshape(-1) % max(n, 1)], "right") - 1) if n else steps[:0]
        at = np.repeat(steps, len(ranks))
        last[numbers] = at
        seen = np.full(shards, NEVER)
        seen[numbers[::-1]] = at[::-1]
        first = np.minimum(first, seen)
        rows += np.bincount(numbers, minlength=shards)
    return Uses(first, last, rows, rounds)


def _known(job: StoreJob, small: StoreJob, epochs: list[list[Uses]]) -> tuple[Fetched, ...]:
    """Return the downloads of nodes with caches that know the order."""
    names = [mix(number) for number in range(len(job.sizes))]
    caches = [KnownOrder(job.sizes, job.cache_bytes) for _ in range(job.nodes)]
    found = []
    for now, following in itertools.pairwise(epochs):
        parts = []
        for cache, uses, then in zip(caches, now, following, strict=True):
            again = np.where(then.first < NEVER, uses.end + then.first, NEVER)
            parts.append(_of_node(job, small, cache, uses, again, names))
        found.append(_sum(parts))
    return tuple(found)


class _Part(NamedTuple):
    """Downloads of a node in an epoch: bytes, requests, rows that were not cached, and all rows that it needs."""

    bytes: int
    requests: int
    missed: float
    rows: int


def _of_node(job: StoreJob, small: StoreJob, cache: KnownOrder, uses: Uses, again: Ints, names: list[int]) -> _Part:
    needed = np.flatnonzero(uses.last >= 0)
    sizes, room = job.sizes[needed], bytes_for_copies(job.cache_bytes)
    if all_fit(sizes, uses.first[needed], uses.last[needed], room):
        return _copies(job, uses, cache.run(uses.first, uses.last, again))
    there = cache.has[needed]
    kept = choose_copies(sizes, again[needed], there, [names[number] for number in needed.tolist()], room)
    copied, ranged = _copies(job, uses, needed[kept & ~there]), needed[~kept]
    cache.keep(needed[kept])
    # Each row of these shards is read by its own request.
    shares = uses.rows[ranged] / np.maximum(small.samples[ranged], 1)
    read, rows = (int(np.rint(column[ranged] * shares).sum()) for column in (job.sizes, job.samples))
    missed = copied.missed + uses.rows[ranged].sum()
    return _Part(copied.bytes + read, copied.requests + rows, missed, copied.rows)


def _copies(job: StoreJob, uses: Uses, fetched: Ints) -> _Part:
    """Return the downloads for copies of these shards."""
    sizes = job.sizes[fetched]
    requests = -(-sizes // job.request_bytes)
    return _Part(int(sizes.sum()), int(requests.sum()), uses.rows[fetched].sum(), int(uses.rows.sum()))


def _least_recent(job: StoreJob, epochs: list[list[Uses]]) -> tuple[Fetched, ...]:
    """Return the downloads of nodes with LRU caches of whole shards, each used once an epoch."""
    caches = [LeastRecentlyUsed(job.sizes, job.cache_bytes) for _ in range(job.nodes)]
    found = []
    for now in epochs[:-1]:
        parts = []
        for cache, uses in zip(caches, now, strict=True):
            needed = np.flatnonzero(uses.last >= 0)
            parts.append(_copies(job, uses, cache.run(needed[np.argsort(uses.first[needed], kind="stable")])))
        found.append(_sum(parts))
    return tuple(found)


def _sum(parts: list[_Part]) -> Fetched:
    size, requests, missed, rows = (sum(column) for column in zip(*parts, strict=True))
    return Fetched(int(size), int(requests), float(1 - missed / rows) if rows else 0.0)
