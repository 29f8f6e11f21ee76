"""WebDataset's names, on Penstock's shards: ``import penstock.wds as wds`` for ``import webdataset as wds``.

    dataset = (
        wds.WebDataset("train-{000..999}.tar", shardshuffle=True, nodesplitter=wds.split_by_node)
        .shuffle(1000)
        .decode("torchrgb8")
        .to_tuple("jpg;png", "cls")
        .batched(64)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=4).with_epoch(10_000)

Differences from WebDataset: the order is a function of (seed, epoch) and changes every epoch; shards are shuffled
before they are split across ranks; a loader's epochs have an exact length; pipelines and loaders have a state and
resume at the sample; files are closed, nothing is printed, handlers do not sleep; shell commands and pickles must be
allowed. See the guide "Coming from WebDataset".
"""

from __future__ import annotations

from typing import Any

from penstock.errors import ConfigError
from penstock.lazy import missing
from penstock.wds import autodecode, compat, extradatasets, mix, pytorch
from penstock.wds.autodecode import (
    Continue,
    Decoder,
    DecodingError,
    gzfilter,
    handle_extension,
    imagehandler,
    torch_audio,
    torch_loads,
    torch_video,
)
from penstock.wds.compat import FluidInterface, FluidWrapper, WebDataset, WebLoader
from penstock.wds.extradatasets import MockDataset, with_epoch, with_length
from penstock.wds.filters import (
    Cached,
    LMDBCached,
    associate,
    batched,
    decode,
    default_collation_fn,
    extract_keys,
    getfirst,
    info,
    listed,
    log_keys,
    map,
    map_dict,
    map_tuple,
    pipelinefilter,
    rename,
    rename_keys,
    rsample,
    select,
    slice,
    to_tuple,
    transform_with,
    unbatched,
    unlisted,
    xdecode,
)
from penstock.wds.gopen import gopen, gopen_schemes
from penstock.wds.handlers import (
    ignore_and_continue,
    ignore_and_stop,
    reraise_exception,
    warn_and_continue,
    warn_and_stop,
)
from penstock.wds.mix import RandomMix, RoundRobin
from penstock.wds.pipeline import DataPipeline, memoryless
from penstock.wds.shardlists import (
    DirectoryShardList,
    ResampledShards,
    SimpleShardList,
    check_empty,
    expand_urls,
    non_empty,
    resampled,
    shardspec,
    single_node_only,
    split_by_node,
    split_by_worker,
)
from penstock.wds.shuffling import detshuffle, shuffle
from penstock.wds.tariterators import DamagedTarError, tarfile_samples, tarfile_to_samples
from penstock.wds.utils import PipelineStage, allow, repeatedly
from penstock.wds.writer import ShardWriter, TarWriter, numpy_dumps, torch_dumps

__all__ = [
    "Cached",
    "Continue",
    "DamagedTarError",
    "DataPipeline",
    "Decoder",
    "DecodingError",
    "DirectoryShardList",
    "FluidInterface",
    "FluidWrapper",
    "LMDBCached",
    "MockDataset",
    "PipelineStage",
    "RandomMix",
    "ResampledShards",
    "RoundRobin",
    "ShardWriter",
    "SimpleShardList",
    "TarWriter",
    "WebDataset",
    "WebLoader",
    "allow",
    "associate",
    "autodecode",
    "batched",
    "check_empty",
    "compat",
    "decode",
    "default_collation_fn",
    "detshuffle",
    "expand_urls",
    "extract_keys",
    "extradatasets",
    "getfirst",
    "gopen",
    "gopen_schemes",
    "gzfilter",
    "handle_extension",
    "ignore_and_continue",
    "ignore_and_stop",
    "imagehandler",
    "info",
    "listed",
    "log_keys",
    "map",
    "map_dict",
    "map_tuple",
    "memoryless",
    "mix",
    "non_empty",
    "numpy_dumps",
    "pipelinefilter",
    "pytorch",
    "rename",
    "rename_keys",
    "repeatedly",
    "reraise_exception",
    "resampled",
    "rsample",
    "select",
    "shardspec",
    "shuffle",
    "single_node_only",
    "slice",
    "split_by_node",
    "split_by_worker",
    "tarfile_samples",
    "tarfile_to_samples",
    "to_tuple",
    "torch_audio",
    "torch_dumps",
    "torch_loads",
    "torch_video",
    "transform_with",
    "unbatched",
    "unlisted",
    "warn_and_continue",
    "warn_and_stop",
    "with_epoch",
    "with_length",
    "xdecode",
]


__version__ = "1.0.2"
"""The WebDataset version whose names and arguments this module has."""


RETIRED = {
    "FileCache": "WebDataset(cache_dir=...)",
    "IterableDataset": "torch.utils.data.IterableDataset",
    "LRUCleanup": "WebDataset(cache_dir=..., cache_size=...): the cache keeps to its size by itself",
    "MultiShardSample": "RandomMix or RoundRobin, or penstock.Mixture, which keeps proportions exactly",
    "cache": "WebDataset(cache_dir=...)",
    "pipe_cleaner": "nothing: copies in a cache are named by the whole address",
    "pytorch_weights_only": "wds.allow('torch') for objects other than tensors",
    "tenbin": "npy or npz fields",
    "wids": "penstock.ShardDataset",
}
"""Replacements by name."""


class RetiredError(ConfigError, AttributeError):
    """A name of WebDataset that is not here. The message names the replacement."""

    def __init__(self, name: str) -> None:
        super().__init__(f"penstock.wds has no {name}; use {RETIRED[name]}")


def __getattr__(name: str) -> Any:
    if name in RETIRED:
        raise missing(RetiredError(name))
    raise AttributeError(f"module 'penstock.wds' has no attribute {name!r}")
