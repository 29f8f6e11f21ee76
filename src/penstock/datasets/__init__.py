"""The map-style and iterable-style datasets.

Each module is imported at its first use: a worker needs only a few of them, or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy

if TYPE_CHECKING:
    from penstock.datasets.arrays import ArrayDataset as ArrayDataset
    from penstock.datasets.arrays import LoadArray as LoadArray
    from penstock.datasets.audio import AudioDataset as AudioDataset
    from penstock.datasets.counting import count_lengths as count_lengths
    from penstock.datasets.documents import DocumentDataset as DocumentDataset
    from penstock.datasets.images import ImageDataset as ImageDataset
    from penstock.datasets.images import LoadImage as LoadImage
    from penstock.datasets.lerobot import LeRobotDataset as LeRobotDataset
    from penstock.datasets.mds import MDSDataset as MDSDataset
    from penstock.datasets.mixture import Mixture as Mixture
    from penstock.datasets.packed import PackedDataset as PackedDataset
    from penstock.datasets.packed import collate_packed as collate_packed
    from penstock.datasets.rank import RankDataset as RankDataset
    from penstock.datasets.raw import LoadBytes as LoadBytes
    from penstock.datasets.server import RankServerDataset as RankServerDataset
    from penstock.datasets.server import ServerDataset as ServerDataset
    from penstock.datasets.shards import ShardDataset as ShardDataset
    from penstock.datasets.stream import MPDataset as MPDataset
    from penstock.datasets.subset import Subset as Subset
    from penstock.datasets.tables import TableDataset as TableDataset
    from penstock.datasets.tokenized import TokenizedDataset as TokenizedDataset
    from penstock.datasets.tokens import TokenDataset as TokenDataset
    from penstock.datasets.video import VideoDataset as VideoDataset

_HOMES = {
    "ArrayDataset": "arrays",
    "AudioDataset": "audio",
    "DocumentDataset": "documents",
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
    "TokenizedDataset": "tokenized",
    "VideoDataset": "video",
    "collate_packed": "packed",
    "count_lengths": "counting",
}

__all__ = list(_HOMES)

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
