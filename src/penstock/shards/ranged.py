"""`RangedShard`: read only the requested samples of a shard in a store; and batches from several such shards.

One request reads neighbours, and several requests run at a time. The bytes are parsed as a tar archive and compared
with the index: an index of another shard is an error, never a wrong sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple, Protocol, TypeGuard, cast

from penstock.errors import ShardError
from penstock.shards.grouping import KEY, URL, Sample, group
from penstock.shards.index import ShardIndex
from penstock.shards.tar import walk, walk_stream
from penstock.storage import RemoteSource
from penstock.storage.backend import Cancel
from penstock.storage.parallel_requests import ObjectsAhead
from penstock.storage.urls import shown

__all__ = ["RangedShard", "SampleSource", "read_samples"]


class SampleSource(Protocol):
    """An open shard of any kind."""

    url: str
    index: ShardIndex

    def check(self) -> None:
        """Raise ShardChangedError if it has changed."""

    def sample(self, number: int) -> Sample:
        """Return one sample, with its data as bytes."""


class RangedShard:
    """A shard that is read by ranges. Thread-safe."""

    is_removed = False

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


class _Run(NamedTuple):
    """The consecutive samples ``[first, stop)`` of a shard, as bytes."""

    shard: RangedShard
    first: int
    stop: int
    begin: int
    end: int

    def read(self, cancel: Cancel) -> bytes:
        source, size = self.shard.source, self.end - self.begin
        if size > source.storage.block or not source.stat.ranged:
            return source.read_at(self.begin, size)
        return bytes(source.fetch(self.begin, self.end, cancel))

    def samples(self, data: bytes) -> Iterator[Sample]:
        shard, number = self.shard, self.first
        members = ((m, data[m.offset : m.offset + m.size]) for m in walk(data, shard.url, require_end=False))
        try:
            for sample in group(members, shard.url):
                if number < self.stop:
                    shard.compare(number, sample)
                    yield sample
                number += 1
        except ShardError as error:
            raise shard.differs(number) from error
        if number != self.stop:
            raise shard.differs(number)


def read_samples(wanted: Sequence[tuple[SampleSource, int]]) -> Iterator[Sample]:
    """Yield samples of shards, in the given order.

    Raises:
        ShardError: a shard does not match its index.
        StorageChangedError, StorageError: see `penstock.storage.RemoteSource`.

    Memory: up to 16 requests of at most `Storage.block` bytes, or one sample.
    """
    runs = list(_runs(wanted))
    ranged = [run for run in runs if isinstance(run, _Run)]
    deadline = max((run.shard.source.storage.deadline for run in ranged), default=0.0)
    with ObjectsAhead(ranged, _Run.read, deadline=deadline) as ahead:
        for run in runs:
            if isinstance(run, _Run):
                yield from run.samples(ahead.next())
            else:
                shard, number = run
                yield shard.sample(number)


def _runs(wanted: Sequence[tuple[SampleSource, int]]) -> Iterator[_Run | tuple[SampleSource, int]]:
    run: _Run | None = None
    for item in wanted:
        shard, number = item
        begin, end = shard.index.span(number)
        if run is not None:
            near = run.shard is shard and run.stop == number and end - run.begin <= run.shard.source.storage.block
            if near:
                run = run._replace(stop=number + 1, end=end)
                continue
            yield run
            run = None
        if _is_ranged(shard):
            run = _Run(shard, number, number + 1, begin, end)
        else:
            yield item
    if run is not None:
        yield run


def _is_ranged(shard: SampleSource) -> TypeGuard[RangedShard]:
    return isinstance(shard, RangedShard)
