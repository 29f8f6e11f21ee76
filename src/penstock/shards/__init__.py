"""Tar shards, as WebDataset has them: reading, random access through an index, writing, packing."""

from penstock.shards.compressed import compression_of, open_stream
from penstock.shards.grouping import Sample, base_and_extension, group, split_name
from penstock.shards.tar import Member, walk, walk_stream
from penstock.shards.urls import expand

__all__ = [
    "Member",
    "Sample",
    "base_and_extension",
    "compression_of",
    "expand",
    "group",
    "open_stream",
    "split_name",
    "walk",
    "walk_stream",
]
