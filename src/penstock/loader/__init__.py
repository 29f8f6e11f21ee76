"""The data loader and its executors."""

from __future__ import annotations

from penstock.loader.dataloader import DataLoader

__all__ = ["DataLoader"]
