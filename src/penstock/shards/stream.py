"""`StreamShards`: shards read from front to back, compressed ones too, without an index.

dataset = StreamShards("train-{000..999}.tar.gz", decode=True, seed=0, buffer_bytes=256 << 20)
loader = DataLoader(dataset, batch_size=256, num_workers=8)

The shards are put into the epoch's order and dealt to ranks, then to workers. How many samples a rank gets is not known
beforehand and need not be equal; `ShardDataset`, which has an index, knows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import torch.distributed as dist
import xxhash

from penstock import distributed
from penstock.errors import ConfigError, PartitionError, ShardError, StorageError
from penstock.hashing import derive_key, mix
from penstock.order import ORDER_VERSION, make_order
from penstock.plan.cursor import STATE_VERSION, State, check_state, read_int, read_ints
from penstock.plan.stream import ResumableDataset, Stream
from penstock.random import call_in_scope, sample_key
from penstock.shards.archive import Archive
from penstock.shards.compressed import compression_of, open_stream
from penstock.shards.decode import chained
from penstock.shards.files import ShardFile, file_of
from penstock.shards.grouping import KEY, LOCAL_PATH, URL, Handler, Sample, group
from penstock.shards.members import Member
from penstock.shards.runs import scan_runs
from penstock.shards.tar import walk_stream
from penstock.shards.urls import Urls, expand, local_path
from penstock.storage import Storage, is_remote, open_source
from penstock.storage.urls import listed
from penstock.wording import counted

__all__ = ["StreamShards", "named_members", "read_shard", "read_stream"]


class StreamShards(ResumableDataset):
    """The samples of this rank's and this worker's shards.

    Args:
        urls: as for `ShardSet`; shards may be compressed (gzip, bzip2, xz, zstandard).
        shuffle: ``"shards"`` puts the shards into another order each epoch, from (seed, epoch), and deals them to ranks
            after that; ``"none"`` keeps theirs.
        buffer_bytes: samples are shuffled within stretches of so many bytes; 0 keeps the order of the shard.
        decode, load: see `ShardDataset`.
        seed: of the order.
        handler: asked about errors of shards: True or False leaves the rest of the shard out, and of an extension that
            comes twice, True leaves out the second one. Without it errors raise.
        storage: how a store is reached, see `penstock.storage.Storage`.
        rank, world_size, process_group: see `penstock.RankDataset`.

    Raises:
        ConfigError, PartitionError: arguments that make no sense, fewer shards than ranks.
        ShardError: (while iterating) a shard that is damaged or cannot be read, by name and byte.

    The state says where this worker is, by shard and byte, and is exact. It is small, and resuming reads no more than
    ``buffer_bytes`` again (of a compressed shard, what comes before in it). Every new iteration is a new epoch, unless
    `set_epoch` was called. Memory: the buffer, and the sample in hand.
    """

    def __init__(
        self,
        urls: Urls,
        *,
        shuffle: str = "shards",
        buffer_bytes: int = 0,
        decode: bool | Mapping[str, Callable[[bytes], Any] | None] | Callable[[Sample], Sample] | None = None,
        load: Callable[[Sample], Any] | None = None,
        seed: int = 0,
        handler: Handler | None = None,
        storage: Storage | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if shuffle not in ("shards", "none"):
            raise ConfigError(f"unknown shuffle {shuffle!r}: use 'shards' or 'none'")
        if buffer_bytes < 0:
            raise ConfigError(f"buffer_bytes must be 0 or more, got {buffer_bytes}")
        derive_key(seed)
        self.urls = expand(urls, storage)
        self.shuffle, self.buffer_bytes, self.seed, self.handler = shuffle, buffer_bytes, seed, handler
        self._load = chained(decode, load)
        self._storage = storage
        self._world = distributed.LateWorld(rank, world_size, process_group=process_group, of="data set")

    def __repr__(self) -> str:
        """Return shards, order and share in words. Asking settles neither rank nor world size."""
        world = self._world.peek()
        buffer = f", buffer_bytes {self.buffer_bytes:,}" if self.buffer_bytes else ""
        return (
            f"{type(self).__name__} of <{counted(len(self.urls), 'shard')}: {listed(self.urls)}>\n"
            f"  order: {self.shuffle}{buffer}, seed {self.seed}, epoch {self.epoch}\n"
            f"  share: rank {world.rank} of {world.world_size}"
        )

    # State.

    def first_cursor(self, epoch: int) -> State:
        return {**self._identity(), "epoch": epoch, "worker": list(distributed.worker()), "at": [0, 0, 0]}

    def check_cursor(self, cursor: Mapping[str, Any]) -> None:
        of = type(self).__name__
        check_state(cursor, self._identity(), of=of)
        read_int(cursor, "epoch", of=of)
        if read_ints(cursor, "at", 3, of=of) != [0, 0, 0]:  # where nothing has begun, anybody may go on
            check_state(cursor, {"worker": list(distributed.worker())}, of=of)

    def _identity(self) -> State:
        world = self._world.get()
        names = "\n".join(os.path.basename(url) for url in self.urls)
        return {
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "shards": xxhash.xxh3_128_hexdigest(names.encode("utf-8", "surrogateescape")),
            "shuffle": self.shuffle,
            "buffer_bytes": self.buffer_bytes,
            "seed": self.seed,
            "rank": world.rank,
            "world_size": world.world_size,
        }

    # Iterating.

    def shards_of(self, epoch: int) -> list[int]:
        """The shards that this worker reads in an epoch, by their numbers in ``urls``, in order.

        Raises:
            PartitionError: fewer shards than ranks.
        """
        world, worker, count = self._world.get(), distributed.worker(), len(self.urls)
        if count < world.world_size:
            raise PartitionError(
                f"{count} shards cannot be dealt to {world.world_size} ranks as streams: use ShardDataset, which "
                "splits below shards, or make more shards (penstock shards split)"
            )
        order = make_order("global" if self.shuffle == "shards" else "none", count, seed=self.seed, epoch=epoch)
        mine = order[np.arange(world.rank, count, world.world_size)].tolist()
        return list(mine[worker.id :: worker.total])

    def open_at(self, cursor: State) -> Stream:
        epoch = int(cursor["epoch"])
        urls = [self.urls[shard] for shard in self.shards_of(epoch)]
        part = _Part(urls, self.buffer_bytes, self.seed, epoch, self.handler, self._storage)
        # Where nothing has begun the cursor may be of another worker.
        stream = _ShardStream(part, {**cursor, "worker": list(distributed.worker())})
        return stream if self._load is None else _Loaded(stream, self._load)


_At = tuple[int, int, int]
"""A place: shard in a worker's list, byte, samples had from there on."""


class _Part(NamedTuple):
    """What a stream reads: a worker's shards of one epoch, in order."""

    urls: list[str]
    buffer_bytes: int
    seed: int
    epoch: int
    handler: Handler | None
    storage: Storage | None

    def read(self, shard: int, byte: int) -> Iterator[tuple[int, Sample]]:
        """Yield samples of a shard from a byte on, each with the byte where it begins. Errors go to the handler."""
        try:
            yield from read_shard(self.urls[shard], start=byte, handler=self.handler, storage=self.storage)
        except Exception as error:
            # At the end of the program such a generator is closed when the names of this module are gone already.
            if self.handler is None or not isinstance(error, ShardError | StorageError):
                raise
            self.handler(error)


class _ShardStream(Stream):
    """The shards of a part, one after the other.

    It does not hold its data set, which remembers it: files would stay open until the next garbage collection.
    """

    def __init__(self, part: _Part, cursor: State) -> None:
        self.part, self._cursor = part, cursor
        self._at: _At = tuple(cursor["at"])
        self._failed = False
        self._items = (_stretches if part.buffer_bytes else _in_order)(part, self._at)

    def __next__(self) -> Sample:
        try:
            self._at, sample = next(self._items)
        except StopIteration:
            if not self._failed:
                self._at = (len(self.part.urls), 0, 0)
            raise
        except Exception:
            self._failed = True  # the generator ends with it, and the epoch does not
            raise
        return sample

    def cursor(self) -> State:
        return {**self._cursor, "at": list(self._at)}


def _in_order(part: _Part, at: _At) -> Iterator[tuple[_At, Sample]]:
    """Yield the samples in the order of their shards, from a place on, each with the place behind it."""
    first, byte, skip = at
    for number in range(first, len(part.urls)):
        for header, sample in part.read(number, byte):
            if skip:
                skip -= 1
                continue
            yield (number, header, 1), sample
        byte = skip = 0


def _stretches(part: _Part, at: _At) -> Iterator[tuple[_At, Sample]]:
    """Yield the same, shuffled within stretches of so many bytes."""
    first, byte, skip = at
    stretch: list[Sample] = []
    size = 0
    begin = (first, byte)
    for number in range(first, len(part.urls)):
        for header, sample in part.read(number, byte):
            if not stretch:
                begin = (number, header)
            stretch.append(sample)
            size += sum(len(value) for value in sample.values())
            if size >= part.buffer_bytes:
                yield from _shuffled(stretch, part, begin, skip)
                stretch, size, skip = [], 0, 0
        byte = 0
    yield from _shuffled(stretch, part, begin, skip)


def _shuffled(stretch: list[Sample], part: _Part, begin: tuple[int, int], skip: int) -> Iterator[tuple[_At, Sample]]:
    order = make_order("global", len(stretch), seed=mix(mix(part.seed, begin[0]), begin[1]), epoch=part.epoch)
    for had, index in enumerate(order[np.arange(len(stretch))].tolist()):
        if had >= skip:
            yield (*begin, had + 1), stretch[index]


class _Loaded(Stream):
    """What ``load`` makes of samples, each under a generator of its own."""

    def __init__(self, samples: _ShardStream, load: Callable[[Sample], Any]) -> None:
        self._samples, self._load = samples, load

    def __next__(self) -> Any:
        sample = next(self._samples)
        text = f"{os.path.basename(sample[URL])}\n{sample[KEY]}".encode("utf-8", "surrogateescape")
        key = sample_key(self._samples.part.seed, self._samples.part.epoch, xxhash.xxh3_64_intdigest(text) >> 2)
        return call_in_scope(key, self._load, sample)

    def cursor(self) -> State:
        return self._samples.cursor()


def read_shard(
    url: str,
    *,
    start: int = 0,
    handler: Handler | None = None,
    storage: Storage | None = None,
    path: str | None = None,
    select: Callable[[str], bool] | None = None,
    rename: Callable[[str], str] | None = None,
) -> Iterator[tuple[int, Sample]]:
    """The samples of one shard, in order, each with the first byte of its headers.

    Args:
        url: a tar file, compressed or not.
        start: begin with the sample whose headers begin here (of a compressed shard, in its content).
        handler: asked about extensions that come twice.
        storage: how a store is reached. A remote shard is read ahead in ranges, and not kept.
        path: a local file with the shard; samples name it in ``__local_path__``.
        select, rename: as for `read_stream`.

    Raises:
        ShardError: as `penstock.shards.walk` and `group`; also what decompression complains of.
        ShardChangedError: the file was truncated or written to meanwhile. Samples before that are of its old content.
        StorageError: the store says no.
    """
    if path is None and local_path(url) is None and is_remote(url):
        remote = open_source(url, storage=storage)
        with open_stream(cast(BinaryIO, remote.stream())) as stream:
            yield from read_stream(stream, url, start=start, handler=handler, select=select, rename=rename)
        return
    name = file_of(url) if path is None else path
    file = ShardFile(name)
    try:
        packed = compression_of(file.read(min(6, file.size), 0)) is not None
        if packed or select is not None or rename is not None:
            with open_stream(name) as stream:
                yield from read_stream(
                    stream, url, start=start, handler=handler, path=path, select=select, rename=rename
                )
            return
        file.settle()
        archive = Archive(file)
        for run in scan_runs(archive, url, start=start, handler=handler):
            samples = zip(run.files.header[run.first[:-1]].tolist(), run.samples(archive, url), strict=True)
            if path is None:
                yield from samples
                continue
            for header, sample in samples:
                sample[LOCAL_PATH] = path
                yield header, sample
    finally:
        file.close()


def read_stream(
    file: BinaryIO,
    url: str,
    *,
    start: int = 0,
    handler: Handler | None = None,
    path: str | None = None,
    select: Callable[[str], bool] | None = None,
    rename: Callable[[str], str] | None = None,
) -> Iterator[tuple[int, Sample]]:
    """The same of an open file that need not be able to seek.

    Args:
        file: of tar data.
        url, start, handler, path: as for `read_shard`.
        select: members whose name it refuses are left out.
        rename: names before they are taken apart, and before ``select``.
    """
    members = named_members(file, url, select, rename)
    found = ((member, (member.header, data)) for member, data in members if member.header >= start)
    for sample in group(found, url, local_path=path, handler=handler):
        header = None
        for name, value in sample.items():
            if isinstance(value, tuple):
                header = value[0] if header is None else header
                sample[name] = value[1]
        yield header or 0, sample


def named_members(
    file: BinaryIO, url: str, select: Callable[[str], bool] | None, rename: Callable[[str], str] | None
) -> Iterator[tuple[Member, bytes]]:
    """The members of an open file with their data, under their new names."""
    if rename is None:
        yield from walk_stream(file, url, select=select)
        return
    wanted = None if select is None else lambda name: select(rename(name))
    for member, data in walk_stream(file, url, select=wanted):
        yield member._replace(name=rename(member.name)), data
