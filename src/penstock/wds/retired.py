"""Former names of WebDataset, and their replacements."""

from __future__ import annotations

from penstock.errors import ConfigError

__all__ = ["RETIRED", "RetiredError"]

_MIX = "RandomMix or RoundRobin, or penstock.Mixture, which keeps proportions exactly"
_SIZE = "dataset.with_epoch(n), or WebLoader(...).with_epoch(n), which is exact for the rank"

RETIRED = {
    "ChoppedDataset": _SIZE,
    "Curried": "pipelinefilter",
    "Curried2": "pipelinefilter",
    "DBCache": "dataset.lmdb_cached(file)",
    "DBLoader": "dataset.lmdb_cached(file)",
    "Dataset": "WebDataset",
    "FakeLength": "dataset.with_length(n)",
    "IterableDataset": "torch.utils.data.IterableDataset",
    "LRUCleanup": "WebDataset(cache_dir=..., cache_size=...): the cache keeps to its size by itself",
    "MultiDataset": "WebLoader(dataset, num_workers=n)",
    "MultiShardSample": _MIX,
    "PytorchShardList": "SimpleShardList with split_by_node and split_by_worker",
    "PytorchEnv": "penstock.wds.utils.pytorch_worker_info",
    "Processor": "DataPipeline(source, filter(...), ...)",
    "Repeatedly": "dataset.repeat(nepochs=n)",
    "ResizedDataset": _SIZE,
    "FileCache": "WebDataset(cache_dir=...)",
    "Shorthands": "FluidInterface",
    "ShardList": "SimpleShardList with split_by_node and split_by_worker in a DataPipeline",
    "ShardSample": "SimpleShardList or ResampledShards",
    "cache": "WebDataset(cache_dir=...)",
    "compose": "DataPipeline(...) or pipeline.compose(...)",
    "composable": "DataPipeline(...) or pipeline.compose(...)",
    "ddp_equalize": "WebLoader(...).with_epoch(n), or penstock.ShardDataset, whose ranks get equal batches",
    "nodeslice": "split_by_node",
    "pipe_cleaner": "nothing: copies in a cache are named by the whole address",
    "shuffle_shards": "WebDataset(urls, shardshuffle=True)",
    "split_by_rank": "split_by_node",
    "tenbin": "npy or npz fields",
    "wids": "penstock.ShardDataset",
    "worker_id": "penstock.wds.utils.pytorch_worker_info",
    "worker_urls": "split_by_worker",
}
"""Replacements by name."""


class RetiredError(ConfigError, AttributeError):
    """A removed name. The message names the replacement."""

    def __init__(self, name: str) -> None:
        super().__init__(f"penstock.wds has no {name}; use {RETIRED[name]}")
