"""`TarShard`, a tar shard before it is opened, local or in a store; `OpenShard`, whose samples can be read.

    shard = TarShard(url, storage, copy=True)         local; or copied to the cache; copy=False: read by ranges
    shard.facts, shard.index(), shard.open()
    read_samples([(opened, 3), (opened, 4)])          of shards that are read by ranges, one request for neighbours

Bytes that are read by ranges are parsed as a tar archive and compared with the index: an index of another shard is an
error, never a wrong sample.

Promise: a `TarShard` can be pickled; in another process it opens the same shard, or raises an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

from penstock.errors import ShardChangedError, ShardError, ShardIOError, StorageAuthError, StorageNotFoundError
from penstock.manifest.sidecar import places
from penstock.shards.grouping import KEY, URL, Sample, group
from penstock.shards.index import BODY, SUFFIX, ShardIndex, ShardIndexHeader, load_or_build, read_header
from penstock.shards.shard_file import INDEXING, Facts, ShardFile, StoredShard
from penstock.shards.tar import walk, walk_stream
from penstock.storage import File, RemoteSource, Storage, cache_root, is_remote, local_path
from penstock.storage.files import SHARD
from penstock.storage.stream import Range, read_ranges
from penstock.storage.transfer import Cancel, Stat
from penstock.storage.urls import path_of, shown
from penstock.warn_once import WarnOnce

if TYPE_CHECKING:
    from penstock.images.entries import ImageIndex

__all__ = ["OpenShard", "TarShard", "file_of", "index_url", "read_samples"]


class OpenShard:
    """An open shard, in a file or read by ranges, with its index. Thread-safe."""

    def __init__(self, url: str, source: File | RemoteSource, index: ShardIndex) -> None:
        self.url, self.source, self.index = url, source, index
        self.file = source if isinstance(source, File) else None
        self._entries: ImageIndex | Literal[False] | None = None  # opened at first use; False: there is none
        if self.file is not None:
            self.file.expect(index.header.size, index.header.mtime_ns)

    def check(self) -> None:
        """Raise ShardChangedError if the file has changed. A store compares each answer with the opened version."""
        if self.file is not None:
            self.file.check()

    def entries(self, number: int, data: bytes, once: WarnOnce) -> bytes | None:
        """Return the entries of a sample's first image, whose bytes are `data`; see `ImageIndex.entries`."""
        if self.file is None:
            return None
        if self._entries is None:
            from penstock.shards.entries import open_if_valid  # imported late: it loads the image decoders

            self._entries = open_if_valid(self.file.path, self.index, once) or False
        return self._entries.entries(number, data) if self._entries else None

    def sample(self, number: int) -> Sample:
        """Return one sample, with its data as bytes. Raises as `read_samples`."""
        if self.file is None:
            return next(read_samples([(self, number)]))
        index, read = self.index, self.file.read_exact
        sample: Sample = {KEY: index.key(number), URL: self.url}
        names, extension, offset, size = index.extensions, index.extension, index.offset, index.size
        for file in range(index.first[number], index.first[number + 1]):
            sample[names[extension[file]]] = read(size[file], offset[file])
        return sample

    def parse(self, number: int, data: bytes) -> Sample:
        """Return a sample, given its bytes in the archive. Raises ShardError if it does not match the index."""
        members = ((m, data[m.offset : m.offset + m.size]) for m in walk(data, self.url, require_end=False))
        try:
            (sample,) = group(members, self.url)
        except ValueError as error:  # it is no archive, or not of one sample
            raise self._differs(number) from error
        self._compare(number, sample)
        return sample

    def stream(self) -> Iterator[Sample]:
        """Yield all samples in order, from a stream with read-ahead. Raises as `parse`."""
        number = -1
        with self.source.stream() as file:
            for number, sample in enumerate(group(walk_stream(cast(BinaryIO, file), self.url), self.url)):
                if number < len(self.index):
                    self._compare(number, sample)
                yield sample
        if number + 1 != len(self.index):
            raise self._differs(number + 1)

    def _compare(self, number: int, sample: Sample) -> None:
        index, sizes = self.index, {}
        for file in range(index.first[number], index.first[number + 1]):
            sizes[index.extensions[index.extension[file]]] = index.size[file]
        found = {name: len(data) for name, data in sample.items() if name not in (KEY, URL)}
        if sample[KEY] != index.key(number) or found != sizes:
            raise self._differs(number)

    def _differs(self, number: int) -> ShardError:
        return ShardError(
            f"{shown(self.url)}: sample {number} is not what the index beside the shard says, which is of another "
            "version of it: make the index again (penstock shards index), and upload both"
        )


def read_samples(wanted: Sequence[tuple[OpenShard, int]]) -> Iterator[Sample]:
    """Yield samples of shards, in the given order.

    Raises:
        ShardError: a shard does not match its index.
        StorageChangedError, StorageError: see `penstock.storage.RemoteSource`.

    Memory: up to 16 requests of at most `Storage.block` bytes, or one sample.
    """
    remote = [(shard.source, shard.index.span(k)) for shard, k in wanted if isinstance(shard.source, RemoteSource)]
    data = read_ranges([Range(source, *span) for source, span in remote])
    for shard, number in wanted:
        yield shard.sample(number) if shard.file is not None else shard.parse(number, next(data))


class TarShard(ShardFile):
    """A tar shard, which may not be counted yet.

    Args:
        url: its name or URL. A shard in a store is copied to the cache when its data is needed.
        storage: access options.
        cache_dir: folder for its index. By default that is beside a local shard, and in the user's cache folder for a
            copy: never beside the copy.
        stat: the version, if known; else the store is asked.
        copy: False: only the requested samples are read, by ranges, and the index is the one beside it in the store.
        write_index: write the index beside the shard in the store, if this process builds it.

    Attributes:
        path: of a local shard; None for a shard in a store.

    If the cache has no room for a copy, or the job wants none, ranges are read, provided that the shard has an index.
    """

    def __init__(
        self,
        url: str,
        storage: Storage | None = None,
        cache_dir: str | None = None,
        stat: Stat | None = None,
        *,
        copy: bool = True,
        write_index: bool = False,
    ) -> None:
        super().__init__(url, storage, stat)
        self.copy, self.write_index = copy, write_index
        self.path = None if is_remote(url) else file_of(url)
        self._cache_dir = str(cache_root() / "shards") if self.path is None and cache_dir is None else cache_dir
        self._beside: RemoteSource | None = None
        self._checked = False
        if self.path is not None:
            file = File(self.path, SHARD)
            self._local = self.path, file.size, file.mtime_ns
            self.facts = self.find()

    @property
    def size(self) -> int:
        """Bytes of the shard."""
        return self.source.size if self.path is None else self._local[1]

    def _place(self) -> tuple[str, int, int]:
        """Return path, size and modification time of the shard, or of its copy, which may be gone."""
        if self.path is not None:
            return self._local
        path, mtime_ns = self.storage.the_cache().place(self.source)
        return str(path), self.size, mtime_ns

    def stored(self, number: int) -> StoredShard:
        """Return the facts for prefetching; ``number`` is the shard's number in its set."""
        return StoredShard(number, self.source, [] if self._beside is None else [self._beside])

    # Counting.

    def find(self) -> Facts | None:
        path, size, mtime_ns = self._place()
        for place in places(path, SUFFIX, self._cache_dir):
            header = read_header(place)
            if header is not None and (header.size, header.mtime_ns) == (size, mtime_ns):
                return self._facts(header)
        return None

    def look_beside(self) -> bool:
        """Return whether the store has an index beside the shard, and read its header, by one request.

        Raises:
            StorageNotFoundError: it has none, with ``copy=False``; or it has no shard.
            ShardError: the index is damaged, or its header is of a shard of another size.
        """
        url = index_url(self.url)
        try:
            begin, stat = self.storage.read_begin(url, BODY)
        except (StorageNotFoundError, StorageAuthError) as error:
            # Without list permission, stores answer "no access" for missing objects.
            if self.copy:
                return False
            if isinstance(error, StorageAuthError):
                raise
            raise StorageNotFoundError(
                f"{error}; create it (penstock shards index writes it beside the shard), or use copy=True"
            ) from error
        header = ShardIndexHeader.unpack(begin)
        if header is None or header.length != stat.size:
            raise _unsound(url)
        if self.size != header.size:
            raise ShardError(
                f"{shown(self.url)} has {self.size:,} bytes, but the index beside it is of a shard with "
                f"{header.size:,}: index it again (penstock shards index --force)"
            )
        self._beside = RemoteSource(url, self.storage, stat)
        self.facts = self._facts(header)
        return True

    def count(self, cancel: Cancel | None = None) -> Facts:
        self.facts = self.facts or self.find()
        if self.facts is None:
            self.look_beside()
        return self.obtain(cancel=cancel)

    def fetch(self, cancel: Cancel | None = None, *, only_later: bool = True) -> File:
        if self.path is not None:
            return File(self.path, SHARD)
        return super().fetch(cancel, only_later=only_later).of(SHARD)

    def index_copy(self, copy: File, progress: Callable[[int], object]) -> Facts:
        with INDEXING:
            index = load_or_build(copy, url=self.url, cache_dir=self._cache_dir, progress=progress)
        if self.write_index:
            self.put_index(index)
        return self._facts(index.header)

    def put_index(self, index: ShardIndex) -> None:
        """Write the index beside the shard in the store."""
        self.storage.put(index_url(self.url), index.path.read_bytes())

    def _facts(self, header: ShardIndexHeader) -> Facts:
        return Facts(self.source.stat if self.path is None else None, header.samples, header.fingerprint)

    # Opening.

    def index(self) -> ShardIndex:
        """Return the index: of this machine, from the store, or built from a copy.

        Raises:
            ShardChangedError: it no longer belongs to the shard that this object refers to.
        """
        if self.path is not None:
            return self._load(self.fetch())
        if self.copy and self.find() is not None:
            # The copy may be gone.
            found = ShardIndex.load(places(self._place()[0], SUFFIX, self._cache_dir)[0], checked=self._checked)
            if found is not None:
                return self._compared(found)
        if self._beside is None:
            return self._load(self.source.local(progress=False).of(SHARD))
        index = ShardIndex.load(Path(self._beside.local(keep=True).path))
        if index is None:
            raise _unsound(self._beside.url)
        if self.facts is not None and index.header.fingerprint != self.facts.content:
            raise ShardChangedError(
                f"{shown(self._beside.url)} is no longer the index that was opened: that one was of a shard with the "
                f"fingerprint {self.facts.content}, this one is of {index.header.fingerprint}. Open the shards again"
            )
        return index

    def open(self) -> OpenShard:
        """Open the file, the copy, or the object for reading ranges. Raises as `index` does."""
        if self.path is not None:
            file = self.fetch()
        else:
            copy = self.source.copy_if_wanted() if self.copy else None
            if copy is None:
                return OpenShard(self.url, self.source, self.index())
            file = copy.of(SHARD)
        return OpenShard(self.url, file, self._load(file))

    def _load(self, file: File) -> ShardIndex:
        return self._compared(load_or_build(file, url=self.url, cache_dir=self._cache_dir, checked=self._checked))

    def _compared(self, index: ShardIndex) -> ShardIndex:
        """Return an index, after a check that it is of the content that was counted."""
        if self.facts is not None and index.header.fingerprint != self.facts.content:
            raise ShardChangedError(
                f"{shown(self.url)} is no longer the shard that was opened: its content had the fingerprint "
                f"{self.facts.content}, now it is {index.header.fingerprint}. Open the shards again; if the index "
                "beside it is of an older version, build it again (penstock shards index), and upload both"
            )
        self._checked = True
        return index

    def __reduce__(self) -> Any:
        if self.path is None:
            return super().__reduce__()
        return _local_again, (self.url, self.path, self._cache_dir, self.facts and self.facts.content)


def _local_again(url: str, path: str, cache_dir: str | None, content: str | None) -> TarShard:
    shard = TarShard(path, cache_dir=cache_dir)
    shard.url = url
    if content not in (None, shard.obtain().content):
        raise ShardChangedError(f"{url} is no longer the shard that was opened: its content has changed")
    return shard


def _unsound(url: str) -> ShardError:
    return ShardError(f"{shown(url)} is not a sound index: make it again (penstock shards index), and upload it")


def file_of(url: str) -> str:
    """Return the path of a shard's file; for a remote shard, of a complete copy in the cache.

    Raises:
        ShardIOError: it is neither a file nor in a store (``pipe:``).
        StorageError: the store fails, see `penstock.storage.local_path`.
    """
    path = path_of(url)
    if path is not None:
        return os.path.abspath(path)
    if not is_remote(url):
        raise ShardIOError(f"{url} is neither a file nor in a store")
    return local_path(url, progress=False)


def index_url(url: str) -> str:
    """Return the URL of a shard's index, with the suffix before the query of a web URL."""
    path, mark, query = url.partition("?") if url.startswith(("http:", "https:")) else (url, "", "")
    return path + SUFFIX + mark + query
