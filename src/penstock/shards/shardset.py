"""`ShardSet`: all samples of some tar shards as one sequence with random access.

    shards = ShardSet("train-{000..999}.tar")
    len(shards), shards[7]              # {"__key__": "000007", "__url__": "train-000.tar", "jpg": b"...", "cls": b"3"}
    shards.records([5, 3, 5])           # a batch of samples, in this order

Promises: opening and reading take no memory for each sample; a shard that changes is noticed before the next read; a
pickle is a handle, which opens the same shards elsewhere and refuses others.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ShardChangedError
from penstock.manifest.indices import Indices, to_rows
from penstock.manifest.sidecar import places
from penstock.progress import progress_bar
from penstock.shards.files import ShardFile, file_of
from penstock.shards.grouping import KEY, URL, Sample
from penstock.shards.index import SUFFIX, ShardIndex, load_or_build, read_header
from penstock.shards.urls import Urls, expand, local_path
from penstock.storage import Storage, cache_root

__all__ = ["OpenShard", "ShardSet"]

_FEWEST, _MOST = 64, 4096  # shards held open; each takes two descriptors


class OpenShard:
    """One shard and its index, open. Safe in threads."""

    def __init__(self, url: str, path: str, index: ShardIndex) -> None:
        self.url, self.index = url, index
        self.file = ShardFile(path)
        self.file.size, self.file.mtime_ns = index.header.size, index.header.mtime_ns  # what it has to be

    def sample(self, number: int) -> Sample:
        """One sample; the data is read, and is bytes."""
        index, read = self.index, self.file.read
        sample: Sample = {KEY: index.key(number), URL: self.url}
        names, extension, offset, size = index.extensions, index.extension, index.offset, index.size
        for file in range(index.first[number], index.first[number + 1]):
            sample[names[extension[file]]] = read(size[file], offset[file])
        return sample


class ShardSet:
    """The samples of shards, one shard after the other.

    Args:
        urls: brace notation, patterns, ``::``, or a list of those, see `penstock.shards.expand`: tar files, not
            compressed. Those in a store are copied into the local cache when they are first needed, which is at once if
            there is no index of them yet.
        storage: how a store is reached, and the cache, see `penstock.storage.Storage`.
        cache_dir: where indexes go, instead of beside the shards (or, if that is read-only, in the user's cache).
        progress: show a bar while indexing: True, False, or None for large shards on a terminal.

    Raises:
        ShardIOError: missing, no permission, disk full.
        TruncatedShardError, ShardError: a damaged or compressed shard, by name and byte.
        ConfigError: no shards, or braces that are not balanced.

    The first opening of a shard indexes it in one pass (about a second per GB; one process does it, others wait); later
    ones take some ten microseconds a shard. Samples are dictionaries as WebDataset's: ``__key__``, ``__url__``, and
    bytes under each extension.
    """

    def __init__(
        self,
        urls: Urls,
        *,
        storage: Storage | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> None:
        self.urls = expand(urls)
        self._cache_dir = None if cache_dir is None else os.path.abspath(cache_dir)
        self._storage = storage
        self._paths = [file_of(url, storage, progress=progress) for url in self.urls]
        self._open: dict[int, OpenShard] = {}
        self._checked: set[int] = set()
        self._limit = _open_limit()
        self._lock = Lock()
        headers = [self._current(number) for number in range(len(self.urls))]
        missing = [number for number, header in enumerate(headers) if header is None]
        if missing:
            total = sum(ShardFile(self._paths[number]).size for number in missing)
            with progress_bar("indexing", total, progress) as advance:
                for number in missing:
                    index = load_or_build(
                        self._paths[number],
                        url=self.urls[number],
                        cache_dir=self._index_folder(number),
                        progress=advance,
                    )
                    headers[number] = index.header
        self._headers = [header for header in headers if header is not None]
        self.starts: npt.NDArray[np.int64] = np.cumsum([0, *(header.samples for header in self._headers)])
        """The number of the first sample of each shard, and of all."""
        self._length = int(self.starts[-1])
        self._whole = range(self._length)

    def _index_folder(self, number: int) -> str | None:
        """Where a shard's index goes; that of a copy does not go beside it, where the cache keeps order."""
        if self._cache_dir is None and local_path(self.urls[number]) is None:
            return str(cache_root() / "shards")
        return self._cache_dir

    def _current(self, number: int) -> Any:
        path = self._paths[number]
        status = ShardFile(path)
        for place in places(path, SUFFIX, self._index_folder(number)):
            header = read_header(place)
            if header is not None and (header.size, header.mtime_ns) == (status.size, status.mtime_ns):
                return header
        return None

    # What it is.

    def __len__(self) -> int:
        return self._length

    @property
    def counts(self) -> list[int]:
        """Samples of each shard."""
        return [header.samples for header in self._headers]

    @property
    def nbytes(self) -> int:
        """Size of the shards in bytes."""
        return sum(header.size for header in self._headers)

    @property
    def sources(self) -> tuple[Path, ...]:
        """The files, as absolute paths in order."""
        return tuple(map(Path, self._paths))

    @property
    def fingerprint(self) -> str:
        """Identity of the samples, 32 hex digits: the content of the shards, in order; neither names nor times."""
        return _combined([header.fingerprint for header in self._headers])

    def prefix_fingerprint(self, rows: int) -> str:
        """The fingerprint of the set that ended with so many samples; "" if no shard ends there."""
        ends = np.flatnonzero(self.starts == rows)
        return _combined([header.fingerprint for header in self._headers[: int(ends[-1])]]) if len(ends) else ""

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Whether a set with this fingerprint and so many samples has since got more shards at its end."""
        ends = np.flatnonzero(self.starts == rows).tolist()
        return any(_combined([h.fingerprint for h in self._headers[:end]]) == fingerprint for end in ends)

    def __repr__(self) -> str:
        more = f" and {len(self.urls) - 1} more" if len(self.urls) > 1 else ""
        return f"<ShardSet of {len(self):,} samples: {self.urls[0]}{more}>"

    # Reading.

    def locate(self, sample: int) -> tuple[int, int]:
        """The number of the shard that holds a sample, and its number there."""
        shard = int(self.starts.searchsorted(sample, "right")) - 1
        return shard, sample - int(self.starts[shard])

    def shard(self, number: int) -> OpenShard:
        """A shard, opened if it is not.

        Raises:
            ShardChangedError: it is not the file any more that this set was made of.
        """
        found = self._open.get(number)
        if found is not None:
            return found
        header = self._headers[number]
        path = file_of(self.urls[number], self._storage)  # a copy may have left the cache meanwhile
        index = load_or_build(
            path, url=self.urls[number], cache_dir=self._index_folder(number), checked=number in self._checked
        )
        if index.header.digest != header.digest:
            raise ShardChangedError(
                f"{self.urls[number]} is no longer the shard that was opened: open the shards again"
            )
        opened = OpenShard(self.urls[number], path, index)
        with self._lock:
            self._checked.add(number)
            while len(self._open) >= self._limit:
                self._open.pop(next(iter(self._open)))
            self._open[number] = opened
        return opened

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """One sample. IndexError outside, negative indices count from the end."""
        try:
            row = self._whole[operator.index(index)]
        except IndexError:
            raise IndexError(f"sample {index} is out of range for {self._length} samples") from None
        number, local = self.locate(row)
        shard = self.shard(number)
        shard.file.check()
        return shard.sample(local)

    def records(self, indices: Indices) -> list[Sample]:
        """The samples at ``indices`` (any order, repeats allowed). The fast way to read a batch."""
        rows = to_rows(indices, self._whole)
        numbers = self.starts.searchsorted(rows, "right") - 1
        local = (rows - self.starts[numbers]).tolist()
        if len(rows) == 0:
            return []
        if (numbers == numbers[0]).all():
            shard = self.shard(int(numbers[0]))
            shard.file.check()
            return [shard.sample(k) for k in local]
        shards: dict[int, OpenShard] = {}
        for number in set(numbers.tolist()):
            shards[number] = self.shard(number)
            shards[number].file.check()
        return [shards[number].sample(k) for number, k in zip(numbers.tolist(), local, strict=True)]

    def __iter__(self) -> Iterator[Sample]:
        for number, count in enumerate(self.counts):
            shard = self.shard(number)
            shard.file.check()
            for local in range(count):
                yield shard.sample(local)

    def key(self, index: int) -> str:
        """The key of a sample, without reading it."""
        number, local = self.locate(self._whole[index])
        return self.shard(number).index.key(local)

    def check_unchanged(self) -> None:
        """Raise ShardChangedError if a shard that is open was truncated, written to or touched since."""
        for shard in list(self._open.values()):
            shard.file.check()

    def __reduce__(self) -> tuple[Any, ...]:
        fingerprints = [header.fingerprint for header in self._headers]
        return _reopen, (self._absolute(), self._storage, self._cache_dir, fingerprints, self.urls)

    def _absolute(self) -> list[str]:
        return [url if local_path(url) is None else path for url, path in zip(self.urls, self._paths, strict=True)]


def _open_limit() -> int:
    """How many shards to hold open: a quarter of the descriptors that this process may have, for two each."""
    try:
        import resource
    except ImportError:  # Windows
        return _FEWEST
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else min(max(soft // 8, _FEWEST), _MOST)


def _reopen(
    absolute: list[str], storage: Storage | None, cache_dir: str | None, fingerprints: list[str], urls: list[str]
) -> ShardSet:
    paths = [Path(url) if local_path(url) is not None else url for url in absolute]
    shards = ShardSet(paths, storage=storage, cache_dir=cache_dir, progress=False)
    shards.urls = urls
    for url, header, expected in zip(shards.urls, shards._headers, fingerprints, strict=True):
        if header.fingerprint != expected:
            raise ShardChangedError(f"{url} is no longer the shard that the set was opened on")
    return shards


def _combined(fingerprints: list[str]) -> str:
    return fingerprints[0] if len(fingerprints) == 1 else xxhash.xxh3_128_hexdigest(" ".join(fingerprints).encode())
