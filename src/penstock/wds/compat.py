"""`WebDataset` and `WebLoader`, in the module that programs import them from."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any

from penstock.errors import ConfigError
from penstock.loader import DataLoader
from penstock.plan.stream import ResumableDataset, Stream
from penstock.shards.urls import local_path
from penstock.wds.fluid import FluidInterface, FluidWrapper
from penstock.wds.folders import PATTERN, DirectoryShardList, shards_in
from penstock.wds.handlers import Handler, reraise_exception
from penstock.wds.pipeline import DataPipeline
from penstock.wds.shardlists import (
    ResampledShards,
    SimpleShardList,
    check_empty,
    single_node_only,
    split_by_node,
    split_by_worker,
)
from penstock.wds.tariterators import tarfile_to_samples
from penstock.wds.trust import checked

__all__ = ["FluidInterface", "FluidWrapper", "WebDataset", "WebLoader", "check_empty"]

Splitter = Callable[..., Any]


class WebDataset(DataPipeline, FluidInterface):
    """The samples of tar shards, as a pipeline to which more stages are added.

    Args:
        urls: addresses, see `penstock.wds.expand_urls`; a folder with a slash at its end, whose shards are read once;
            a `penstock.wds.DirectoryShardList`, which watches one; or anything that gives shards.
        handler: asked about shards that cannot be opened or are damaged.
        mode: ``"resampled"`` is the same as ``resampled=True``.
        resampled: an endless stream of shards drawn at random, by each worker for itself.
        repeat: go over the shards again and again.
        shardshuffle: put the shards into another order every epoch; a number means the same, for the whole list is
            shuffled whatever it is. None and False: their own order.
        cache_dir: a folder for copies of remote shards, which has to exist.
        cache_size: bytes in it at most; 0 is no cache, below 0 no limit.
        detshuffle: the same as ``shardshuffle=True``: orders are always functions of seed and epoch.
        nodesplitter: what deals shards to ranks: `split_by_node`. By default several ranks are an error.
        workersplitter: what deals them to workers.
        url_to_name, verbose: for compatibility: copies are named by a hash of the address, and nothing is printed.
        select_files, rename_files: which members count, and under which names.
        empty_check: a worker without samples is an error.
        seed: of all orders, 0 by default.
        allow: of ``"pipe"``, ``"pickle"``, ``"torch"``, see `penstock.wds.trust`.

    Raises:
        ConfigError: (a ValueError) arguments that make no sense.

    Shards are shuffled before they are dealt out, so a rank reads others every epoch.
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
            raise ConfigError(f"mode is None or 'resampled', not {mode!r}")
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
        if draws:  # by each worker for itself, so there is nothing to deal out; a program's own choice still holds
            splitters = [s for s in splitters if s not in (single_node_only, split_by_node, split_by_worker)]
        check = check_empty if empty_check else None
        super().__init__(_source(urls, draws, shuffled), *splitters, expander, check, seed=seed)
        if repeat:
            self.repeat()


def _source(urls: Any, draws: bool, shuffled: bool) -> Any:
    if isinstance(urls, dict) or (isinstance(urls, str) and urls.endswith((".yaml", ".yml"))):
        raise ConfigError(
            "data sets described by a dict or a YAML file are not read: make one WebDataset for each and mix them with "
            "penstock.wds.RandomMix or penstock.Mixture"
        )
    if isinstance(urls, str) and urls.endswith(".json"):
        raise ConfigError("unimplemented: a list of shards in a JSON file; give the list itself")
    if isinstance(urls, str) and urls.endswith("/") and "::" not in urls and local_path(urls) is not None:
        found = shards_in(local_path(urls) or urls)
        if not found:
            raise ConfigError(f"no shard in {urls}: their names match {PATTERN}")
        urls = found
    if isinstance(urls, DirectoryShardList):
        if draws or shuffled:
            raise ConfigError(
                "a folder that is watched is not shuffled: DirectoryShardList(select=) says which is next"
            )
        return urls
    if not isinstance(urls, str | os.PathLike) and not hasattr(urls, "__iter__"):
        raise ConfigError(f"cannot handle urls of type {type(urls)}")
    return ResampledShards(urls) if draws else SimpleShardList(urls, shuffle=shuffled)


class WebLoader(DataPipeline, FluidInterface):
    """A `penstock.DataLoader` as the source of a pipeline in the trainer's process; arguments are the loader's.

    ``with_epoch(n)`` is exact for the rank, whatever the number of workers, and its epochs go on in one stream; the
    state is the loader's, with where the pipeline is.
    """

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(DataLoader(*args, **kw))
        self._heard_loader = 0  # how often the epoch of the loader's data set had been chosen

    @property
    def loader(self) -> DataLoader[Any]:
        """The loader."""
        found: DataLoader[Any] = self.pipeline[0]
        return found

    def __iter__(self) -> Stream:
        dataset = self.loader.dataset
        if isinstance(dataset, ResumableDataset) and dataset.times_set != self._heard_loader:
            self._heard_loader = dataset.times_set
            if self._loaded is None:
                self.set_epoch(dataset.start_request.cursor.epoch)
        return super().__iter__()
