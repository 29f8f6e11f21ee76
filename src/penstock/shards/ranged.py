"""`RangedShard`: read only the requested samples of a shard in a store; and batches from several such shards.

One request reads neighbours, and several requests run at a time. The bytes are parsed as a tar archive and compared
with the index: an index of another shard is an error, never a wrong sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO, cast

from penstock.errors import ShardError
from penstock.shards.grouping import KEY, URL, Sample, group
from penstock.shards.index import ShardIndex
from penstock.shards.tar import walk, walk_stream
from penstock.storage import RemoteSource
from penstock.storage.ranges import Range, read_ranges
from penstock.storage.urls import shown

if TYPE_CHECKING:
    from penstock.shards.handles import OpenShard

__all__ = ["RangedShard", "read_samples"]


class RangedShard:
    """A shard that is read by ranges. Thread-safe."""

    file = None

    def __init__(self, url: str, source: RemoteSource, index: ShardIndex) -> None:
        self.url, self.source, self.index = url, source, index

    def check(self) -> None:
        """Do nothing: each answer of the store is compared with the opened version."""

    def sample(self, number: int) -> Sample:
        """Return one sample, by one request. Raises as `read_samples`."""
        return next(read_samples([(self, number)]))

    def raw(self, number: int) -> bytes:
        """Return one sample as stored in the archive, with its headers and padding."""
        begin, end = self.index.span(number)
        return self.source.read_at(begin, end - begin)

    def __iter__(self) -> Iterator[Sample]:
        """Yield all samples in order, from a stream with read-ahead."""
        number = -1
        with self.source.stream() as file:
            for number, sample in enumerate(group(walk_stream(cast(BinaryIO, file), self.url), self.url)):
                if number < len(self.index):
                    self.compare(number, sample)
                yield sample
        if number + 1 != len(self.index):
            raise self.differs(number + 1)

    def parse(self, number: int, data: bytes) -> Sample:
        """Return a sample, given its bytes in the archive. Raises ShardError if it does not match the index."""
        members = ((m, data[m.offset : m.offset + m.size]) for m in walk(data, self.url, require_end=False))
        try:
            (sample,) = group(members, self.url)
            self.compare(number, sample)
        except ValueError as error:
            raise self.differs(number) from error
        return sample

    def compare(self, number: int, sample: Sample) -> None:
        """Raise ShardError unless a sample matches the index."""
        index, sizes = self.index, {}
        for file in range(index.first[number], index.first[number + 1]):
            sizes[index.extensions[index.extension[file]]] = index.size[file]
        found = {name: len(data) for name, data in sample.items() if name not in (KEY, URL)}
        if sample[KEY] != index.key(number) or found != sizes:
            raise self.differs(number)

    def differs(self, number: int) -> ShardError:
        """Return the error about an index of another shard."""
        return ShardError(
            f"{shown(self.url)}: sample {number} is not what the index beside the shard says, which is of another "
            "version of it: make the index again (penstock shards index), and upload both"
        )


def read_samples(wanted: Sequence[tuple[OpenShard | RangedShard, int]]) -> Iterator[Sample]:
    """Yield samples of shards, in the given order.

    Raises:
        ShardError: a shard does not match its index.
        StorageChangedError, StorageError: see `penstock.storage.RemoteSource`.

    Memory: up to 16 requests of at most `Storage.block` bytes, or one sample.
    """
    ranged = [(shard, number) for shard, number in wanted if isinstance(shard, RangedShard)]
    ranges = [Range(shard.source, *shard.index.span(number)) for shard, number in ranged]
    data = read_ranges(ranges)
    for shard, number in wanted:
        yield shard.parse(number, next(data)) if isinstance(shard, RangedShard) else shard.sample(number)
