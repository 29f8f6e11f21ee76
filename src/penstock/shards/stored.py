"""`StoredShard`: what look-ahead has to know of a shard that lies in a store."""

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
        number: in the set.
        url: its address.
        size: in bytes.
        storage: how it is reached.
        stat: its version, where that is known.
        index: what has to be in the cache for ranges of it to be read; None if no ranges can be read.
    """

    number: int
    url: str
    size: int
    storage: Storage
    stat: Stat | None = None
    index: Sequence[RemoteSource] | None = None
