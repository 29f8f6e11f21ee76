"""The shards of a set one by one, before they are open: where each lies, and what its index says.

    handle = LocalShard(url, storage, cache_dir)          a file, or a copy in the cache of an object
    handle = RemoteShard(url, storage)                    an object that is read by ranges
    handle.header, handle.index(), handle.open()

Promises: a handle may be pickled; what it opens elsewhere is the same shard, or an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ShardChangedError, ShardError, ShardIOError, StorageAuthError, StorageNotFoundError
from penstock.images.once import Once
from penstock.manifest.sidecar import places
from penstock.progress import progress_bar
from penstock.shards.files import ShardFile, file_of
from penstock.shards.grouping import KEY, URL, Sample
from penstock.shards.index import SUFFIX, Header, ShardIndex, load_or_build, read_header
from penstock.shards.ranged import RangedShard
from penstock.shards.urls import local_path
from penstock.storage import RemoteSource, Storage, cache_root, io_error, is_remote, write_atomically
from penstock.storage.urls import shown

if TYPE_CHECKING:
    from penstock.shards.entries import ShardEntries

__all__ = ["Handle", "LocalShard", "OpenShard", "RemoteShard", "build", "open_handles", "write_indexes"]

_REQUESTS = 16  # under way at a time, while the indexes of a set are fetched
_COPIES = 4  # shards copied at a time


class OpenShard:
    """A shard in a file and its index, open. Safe in threads."""

    def __init__(self, url: str, path: str, index: ShardIndex) -> None:
        self.url, self.index = url, index
        self._entries: ShardEntries | None = None  # that of images is opened when somebody asks
        self.file = ShardFile(path)
        self.file.size, self.file.mtime_ns = index.header.size, index.header.mtime_ns  # what it has to be

    def check(self) -> None:
        """Raise ShardChangedError if the file was changed."""
        self.file.check()

    def entries(self, number: int, data: bytes, once: Once) -> bytes | None:
        """The entries of a sample's first image, whose bytes are `data`; see `ShardEntries`."""
        if self._entries is None:
            from penstock.shards.entries import ShardEntries  # with all that decodes images

            self._entries = ShardEntries(self.file.path, self.index, once)
        return self._entries.of(number, data)

    def raw(self, number: int) -> bytes:
        """One sample as it stands in the archive, with its headers and padding."""
        begin, end = self.index.span(number)
        return self.file.read(end - begin, begin)

    def sample(self, number: int) -> Sample:
        """One sample; the data is read, and is bytes."""
        index, read = self.index, self.file.read
        sample: Sample = {KEY: index.key(number), URL: self.url}
        names, extension, offset, size = index.extensions, index.extension, index.offset, index.size
        for file in range(index.first[number], index.first[number + 1]):
            sample[names[extension[file]]] = read(size[file], offset[file])
        return sample


class LocalShard:
    """A shard in a file; one in a store is copied into the local cache when its data, or an index, is needed.

    Args:
        url: its name.
        storage: how a store is reached.
        cache_dir: where indexes go, instead of beside the shards; that of a copy never goes beside it, where the cache
            keeps order.
        header: what an index in the store says.

    Attributes: ``header`` is None while there is no index.
    """

    def __init__(self, url: str, storage: Storage | None, cache_dir: str | None, header: Header | None = None) -> None:
        self.url, self._storage = url, storage
        path = local_path(url)
        self._path = None if path is None else os.path.abspath(path)
        self._cache_dir = str(cache_root() / "shards") if path is None and cache_dir is None else cache_dir
        self.header = header if header is not None else self._current()
        self._checked = False

    @property
    def is_file(self) -> bool:
        """Whether it is a file of its own, and no copy of an object in a store."""
        return self._path is not None

    @property
    def path(self) -> str:
        """The file, or a copy that is there now; it may leave the cache after a while."""
        return self._path if self._path is not None else file_of(self.url, self._storage)

    def _current(self) -> Header | None:
        path = self.path
        status = ShardFile(path)
        for place in places(path, SUFFIX, self._cache_dir):
            header = read_header(place)
            if header is not None and (header.size, header.mtime_ns) == (status.size, status.mtime_ns):
                return header
        return None

    def build(self, progress: Callable[[int], object]) -> None:
        """Make the index, if there is none."""
        self.header = load_or_build(self.path, url=self.url, cache_dir=self._cache_dir, progress=progress).header

    def index(self) -> ShardIndex:
        """The index.

        Raises:
            ShardChangedError: it is not the shard any more that this was made of.
        """
        return self._load(self.path)

    def _load(self, path: str) -> ShardIndex:
        index = load_or_build(path, url=self.url, cache_dir=self._cache_dir, checked=self._checked)
        if self.header is not None and index.header.digest != self.header.digest:
            raise ShardChangedError(f"{shown(self.url)} is no longer the shard that was opened: open the shards again")
        self._checked = True
        return index

    def open(self) -> OpenShard:
        """Open it. Raises as `index` does."""
        path = self.path
        return OpenShard(self.url, path, self._load(path))

    def __reduce__(self) -> tuple[Any, ...]:
        if self._path is None:
            return LocalShard, (self.url, self._storage, self._cache_dir, self.header)
        digest = b"" if self.header is None else self.header.digest
        return _local_again, (self.url, self._path, self._cache_dir, digest)


class RemoteShard:
    """A shard in a store with its index beside it there, of which only the samples asked for are read.

    Args:
        url: its address.
        storage: how the store is reached.

    Raises:
        StorageNotFoundError: the index (or the shard) is not there.
        ShardError: the index is of a shard of another size, or is damaged.
    """

    is_file = False

    def __init__(self, url: str, storage: Storage | None) -> None:
        self.url, self._storage = url, storage
        try:
            self.header = _stored_index(url, storage, None).header
        except StorageNotFoundError as error:
            raise StorageNotFoundError(
                f"{error}; make it (penstock shards index ... --out), and upload it beside the shard, or use copy=True"
            ) from error
        self._source = RemoteSource(url, storage)
        if self._source.size != self.header.size:
            raise ShardError(
                f"{shown(url)} has {self._source.size:,} bytes, and the index beside it is of a shard with "
                f"{self.header.size:,}: make the index of this one (penstock shards index) and upload it"
            )

    def index(self) -> ShardIndex:
        """The index, from a copy in the cache."""
        return _stored_index(self.url, self._storage, self.header)

    def open(self) -> RangedShard:
        """The shard, to be read from."""
        return RangedShard(self.url, self._source, self.index())


Handle = LocalShard | RemoteShard


def _stored_index(url: str, storage: Storage | None, expected: Header | None) -> ShardIndex:
    """The index beside a shard in a store, copied into the cache."""
    address = _beside(url)
    copy = RemoteSource(address, storage).local(keep=True)
    index = ShardIndex.load(copy.path)
    if index is None:
        raise ShardError(f"{shown(address)} is not a sound index: make it again (penstock shards index), and upload it")
    if expected is not None and index.header.digest != expected.digest:
        raise ShardChangedError(f"{shown(address)} is no longer the index that was opened: open the shards again")
    return index


def _beside(url: str) -> str:
    """The address of a shard's index: the suffix goes before what a web address asks for."""
    path, mark, query = url.partition("?") if url.startswith(("http:", "https:")) else (url, "", "")
    return path + SUFFIX + mark + query


def write_indexes(shards: Iterable[LocalShard], folder: Path) -> None:
    """Write the indexes of shards as ``NAME.pidx`` into a folder, to be put beside their shards elsewhere.

    Raises:
        ShardError: two shards have the same name.
        ShardIOError: the folder cannot be written to.
    """
    written: set[str] = set()
    for shard in shards:
        name = os.path.basename(local_path(shard.url) or shard.url.partition("?")[0]) + SUFFIX
        if name in written:
            raise ShardError(f"two shards have an index named {name}: write those of each folder into one of its own")
        written.add(name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with write_atomically(folder / name) as file:
                file.write(shard.index().path.read_bytes())
        except OSError as error:
            raise ShardIOError(str(io_error(folder / name, error, "cannot write the index"))) from error


def open_handles(
    urls: list[str], storage: Storage | None, cache_dir: str | None, *, copy: bool, progress: bool | None
) -> list[Handle]:
    """Handles of all shards, each with its header; what has no index is indexed."""
    remote = [url for url in urls if is_remote(url)]

    def look(url: str) -> RemoteShard | Header | None:
        if not copy:
            return RemoteShard(url, storage)
        try:
            return RemoteShard(url, storage).header
        except (StorageNotFoundError, StorageAuthError):  # stores say "no access" where one may not list
            return None

    with ThreadPoolExecutor(_REQUESTS, "penstock-indexes") as pool:
        found = dict(zip(remote, pool.map(look, remote), strict=True)) if remote else {}

    def handle_of(url: str) -> Handle:
        one = found.get(url)
        return one if isinstance(one, RemoteShard) else LocalShard(url, storage, cache_dir, one)

    with ThreadPoolExecutor(_COPIES, "penstock-copies") as pool:  # what has no index in the store is copied here
        copies = [url for url in remote if found[url] is None]
        made = dict(zip(copies, pool.map(handle_of, copies), strict=True)) if copies else {}
    handles = [made[url] if url in made else handle_of(url) for url in urls]
    build([handle for handle in handles if isinstance(handle, LocalShard)], progress=progress)
    return handles


def build(shards: list[LocalShard], *, progress: bool | None = None) -> None:
    """Index those that have no index, one after the other: threads would wait for Python's lock, and cost more."""
    missing = [shard for shard in shards if shard.header is None]
    if not missing:
        return
    total = sum(ShardFile(handle.path).size for handle in missing)
    with progress_bar("indexing", total, progress) as advance:
        for handle in missing:
            handle.build(advance)


def _local_again(url: str, path: str, cache_dir: str | None, digest: bytes) -> LocalShard:
    handle = LocalShard(path, None, cache_dir)
    handle.url = url
    if handle.header is None:
        handle.build(lambda _: None)
    if handle.header is None or (digest and handle.header.digest != digest):
        raise ShardChangedError(f"{url} is no longer the shard that the set was opened on")
    return handle
