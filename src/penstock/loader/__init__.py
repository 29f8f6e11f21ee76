"""The data loader and its executors."""

from __future__ import annotations

from penstock.loader.dataloader import DataLoader
from penstock.loader.dpex import DpexDataLoader
from penstock.loader.failures import Failure, OnError
from penstock.loader.ray import RayOptions

__all__ = ["DataLoader", "DpexDataLoader", "Failure", "OnError", "RayOptions"]
