"""Penstock: data loading for PyTorch in constant memory, in an order that anyone can reproduce.

The public names, each imported at first use.
"""

from __future__ import annotations

from penstock import lazy

TYPE_CHECKING: bool = False  # like typing.TYPE_CHECKING, without the slow import

__version__ = "0.1.0"

_HOMES = {
    "ArrayDataset": "datasets",
    "AudioDataset": "datasets",
    "BatchSampler": "samplers",
    "DataLoader": "loader",
    "DistributedSampler": "samplers",
    "DocumentDataset": "datasets",
    "DpexDataLoader": "compat",
    "Failure": "loader",
    "GroupedBatchSampler": "samplers",
    "ImageDataset": "datasets",
    "InfiniteSampler": "samplers",
    "IterationBasedBatchSampler": "samplers",
    "Ledger": "ledger",
    "LeRobotDataset": "datasets",
    "LoadArray": "datasets",
    "LoadBytes": "datasets",
    "LoadImage": "datasets",
    "MDSDataset": "datasets",
    "MDSFolder": "shards.mds",
    "JsonFiles": "tables",
    "MPDataset": "datasets",
    "Manifest": "manifest",
    "Mixture": "datasets",
    "OnError": "loader",
    "PackedDataset": "datasets",
    "Partition": "order",
    "Permutation": "order",
    "RandomSampler": "samplers",
    "RankDataset": "datasets",
    "RankServerDataset": "datasets",
    "RayOptions": "loader",
    "Record": "manifest",
    "SequentialSampler": "samplers",
    "ServerDataset": "datasets",
    "ShardDataset": "datasets",
    "ShardSet": "shards",
    "ShardWriter": "shards",
    "StreamShards": "shards",
    "Subset": "datasets",
    "TableDataset": "datasets",
    "TableFiles": "tables",
    "TarWriter": "shards",
    "TokenBudgetBatchSampler": "samplers",
    "TokenDataset": "datasets",
    "TokenizedDataset": "datasets",
    "VideoDataset": "datasets",
    "WeightedRandomSampler": "samplers",
    "collate_packed": "datasets",
    "count_lengths": "datasets",
    "generator": "random",
    "make_batch_data_sampler": "compat",
    "make_data_sampler": "compat",
    "make_order": "order",
    "open": "opening",
    "stage": "stages",
    "tokenize": "tokenizing",
    "use_generator": "random",
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
    from penstock.datasets import (
        ArrayDataset,
        AudioDataset,
        DocumentDataset,
        ImageDataset,
        LeRobotDataset,
        LoadArray,
        LoadBytes,
        LoadImage,
        MDSDataset,
        Mixture,
        MPDataset,
        PackedDataset,
        RankDataset,
        RankServerDataset,
        ServerDataset,
        ShardDataset,
        Subset,
        TableDataset,
        TokenDataset,
        TokenizedDataset,
        VideoDataset,
        collate_packed,
        count_lengths,
    )
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


__getattr__, __dir__ = lazy.names(__name__, _HOMES)
