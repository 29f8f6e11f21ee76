"""The data loader and its executors."""

from __future__ import annotations

from penstock.loader.dataloader import DataLoader
from penstock.loader.failures import Failure, OnError

__all__ = ["DataLoader", "Failure", "OnError"]
