"""Stages that turn shards into samples.

`tarfile_to_samples` is the stage that pipelines use: it reads local shards by position, all others as streams, and its
state is a shard and a byte offset. The functions `url_opener`, `tar_file_expander` and `group_by_keys` are building
blocks for custom stages.

A sample never crosses the end of a shard. A truncated sample is dropped, with an error that names shard and byte. Files
are closed after the last sample, or when the stream is dropped.
"""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, BinaryIO

import xxhash

from penstock.errors import ConfigError, ShardError, ShardIOError, StorageError
from penstock.shards.compressed import open_stream
from penstock.shards.grouping import LOCAL_PATH, Sample, base_and_extension, group_from
from penstock.shards.stream import named_members, read_shard
from penstock.storage import Cache, Storage, file_lock, is_remote, write_atomically
from penstock.storage import local_path as copy_of
from penstock.storage.urls import path_of, shown
from penstock.wds.gopen import gopen, has_own_opener
from penstock.wds.handlers import Handler, decide, reraise_exception
from penstock.wds.pipeline import Context, EndOfStream, FlatMapStep, Stage, Step
from penstock.wds.utils import check_local

Names = Callable[[str], bool]
Renames = Callable[[str], str]


class DamagedTarError(ShardError, tarfile.ReadError):
    """A damaged or truncated shard; also a `tarfile.ReadError`, which programs may catch."""


class tarfile_to_samples(Stage):
    """A stage that turns shards into samples.

    Args:
        handler: decides about shards that cannot be opened, are damaged, or repeat an extension in a sample.
        select_files: a function of a member's name that returns whether to read the member.
        rename_files: a function that renames members, before ``select_files`` and before names are split into key and
            extension.
        cache_dir: a folder for copies of remote shards.
        cache_size: the largest size of the cache in bytes; a negative number removes the limit.
        allow: ``("pipe",)`` to run ``pipe:`` commands.
    """

    def __init__(
        self,
        handler: Handler = reraise_exception,
        select_files: Names | None = None,
        rename_files: Renames | None = None,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_size: int = -1,
        allow: Collection[str] = (),
    ) -> None:
        self.handler, self.select_files, self.rename_files = handler, select_files, rename_files
        self.cache_dir, self.cache_size, self.allow = cache_dir, cache_size, allow

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        return FlatMapStep(source, self.samples, own)

    def samples(self, shard: Any, position: Any) -> Iterator[tuple[int, Sample]]:
        """Yield (byte offset, sample) for the samples of a shard, starting after the sample at offset ``position``."""
        url = shard["url"] if isinstance(shard, dict) else shard
        begin = 0 if position is None else position
        try:
            for header, sample in self._read(url, begin):
                if position is not None and header <= position:
                    continue
                if isinstance(shard, dict) and "__dataset__" in shard:
                    sample["__dataset__"] = shard["__dataset__"]
                yield header, sample
        except (ShardError, StorageError, OSError) as error:
            if not decide(self.handler, _as_tarfile(error)):
                raise EndOfStream from error

    def _read(self, url: str, begin: int) -> Iterator[tuple[int, Sample]]:
        handler = None if self.handler is reraise_exception else self.handler
        select, rename = self.select_files, self.rename_files
        path = self._path(url)
        if path is not None or not has_own_opener(url):
            yield from read_shard(url, start=begin, handler=handler, path=path, select=select, rename=rename)
            return
        with open_stream(gopen(url, allow=self.allow)) as stream:
            yield from group_from(named_members(stream, url, select, rename), url, start=begin, handler=handler)

    def _path(self, url: str) -> str | None:
        """Return the local file of a shard; None for a shard that is read as a stream."""
        path = path_of(url)
        if path is not None and url != "-":
            check_local(path)
            return path
        if self.cache_dir is None or not self.cache_size:
            return None
        if is_remote(url) and not has_own_opener(url):
            limit = None if self.cache_size < 0 else self.cache_size
            return copy_of(url, storage=Storage(cache=Cache(self.cache_dir, max_bytes=limit)), progress=False)
        return self._copy(url)

    def _copy(self, url: str) -> str:
        """Return a copy of an address that only `gopen` can open, named by a hash of the address."""
        assert self.cache_dir is not None
        path = os.path.join(self.cache_dir, xxhash.xxh3_128_hexdigest(url.encode()) + ".tar")
        if os.path.exists(path):
            return path
        with file_lock(path):
            if not os.path.exists(path):
                with contextlib.closing(gopen(url, allow=self.allow)) as source, write_atomically(path) as out:
                    while data := source.read(1 << 20):
                        out.write(data)
        return path


def _as_tarfile(error: Exception) -> Exception:
    """Convert an error of damage to `DamagedTarError`; a shard that cannot be read at all stays an OSError."""
    if (
        isinstance(error, ShardError)
        and not isinstance(error, ShardIOError)
        and "duplicate file name" not in str(error)
    ):
        damaged = DamagedTarError(str(error))
        damaged.__cause__ = error
        return damaged
    return error


def tarfile_samples(
    src: Iterable[Any],
    handler: Handler = reraise_exception,
    select_files: Names | None = None,
    rename_files: Renames | None = None,
) -> Iterator[Sample]:
    """Yield the samples of shards: `tarfile_to_samples` as a function, usable as a stage."""
    return tarfile_to_samples(handler, select_files, rename_files).run(src)


# A pipeline uses the stage in its place, to resume at a byte offset.
tarfile_samples.stage = tarfile_to_samples  # type: ignore[attr-defined]


# ------------------------------------------------------------------ building blocks for custom stages


def base_plus_ext(path: str) -> tuple[str | None, str | None]:
    """Split a name into key and extension; both are None for a name without extension."""
    found = base_and_extension(path)
    return (None, None) if found is None else found


def valid_sample(sample: dict[str, Any] | None) -> bool:
    """Return whether a sample is not empty and not marked as bad."""
    return sample is not None and isinstance(sample, dict) and len(sample) > 0 and not sample.get("__bad__", False)


def url_opener(data: Iterable[Any], handler: Handler = reraise_exception, **kw: Any) -> Iterator[dict[str, Any]]:
    """Add an open ``stream`` to each shard, closed when the next shard is requested."""
    for shard in data:
        if not isinstance(shard, dict) or "url" not in shard:
            raise ConfigError(f"a shard must be a dict with a url, got {shard!r}")
        try:
            stream = gopen(shard["url"], **kw)
        except Exception as error:
            error.add_note(f"shard {shown(str(shard['url']))}")
            if decide(handler, error):
                continue
            return
        try:
            path = path_of(shard["url"])
            yield {**shard, "stream": stream, **({} if path is None else {"local_path": path})}
        finally:
            stream.close()


def tar_file_iterator(
    fileobj: BinaryIO,
    skip_meta: Any = None,
    handler: Handler = reraise_exception,
    select_files: Names | None = None,
    rename_files: Renames | None = None,
    *,
    url: str = "",
) -> Iterator[dict[str, Any]]:
    """Yield the files of a tar archive: ``{"fname": name, "data": bytes}``."""
    opened = [{"stream": fileobj, "url": url}]
    for file in tar_file_expander(opened, handler, select_files, rename_files):
        del file["__url__"]
        yield file


def tar_file_expander(
    data: Iterable[dict[str, Any]],
    handler: Handler = reraise_exception,
    select_files: Names | None = None,
    rename_files: Renames | None = None,
    eof_value: Any = None,
) -> Iterator[dict[str, Any]]:
    """Yield the files of archives opened by `url_opener`, with ``__url__``, and ``eof_value`` after each archive."""
    for source in data:
        url, path = source["url"], source.get("local_path")
        try:
            for member, content in named_members(open_stream(source["stream"]), url, select_files, rename_files):
                name = member.name
                if member.kind != "file" or (name.startswith("__") and name.partition("/")[0].endswith("__")):
                    continue
                file = {"fname": name, "data": content, "__url__": url}
                if path is not None:
                    file[LOCAL_PATH] = path
                yield file
        except (ShardError, OSError) as error:
            if not decide(handler, _as_tarfile(error)):
                return
        if eof_value is not None:
            yield eof_value


def group_by_keys(
    data: Iterable[dict[str, Any]],
    keys: Callable[[str], tuple[str | None, str | None]] = base_plus_ext,
    lcase: bool = True,
    suffixes: Collection[str] | None = None,
    handler: Handler = reraise_exception,
) -> Iterator[Sample]:
    """Group consecutive files with the same key and shard into samples."""
    sample: Sample = {}
    for file in data:
        if not file:  # the end of a shard
            if valid_sample(sample):
                yield sample
            sample = {}
            continue
        key, extension = keys(file["fname"])
        if key is None or extension is None:
            continue
        extension = extension.lower() if lcase else extension
        if sample.get("__key__") != key or sample.get("__url__") != file.get("__url__"):
            if valid_sample(sample):
                yield sample
            sample = {"__key__": key, "__url__": file.get("__url__")}
            if file.get(LOCAL_PATH) is not None:
                sample[LOCAL_PATH] = file[LOCAL_PATH]
        if extension in sample:
            error = ShardError(f"{file['fname']}: duplicate file name in tar file {extension} {sample.keys()}")
            if decide(handler, error):
                continue
            return
        if suffixes is None or extension in suffixes:
            sample[extension] = file["data"]
    if valid_sample(sample):
        yield sample
