"""Data sets over manifests."""

from __future__ import annotations

from penstock.datasets.images import ImageDataset, LoadImage
from penstock.datasets.rank import RankDataset
from penstock.datasets.server import RankServerDataset, ServerDataset
from penstock.datasets.stream import MPDataset

__all__ = ["ImageDataset", "LoadImage", "MPDataset", "RankDataset", "RankServerDataset", "ServerDataset"]
