"""Transforms of images: `Compose` and its steps. Import from here; what each promises stands in its module."""

from __future__ import annotations

from penstock.images.transforms.base import Transform
from penstock.images.transforms.compose import Compose
from penstock.images.transforms.geometric import (
    CenterCrop,
    HorizontalFlip,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    VerticalFlip,
)
from penstock.images.transforms.tensors import Normalize, ToTensor

__all__ = [
    "CenterCrop",
    "Compose",
    "HorizontalFlip",
    "Normalize",
    "RandomCrop",
    "RandomResizedCrop",
    "Resize",
    "ToTensor",
    "Transform",
    "VerticalFlip",
]
