"""WebDataset's tar shards: reading, random access through an index, writing, packing.

Names that need torch are imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy
from penstock.shards.compressed import compression_of, open_stream
from penstock.shards.grouping import Sample, base_and_extension, group, split_name
from penstock.shards.shardset import ShardSet
from penstock.shards.tar import Member, walk, walk_stream
from penstock.shards.writer import ShardWriter, TarWriter
from penstock.storage.names import expand

if TYPE_CHECKING:
    from penstock.shards.decode import Decode
    from penstock.shards.stream import StreamShards, read_shard

__all__ = [
    "Decode",
    "Member",
    "Sample",
    "ShardSet",
    "ShardWriter",
    "StreamShards",
    "TarWriter",
    "base_and_extension",
    "compression_of",
    "expand",
    "group",
    "open_stream",
    "read_shard",
    "split_name",
    "walk",
    "walk_stream",
]

__getattr__, __dir__ = lazy.names(__name__, {"decode": ["Decode"], "stream": ["StreamShards", "read_shard"]})
