"""What ranks tell each other of shards that only one of them has read: `Exchange`, over the store of torch.distributed.

    exchange = exchange_of(urls)               # None where there is no process group
    exchange.tell(7, facts)                    # by the rank that has read shard 7
    exchange.wait([7, 8])                      # by the others

The store is the one by which the ranks have found each other: a few hundred bytes a shard, and no collective call, so
ranks may ask at any time. Without a process group each rank finds out by itself: those of one machine share a cache.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import xxhash

from penstock.errors import StorageUnavailableError
from penstock.shards.facts import Facts
from penstock.storage.transfer import rank_note
from penstock.storage.urls import shown

__all__ = ["Exchange", "exchange_of"]

_PATIENCE = 1800.0  # seconds that another rank may take for one shard
_TURN = timedelta(seconds=2)  # after which Ctrl-C is looked at


class Exchange:
    """Facts of shards, told by one rank and read by all.

    Args:
        store: of torch.distributed, for this object alone.
        urls: the shards of the data set, which all ranks have alike.
    """

    def __init__(self, store: Any, urls: Sequence[str]) -> None:
        self._store, self._urls = store, urls
        names = "\n".join(urls).encode("utf-8", "surrogateescape")
        self._name = f"penstock/shards/{xxhash.xxh3_128_hexdigest(names)}"

    def tell(self, number: int, facts: Facts) -> None:
        """Tell the other ranks of a shard."""
        self._store.set(f"{self._name}/{number}", json.dumps(facts.to_json()))

    def wait(self, numbers: Sequence[int]) -> list[Facts]:
        """Return what was told of shards, once it is.

        Raises:
            StorageUnavailableError: nothing was told of one of them for half an hour, or the store is gone.
        """
        return [Facts.of_json(json.loads(self._get(number))) for number in numbers]

    def _get(self, number: int) -> bytes:
        key, deadline = f"{self._name}/{number}", time.monotonic() + _PATIENCE
        while True:
            try:
                self._store.wait([key], _TURN)
                told: bytes = self._store.get(key)
                return told
            except dist.DistStoreError as error:
                if time.monotonic() > deadline:
                    raise StorageUnavailableError(
                        f"no other rank has told how many samples {shown(self._urls[number])} has{rank_note()}, for "
                        f"{_PATIENCE:g} s: the rank that reads it hangs or has ended"
                    ) from error
            except RuntimeError as error:
                raise StorageUnavailableError(
                    f"cannot learn how many samples {shown(self._urls[number])} has{rank_note()}: the store of "
                    f"torch.distributed is gone ({error})"
                ) from error


def exchange_of(urls: Sequence[str]) -> Exchange | None:
    """Return how the ranks of this job tell each other of shards; None where there is one rank, or no process group."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    # Threads wait for it, and whoever else uses it must not wait for them.
    return Exchange(store.clone(), urls)
