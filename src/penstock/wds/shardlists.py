"""Lists of shards, and the stages that split them across ranks and workers.

All ranks and workers see the same list in the same order, which a shuffle changes every epoch. The list is split after
the shuffle, so a rank reads different shards every epoch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count as counter
from typing import Any

import numpy as np

from penstock import distributed
from penstock.distributed import Worker, World
from penstock.errors import ConfigError
from penstock.hashing import mix
from penstock.order import make_order
from penstock.storage.names import expand
from penstock.wds.folders import DirectoryShardList
from penstock.wds.iterators import Context, CountedStep, Source, Stage, Step, default_context, read_count

__all__ = [
    "DirectoryShardList",
    "ResampledShardList",
    "ResampledShards",
    "SimpleShardList",
    "check_empty",
    "expand_source",
    "expand_urls",
    "non_empty",
    "resampled",
    "shardspec",
    "single_node_only",
    "split_by_node",
    "split_by_worker",
]

_MULTI_NODE = "you need to add an explicit nodesplitter to your input pipeline for multi-node training"
_EMPTY = (
    "No samples found in dataset; perhaps you have fewer shards than workers.\nTurn off using empty_check=False in the "
    "WebDataset constructor."
)
_NO_DATA = "pipeline stage received no data at all and this was declared as an error"


expand_urls = expand
"""Expands a string with braces, glob patterns and ``::`` into shards; entries of a list are expanded too."""


def expand_source(source: Any, max_urls: int = int(1e9)) -> list[str]:
    """Expand any iterable of addresses, up to ``max_urls``."""
    if isinstance(source, str | os.PathLike | list | tuple):
        return expand_urls(source)[:max_urls]
    found = []
    for _, url in zip(range(max_urls), source, strict=False):
        found.append(url["url"] if isinstance(url, Mapping) else url)
    return found


class _ShardStep(Step):
    """Shards by position; the state is the number of shards delivered."""

    def __init__(self, url: Any, count: int | None, own: Any) -> None:
        self._url, self._count, self._had = url, count, read_count(own)

    def __next__(self) -> Any:
        if self._count is not None and self._had >= self._count:
            raise StopIteration
        url = self._url(self._had)
        self._had += 1
        return {"url": url}

    def cursor(self) -> list[Any]:
        return [self._had]


class SimpleShardList(Source):
    """A list of shards in order.

    Args:
        urls: as for `expand_urls`.
        seed: shuffle the shards every epoch with this seed; True uses the pipeline's seed.
        shuffle: shuffle the shards every epoch with the pipeline's seed.
    """

    def __init__(self, urls: Any, seed: int | bool | None = None, *, shuffle: bool = False) -> None:
        self.urls = expand_urls(urls)
        self.seed = seed
        self.shuffle = shuffle

    def __len__(self) -> int:
        return len(self.urls)

    def begin_source(self, context: Context, own: Any) -> Step:
        """Open the list as the first stage of a pipeline."""
        urls = self.urls
        if not self.shuffle and (self.seed is None or self.seed is False):
            return _ShardStep(urls.__getitem__, len(urls), own)
        seed = context.seed if self.seed is None or isinstance(self.seed, bool) else self.seed
        order = make_order("global", len(urls), seed=mix(seed, context.turn), epoch=context.epoch)
        return _ShardStep(lambda number: urls[int(order[np.array([number])][0])], len(urls), own)


class ResampledShards(Source):
    """Shards drawn at random with replacement, independently by each rank and worker.

    Args:
        urls: as for `expand_urls`.
        nshards: shards per epoch.
        seed: combined with the pipeline's seed.
        worker_seed: a function that returns a seed for this worker, used instead of its rank and number.
        deterministic: for compatibility: draws are always a function of seed, epoch, rank and worker.
        max_urls: the largest number of addresses to take from an endless iterable.
        empty_check: raise an error for an empty list.

    As many draws as there are shards reach 63 % of them.
    """

    def __init__(
        self,
        urls: Any,
        nshards: int = sys.maxsize,
        seed: int = 0,
        worker_seed: Any = None,
        deterministic: bool = False,
        max_urls: int = int(1e6),
        empty_check: bool = True,
    ) -> None:
        self.urls = expand_source(urls, max_urls)
        if empty_check and not self.urls:
            raise ConfigError("empty_check=True, but no shards found.")
        self.nshards, self.seed, self.worker_seed, self.deterministic = nshards, seed, worker_seed, deterministic
        self.epoch = -1

    def __iter__(self) -> Iterator[dict[str, str]]:
        self.epoch += 1
        return self.begin_source(default_context()._replace(epoch=self.epoch), None)

    def begin_source(self, context: Context, own: Any) -> Step:
        """Open the list as the first stage of a pipeline."""
        key = mix(context.key("resampled", common=self.worker_seed is not None), self.seed)
        if self.worker_seed is not None:
            key = mix(key, self.worker_seed())
        urls = self.urls
        return _ShardStep(lambda number: urls[mix(key, number) % len(urls)], self.nshards if urls else 0, own)


ResampledShardList = ResampledShards


def shardspec(spec: Any) -> SimpleShardList:
    """Return a `SimpleShardList` of the shards that a string names."""
    return SimpleShardList(spec)


# ------------------------------------------------------------------ splitting


class _Named(Stage):
    """A stage that programs use without calling it. It pickles by name."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __reduce__(self) -> str:
        return self.__name__

    def __repr__(self) -> str:
        return f"<{self.__name__}>"


class _Split(_Named):
    """A stage that keeps every n-th item, and every item that already belongs only to this worker.

    Args:
        name: its name in this module.
        part: returns (index, total) of this rank and worker.
    """

    def __init__(self, name: str, part: Callable[[World, Worker], tuple[int, int]]) -> None:
        super().__init__(name)
        self.part = part

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        """Return a `Step` over the source."""
        index, total = (0, 1) if source.taken else self.part(context.world, context.worker)
        step = CountedStep(source, lambda src, had: _every(src, had, index, total), own)
        step.taken = source.taken
        return step

    def __call__(self, src: Iterable[Any], group: Any = None) -> Iterator[Any]:
        index, total = self.part(distributed.current(process_group=group), distributed.worker())
        return (item for _, item in _every(src, 0, index, total))


def _every(src: Iterable[Any], had: int, index: int, total: int) -> Iterator[tuple[int, Any]]:
    for number, item in zip(counter(had), src, strict=False):
        if number % total == index:
            yield number + 1, item


def _node(world: World, worker: Worker) -> tuple[int, int]:
    return world.rank, world.world_size


def _worker(world: World, worker: Worker) -> tuple[int, int]:
    return worker.id, worker.total


def _single(world: World, worker: Worker) -> tuple[int, int]:
    if world.world_size > 1:
        raise ConfigError(f"{_MULTI_NODE}: nodesplitter=penstock.wds.split_by_node")
    return 0, 1


class _Check(_Named):
    """A stage that raises an error if there are no items."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(name)
        self.message = message

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        """Return a `Step` over the source."""
        return CountedStep(source, self._all, own)

    def _all(self, src: Iterable[Any], had: int) -> Iterator[tuple[int, Any]]:
        for had, item in zip(counter(had + 1), src, strict=False):  # noqa: B020
            yield had, item
        if not had:
            raise ConfigError(self.message)


split_by_node = _Split("split_by_node", _node)
"""Keeps the items whose number, modulo the number of ranks, is this rank."""
split_by_worker = _Split("split_by_worker", _worker)
"""Keeps the items whose number, modulo the number of the loader's workers, is this worker."""
single_node_only = _Split("single_node_only", _single)
"""Keeps all items on one rank; raises a `ConfigError` with advice on several ranks."""
non_empty = _Check("non_empty", _NO_DATA)
"""Keeps all items; raises `ConfigError` if there are none."""
check_empty = _Check("check_empty", _EMPTY)
"""The same for samples; its message says that there may be fewer shards than workers."""


class resampled(Stage):
    """A stage that draws ``n`` items, or endlessly, from a short list, at random with replacement."""

    def __init__(self, n: int = sys.maxsize) -> None:
        self.n = n

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        """Return a `Step` over the source, which is read to its end."""
        items = list(source)
        key = context.key("resampled", common=False)

        def draws(_: Step, had: int) -> Iterator[tuple[int, Any]]:
            while items and had < self.n:
                yield had + 1, items[mix(key, had) % len(items)]
                had += 1

        return _RereadStep(source, draws, own)


class _RereadStep(CountedStep):
    """A step that reads its whole source whenever it is opened."""

    def cursor(self) -> list[Any]:
        return [*([None] * (len(self._source.cursor()))), self._count]
