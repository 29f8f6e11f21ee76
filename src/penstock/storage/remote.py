"""Read files and remote objects: `open_source` returns size, version, ranges and streams of either.

    source = open_source("s3://bucket/shards/000.tar")
    source.size, source.etag, source.fingerprint
    source.read_at(512, 1024)                     1,024 bytes from byte 512 on
    with source.stream() as file: ...             a file that reads ahead, in parallel
    local_path("https://host/train.txt")          a complete copy on this machine

Promises: every byte is from the version that was opened, or the read raises an error that tells what changed; every
wait has a deadline; an interrupted transfer resumes at the next byte. Each process opens its own connections at first
use, so sources may be pickled and forked at any time.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Protocol

from penstock.errors import ConfigError, NotCachedError, StorageChangedError, StorageError, StorageNotFoundError
from penstock.stages import stage
from penstock.storage.cache import Cache
from penstock.storage.files import DATA, STORED, File
from penstock.storage.local import put_file
from penstock.storage.planned_use import object_name
from penstock.storage.stream import BLOCK, PARALLEL, BlockStream, in_order
from penstock.storage.transfer import Cancel, Stat, Store, Write, persist, transfer
from penstock.storage.urls import WEB, is_remote, path_of, scheme, shown

__all__ = [
    *("Peer", "RemoteSource", "Source", "Storage", "list_objects", "local_path", "open_source", "read_file"),
    "read_object",
]

_OBJECT_STORES = frozenset({*WEB, "ais", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl"})

_stores: dict[tuple[int, str, str, float], Store] = {}
"""The stores of this process. Those of a parent process stay, too: it shares their sockets, so that they must not be
closed here.
"""


class Peer(Protocol):
    """A cache closer than the store, such as `penstock.server.CacheClient`. Thread-safe and picklable."""

    def read(self, key: str, begin: int, target: memoryview, cancel: Cancel) -> int:
        """Fill a buffer with a copy's bytes from ``begin`` on; return the number of bytes read from the front.

        Args:
            key: the name of the copy, for one version of one object; see `penstock.storage.Cache.key`.
            begin: the first byte.
            target: the buffer to fill.
            cancel: aborts the read from another thread.

        Never raises if the peer is gone, hangs, fails or has no such copy: it returns fewer bytes.
        """


@dataclass(frozen=True)
class Storage:
    """Options for remote objects: access, deadlines, cache. Small and picklable, for datasets and workers.

    Args:
        options: store options: ``{"anon": True}``, ``{"endpoint_url": ...}``,
            ``{"headers": {"https://HOST": {"Authorization": ...}}}``, which no other host receives, and all options of
            obstore's stores. Credentials are usually found where the stores' own tools look for them.
        cache: the `Cache` for local copies, or its folder; None for ``penstock/objects`` in the user's cache folder.
        idle: seconds without a byte after which a connection is closed.
        deadline: seconds for one request of a few MiB, including its retries.
        attempts: consecutive failures without progress before an error. The pauses between them grow from 0.1 to 10 s,
            so the default survives a store that is down for 40 s.
        parallel: concurrent requests of one stream or download.
        block: bytes per request.
        peer: a cache that is closer than the store: a `penstock.server.CacheClient`. It is asked first, then the
            store.

    Raises:
        ConfigError: numbers that are not positive; a URL as ``peer``.
    """

    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    cache: Cache | str | os.PathLike[str] | None = None
    idle: float = 30.0
    deadline: float = 300.0
    attempts: int = 15
    parallel: int = PARALLEL
    block: int = BLOCK
    peer: Peer | None = None

    def __post_init__(self) -> None:
        for name in ("idle", "deadline", "attempts", "parallel", "block"):
            value: Any = getattr(self, name)
            kind: Any = Real if name in ("idle", "deadline") else Integral
            if not isinstance(value, kind) or not value > 0:
                what = "number" if kind is Real else "integer"
                raise ConfigError(f"{name} must be a positive {what}, not {value!r}")
        if isinstance(self.peer, str):
            raise ConfigError(f"peer must be a client: pass penstock.server.CacheClient({self.peer!r})")

    def the_cache(self) -> Cache:
        """The cache of local copies."""
        return self.cache if isinstance(self.cache, Cache) else Cache(self.cache)

    def store_of(self, url: str) -> Store:
        """Return the store of a URL in this process, created at first use.

        Raises:
            StorageError: an unknown scheme, or its package is not installed.
        """
        options = json.dumps(dict(self.options), sort_keys=True, default=repr)
        key = (os.getpid(), scheme(url), options, self.idle)
        found = _stores.get(key)
        # Of two threads that make one at the same time, both get the first one.
        return found if found is not None else _stores.setdefault(key, _make_store(url, self))

    def open(self, url: str | os.PathLike[str]) -> File | RemoteSource:
        """See `open_source`."""
        path = path_of(url)
        return RemoteSource(os.fspath(url), self) if path is None else File(path, STORED)

    def read(self, url: str | os.PathLike[str], cancel: Cancel | None = None) -> bytes:
        """See `read_object`. Another thread can abort it with ``cancel``."""
        path = path_of(url)
        if path is not None:
            source = File(path, STORED)
            return source.read_at(0, source.size)
        return self._read(os.fspath(url), None, cancel)[0]

    def read_begin(self, url: str, size: int) -> tuple[bytes, Stat]:
        """Return the first ``size`` bytes of a remote object (fewer if it is shorter), and its version; one request."""
        try:
            return self._read(url, size)
        except StorageChangedError:
            stat = RemoteSource(url, self).stat
            if stat.size:
                raise
            return b"", stat  # an empty object has no first byte

    def _read(self, url: str, end: int | None, cancel: Cancel | None = None) -> tuple[bytes, Stat]:
        data = bytearray()
        stat = transfer(url, 0, end, self, known=None, write=lambda _, piece: data.extend(piece), cancel=cancel)
        return bytes(data), stat

    def read_ahead(self, urls: Sequence[str]) -> Generator[bytes]:
        """Yield whole objects in order, read by concurrent requests. Close it to cancel them."""
        return in_order(self.read, urls)

    def local_path(self, url: str | os.PathLike[str], *, progress: bool | None = None) -> str:
        """See the function `local_path`."""
        path = path_of(url)
        if path is None:
            return RemoteSource(os.fspath(url), self).local(keep=True, progress=progress).path
        if not os.path.exists(path):
            raise StorageNotFoundError(errno.ENOENT, "no such file", path)
        return path

    def pinned(self, url: str) -> str:
        """Return the URL with the commit that a branch or tag on a hub (``hf://``) refers to now; other URLs unchanged.

        Raises:
            StorageNotFoundError: no such dataset or revision.
        """
        pin = getattr(self.store_of(url), "pin", None) if scheme(url) == "hf" else None
        return url if pin is None else persist(url, "open", lambda: str(pin(url)), self)

    def glob(self, url: str) -> list[str]:
        """Return the URLs that `list_objects` finds."""
        return [address for address, _ in self.list_objects(url)]

    def list_objects(self, url: str) -> list[tuple[str, Stat]]:
        """See the function `list_objects`."""
        store = self.store_of(url)
        found = persist(url, "list", lambda: store.find(url), self)
        if not found:
            raise StorageNotFoundError(f"no object matches {shown(url)}")
        return found

    def put(self, url: str | os.PathLike[str], data: bytes, *, if_absent: bool = False) -> bool:
        """Write a small object or file atomically: readers see the old bytes or the new ones.

        Args:
            url: the target. The folder of a file must exist.
            data: at most 5 GB, sent in one request.
            if_absent: keep an existing object. Of several concurrent writers, one succeeds.

        Returns:
            Whether it was written. With ``if_absent``, False may also mean: written, but the answer was lost.

        Raises:
            StorageAuthError: no permission to write.
            StorageUnavailableError: the store does not answer.
            StorageError: the store does not support it; web servers have no ``if_absent``.
        """
        path = path_of(url)
        if path is not None:
            return put_file(path, data, if_absent)
        text = os.fspath(url)
        store = self.store_of(text)
        return persist(text, "write", lambda: store.put(text, data, if_absent=if_absent), self)


def _make_store(url: str, storage: Storage) -> Store:
    protocol = scheme(url)
    if not protocol:
        raise StorageError(f"{shown(url)} is neither a file nor an address in a store")
    # Packages that need not be installed are imported here.
    try:
        if protocol in _OBJECT_STORES:
            from penstock.storage.object_store import ObjectStore

            return ObjectStore(storage.options, storage.idle)
        if protocol == "hf":
            from penstock.storage.hub import HubStore

            return HubStore(storage.options, storage.idle)
        from penstock.storage.fsspec_store import FsspecStore

        return FsspecStore(protocol, storage.options)
    except ImportError as error:
        # fsspec raises an error of its own from that of the package.
        missing = (error.name or getattr(error.__cause__, "name", None) or "fsspec").partition(".")[0]
        extra = "'penstock[cloud]'" if missing in ("fsspec", "huggingface_hub", "obstore") else missing
        raise StorageError(
            f"{shown(url)}: reading {protocol}:// needs the package {missing}: pip install {extra}"
        ) from error
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise StorageError(f"{shown(url)}: {error}") from error


class RemoteSource:
    """One version of a remote object.

    Args:
        url: its URL.
        storage: access options.
        stat: the version to read, for copies in other processes; looked up by default.

    Raises:
        StorageNotFoundError, StorageAuthError, StorageUnavailableError, StorageError.

    Safe in several threads, after a fork, and pickled: the other process reads the same version, or raises an error.
    """

    def __init__(self, url: str, storage: Storage | None = None, stat: Stat | None = None) -> None:
        self.url, self.storage = url, storage if storage is not None else Storage()
        if stat is None:
            store = self.storage.store_of(url)
            stat = persist(url, "open", lambda: store.stat(url), self.storage)
        self.stat = stat
        self.size, self.etag, self.fingerprint = self.stat.size, self.stat.etag, self.stat.fingerprint
        self._local: File | None = None
        self._cancel: Cancel | None = None
        self._begun: Callable[[], object] = lambda: None

    def until(self, cancel: Cancel | None, begun: Callable[[], object] = lambda: None) -> RemoteSource:
        """Return the same version as a source whose requests end when ``cancel`` is set.

        ``begun`` is called when a download begins, for which the cache has made room.
        """
        made = copy.copy(self)
        made._cancel, made._begun = cancel, begun
        return made

    @property
    def is_cancelled(self) -> bool:
        """Whether its requests were cancelled, see `until`."""
        return self._cancel is not None and self._cancel.is_set()

    def read_at(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes from ``offset`` on, fewer only at the end; large reads use parallel requests.

        Raises:
            StorageChangedError: the object was replaced.
            StorageUnavailableError: the store keeps failing.

        If the server does not support range requests, the whole object is first downloaded into the cache.
        """
        stop = min(offset + size, self.size)
        if offset >= stop:
            return b""
        if not self.stat.ranged:
            return self._whole().read_at(offset, stop - offset)
        if stop - offset <= self.storage.block:
            return bytes(self.fetch(offset, stop))
        with self.stream(offset, stop) as stream:
            return stream.read()

    def stream(self, begin: int = 0, end: int | None = None) -> BlockStream:
        """Return the bytes ``[begin, end)`` as a file that reads ahead. Memory: `Storage.parallel` blocks."""
        how, stop = self.storage, self.size if end is None else min(end, self.size)
        if not self.stat.ranged:
            return self._whole().stream(begin, stop)
        spare: list[bytearray] = []  # reused: fresh memory costs a page fault for every 4 KiB

        def fetch(first: int, last: int, cancel: Cancel) -> bytearray:
            with contextlib.suppress(IndexError):
                if last - first == how.block:
                    return self.fetch(first, last, cancel, spare.pop())
            return self.fetch(first, last, cancel)

        def spent(data: Any) -> None:
            if isinstance(data, bytearray) and len(data) == how.block:
                spare.append(data)

        name = shown(self.url)
        return BlockStream(fetch, begin, stop, block=how.block, parallel=how.parallel, name=name, spent=spent)

    def fetch(self, begin: int, end: int, cancel: Cancel | None = None, data: bytearray | None = None) -> bytearray:
        """Return the bytes ``[begin, end)`` by one request, with retries that resume; into ``data`` if given."""
        data = data if data is not None else bytearray(end - begin)
        target, start, peer = memoryview(data), begin, self.storage.peer

        def write(position: int, piece: bytes | memoryview) -> None:
            target[position - start : position - start + len(piece)] = piece

        with self._joined(cancel) as both:
            if peer is not None:
                begin += peer.read(Cache.key(self), begin, target, both)
            transfer(self.url, begin, end, self.storage, known=self.stat, write=write, cancel=both)
        return data

    def fetch_into(self, write: Write, begin: int, end: int) -> None:
        """Fetch the same bytes, and pass them in order, piece by piece, to ``write(position, piece)``.

        By parallel requests, or by a single one if the server does not support range requests.
        """
        self._begun()
        if not self.stat.ranged:
            with self._joined(None) as both:
                transfer(self.url, begin, end, self.storage, known=self.stat, write=write, cancel=both)
        elif end - begin <= self.storage.block:
            write(begin, memoryview(self.fetch(begin, end)))
        else:
            with self.stream(begin, end) as stream:
                for piece in stream.pieces():
                    write(stream.tell() - len(piece), piece)

    @contextlib.contextmanager
    def _joined(self, cancel: Cancel | None) -> Iterator[Cancel]:
        """Yield a signal that is set when ``cancel`` or the source's own one is."""
        both, own = cancel or Cancel(), self._cancel or Cancel()
        key = own.add(both.set)
        try:
            yield both
        finally:
            own.remove(key)

    def local(self, *, keep: bool = False, progress: bool | None = None) -> File:
        """Return an open, complete local copy, downloaded if the cache has none. See `Cache.open`."""
        return self.storage.the_cache().open(self, keep=keep, progress=progress)

    def copy_if_wanted(self) -> File | None:
        """Return a complete copy if the cache has or may have one; None if ranges should be read instead.

        Ranges are read if the jobs of this machine prefer them, if a copy would evict copies that they need sooner
        (`penstock.storage.planned_use`), or if the object exceeds the cache's limit.
        """
        cache = self.storage.the_cache()
        found = cache.find(self)
        if found is not None:
            return found
        if self.size > cache.limit() or cache.planned_uses().prefer_ranges(object_name(self.url)):
            return None
        try:
            return cache.open(self, only_later=True, progress=False)
        except NotCachedError:
            return None

    def _whole(self) -> File:
        if self._local is None:  # not a cached_property, which in Python 3.11 holds one lock for all objects
            self._local = self.local()
        return self._local

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteSource, (self.url, self.storage, self.stat)

    def __repr__(self) -> str:
        return f"<RemoteSource {shown(self.url)}, {self.size:,} bytes, {self.etag or 'no etag'}>"


Source = File | RemoteSource
"""An open file or object: both have ``url``, ``size``, ``etag``, ``fingerprint``, ``read_at`` and ``stream``."""


def open_source(url: str | os.PathLike[str], *, storage: Storage | None = None) -> File | RemoteSource:
    """Open a path, a ``file://`` URL or a remote object for reading.

    Args:
        url: schemes http, https, s3, gs, az, hf, ais, and all others that fsspec supports.
        storage: options, deadlines, cache; `Storage()` by default.

    Raises:
        StorageNotFoundError: the object does not exist.
        StorageAuthError: credentials are missing or insufficient.
        StorageUnavailableError: the store does not answer.
        StorageError: the package for this kind of store is not installed, or any other failure.

    Costs one request.
    """
    return (storage or Storage()).open(url)


def read_object(url: str | os.PathLike[str], *, storage: Storage | None = None) -> bytes:
    """Return all bytes of an object by one request, bypassing the cache: for many small objects, such as images."""
    return (storage or Storage()).read(url)


def read_file(path: str, storage: Storage | None = None) -> bytes:
    """Return the bytes of a whole file, local or remote.

    Raises:
        DataFileIOError: it is missing or cannot be read.
        StorageError: a store fails.
    """
    with stage("read"):
        if is_remote(path):
            return read_object(path, storage=storage)
        try:
            # Without a buffer, a small file is read in two thirds of the time.
            with open(path, "rb", buffering=0) as file:
                return file.readall()
        except OSError as error:
            raise DATA.error(path, error) from error
        except ValueError as error:  # a NUL, or a lone surrogate
            raise DATA.failed(f"cannot read {path!r}: {error}") from None


def list_objects(pattern: str, *, storage: Storage | None = None) -> list[tuple[str, Stat]]:
    """Return the objects that match a pattern in a store, sorted, each with its size and version.

    Args:
        pattern: ``s3://bucket/train-*.tar``. ``*`` matches within a folder, ``**`` matches any folders.
        storage: access options.

    Raises:
        StorageNotFoundError: no object matches.
        StorageError: the store cannot be listed, such as a web server.

    Costs one request per 1,000 objects in the folder before the first wildcard, and in the folders below it if the
    pattern continues. ``RemoteSource(url, storage, stat)`` then opens an object without another request.
    """
    return (storage or Storage()).list_objects(pattern)


def local_path(
    url: str | os.PathLike[str],
    *,
    cache: Cache | str | os.PathLike[str] | None = None,
    storage: Storage | None = None,
    progress: bool | None = None,
) -> str:
    """Return the path of a complete local copy of an object; local paths are returned unchanged.

    Args:
        url: the object.
        cache: a cache to use instead of the cache of ``storage``.
        storage: options, deadlines, cache.
        progress: show a bar: True, False, or None for large objects on a terminal.

    The copy is of the store's current version (one request). One process of the machine downloads it while the others
    wait. It stays for at least a minute after the last call, and as long as a process has it open or mapped; then the
    cache may evict it. Open it immediately, or call again.

    Raises: as `open_source`; also StorageError if the disk is full, or the object exceeds the cache's limit.
    """
    how = storage or Storage()
    if cache is not None:
        how = replace(how, cache=cache)
    return how.local_path(url, progress=progress)
