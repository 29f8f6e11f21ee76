"""Small data sets under the name of the module that programs import."""

from __future__ import annotations

from penstock.wds.extra import MockDataset, with_epoch, with_length
from penstock.wds.utils import PipelineStage, repeatedly

__all__ = ["MockDataset", "PipelineStage", "repeatedly", "with_epoch", "with_length"]
