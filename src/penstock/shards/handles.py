"""Handles of single shards before they are opened: location and index header.

    handle = LocalShard(url, cache_dir)                   a file
    handle = StoreShard(url, storage)                     an object, which is copied to the cache
    handle = StoreShard(url, storage, copy=False)         an object that is read by ranges
    handle.header, handle.index(), handle.open()

Promise: handles can be pickled; in another process they open the same shard, or raise an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from penstock.errors import ShardChangedError, ShardError, ShardIOError, StorageAuthError, StorageNotFoundError
from penstock.images.warn_once import WarnOnce
from penstock.manifest.sidecar import places
from penstock.shards.exchange import Facts
from penstock.shards.grouping import KEY, URL, Sample
from penstock.shards.index import BODY, SUFFIX, Header, ShardIndex, load_or_build, read_header
from penstock.shards.ranged import RangedShard
from penstock.shards.stored import StoredShard
from penstock.storage import Cache, File, RemoteSource, Storage, cache_root, is_remote
from penstock.storage import local_path as copy_of
from penstock.storage.backend import Cancel, Stat
from penstock.storage.files import SHARD
from penstock.storage.urls import path_of, shown

if TYPE_CHECKING:
    from penstock.shards.entries import ShardEntries

__all__ = ["Handle", "LocalShard", "OpenShard", "StoreShard", "file_of", "index_url"]


class OpenShard:
    """An open shard in a file, with its index. Thread-safe."""

    def __init__(self, url: str, file: File, index: ShardIndex) -> None:
        self.url, self.index, self.file = url, index, file
        self._entries: ShardEntries | None = None  # opened at first use
        self.file.expect(index.header.size, index.header.mtime_ns)

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
        file = File(self._path, SHARD)
        self.size = file.size
        self.header = _header_of(self._path, cache_dir, file.size, file.mtime_ns)
        self.checked = False

    def build(self, progress: Callable[[int], object]) -> None:
        """Build the index if it is missing."""
        self.header = load_or_build(self._path, url=self.url, cache_dir=self._cache_dir, progress=progress).header

    def index(self) -> ShardIndex:
        """Return the index.

        Raises:
            ShardChangedError: the shard is no longer the one that this handle refers to.
        """
        return self._load(self._path)

    def _load(self, file: str | File) -> ShardIndex:
        return _checked(self, load_or_build(file, url=self.url, cache_dir=self._cache_dir, checked=self.checked))

    def open(self) -> OpenShard:
        """Open the shard. Raises as `index` does."""
        file = File(self._path, SHARD)
        return OpenShard(self.url, file, self._load(file))

    def __reduce__(self) -> tuple[Any, ...]:
        digest = b"" if self.header is None else self.header.digest
        return _local_again, (self.url, self._path, self._cache_dir, digest)


class StoreShard:
    """A shard in a store, which may not be counted yet: it is copied to the cache when its data is needed.

    Args:
        url: its URL.
        storage: access options.
        cache_dir: folder for indexes of copies, by default in the user's cache folder: never beside a copy.
        stat: the version, if known; else the store is asked.
        copy: False: only the requested samples are read, by ranges, and the index is the one beside it in the store.
        write_index: write the index beside the shard in the store, if this process builds it.

    Attributes: ``facts`` is None until this process has found or built an index, or received the facts from another
    process.

    If the cache has no room for a copy, or the job wants none, ranges are read, provided that the shard has an index.
    """

    is_file = False

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
        self.url, self.storage, self.copy, self.write_index = url, storage or Storage(), copy, write_index
        self._cache_dir = str(cache_root() / "shards") if cache_dir is None else cache_dir
        self._stat = stat
        self.facts: Facts | None = None
        self._source: RemoteSource | None = None
        self._beside: RemoteSource | None = None
        self.checked = False

    @property
    def source(self) -> RemoteSource:
        """The counted version of the object, or else the current one, which may cost a request.

        Raises:
            StorageError: its version is unknown and it does not exist.
        """
        stat = self._stat if self.facts is None else self.facts.version
        if self._source is None or stat not in (None, self._source.stat):
            self._source = RemoteSource(self.url, self.storage, stat)
        return self._source

    @property
    def size(self) -> int:
        """Bytes of the shard."""
        return self.source.size

    @property
    def header(self) -> Header | None:
        """The counts and the digest in the index's header; None while the shard is not counted."""
        facts = self.facts
        return None if facts is None else Header(0, facts.samples, 0, 0, self.size, 0, bytes.fromhex(facts.content), 0)

    def stored(self, number: int) -> StoredShard:
        """Return the facts for prefetching; ``number`` is the shard's number in its set."""
        index = [] if self._beside is None else [self._beside]
        return StoredShard(number, self.url, self.size, self.storage, self.source.stat, index)

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
        header = Header.unpack(begin)
        if header is None or header.length != stat.size:
            raise _unsound(url)
        if self.size != header.size:
            raise ShardError(
                f"{shown(self.url)} has {self.size:,} bytes, but the index beside it is of a shard with "
                f"{header.size:,}: index it again (penstock shards index --force)"
            )
        self._beside = RemoteSource(url, self.storage, stat)
        self._know(header)
        return True

    def is_known(self) -> bool:
        """Return whether the shard is counted here, or was counted on this machine. Costs at most one request."""
        if self.facts is None:
            path, mtime_ns = self._place()
            header = _header_of(path, self._cache_dir, self.size, mtime_ns)
            if header is not None:
                self._know(header)
        return self.facts is not None

    def count(self, cancel: Cancel | None = None) -> Facts:
        """Count the shard unless it is counted, by the index beside it in the store if that exists; return the facts.

        Raises:
            StorageError: it is unavailable.
            ShardError: it is damaged or compressed; or the index belongs to another shard.
        """
        if not self.is_known():
            self.look_beside()
        return self.facts or self.obtain(cancel=cancel)

    def obtain(self, *, only_later: bool = False, cancel: Cancel | None = None) -> Facts:
        """Copy and index the shard unless it is counted; return the facts. Raises as `count`.

        Arguments: see `fetch`.

        Raises:
            NotCachedError: see `penstock.storage.Cache.open` on ``only_later``.
        """
        if not self.is_known():
            self.build(lambda _: None, only_later=only_later, cancel=cancel)
        assert self.facts is not None
        return self.facts

    def build(
        self, progress: Callable[[int], object], *, only_later: bool = False, cancel: Cancel | None = None
    ) -> None:
        """Build the index from a copy unless this machine has one; the copy is fetched first.

        ``only_later`` and ``cancel``: see `fetch`.
        """
        if self.is_known():
            progress(self.size)
            return
        file = self.fetch(cancel, only_later=only_later)
        with _indexing:
            index = load_or_build(file, url=self.url, cache_dir=self._cache_dir, progress=progress)
        if self.write_index:
            self._put(index)
        self._know(index.header)

    def fetch(self, cancel: Cancel | None = None, *, only_later: bool = True) -> File:
        """Return an open copy, fetched if it is missing.

        Args:
            cancel: ends the download, which a later call resumes.
            only_later: see `Cache.open`.

        Raises:
            NotCachedError: with ``only_later``, the cached objects are needed sooner.
        """
        return self._cache().open(self.source.until(cancel), only_later=only_later, progress=False).of(SHARD)

    def index(self) -> ShardIndex:
        """Return the index: from the store, or built from a copy.

        Raises:
            ShardChangedError: it no longer belongs to the shard that this handle refers to.
        """
        path, mtime_ns = self._place()
        if self.copy and _header_of(path, self._cache_dir, self.size, mtime_ns) is not None:
            found = ShardIndex.load(places(path, SUFFIX, self._cache_dir)[0], checked=self.checked)
            if found is not None:
                return _checked(self, found)
        if self._beside is not None:
            return self._index_beside(self._beside)
        return self._load(self.source.local(progress=False).of(SHARD))

    def open(self) -> OpenShard | RangedShard:
        """Open the copy, or the object for reading ranges. Raises as `index` does."""
        copy = self.source.copy_if_wanted() if self.copy else None
        if copy is None:
            return RangedShard(self.url, self.source, self.index())
        return OpenShard(self.url, copy, self._load(copy.of(SHARD)))

    def write_beside(self, *, force: bool = False, cancel: Cancel | None = None) -> bool:
        """Ensure that the store has an index beside the shard; return whether it was written. Raises as `count`.

        Args:
            force: write it again.
            cancel: see `fetch`.
        """
        if not force and self.look_beside():
            return False
        self.build(lambda _: None, cancel=cancel)
        self._put(self.index())
        return True

    def _know(self, header: Header) -> None:
        self.facts = Facts(self.source.stat, header.samples, header.digest.hex())

    def _cache(self) -> Cache:
        return self.storage.the_cache()

    def _place(self) -> tuple[str, int]:
        """Return path and modification time of a copy, which may be gone."""
        path, mtime_ns = self._cache().place(self.source)
        return str(path), mtime_ns

    def _put(self, index: ShardIndex) -> None:
        self.storage.put(index_url(self.url), index.path.read_bytes())

    def _load(self, file: File) -> ShardIndex:
        return _checked(self, load_or_build(file, url=self.url, cache_dir=self._cache_dir, checked=self.checked))

    def _index_beside(self, source: RemoteSource) -> ShardIndex:
        """Return the index beside the shard, copied to the cache."""
        index = ShardIndex.load(Path(source.local(keep=True).path))
        if index is None:
            raise _unsound(source.url)
        if self.facts is not None and index.header.fingerprint != self.facts.content:
            raise ShardChangedError(
                f"{shown(source.url)} is no longer the index that was opened: that one was of a shard with the "
                f"fingerprint {self.facts.content}, this one is of {index.header.fingerprint}. Open the shards again"
            )
        return index


Handle = LocalShard | StoreShard

_indexing = Lock()
"""Shards are indexed one at a time: threads would only contend for the GIL."""


def _unsound(url: str) -> ShardError:
    return ShardError(f"{shown(url)} is not a sound index: make it again (penstock shards index), and upload it")


def _checked(shard: Handle, index: ShardIndex) -> ShardIndex:
    """Return the index of a shard, after a check that it is of the content that was opened."""
    header = shard.header
    if header is not None and index.header.digest != header.digest:
        raise ShardChangedError(
            f"{shown(shard.url)} is no longer the shard that was opened: its content had the fingerprint "
            f"{header.fingerprint}, now it is {index.header.fingerprint}. Open the shards again; if the index beside "
            "it is of an older version, build it again (penstock shards index), and upload both"
        )
    shard.checked = True
    return index


def _header_of(path: str, cache_dir: str | None, size: int, mtime_ns: int) -> Header | None:
    """Return the header of this file's index, wherever that is stored; None if there is none."""
    for place in places(path, SUFFIX, cache_dir):
        header = read_header(place)
        if header is not None and (header.size, header.mtime_ns) == (size, mtime_ns):
            return header
    return None


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
