"""How ranks share the facts of counted shards.

    exchange = exchange_of(urls, world_size)   # by torch.distributed's store; None without a process group
    exchange.send(7, facts)                    # by the rank that has read shard 7
    exchange.wait(7)                           # by the others
    agree_on(urls, "counted", world_size)      # the value of the first rank

The store is that by which the ranks of the process group connected. It takes a few hundred bytes a shard and no
collective calls, so ranks may ask at any time. Without a process group, each rank reads by itself; ranks of one machine
share a cache.

All ranks must open the same shards equally often. The n-th opening of a rank receives only messages of the n-th
openings of others, since earlier ones may describe other content.
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
from penstock.shards.shard_file import Facts
from penstock.storage.planned_use import object_name
from penstock.storage.transfer import rank_note
from penstock.storage.urls import shown

__all__ = ["Exchange", "agree_on", "exchange_of"]

_TIMEOUT_S = 1800.0  # for another rank to read one shard
_WARN_AFTER_S = 60.0  # of waiting
_SHORTEST, _LONGEST = 0.001, 0.1  # seconds between polls

_opened: Counter[str] = Counter()
"""How often this process has opened shards, by their name among ranks."""


class Exchange:
    """Facts of shards, sent by one rank and read by all.

    Args:
        store: a torch.distributed store, used by this object only.
        urls: the shards of the dataset, the same on all ranks.
        world_size: number of ranks that share them.
    """

    def __init__(self, store: Any, urls: Sequence[str], world_size: int) -> None:
        self._store, self._urls = store, urls
        self._name = _next_name("shards", urls, world_size)

    def _key(self, number: int) -> str:
        return f"{self._name}/{object_name(self._urls[number]):x}"

    def send(self, number: int, facts: Facts) -> None:
        """Send the facts of a shard to the other ranks."""
        self._store.set(self._key(number), json.dumps(facts.to_json()))

    def wait(self, number: int) -> Facts:
        """Wait for the facts of a shard and return them.

        Raises:
            StorageUnavailableError: they were not sent for half an hour, or the store is gone.
        """
        name = f"{shown(self._urls[number])}{rank_note()}"
        facts = self.hear(number, _WARN_AFTER_S)
        if facts is None:
            warnings.warn(
                f"waiting for another rank to count {name}, for {_WARN_AFTER_S:g} s. Every rank must create this "
                "dataset and iterate over it, equally often; a rank that reads alone needs rank=0, world_size=1",
                stacklevel=2,
            )
            facts = self.hear(number, _TIMEOUT_S - _WARN_AFTER_S)
        if facts is None:
            raise StorageUnavailableError(
                f"no other rank has reported the sample count of {name} for {_TIMEOUT_S:g} s: the rank that reads it "
                "hangs or has ended"
            )
        return facts

    def hear(self, number: int, seconds: float) -> Facts | None:
        """Return the facts of a shard, or None if they do not arrive within ``seconds``. Raises as `wait` does."""
        key, deadline, pause = self._key(number), time.monotonic() + seconds, _SHORTEST
        try:
            # Polls, since a blocking wait would hold the store's connection, and other threads could not send.
            while not self._store.check([key]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST)
            return Facts.of_json(json.loads(self._store.get(key)))
        except RuntimeError as error:
            raise StorageUnavailableError(
                f"cannot receive the sample count of {shown(self._urls[number])}{rank_note()}: the store of "
                f"torch.distributed is gone ({error})"
            ) from error


def exchange_of(urls: Sequence[str], world_size: int) -> Exchange | None:
    """Return the exchange of the ranks that share shards; None without a process group."""
    store = _store()
    # Its own connection: threads wait on it, and must not block other users of the store.
    return None if store is None else Exchange(store.clone(), urls, world_size)


def agree_on(urls: Sequence[str], mine: str, world_size: int) -> str | None:
    """Return the value of the first rank that opened these shards, the same on all ranks; ``mine`` if it is this rank.

    Returns None without a process group, since the values of other ranks are unknown then.
    """
    store = _store()
    if store is None:
        return None
    first: bytes = store.compare_set(_next_name("openings", urls, world_size), "", mine)
    return first.decode()


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
