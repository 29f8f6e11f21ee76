"""Penstock: data loading for PyTorch in constant memory, in an order that anyone can reproduce.

The public names, each imported at first use.
"""

from __future__ import annotations

from penstock import lazy

TYPE_CHECKING: bool = False  # like typing.TYPE_CHECKING, without the slow import

__version__ = "0.1.0"

_MODULES = {
    "compat": ["DpexDataLoader", "make_batch_data_sampler", "make_data_sampler"],
    "datasets.arrays": ["ArrayDataset", "LoadArray", "LoadBytes"],
    "datasets.clips": ["AudioDataset", "VideoDataset"],
    "datasets.images": ["ImageDataset", "LoadImage"],
    "datasets.lengths": ["count_lengths"],
    "datasets.lerobot": ["LeRobotDataset"],
    "datasets.mds": ["MDSDataset"],
    "datasets.mixture": ["Mixture"],
    "datasets.packed": ["PackedDataset", "collate_packed"],
    "datasets.rank": ["RankDataset"],
    "datasets.server": ["RankServerDataset", "ServerDataset"],
    "datasets.shards": ["ShardDataset"],
    "datasets.stream": ["MPDataset"],
    "datasets.subset": ["Subset"],
    "datasets.tables": ["TableDataset"],
    "datasets.tokenized": ["TokenizedDataset"],
    "datasets.tokens": ["DocumentDataset", "TokenDataset"],
    "ledger": ["Ledger"],
    "loader": ["DataLoader", "Failure", "OnError", "RayOptions"],
    "manifest": ["Manifest", "Record"],
    "opening": ["open"],
    "order": ["Partition", "Permutation", "make_order"],
    "random": ["generator", "use_generator"],
    "samplers": [
        "BatchSampler",
        "DistributedSampler",
        "GroupedBatchSampler",
        "InfiniteSampler",
        "IterationBasedBatchSampler",
        "RandomSampler",
        "SequentialSampler",
        "TokenBudgetBatchSampler",
        "WeightedRandomSampler",
    ],
    "shards": ["ShardSet", "ShardWriter", "StreamShards", "TarWriter"],
    "shards.mds": ["MDSFolder"],
    "stages": ["stage"],
    "tables": ["JsonFiles", "TableFiles"],
    "tokenizing": ["tokenize"],
}

__all__ = [
    "__version__",
    "ArrayDataset",
    "AudioDataset",
    "BatchSampler",
    "DataLoader",
    "DistributedSampler",
    "DocumentDataset",
    "DpexDataLoader",
    "Failure",
    "GroupedBatchSampler",
    "ImageDataset",
    "InfiniteSampler",
    "IterationBasedBatchSampler",
    "JsonFiles",
    "Ledger",
    "LeRobotDataset",
    "LoadArray",
    "LoadBytes",
    "LoadImage",
    "MDSDataset",
    "MDSFolder",
    "MPDataset",
    "Manifest",
    "Mixture",
    "OnError",
    "PackedDataset",
    "Partition",
    "Permutation",
    "RandomSampler",
    "RankDataset",
    "RankServerDataset",
    "RayOptions",
    "Record",
    "SequentialSampler",
    "ServerDataset",
    "ShardDataset",
    "ShardSet",
    "ShardWriter",
    "StreamShards",
    "Subset",
    "TableDataset",
    "TableFiles",
    "TarWriter",
    "TokenBudgetBatchSampler",
    "TokenDataset",
    "TokenizedDataset",
    "VideoDataset",
    "WeightedRandomSampler",
    "collate_packed",
    "count_lengths",
    "generator",
    "make_batch_data_sampler",
    "make_data_sampler",
    "make_order",
    "open",
    "stage",
    "tokenize",
    "use_generator",
]

if TYPE_CHECKING:
    from penstock.compat import DpexDataLoader, make_batch_data_sampler, make_data_sampler
    from penstock.datasets.arrays import ArrayDataset, LoadArray, LoadBytes
    from penstock.datasets.clips import AudioDataset, VideoDataset
    from penstock.datasets.images import ImageDataset, LoadImage
    from penstock.datasets.lengths import count_lengths
    from penstock.datasets.lerobot import LeRobotDataset
    from penstock.datasets.mds import MDSDataset
    from penstock.datasets.mixture import Mixture
    from penstock.datasets.packed import PackedDataset, collate_packed
    from penstock.datasets.rank import RankDataset
    from penstock.datasets.server import RankServerDataset, ServerDataset
    from penstock.datasets.shards import ShardDataset
    from penstock.datasets.stream import MPDataset
    from penstock.datasets.subset import Subset
    from penstock.datasets.tables import TableDataset
    from penstock.datasets.tokenized import TokenizedDataset
    from penstock.datasets.tokens import DocumentDataset, TokenDataset
    from penstock.ledger import Ledger
    from penstock.loader import DataLoader, Failure, OnError, RayOptions
    from penstock.manifest import Manifest, Record
    from penstock.opening import open
    from penstock.order import Partition, Permutation, make_order
    from penstock.random import generator, use_generator
    from penstock.samplers import (
        BatchSampler,
        DistributedSampler,
        GroupedBatchSampler,
        InfiniteSampler,
        IterationBasedBatchSampler,
        RandomSampler,
        SequentialSampler,
        TokenBudgetBatchSampler,
        WeightedRandomSampler,
    )
    from penstock.shards import ShardSet, ShardWriter, StreamShards, TarWriter
    from penstock.shards.mds import MDSFolder
    from penstock.stages import stage
    from penstock.tables import JsonFiles, TableFiles
    from penstock.tokenizing import tokenize


__getattr__, __dir__ = lazy.names(__name__, _MODULES)
