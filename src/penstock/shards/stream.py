"""`StreamShards`: read shards from start to end, also compressed ones, without an index.

dataset = StreamShards("train-{000..999}.tar.gz", decode=True, seed=0, buffer_bytes=256 << 20)
loader = DataLoader(dataset, batch_size=256, num_workers=8)

The shards are shuffled by epoch and split among ranks, then among workers. The number of samples per rank is unknown in
advance and may differ; `ShardDataset`, which uses indexes, has exact and equal numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import numpy as np
import torch.distributed as dist
import xxhash

from penstock import distributed
from penstock.errors import ConfigError, PartitionError, ShardError, StorageError, escaped
from penstock.hashing import derive_key, mix, sample_key
from penstock.order import ORDER_VERSION, make_order
from penstock.plan.cursor import State, check_state, read_int, read_ints
from penstock.plan.stream import ResumableDataset, Stream
from penstock.random import call_in_scope
from penstock.shards.archive import Archive
from penstock.shards.compressed import compression_of, open_stream
from penstock.shards.decode import chained
from penstock.shards.grouping import KEY, LOCAL_PATH, URL, Handler, Sample, group_from
from penstock.shards.runs import scan_runs
from penstock.shards.tar import Member, walk_stream
from penstock.shards.tar_shard import file_of
from penstock.storage import Storage, is_remote, open_source
from penstock.storage.files import SHARD, File
from penstock.storage.names import Urls, expand
from penstock.storage.urls import listed
from penstock.wording import counted

__all__ = ["StreamShards", "named_members", "read_shard"]


class StreamShards(ResumableDataset):
    """The samples of this rank's and this worker's shards.

    Args:
        urls: as for `ShardSet`; shards may be compressed (gzip, bzip2, xz, zstandard).
        shuffle: ``"shards"`` shuffles the shards each epoch, by (seed, epoch), and then splits them among ranks;
            ``"none"`` keeps their order.
        buffer_bytes: samples are shuffled within blocks of this many bytes; 0 keeps the order of the shard.
        decode, load: see `ShardDataset`.
        seed: the seed of the order.
        handler: decides about errors of shards: True or False skips the rest of the shard; for a repeated extension,
            True skips only the second file. Without it, errors raise.
        storage: access options, see `penstock.storage.Storage`.
        rank, world_size, process_group, mesh: see `penstock.RankDataset`.

    Raises:
        ConfigError, PartitionError: invalid arguments, or fewer shards than ranks.
        ShardError: (while iterating) a damaged or unreadable shard; the message names shard and byte.

    The state is the exact position of this worker, by shard and byte. It is small, and resuming reads no more than
    ``buffer_bytes`` again (for a compressed shard, also all data before the position in it). Every new iteration is a
    new epoch, unless `set_epoch` was called. Memory: the buffer, and the current sample.
    """

    def __init__(
        self,
        urls: Urls,
        *,
        shuffle: Literal["shards", "none"] = "shards",
        buffer_bytes: int = 0,
        decode: bool | Mapping[str, Callable[[bytes], Any] | None] | Callable[[Sample], Sample] | None = None,
        load: Callable[[Sample], Any] | None = None,
        seed: int = 0,
        handler: Handler | None = None,
        storage: Storage | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        mesh: dist.device_mesh.DeviceMesh | None = None,
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
        self._world = distributed.LateWorld(rank, world_size, process_group=process_group, mesh=mesh, of="dataset")

    def __repr__(self) -> str:
        """Return shards, order and share in words. This determines neither rank nor world size."""
        buffer = f", buffer_bytes {self.buffer_bytes:,}" if self.buffer_bytes else ""
        return (
            f"{type(self).__name__} of <{counted(len(self.urls), 'shard')}: {listed(self.urls)}>\n"
            f"  order: {self.shuffle}{buffer}, seed {self.seed}, epoch {self.epoch}\n"
            f"  share: {self._world}"
        )

    # State.

    def first_cursor(self, epoch: int) -> State:
        return {**self._identity(), "epoch": epoch, "worker": list(distributed.worker()), "at": [0, 0, 0]}

    def check_cursor(self, cursor: Mapping[str, Any]) -> None:
        of = type(self).__name__
        check_state(cursor, self._identity(), of=of)
        read_int(cursor, "epoch", of=of)
        if read_ints(cursor, "at", 3, of=of) != [0, 0, 0]:  # at the start, any worker may continue
            check_state(cursor, {"worker": list(distributed.worker())}, of=of)

    def _identity(self) -> State:
        world = self._world.get()
        names = "\n".join(os.path.basename(url) for url in self.urls)
        return {
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
                f"{count} shards cannot be split among {world.world_size} ranks as streams: use ShardDataset, which "
                "splits samples, or write more shards"
            )
        order = make_order("global" if self.shuffle == "shards" else "none", count, seed=self.seed, epoch=epoch)
        mine = order[np.arange(world.rank, count, world.world_size)].tolist()
        return list(mine[worker.id :: worker.total])

    def open_at(self, cursor: State) -> Stream:
        epoch = int(cursor["epoch"])
        urls = [self.urls[shard] for shard in self.shards_of(epoch)]
        part = _Part(urls, self.buffer_bytes, self.seed, epoch, self.handler, self._storage)
        # A cursor at the start may belong to another worker.
        return _ShardStream(part, self._load, {**cursor, "worker": list(distributed.worker())})


_At = tuple[int, int, int]
"""A position: shard in the worker's list, byte, and samples consumed from there on."""


class _Part(NamedTuple):
    """The input of a stream: a worker's shards of one epoch, in order."""

    urls: list[str]
    buffer_bytes: int
    seed: int
    epoch: int
    handler: Handler | None
    storage: Storage | None

    def read(self, shard: int, byte: int) -> Iterator[tuple[int, Sample]]:
        """Yield samples of a shard from a byte on, each with its first byte. The handler decides about errors."""
        try:
            yield from read_shard(self.urls[shard], start=byte, handler=self.handler, storage=self.storage)
        except Exception as error:
            # At exit, this generator may be closed after the module globals are gone.
            if self.handler is None or not isinstance(error, ShardError | StorageError):
                raise
            self.handler(error)


class _ShardStream(Stream):
    """The samples of a part's shards, in order.

    It does not refer to its dataset, which refers to it: with a cycle, files would stay open until garbage collection.
    """

    def __init__(self, part: _Part, load: Callable[[Sample], Any] | None, cursor: State) -> None:
        self._part, self._load, self._cursor = part, load, cursor
        self._at: _At = tuple(cursor["at"])
        self._failed = False
        self._items = _shuffled(part, self._at) if part.buffer_bytes else _in_order(part, self._at)

    def __next__(self) -> Any:
        try:
            self._at, sample = next(self._items)
        except StopIteration:
            if not self._failed:
                self._at = (len(self._part.urls), 0, 0)
            raise
        except Exception:
            self._failed = True  # the generator ends with the error, but the epoch does not
            raise
        return sample if self._load is None else self._loaded(self._load, sample)

    def _loaded(self, load: Callable[[Sample], Any], sample: Sample) -> Any:
        """Apply ``load`` to a sample, with the sample's own random generator."""
        text = f"{os.path.basename(sample[URL])}\n{sample[KEY]}".encode("utf-8", "surrogateescape")
        key = sample_key(self._part.seed, self._part.epoch, xxhash.xxh3_64_intdigest(text) >> 2)
        try:
            return call_in_scope(key, load, sample)
        except StopIteration as stop:
            raise escaped(stop) from stop

    def cursor(self) -> State:
        return {**self._cursor, "at": list(self._at)}


def _in_order(part: _Part, at: _At) -> Iterator[tuple[_At, Sample]]:
    """Yield samples in the order of their shards, from a position on, each with the position after it."""
    first, byte, skip = at
    for number in range(first, len(part.urls)):
        for header, sample in part.read(number, byte):
            if skip:
                skip -= 1
                continue
            yield (number, header, 1), sample
        byte = skip = 0


def _shuffled(part: _Part, at: _At) -> Iterator[tuple[_At, Sample]]:
    """Yield the same samples, shuffled within blocks of ``buffer_bytes``."""
    first, byte, skip = at
    for shard, header, block in _blocks(part, first, byte):
        order = make_order("global", len(block), seed=mix(mix(part.seed, shard), header), epoch=part.epoch)
        for had, index in enumerate(order[np.arange(len(block))].tolist()[skip:], skip + 1):
            yield (shard, header, had), block[index]
        skip = 0
        del block  # before the next one is read


def _blocks(part: _Part, first: int, byte: int) -> Iterator[tuple[int, int, list[Sample]]]:
    """Yield blocks of samples, each with the shard and byte where it begins."""
    block: list[Sample] = []
    size, begin = 0, (first, byte)
    for number in range(first, len(part.urls)):
        for header, sample in part.read(number, byte):
            if not block:
                begin = (number, header)
            block.append(sample)
            size += sum(len(value) for value in sample.values())
            if size >= part.buffer_bytes:
                yield (*begin, block)
                block, size = [], 0
        byte = 0
    if block:
        yield (*begin, block)


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
    """Yield the samples of one shard, in order, each with the first byte of its headers.

    Args:
        url: a tar file, compressed or not.
        start: the first header byte of the first sample (for a compressed shard, in its content).
        handler: decides about repeated extensions.
        storage: access options. A remote shard is read ahead by ranges, and not cached.
        path: a local file of the shard; samples name it in ``__local_path__``.
        select, rename: as for `named_members`.

    Raises:
        ShardError: as `penstock.shards.walk` and `group`; also for errors of decompression.
        ShardChangedError: the file was truncated or modified meanwhile. Earlier samples are of its old content.
        StorageError: the store fails.
    """
    if path is None and is_remote(url):
        remote = open_source(url, storage=storage)
        with open_stream(cast(BinaryIO, remote.stream())) as stream:
            yield from group_from(named_members(stream, url, select, rename), url, start=start, handler=handler)
        return
    name = file_of(url) if path is None else path
    file = File(name, SHARD)
    try:
        packed = compression_of(file.read_exact(min(6, file.size), 0)) is not None
        if packed or rename is not None:
            with open_stream(name) as stream:
                members = named_members(stream, url, select, rename)
                yield from group_from(members, url, start=start, local_path=path, handler=handler)
            return
        file.settle()
        archive = Archive(file)
        for run in scan_runs(archive, url, start=start, handler=handler, select=select):
            samples = zip(run.files.header[run.first[:-1]].tolist(), run.samples(archive, url), strict=True)
            if path is None:
                yield from samples
                continue
            for header, sample in samples:
                sample[LOCAL_PATH] = path
                yield header, sample
    finally:
        file.close()


def named_members(
    file: BinaryIO, url: str, select: Callable[[str], bool] | None, rename: Callable[[str], str] | None
) -> Iterator[tuple[Member, bytes]]:
    """Yield the members of an open file, which need not be seekable, with their data.

    Args:
        file: tar data.
        url: its name, for messages.
        select: returns whether to read the member of a name.
        rename: maps member names, before they are split and before ``select``.
    """
    if rename is None:
        yield from walk_stream(file, url, select=select)
        return
    wanted = None if select is None else lambda name: select(rename(name))
    for member, data in walk_stream(file, url, select=wanted):
        yield member._replace(name=rename(member.name)), data
