"""Torch's classes under the name of the module that programs import."""

from __future__ import annotations

from torch import Tensor as TorchTensor
from torch.utils.data import DataLoader, IterableDataset

__all__ = ["DataLoader", "IterableDataset", "TorchTensor"]
