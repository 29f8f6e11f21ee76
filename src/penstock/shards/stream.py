"""`StreamShards`: shards read from front to back, compressed ones too, without an index.

dataset = StreamShards("train-{000..999}.tar.gz", decode=True, seed=0, buffer_bytes=256 << 20)
loader = DataLoader(dataset, batch_size=256, num_workers=8)

The shards are put into the epoch's order and dealt to ranks, then to workers. How many samples a rank gets is not known
beforehand and need not be equal; `ShardDataset`, which has an index, knows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, cast

import numpy as np
import torch.distributed as dist
import xxhash
from torch.utils.data import IterableDataset

from penstock import distributed
from penstock.datasets.clock import Clock
from penstock.errors import ConfigError, PartitionError, ShardError, StorageError
from penstock.order import ORDER_VERSION, make_order
from penstock.order.hashing import derive_key, mix
from penstock.plan.cursor import STATE_VERSION, State, check_state, read_int, read_ints
from penstock.random import sample_key, sample_scope
from penstock.shards.archive import Archive
from penstock.shards.compressed import compression_of, open_stream
from penstock.shards.decode import chained
from penstock.shards.files import ShardFile, file_of
from penstock.shards.grouping import KEY, URL, Handler, Sample, group
from penstock.shards.runs import scan_runs
from penstock.shards.tar import walk_stream
from penstock.shards.urls import Urls, expand, local_path
from penstock.storage import Storage, is_remote, open_source

__all__ = ["StreamShards", "read_shard"]


class StreamShards(IterableDataset[Any]):
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
        self._clock = Clock()
        self._told = -1  # how often the clock had been set when this object's epoch began
        self._epoch = -1
        self._at = (0, 0, 0)  # shard in this worker's list, byte where a stretch begins, samples had of that
        self._resuming = False

    # Epochs and state.

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or was last; before that the one that comes."""
        return self._epoch if self._resuming else self._clock.now()

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration. That of a state just loaded keeps its position.

        Raises:
            ConfigError: a negative epoch.
        """
        if epoch < 0:
            raise ConfigError(f"epoch must be 0 or more, got {epoch}")
        if self._resuming and epoch == self._epoch:
            return
        self._resuming = False
        self._clock.set(epoch)

    def state_dict(self) -> State:
        """Where this object is in its own iteration."""
        worker = distributed.worker()
        epoch, told = self._clock.peek()
        if self._epoch >= 0 and told == self._told:
            epoch = self._epoch
        return {**self._identity(), "epoch": epoch, "worker": [worker.id, worker.total], "at": list(self._at)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there at the next iteration.

        Raises:
            StateError: the state is of other shards, another order, rank or worker.
        """
        worker = distributed.worker()
        check_state(state, {"version": STATE_VERSION}, of="data set")
        expected, at = self._identity(), read_ints(state, "at", 3, of="data set")
        if at != [0, 0, 0]:  # where nothing has begun, anybody may go on
            expected["worker"] = [worker.id, worker.total]
        check_state(state, expected, of="data set")
        self._epoch = read_int(state, "epoch", of="data set")
        self._at = (at[0], at[1], at[2])
        self._told = self._clock.peek()[1]
        self._resuming = True

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

    def __iter__(self) -> Iterator[Any]:
        if self._resuming:
            self._clock.resumed(self._epoch)
        else:
            self._epoch, self._told = self._clock.next()
            self._at = (0, 0, 0)
        self._resuming = False
        samples = self._stretches() if self.buffer_bytes else self._plain()
        return samples if self._load is None else self._loaded(samples, self._load)

    def _plain(self) -> Iterator[Sample]:
        first, byte, skip = self._at
        for number, shard in list(enumerate(self.shards_of(self._epoch)))[first:]:
            for header, sample in self._read(shard, byte):
                if skip:
                    skip -= 1
                    continue
                self._at = (number, header, 1)
                yield sample
            byte = skip = 0
        self._at = (len(self.urls), 0, 0)

    def _stretches(self) -> Iterator[Sample]:
        first, byte, skip = self._at
        stretch: list[Sample] = []
        size = 0
        begin = (first, byte)
        for number, shard in list(enumerate(self.shards_of(self._epoch)))[first:]:
            for header, sample in self._read(shard, byte):
                if not stretch:
                    begin = (number, header)
                stretch.append(sample)
                size += sum(len(value) for value in sample.values())
                if size >= self.buffer_bytes:
                    yield from self._shuffled(stretch, begin, skip)
                    stretch, size, skip = [], 0, 0
            byte = 0
        yield from self._shuffled(stretch, begin, skip)
        self._at = (len(self.urls), 0, 0)

    def _shuffled(self, stretch: list[Sample], begin: tuple[int, int], skip: int) -> Iterator[Sample]:
        order = make_order("global", len(stretch), seed=mix(mix(self.seed, begin[0]), begin[1]), epoch=self._epoch)
        for had, index in enumerate(order[np.arange(len(stretch))].tolist()):
            if had >= skip:
                self._at = (*begin, had + 1)
                yield stretch[index]

    def _loaded(self, samples: Iterator[Sample], load: Callable[[Sample], Any]) -> Iterator[Any]:
        for sample in samples:
            text = f"{os.path.basename(sample[URL])}\n{sample[KEY]}".encode("utf-8", "surrogateescape")
            with sample_scope(sample_key(self.seed, self._epoch, xxhash.xxh3_64_intdigest(text) >> 2)):
                item = load(sample)
            yield item

    def _read(self, shard: int, byte: int) -> Iterator[tuple[int, Sample]]:
        try:
            yield from read_shard(self.urls[shard], start=byte, handler=self.handler, storage=self._storage)
        except (ShardError, StorageError) as error:
            if self.handler is None:
                raise
            self.handler(error)


def read_shard(
    url: str, *, start: int = 0, handler: Handler | None = None, storage: Storage | None = None
) -> Iterator[tuple[int, Sample]]:
    """The samples of one shard, in order, each with the first byte of its headers.

    Args:
        url: a tar file, compressed or not.
        start: begin with the sample whose headers begin here (of a compressed shard, in its content).
        handler: asked about extensions that come twice.
        storage: how a store is reached. A remote shard is read ahead in ranges, and not kept.

    Raises:
        ShardError: as `penstock.shards.walk` and `group`; also what decompression complains of.
        ShardChangedError: the file was truncated or written to meanwhile. Samples before that are of its old content.
        StorageError: the store says no.
    """
    if local_path(url) is None and is_remote(url):
        remote = open_source(url, storage=storage)
        with open_stream(cast(BinaryIO, remote.stream())) as stream:
            yield from _read_stream(stream, url, start, handler)
        return
    path = file_of(url)
    file = ShardFile(path)
    try:
        if compression_of(file.read(min(6, file.size), 0)) is not None:
            with open_stream(path) as stream:
                yield from _read_stream(stream, url, start, handler)
            return
        file.settle()
        archive = Archive(file)
        for run in scan_runs(archive, url, start=start, handler=handler):
            yield from zip(run.files.header[run.first[:-1]].tolist(), run.samples(archive, url), strict=True)
    finally:
        file.close()


def _read_stream(file: BinaryIO, url: str, start: int, handler: Handler | None) -> Iterator[tuple[int, Sample]]:
    members = ((m, (m.header, data)) for m, data in walk_stream(file, url) if m.header >= start)
    for sample in group(members, url, handler=handler):
        header = None
        for name, value in sample.items():
            if isinstance(value, tuple):
                header = value[0] if header is None else header
                sample[name] = value[1]
        yield header or 0, sample
