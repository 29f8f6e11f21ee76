"""`StoredShard`: the facts about a shard in a store that prefetching needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.storage import RemoteSource, Storage
from penstock.storage.backend import Stat

__all__ = ["StoredShard"]


@dataclass(frozen=True)
class StoredShard:
    """A shard in a store that is copied when its data is needed.

    Attributes:
        number: its number in the set.
        url: its URL.
        size: its size in bytes.
        storage: access options.
        stat: its version, if known.
        index: the object that must be cached before ranges can be read; None if ranges cannot be read.
    """

    number: int
    url: str
    size: int
    storage: Storage
    stat: Stat | None = None
    index: Sequence[RemoteSource] | None = None
