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
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Self, SupportsIndex, cast

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.images.sample_record import SampleRecord
from penstock.manifest.indices import Indices, located, to_rows
from penstock.progress import progress_bar
from penstock.shards.grouping import Sample
from penstock.shards.index import ShardIndex
from penstock.shards.shard_file import Facts, StoredShard, pack_rows, split_rows
from penstock.shards.tar_shard import OpenShard, TarShard, read_samples
from penstock.storage import Storage, is_remote
from penstock.storage.file_pool import FilePool
from penstock.storage.names import Urls, expand_versions
from penstock.storage.stream import in_threads
from penstock.storage.transfer import Stat
from penstock.storage.urls import listed
from penstock.warn_once import WarnOnce
from penstock.wording import counted

__all__ = ["ShardSet", "build", "find_shards"]

_COPIES = 4  # shards copied at a time
_DESCRIPTORS = 4  # that an open shard takes: of itself and of its indexes, one for images included
_AT_ONCE, _SMALL = 32, 32 << 10  # while iterating: samples of at most 32 KiB that are read between two checks of a file

Ints = npt.NDArray[np.int64]


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
        shards = find_shards(found, storage, folder, copy=copy)
        build(shards, progress=progress)
        self._set_up(shards)

    @classmethod
    def of(cls, shards: Sequence[TarShard]) -> Self:
        """Return a set of shards, each counted before the set is used other than by `read`."""
        made = cls.__new__(cls)
        made._set_up(shards)
        return made

    def _set_up(self, shards: Sequence[TarShard]) -> None:
        self.urls, self._shards = [shard.url for shard in shards], shards
        self._has_remote = any(shard.path is None for shard in shards)
        self._open: FilePool[OpenShard] = FilePool(_DESCRIPTORS, copies=self._has_remote)
        self._once = WarnOnce()  # one warning for all indexes of entries

    # Properties.

    @cached_property
    def starts(self) -> Ints:
        """The first sample of each shard, and the number of all samples."""
        return np.cumsum([0, *self.counts])

    @cached_property
    def _rows(self) -> range:
        return range(int(self.starts[-1]))

    def __len__(self) -> int:
        return len(self._rows)

    def facts(self, shards: Iterable[int] | None = None) -> list[Facts]:
        """Return the facts of counted shards, by default of all."""
        return [cast(Facts, self._shards[at].facts) for at in (range(len(self._shards)) if shards is None else shards)]

    @property
    def counts(self) -> list[int]:
        """The number of samples of each shard."""
        return [facts.samples for facts in self.facts()]

    @property
    def nbytes(self) -> int:
        """The size of the shards in bytes."""
        return sum(shard.size for shard in self._shards)

    @property
    def fingerprint(self) -> str:
        """The identity of the samples, 32 hex digits: a hash of the shards' content in order, without names."""
        return _combined(self.facts())

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Return whether a set with this fingerprint and number of samples has since grown into this one."""
        facts, ends = self.facts(), np.flatnonzero(self.starts == rows).tolist()
        return any(_combined(facts[:end]) == fingerprint for end in ends)

    def __repr__(self) -> str:
        return f"<ShardSet of {counted(len(self), 'sample')}: {listed(self.urls)}>"

    def stored(self) -> list[StoredShard]:
        """Return the shards in a store that are copied."""
        return [shard.stored(number) for number, shard in enumerate(self._shards) if shard.path is None and shard.copy]

    # Reading.

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the number of the shard that holds a sample, and the sample's number in it."""
        shard = int(self.starts.searchsorted(sample, "right")) - 1
        return shard, sample - int(self.starts[shard])

    def index(self, number: int) -> ShardIndex:
        """Return the index of a shard, without its data. Raises as `shard`."""
        found = self._open.find(number)
        return found.index if found is not None else self._shards[number].index()

    def shard(self, number: int) -> OpenShard:
        """Return a shard, opened if needed.

        Raises:
            ShardChangedError: the shard is no longer the one that was counted.
            StorageError: see `penstock.storage.local_path`.
        """
        return self._open.find(number) or self._open.add(number, self._shards[number].open())

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """Return one sample. Negative indices count from the end; other ones outside the set raise IndexError."""
        try:
            row = self._rows[operator.index(index)]
        except IndexError:
            raise IndexError(f"sample {index} is out of range for {counted(len(self), 'sample')}") from None
        number, local = self.locate(row)
        shard = self.shard(number)
        sample = shard.sample(local)
        shard.check()  # after the read, so that no changed data is returned
        return sample

    def records(self, indices: Indices) -> list[Sample]:
        """Return the samples at ``indices`` (any order, repeats allowed): the fast way to read a batch."""
        return self.read(*located(self.starts, to_rows(indices, self._rows)))

    def read(self, shards: Ints, samples: Ints) -> list[Sample]:
        """Return samples, in this order; other shards need not be counted.

        Args:
            shards, samples: shard numbers, and sample numbers within them: int64 of shape (n,).

        Raises as `shard` does.
        """
        if not self._has_remote and len(set(shards.tolist())) <= self._open.most:
            return self._read(shards, samples)
        # In sorted order, one request reads neighbours, and the limit of open shards holds.
        ordered, places = np.unique(pack_rows(shards, samples), return_inverse=True)
        shards, samples = split_rows(ordered)
        part = np.cumsum(np.diff(shards, prepend=shards[:1]) != 0) // self._open.most
        cuts = np.flatnonzero(np.diff(part)) + 1
        pairs = zip(np.split(shards, cuts), np.split(samples, cuts), strict=True)
        found = [sample for numbers, theirs in pairs for sample in self._read(numbers, theirs)]
        return [dict(found[place]) for place in places.tolist()]

    def _read(self, shards: Ints, samples: Ints) -> list[Sample]:
        opened = {number: self.shard(number) for number in set(shards.tolist())}
        wanted = [(opened[number], k) for number, k in zip(shards.tolist(), samples.tolist(), strict=True)]
        by_ranges = any(shard.file is None for shard in opened.values())
        found = list(read_samples(wanted)) if by_ranges else [shard.sample(k) for shard, k in wanted]
        for shard in opened.values():
            shard.check()  # after the reads, so that no changed data is returned
        return found

    def image_records(self, indices: Indices) -> list[SampleRecord]:
        """Return the samples as image records, for `penstock.ImageDataset`. See `as_images`."""
        rows = to_rows(indices, self._rows)
        return self.as_images(rows, self.records(rows))

    def as_images(self, rows: Indices, samples: list[Sample]) -> list[SampleRecord]:
        """Return the samples at `rows` as image records with their entries.

        The entries are from the index beside a local shard (``.entries``), if it has one. Raises `ImageError` for a
        sample without an image.
        """
        numbers, local = located(self.starts, np.asarray(rows, np.int64))
        places = zip(numbers.tolist(), local.tolist(), strict=True)
        found = [partial(self._entries, *at) if self._shards[at[0]].path is not None else None for at in places]
        return [SampleRecord(sample, entries) for sample, entries in zip(samples, found, strict=True)]

    def _entries(self, number: int, local: int, data: bytes) -> bytes | None:
        return self.shard(number).entries(local, data, self._once)

    def __iter__(self) -> Iterator[Sample]:
        for number, count in enumerate(self.counts):
            shard = self.shard(number)
            if shard.file is None:
                yield from shard.stream()
                continue
            step = _AT_ONCE if shard.index.header.size < count * _SMALL else 1
            for start in range(0, count, step):
                found = [shard.sample(local) for local in range(start, min(start + step, count))]
                shard.check()  # after the reads, so that no changed data is returned
                yield from found

    def key(self, index: int) -> str:
        """Return the key of a sample, without reading the sample."""
        number, local = self.locate(self._rows[index])
        return self.index(number).key(local)

    def check_unchanged(self) -> None:
        """Raise ShardChangedError if an open shard was truncated, modified or touched."""
        for shard in self._open:
            shard.check()

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardSet.of, (self._shards,)


def _combined(facts: list[Facts]) -> str:
    if len(facts) == 1:
        return facts[0].content
    return xxhash.xxh3_128_hexdigest(" ".join(one.content for one in facts).encode())


def find_shards(
    found: Sequence[tuple[str, Stat | None]], storage: Storage | None, cache_dir: str | None, *, copy: bool
) -> list[TarShard]:
    """Return shards, given with their versions if known; a shard without an index has no facts yet."""

    def look(url: str, stat: Stat | None) -> TarShard:
        shard = TarShard(url, storage, cache_dir, stat, copy=copy)
        if shard.path is None and not shard.look_beside():
            shard.facts = shard.find()
        return shard

    remote = {url: stat for url, stat in found if is_remote(url)}
    made = dict(zip(remote, in_threads(lambda pair: look(*pair), [*remote.items()]), strict=True))
    return [made[url] if url in made else look(url, stat) for url, stat in found]


def build(shards: Sequence[TarShard], *, progress: bool | None = None) -> None:
    """Index the shards that are not counted; remote ones are copied first, several at a time."""
    missing = [shard for shard in shards if shard.facts is None]
    if not missing:
        return
    with progress_bar("indexing", sum(shard.size for shard in missing), progress) as advance:
        for shard in missing:
            if shard.path is not None:
                shard.obtain(progress=advance)
        remote = [shard for shard in missing if shard.path is None]
        in_threads(lambda shard: shard.obtain(progress=advance), remote, count=_COPIES)
