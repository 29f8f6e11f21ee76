"""The map-style and iterable-style datasets.

Each module is imported at its first use: a worker needs only a few of them, or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy

__all__ = [
    "ArrayDataset",
    "AudioDataset",
    "DocumentDataset",
    "ImageDataset",
    "LeRobotDataset",
    "LoadArray",
    "LoadBytes",
    "LoadImage",
    "MDSDataset",
    "MPDataset",
    "Mixture",
    "PackedDataset",
    "RankDataset",
    "RankServerDataset",
    "ServerDataset",
    "ShardDataset",
    "Subset",
    "TableDataset",
    "TokenDataset",
    "TokenizedDataset",
    "VideoDataset",
    "collate_packed",
    "count_lengths",
]

if TYPE_CHECKING:
    from penstock.datasets.arrays import ArrayDataset, LoadArray
    from penstock.datasets.audio import AudioDataset
    from penstock.datasets.counting import count_lengths
    from penstock.datasets.images import ImageDataset, LoadImage
    from penstock.datasets.lerobot import LeRobotDataset
    from penstock.datasets.mds import MDSDataset
    from penstock.datasets.mixture import Mixture
    from penstock.datasets.packed import PackedDataset, collate_packed
    from penstock.datasets.rank import RankDataset
    from penstock.datasets.raw import LoadBytes
    from penstock.datasets.server import RankServerDataset, ServerDataset
    from penstock.datasets.shards import ShardDataset
    from penstock.datasets.stream import MPDataset
    from penstock.datasets.subset import Subset
    from penstock.datasets.tables import TableDataset
    from penstock.datasets.tokenized import TokenizedDataset
    from penstock.datasets.tokens import DocumentDataset, TokenDataset
    from penstock.datasets.video import VideoDataset

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "ArrayDataset": "arrays",
        "AudioDataset": "audio",
        "DocumentDataset": "tokens",
        "ImageDataset": "images",
        "LeRobotDataset": "lerobot",
        "LoadArray": "arrays",
        "LoadBytes": "raw",
        "LoadImage": "images",
        "MDSDataset": "mds",
        "MPDataset": "stream",
        "Mixture": "mixture",
        "PackedDataset": "packed",
        "RankDataset": "rank",
        "RankServerDataset": "server",
        "ServerDataset": "server",
        "ShardDataset": "shards",
        "Subset": "subset",
        "TableDataset": "tables",
        "TokenDataset": "tokens",
        "collate_packed": "packed",
        "count_lengths": "counting",
        "TokenizedDataset": "tokenized",
        "VideoDataset": "video",
    },
)
