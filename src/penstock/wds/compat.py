"""`WebDataset` and `WebLoader`, and the methods that build a pipeline: each returns a new one with one more stage."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any, Self

from penstock.errors import ConfigError
from penstock.loader import DataLoader
from penstock.plan.stream import ResumableDataset, Stream
from penstock.storage.urls import path_of
from penstock.wds import filters
from penstock.wds.handlers import Handler, reraise_exception
from penstock.wds.pipeline import DataPipeline
from penstock.wds.shardlists import (
    PATTERN,
    DirectoryShardList,
    ResampledShards,
    SimpleShardList,
    check_empty,
    shards_in,
    single_node_only,
    split_by_node,
    split_by_worker,
)
from penstock.wds.shuffling import Shuffle
from penstock.wds.tariterators import tarfile_to_samples
from penstock.wds.utils import checked

Splitter = Callable[..., Any]


class FluidInterface:
    """Methods for classes with ``compose(stage)``. Arguments are those of the filters with the same names."""

    _allow: tuple[str, ...] = ()

    def compose(self, *args: Any) -> Self:
        """Return a pipeline with more stages."""
        raise NotImplementedError

    def batched(
        self,
        batchsize: int,
        collation_fn: Callable[[list[Any]], Any] | None = filters.default_collation_fn,
        partial: bool = True,
    ) -> Self:
        """Batch samples, combining columns; ``partial`` keeps a last batch that is not full."""
        return self.compose(filters.batched(batchsize, collation_fn=collation_fn, partial=partial))

    def unbatched(self) -> Self:
        """Split batches into samples."""
        return self.compose(filters.unbatched())

    def listed(self, batchsize: int, partial: bool = True) -> Self:
        """Batch samples into lists."""
        return self.compose(filters.listed(batchsize, partial))

    def unlisted(self) -> Self:
        """Split lists into samples."""
        return self.compose(filters.unlisted())

    def log_keys(self, logfile: str | None = None) -> Self:
        """Write the keys of samples to a file."""
        return self.compose(filters.log_keys(logfile))

    def info(self, *args: Any, **kw: Any) -> Self:
        """Print some of the samples to standard error, or ``stream``."""
        return self.compose(filters.info(*args, **kw))

    def shuffle(self, size: int, **kw: Any) -> Self:
        """Shuffle samples in a buffer of ``size``; below 1 the order does not change."""
        return self if size < 1 else self.compose(Shuffle(size, **kw))

    def map(self, f: Callable[[Any], Any], handler: Handler = reraise_exception) -> Self:
        """Apply ``f`` to each sample; a result of None drops the sample."""
        return self.compose(filters.map(f, handler=handler))

    def decode(self, *args: Any, handler: Handler = reraise_exception, **kw: Any) -> Self:
        """Decode fields: ``decode("rgb8")``, see `penstock.wds.autodecode`."""
        return self.compose(filters.decode(*args, handler=handler, **{"allow": self._allow, **kw}))

    def map_dict(self, handler: Handler = reraise_exception, **kw: Callable[[Any], Any]) -> Self:
        """Apply one function to each named field."""
        return self.compose(filters.map_dict(handler=handler, **kw))

    def select(self, predicate: Callable[[Any], bool], **kw: Any) -> Self:
        """Keep the samples for which the predicate is true."""
        return self.compose(filters.select(predicate, **kw))

    def to_tuple(self, *args: str, **kw: Any) -> Self:
        """Turn samples into tuples: ``to_tuple("jpg;png", "cls")``."""
        return self.compose(filters.to_tuple(*args, **kw))

    def map_tuple(self, *args: Callable[[Any], Any] | None, handler: Handler = reraise_exception) -> Self:
        """Apply one function to each field of a tuple; None leaves a field unchanged."""
        return self.compose(filters.map_tuple(*args, handler=handler))

    def slice(self, *args: int | None) -> Self:
        """Select samples by number, like ``itertools.islice``."""
        return self.compose(filters.slice(*args))

    def rename(self, **kw: Any) -> Self:
        """Rename fields: ``rename(image="jpg;png")``; ``keep=False`` drops all others."""
        return self.compose(filters.rename(**kw))

    def rsample(self, p: float = 0.5) -> Self:
        """Keep each sample with probability ``p``."""
        return self.compose(filters.rsample(p))

    def rename_keys(self, *args: Any, **kw: Any) -> Self:
        """Rename fields that match patterns: ``rename_keys(image="*.jpg")``."""
        return self.compose(filters.rename_keys(*args, **kw))

    def extract_keys(self, *args: str, **kw: Any) -> Self:
        """Turn samples into tuples of the fields that match: ``extract_keys("*.jpg;*.png", "*.cls")``."""
        return self.compose(filters.extract_keys(*args, **kw))

    def associate(self, associator: Any, **kw: Any) -> Self:
        """Add fields from a mapping by key, or from a function of the key."""
        return self.compose(filters.associate(associator, **kw))

    def xdecode(self, *args: Any, **kw: Any) -> Self:
        """Decode fields with functions of an open file, chosen by patterns."""
        return self.compose(filters.xdecode(*args, **kw))

    def mcached(self) -> Self:
        """Cache the samples of the first epoch in memory."""
        return self.compose(filters.Cached())

    def lmdb_cached(self, *args: Any, **kw: Any) -> Self:
        """Cache the samples of the first epoch in an LMDB file."""
        return self.compose(filters.LMDBCached(*args, **kw))


class FluidWrapper(DataPipeline, FluidInterface):
    """These methods for any iterable."""

    def __init__(self, initial: Any) -> None:
        super().__init__(initial)


class WebDataset(DataPipeline, FluidInterface):
    """A pipeline over the samples of tar shards, to which more stages are added.

    Args:
        urls: addresses, see `penstock.wds.expand_urls`; a folder with a trailing slash, whose shards are read once;
            a `penstock.wds.DirectoryShardList`, which watches a folder; or an iterable of shards.
        handler: decides about shards that cannot be opened or are damaged.
        mode: ``"resampled"`` is the same as ``resampled=True``.
        resampled: read an endless stream of shards that each worker draws at random with replacement.
        repeat: repeat the shards without end.
        shardshuffle: shuffle the shards every epoch. A number means the same: the whole list is always shuffled.
            None and False keep the order.
        cache_dir: an existing folder for copies of remote shards.
        cache_size: the largest size of the cache in bytes; 0 disables it, a negative number removes the limit.
        detshuffle: the same as ``shardshuffle=True``: the order is always a function of seed and epoch.
        nodesplitter: splits shards across ranks: `split_by_node`. By default, several ranks are an error.
        workersplitter: splits shards across workers.
        url_to_name, verbose: for compatibility: copies are named by a hash of the address, and nothing is printed.
        select_files, rename_files: functions that select members by name, and rename them.
        empty_check: raise an error in a worker without samples.
        seed: seed of every shuffle and draw, 0 by default.
        allow: what to allow: ``"pipe"``, ``"pickle"``, ``"torch"``, see `penstock.wds.utils`.

    Raises:
        ConfigError: (a ValueError) invalid arguments.

    Shards are shuffled before they are split, so a rank reads different shards every epoch.
    """

    def __init__(
        self,
        urls: Any,
        handler: Handler = reraise_exception,
        mode: str | None = None,
        resampled: bool = False,
        repeat: bool = False,
        shardshuffle: bool | int | None = None,
        cache_size: int = -1,
        cache_dir: str | os.PathLike[str] | None = None,
        url_to_name: Any = None,
        detshuffle: bool = False,
        nodesplitter: Splitter | None = single_node_only,
        workersplitter: Splitter | None = split_by_worker,
        select_files: Callable[[str], bool] | None = None,
        rename_files: Callable[[str], str] | None = None,
        empty_check: bool = True,
        verbose: bool = False,
        seed: int | None = None,
        *,
        allow: Collection[str] = (),
    ) -> None:
        if mode not in (None, "resampled"):
            raise ConfigError(f"mode must be None or 'resampled', got {mode!r}")
        if cache_dir is not None and not os.path.isdir(cache_dir):
            raise ConfigError(f"cache directory {cache_dir} does not exist")
        self._allow = tuple(sorted(checked(allow)))
        draws = resampled or mode == "resampled"
        shuffled = bool(shardshuffle) or detshuffle
        expander = tarfile_to_samples(
            handler,
            select_files,
            rename_files,
            cache_dir=cache_dir,
            cache_size=cache_size,
            allow=self._allow,
        )
        splitters = [nodesplitter, workersplitter]
        if draws:  # each worker draws for itself, so nothing is left to split; a program's own splitters still apply
            splitters = [s for s in splitters if s not in (single_node_only, split_by_node, split_by_worker)]
        check = check_empty if empty_check else None
        super().__init__(_source(urls, draws, shuffled), *splitters, expander, check, seed=seed)
        if repeat:
            self.repeat()


def _source(urls: Any, draws: bool, shuffled: bool) -> Any:
    if isinstance(urls, dict) or (isinstance(urls, str) and urls.endswith((".yaml", ".yml"))):
        raise ConfigError(
            "datasets described by a dict or a YAML file are not supported: make one WebDataset for each and mix them "
            "with penstock.wds.RandomMix or penstock.Mixture"
        )
    if isinstance(urls, str) and urls.endswith(".json"):
        raise ConfigError("unimplemented: a list of shards in a JSON file; pass the list itself")
    if isinstance(urls, str) and urls.endswith("/") and "::" not in urls and path_of(urls) is not None:
        found = shards_in(path_of(urls) or urls)
        if not found:
            raise ConfigError(f"no shards in {urls}: the name of a shard must match {PATTERN}")
        urls = found
    if isinstance(urls, DirectoryShardList):
        if draws or shuffled:
            raise ConfigError("a watched folder cannot be shuffled: DirectoryShardList(select=) chooses the next shard")
        return urls
    if not isinstance(urls, str | os.PathLike) and not hasattr(urls, "__iter__"):
        raise ConfigError(f"cannot handle urls of type {type(urls)}")
    return ResampledShards(urls) if draws else SimpleShardList(urls, shuffle=shuffled)


class WebLoader(DataPipeline, FluidInterface):
    """A `penstock.DataLoader` as the source of a pipeline in the trainer's process; takes the loader's arguments.

    ``with_epoch(n)`` is exact for the rank, whatever the number of workers, and its epochs continue one stream. The
    state holds the loader's state and the pipeline's position.
    """

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(DataLoader(*args, **kw))
        self._heard_loader = 0  # how many times set_epoch of the loader's dataset had been called

    @property
    def loader(self) -> DataLoader[Any]:
        """The loader."""
        found: DataLoader[Any] = self.pipeline[0]
        return found

    def __iter__(self) -> Stream:
        dataset = self.loader.dataset
        if isinstance(dataset, ResumableDataset) and dataset.bookmark.version != self._heard_loader:
            self._heard_loader = dataset.bookmark.version
            if self._loaded is None:
                self.set_epoch(dataset.bookmark.cursor.epoch)
        return super().__iter__()
