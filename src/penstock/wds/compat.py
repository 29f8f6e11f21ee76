"""`WebDataset` and its like under the name of the module that programs import."""

from __future__ import annotations

from penstock.wds.dataset import WebDataset, WebLoader
from penstock.wds.fluid import FluidInterface, FluidWrapper
from penstock.wds.shardlists import check_empty

__all__ = ["FluidInterface", "FluidWrapper", "WebDataset", "WebLoader", "check_empty"]
