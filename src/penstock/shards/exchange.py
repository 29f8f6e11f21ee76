"""What ranks tell each other of shards that only one of them has read: `Exchange`, over the store of torch.distributed.

    exchange = exchange_of(urls, world_size)   # None where there is no process group
    exchange.tell(7, facts)                    # by the rank that has read shard 7
    exchange.wait([7, 8])                      # by the others
    agree_on(urls, "counted")                  # what the first rank said

The store is the one by which the ranks have found each other: a few hundred bytes a shard, and no collective call, so
ranks may ask at any time. Without a process group each rank finds out by itself: those of one machine share a cache.

Ranks open the same shards equally often. The n-th opening of one rank hears of the n-th ones of the others alone: what
was told of an earlier one may be of other content.
"""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
import xxhash

from penstock.errors import StorageUnavailableError
from penstock.shards.facts import Facts
from penstock.storage.transfer import rank_note
from penstock.storage.urls import shown

__all__ = ["Exchange", "agree_on", "exchange_of"]

_PATIENCE = 1800.0  # seconds that another rank may take for one shard
_WARN = 60.0  # seconds after which somebody who waits hears what for
_SHORTEST, _LONGEST = 0.001, 0.1  # seconds from one look to the next

_opened: Counter[str] = Counter()
"""How often this process has opened shards, by what ranks call them."""


class Exchange:
    """Facts of shards, told by one rank and read by all.

    Args:
        store: of torch.distributed, for this object alone.
        urls: the shards of the data set, which all ranks have alike.
        world_size: how many ranks share them.
    """

    def __init__(self, store: Any, urls: Sequence[str], world_size: int) -> None:
        self._store, self._urls = store, urls
        self._name = _next_name("shards", urls, world_size)

    def tell(self, number: int, facts: Facts) -> None:
        """Tell the other ranks of a shard."""
        self._store.set(f"{self._name}/{number}", json.dumps(facts.to_json()))

    def wait(self, numbers: Sequence[int]) -> list[Facts]:
        """Return what was told of shards, once it is.

        Raises:
            StorageUnavailableError: nothing was told of one of them for half an hour, or the store is gone.
        """
        return [self._wait(number) for number in numbers]

    def _wait(self, number: int) -> Facts:
        facts = self.hear(number, _WARN)
        if facts is None:
            warnings.warn(self._still_waiting(number), stacklevel=2)
            facts = self.hear(number, _PATIENCE - _WARN)
        if facts is None:
            raise StorageUnavailableError(
                f"no other rank has told how many samples {shown(self._urls[number])} has{rank_note()}, for "
                f"{_PATIENCE:g} s: the rank that reads it hangs or has ended"
            )
        return facts

    def hear(self, number: int, seconds: float) -> Facts | None:
        """Return what was told of a shard, None if nothing is within so many seconds. Raises as `wait` does."""
        key, deadline, pause = f"{self._name}/{number}", time.monotonic() + seconds, _SHORTEST
        try:
            # Whoever waits in the store keeps its connection to himself, and other threads could tell nothing.
            while not self._store.check([key]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST)
            return Facts.of_json(json.loads(self._store.get(key)))
        except RuntimeError as error:
            raise StorageUnavailableError(
                f"cannot learn how many samples {shown(self._urls[number])} has{rank_note()}: the store of "
                f"torch.distributed is gone ({error})"
            ) from error

    def _still_waiting(self, number: int) -> str:
        return (
            f"waiting for another rank to count {shown(self._urls[number])}{rank_note()}, for {_WARN:g} s so far. "
            "Every rank has to make this data set and to iterate over it, equally often; a rank that reads alone needs "
            "rank=0, world_size=1"
        )


def exchange_of(urls: Sequence[str], world_size: int) -> Exchange | None:
    """Return how the ranks that share shards tell each other of them; None for one rank, or without a process group."""
    store = _store() if world_size > 1 else None
    # Threads wait for it, and whoever else uses it must not wait for them.
    return None if store is None else Exchange(store.clone(), urls, world_size)


def agree_on(urls: Sequence[str], mine: str, world_size: int) -> str | None:
    """Return what the first rank that opened these shards says of them, for all ranks; ``mine`` if this one is that.

    Returns None without a process group: then nobody knows what other ranks say.
    """
    store = _store()
    if store is None:
        return None
    said: bytes = store.compare_set(_next_name("openings", urls, world_size), "", mine)
    return said.decode()


def _store() -> Any:
    """Return the store of the process group, if there are several ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return dist.distributed_c10d._get_default_store()


def _next_name(of: str, urls: Sequence[str], world_size: int) -> str:
    names = xxhash.xxh3_128_hexdigest("\n".join(urls).encode("utf-8", "surrogateescape"))
    name = f"penstock/{of}/{names}/{world_size}"
    _opened[name] += 1
    return f"{name}/{_opened[name]}"
