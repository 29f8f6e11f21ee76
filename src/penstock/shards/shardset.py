"""`ShardSet`: the samples of tar shards as one sequence with random access.

    shards = ShardSet("train-{000..999}.tar")
    len(shards), shards[7]              # {"__key__": "000007", "__url__": "train-000.tar", "jpg": b"...", "cls": b"3"}
    shards.records([5, 3, 5])           # a batch of samples, in this order

Promises: opening and reading use no memory per sample; a changed shard is detected before the next read; a pickle is a
handle: unpickled, it opens the same shards, and refuses others.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Self, SupportsIndex

import numpy as np
import xxhash

from penstock.images.sample_record import SampleRecord
from penstock.images.warn_once import WarnOnce
from penstock.manifest.indices import Indices, to_rows
from penstock.shards.exchange import Facts
from penstock.shards.find_handles import open_handles
from penstock.shards.grouping import Sample
from penstock.shards.handles import Handle, OpenShard, StoreShard
from penstock.shards.index import ShardIndex
from penstock.shards.opened import OpenShards
from penstock.shards.ranged import RangedShard
from penstock.shards.stored import StoredShard
from penstock.storage import Storage
from penstock.storage.names import Urls, expand_versions
from penstock.storage.urls import listed
from penstock.wording import counted

__all__ = ["ShardSet"]


_AT_ONCE, _SMALL = (
    32,
    32 << 10,
)  # while iterating: samples of at most 32 KiB that are read between two checks of the file


class ShardSet:
    """The samples of shards, concatenated.

    Args:
        urls: brace notation, patterns, ``::``, or a list of those, see `penstock.shards.expand`: uncompressed tar
            files. Shards in a store with an index beside them (``.pidx``, written by `penstock shards pack` and
            `index`) are opened without their data; others are copied and indexed immediately.
        copy: copy whole shards from a store to the local cache when they are first needed. False: read only the
            requested samples, by concurrent range requests, again at each read; every shard needs an index beside it.
        storage: access options and the cache, see `penstock.storage.Storage`.
        cache_dir: folder for indexes. Default: beside the shards, or the user's cache if that is read-only or full.
        progress: show a bar while indexing: True, False, or None for large shards on a terminal.

    Raises:
        ShardIOError: missing, no permission, disk full.
        TruncatedShardError, ShardError: a damaged or compressed shard; the message names shard and byte.
        StorageError: a store fails; StorageNotFoundError: a shard is missing, or has no index and ``copy=False``.
        ConfigError: no shards, or braces that are not balanced.

    The first opening of a shard indexes it in one pass, about a second per GB; one process does it while others wait.
    Later openings take some ten microseconds a shard. Samples are dictionaries as in WebDataset: ``__key__``,
    ``__url__``, and bytes for each extension.
    """

    complete = True
    """Whether all shards are counted."""

    def __init__(
        self,
        urls: Urls,
        *,
        copy: bool = True,
        storage: Storage | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> None:
        found = expand_versions(urls, storage)
        folder = None if cache_dir is None else os.path.abspath(cache_dir)
        handles = open_handles(found, storage, folder, copy=copy, progress=progress)
        self._set_up(handles)

    @classmethod
    def of_handles(cls, handles: Sequence[Handle]) -> Self:
        """Return a set of shards from handles, each with its index."""
        made = cls.__new__(cls)
        made._set_up(handles)
        return made

    def _set_up(self, handles: Sequence[Handle]) -> None:
        self.urls, self._handles = [handle.url for handle in handles], handles
        self._opened = OpenShards(handles)
        self._once = WarnOnce()  # one warning for all indexes of entries
        self._headers = [handle.header for handle in handles if handle.header is not None]
        self.starts = np.cumsum([0, *(header.samples for header in self._headers)])
        self._length = int(self.starts[-1])
        self._whole = range(self._length)

    # Properties.

    def __len__(self) -> int:
        return self._length

    @property
    def counts(self) -> list[int]:
        """The number of samples of each shard."""
        return [header.samples for header in self._headers]

    @property
    def nbytes(self) -> int:
        """The size of the shards in bytes."""
        return sum(header.size for header in self._headers)

    @property
    def fingerprint(self) -> str:
        """The identity of the samples, 32 hex digits: a hash of the shards' content in order, without names."""
        return _combined([header.fingerprint for header in self._headers])

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Return whether a set with this fingerprint and number of samples has since grown into this one."""
        ends = np.flatnonzero(self.starts == rows).tolist()
        return any(_combined([h.fingerprint for h in self._headers[:end]]) == fingerprint for end in ends)

    def __repr__(self) -> str:
        return f"<ShardSet of {counted(len(self), 'sample')}: {listed(self.urls)}>"

    def facts(self, shards: Sequence[int]) -> list[Facts]:
        """Return facts of shards, to finish an epoch that began before they were counted."""
        headers = [self._headers[number] for number in shards]
        return [Facts(None, header.samples, header.fingerprint) for header in headers]

    def stored(self) -> list[StoredShard]:
        """Return the shards in a store that are copied."""
        stored = [(number, handle) for number, handle in enumerate(self._handles) if isinstance(handle, StoreShard)]
        return [handle.stored(number) for number, handle in stored if handle.copy]

    # Reading.

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the number of the shard that holds a sample, and the sample's number in it."""
        shard = int(self.starts.searchsorted(sample, "right")) - 1
        return shard, sample - int(self.starts[shard])

    def index(self, number: int) -> ShardIndex:
        """Return the index of a shard, without its data. Raises as `shard`."""
        found = self._opened.find(number)
        return found.index if found is not None else self._handles[number].index()

    def shard(self, number: int) -> OpenShard | RangedShard:
        """Return a shard, opened if needed. Raises as `OpenShards.get`."""
        return self._opened.get(number)

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """Return one sample. Negative indices count from the end; other ones outside the set raise IndexError."""
        try:
            row = self._whole[operator.index(index)]
        except IndexError:
            raise IndexError(f"sample {index} is out of range for {counted(self._length, 'sample')}") from None
        number, local = self.locate(row)
        shard = self.shard(number)
        sample = shard.sample(local)
        shard.check()  # after the read, so that no changed data is returned
        return sample

    def records(self, indices: Indices) -> list[Sample]:
        """Return the samples at ``indices`` (any order, repeats allowed): the fast way to read a batch."""
        rows = to_rows(indices, self._whole)
        numbers = self.starts.searchsorted(rows, "right") - 1
        return self._opened.read(numbers, rows - self.starts[numbers])

    def image_records(self, indices: Indices) -> list[SampleRecord]:
        """Return the samples as image records, for `penstock.ImageDataset`. See `as_images`."""
        rows = to_rows(indices, self._whole)
        return self.as_images(rows, self.records(rows))

    def as_images(self, rows: Indices, samples: list[Sample]) -> list[SampleRecord]:
        """Return the samples at `rows` as image records with their entries.

        The entries are from the index beside a local shard (``.entries``), if it has one. Raises `ImageError` for a
        sample without an image.
        """
        rows = np.asarray(rows, np.int64)
        numbers = self.starts.searchsorted(rows, "right") - 1
        places = zip(numbers.tolist(), (rows - self.starts[numbers]).tolist(), strict=True)
        found = [partial(self._entries, *place) if self._handles[place[0]].is_file else None for place in places]
        return [SampleRecord(sample, entries) for sample, entries in zip(samples, found, strict=True)]

    def _entries(self, number: int, local: int, data: bytes) -> bytes | None:
        shard = self.shard(number)
        return shard.entries(local, data, self._once) if isinstance(shard, OpenShard) else None

    def __iter__(self) -> Iterator[Sample]:
        for number, count in enumerate(self.counts):
            shard = self.shard(number)
            if isinstance(shard, RangedShard):
                yield from shard
                continue
            step = _AT_ONCE if shard.index.header.size < count * _SMALL else 1
            for start in range(0, count, step):
                found = [shard.sample(local) for local in range(start, min(start + step, count))]
                shard.check()  # after the reads, so that no changed data is returned
                yield from found

    def key(self, index: int) -> str:
        """Return the key of a sample, without reading the sample."""
        number, local = self.locate(self._whole[index])
        return self.index(number).key(local)

    def check_unchanged(self) -> None:
        """Raise ShardChangedError if an open shard was truncated, modified or touched."""
        self._opened.check()

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardSet.of_handles, (self._handles,)


def _combined(fingerprints: list[str]) -> str:
    return fingerprints[0] if len(fingerprints) == 1 else xxhash.xxh3_128_hexdigest(" ".join(fingerprints).encode())
