"""Handles of single shards before they are opened: location and index header.

    handle = LocalShard(url, cache_dir)                   a file
    handle = CopiedShard(url, storage, cache_dir, None)   an object that is copied to the cache
    handle = RemoteShard(url, storage)                    an object that is read by ranges
    handle.header, handle.index(), handle.open()

Promise: handles can be pickled; in another process they open the same shard, or raise an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any

from penstock.errors import ShardChangedError, ShardError, ShardIOError, StorageNotFoundError
from penstock.images.warn_once import WarnOnce
from penstock.manifest.sidecar import places
from penstock.shards.grouping import KEY, URL, Sample
from penstock.shards.index import BODY, SUFFIX, Header, ShardIndex, load_or_build, read_header
from penstock.shards.ranged import RangedShard
from penstock.shards.stored import StoredShard
from penstock.storage import Cache, RemoteSource, SourceFile, Storage, cache_root, is_remote
from penstock.storage import local_path as copy_of
from penstock.storage.backend import Cancel, Stat
from penstock.storage.files import SHARD
from penstock.storage.names import path_of
from penstock.storage.prefetch import Stoppable
from penstock.storage.urls import shown

if TYPE_CHECKING:
    from penstock.shards.entries import ShardEntries

__all__ = ["CopiedShard", "Handle", "LocalShard", "OpenShard", "RemoteShard", "file_of", "index_url"]


class OpenShard:
    """An open shard in a file, with its index. Thread-safe."""

    def __init__(self, url: str, file: SourceFile, index: ShardIndex) -> None:
        self.url, self.index, self.file = url, index, file
        self._entries: ShardEntries | None = None  # opened at first use
        self.file.expect(index.header.size, index.header.mtime_ns)

    @property
    def is_removed(self) -> bool:
        """Whether the file was unlinked."""
        return self.file.is_removed

    def check(self) -> None:
        """Raise ShardChangedError if the file has changed."""
        self.file.check()

    def entries(self, number: int, data: bytes, once: WarnOnce) -> bytes | None:
        """Return the entries of a sample's first image, whose bytes are `data`; see `ShardEntries`."""
        if self._entries is None:
            from penstock.shards.entries import ShardEntries  # imported late: it loads the image decoders

            self._entries = ShardEntries(self.file.path, self.index, once)
        return self._entries.of(number, data)

    def raw(self, number: int) -> bytes:
        """Return one sample as stored in the archive, with its headers and padding."""
        begin, end = self.index.span(number)
        return self.file.read_exact(end - begin, begin)

    def sample(self, number: int) -> Sample:
        """Return one sample, with its data as bytes."""
        index, read = self.index, self.file.read_exact
        sample: Sample = {KEY: index.key(number), URL: self.url}
        names, extension, offset, size = index.extensions, index.extension, index.offset, index.size
        for file in range(index.first[number], index.first[number + 1]):
            sample[names[extension[file]]] = read(size[file], offset[file])
        return sample


class LocalShard:
    """A shard in a local file.

    Args:
        url: its name.
        cache_dir: folder for its index, instead of beside it.

    Attributes: ``header`` is None while it has no index.
    """

    is_file = True

    def __init__(self, url: str, cache_dir: str | None) -> None:
        self.url, self._cache_dir = url, cache_dir
        self._path = file_of(url)
        self.header = self._current()
        self._checked = False

    @property
    def size(self) -> int:
        """Bytes of the shard."""
        return SourceFile(self._path, SHARD).size

    def _current(self) -> Header | None:
        status = SourceFile(self._path, SHARD)
        return _header_of(self._path, self._cache_dir, status.size, status.mtime_ns)

    def build(self, progress: Callable[[int], object]) -> None:
        """Build the index if it is missing."""
        self.header = load_or_build(self._path, url=self.url, cache_dir=self._cache_dir, progress=progress).header

    def index(self) -> ShardIndex:
        """Return the index.

        Raises:
            ShardChangedError: the shard is no longer the one that this handle refers to.
        """
        return self._load(self._path)

    def _load(self, file: str | SourceFile) -> ShardIndex:
        index = load_or_build(file, url=self.url, cache_dir=self._cache_dir, checked=self._checked)
        _check_digest(self.url, self.header, index)
        self._checked = True
        return index

    def open(self) -> OpenShard:
        """Open the shard. Raises as `index` does."""
        file = SourceFile(self._path, SHARD)
        return OpenShard(self.url, file, self._load(file))

    def __reduce__(self) -> tuple[Any, ...]:
        digest = b"" if self.header is None else self.header.digest
        return _local_again, (self.url, self._path, self._cache_dir, digest)


class CopiedShard:
    """One version of a shard in a store, which is copied to the cache when its data is needed.

    Args:
        url: its URL.
        storage: access options.
        cache_dir: folder for indexes of copies, by default in the user's cache folder: never beside a copy.
        beside: the shard with the index that is beside it in the store, if any.
        stat: the version, if known; else the store is asked.

    Attributes: ``header`` is None while it has no index.

    If the cache has no room for a copy, or the job wants none, ranges are read, provided that the shard has an index.
    """

    is_file = False

    def __init__(
        self,
        url: str,
        storage: Storage | None,
        cache_dir: str | None,
        beside: RemoteShard | None,
        stat: Stat | None = None,
    ) -> None:
        self.url, self._beside = url, beside
        self._cache_dir = str(cache_root() / "shards") if cache_dir is None else cache_dir
        self.source = RemoteSource(url, storage, stat) if beside is None else beside.source
        self.header = self._current() if beside is None else beside.header
        self._checked = False

    @property
    def size(self) -> int:
        """Bytes of the shard."""
        return self.source.size

    def stored(self, number: int) -> StoredShard:
        """Return the facts for prefetching; ``number`` is the shard's number in its set."""
        source = self.source
        index = [] if self._beside is None else [self._beside.beside]
        return StoredShard(number, self.url, source.size, source.storage, source.stat, index)

    def _cache(self) -> Cache:
        return self.source.storage.the_cache()

    def _current(self) -> Header | None:
        """Return the header of an index that was built from a copy, which may be gone."""
        path, mtime_ns = self._cache().place(self.source)
        return _header_of(str(path), self._cache_dir, self.source.size, mtime_ns)

    def build(
        self, progress: Callable[[int], object], *, only_later: bool = False, cancel: Cancel | None = None
    ) -> None:
        """Build the index from a copy if it is missing; the copy is fetched first.

        ``only_later`` and ``cancel``: see `fetch`.
        """
        file = _file_of_copy(self.fetch(only_later=only_later, cancel=cancel))
        with _indexing:
            index = load_or_build(file, url=self.url, cache_dir=self._cache_dir, progress=progress)
        self.header = index.header

    def fetch(self, *, only_later: bool = False, cancel: Cancel | None = None) -> SourceFile:
        """Return an open copy, fetched if it is missing.

        Args:
            only_later: see `Cache.open`.
            cancel: ends the download, which a later call resumes.
        """
        source = self.source if cancel is None else Stoppable(self.source, cancel)
        return self._cache().open(source, only_later=only_later, progress=False)

    def index(self) -> ShardIndex:
        """Return the index: from the store, or built from a copy.

        Raises:
            ShardChangedError: it no longer belongs to the shard that this handle refers to.
        """
        path, _ = self._cache().place(self.source)
        if self._current() is not None:
            found = ShardIndex.load(places(str(path), SUFFIX, self._cache_dir)[0], checked=self._checked)
            if found is not None:
                return self._checked_index(found)
        if self._beside is not None:
            return self._beside.index()
        return self._load(_file_of_copy(self.source.local(progress=False)))

    def _load(self, file: SourceFile) -> ShardIndex:
        return self._checked_index(load_or_build(file, url=self.url, cache_dir=self._cache_dir, checked=self._checked))

    def _checked_index(self, index: ShardIndex) -> ShardIndex:
        _check_digest(self.url, self.header, index)
        self._checked = True
        return index

    def open(self) -> OpenShard | RangedShard:
        """Open the copy, or the object for reading ranges. Raises as `index` does."""
        copy = self.source.copy_if_wanted()
        if copy is None:
            return RangedShard(self.url, self.source, self.index())
        file = _file_of_copy(copy)
        return OpenShard(self.url, file, self._load(file))


class RemoteShard:
    """A shard in a store with its index beside it; only the requested samples are read.

    Args:
        url: its URL.
        storage: access options.
        stat: the version, if known; else the store is asked.

    Raises:
        StorageNotFoundError: the index (or the shard) does not exist.
        ShardError: the index is damaged, or its header is of a shard of another size.

    Costs one request if the version is known. The rest of the index is fetched when it is needed.
    """

    is_file = False

    def __init__(self, url: str, storage: Storage | None, stat: Stat | None = None) -> None:
        self.url = url
        try:
            self.beside, self.header = _look_at_index(index_url(url), storage)
        except StorageNotFoundError as error:
            raise StorageNotFoundError(
                f"{error}; create it (penstock shards index writes it beside the shard), or use copy=True"
            ) from error
        self.source = RemoteSource(url, storage, stat)
        if self.source.size != self.header.size:
            raise ShardError(
                f"{shown(url)} has {self.source.size:,} bytes, but the index beside it is of a shard with "
                f"{self.header.size:,}: index it again (penstock shards index --force)"
            )

    def index(self) -> ShardIndex:
        """Return the index, from a copy in the cache."""
        return _copied_index(self.beside, self.header)

    def open(self) -> RangedShard:
        """Open the shard for reading ranges."""
        return RangedShard(self.url, self.source, self.index())


Handle = LocalShard | CopiedShard | RemoteShard

_indexing = Lock()
"""Shards are indexed one at a time: threads would only contend for the GIL."""


def _look_at_index(url: str, storage: Storage | None) -> tuple[RemoteSource, Header]:
    """Return the index beside a shard in a store, and its header, by one request."""
    how = storage or Storage()
    begin, stat = how.read_begin(url, BODY)
    header = Header.unpack(begin)
    if header is None or header.length != stat.size:
        raise _unsound(url)
    return RemoteSource(url, how, stat), header


def _copied_index(source: RemoteSource, expected: Header) -> ShardIndex:
    """Return the index beside a shard in a store, copied to the cache."""
    index = ShardIndex.load(source.local(keep=True).path)
    if index is None:
        raise _unsound(source.url)
    if index.header.digest != expected.digest:
        raise ShardChangedError(
            f"{shown(source.url)} is no longer the index that was opened: that one was of a shard with the fingerprint "
            f"{expected.fingerprint}, this one is of {index.header.fingerprint}. Open the shards again"
        )
    return index


def _unsound(url: str) -> ShardError:
    return ShardError(f"{shown(url)} is not a sound index: make it again (penstock shards index), and upload it")


def _check_digest(url: str, header: Header | None, index: ShardIndex) -> None:
    if header is not None and index.header.digest != header.digest:
        raise ShardChangedError(
            f"{shown(url)} is no longer the shard that was opened: its content had the fingerprint "
            f"{header.fingerprint}, now it is {index.header.fingerprint}. Open the shards again; if the index beside "
            "it is of an older version, build it again (penstock shards index), and upload both"
        )


def _header_of(path: str, cache_dir: str | None, size: int, mtime_ns: int) -> Header | None:
    """Return the header of this file's index, wherever that is stored; None if there is none."""
    for place in places(path, SUFFIX, cache_dir):
        header = read_header(place)
        if header is not None and (header.size, header.mtime_ns) == (size, mtime_ns):
            return header
    return None


def _file_of_copy(copy: SourceFile) -> SourceFile:
    """Return a cached copy with the errors of a shard."""
    copy.family = SHARD
    return copy


def file_of(url: str, storage: Storage | None = None, *, progress: bool | None = False) -> str:
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
    return copy_of(url, storage=storage, progress=progress)


def index_url(url: str) -> str:
    """Return the URL of a shard's index, with the suffix before the query of a web URL."""
    path, mark, query = url.partition("?") if url.startswith(("http:", "https:")) else (url, "", "")
    return path + SUFFIX + mark + query


def _local_again(url: str, path: str, cache_dir: str | None, digest: bytes) -> LocalShard:
    handle = LocalShard(path, cache_dir)
    handle.url = url
    if handle.header is None:
        handle.build(lambda _: None)
    if handle.header is None or (digest and handle.header.digest != digest):
        raise ShardChangedError(f"{url} is no longer the shard that was opened: its content has changed")
    return handle
