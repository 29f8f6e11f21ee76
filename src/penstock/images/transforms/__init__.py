"""Transforms of images: `Compose` and its steps. Import from here; what each promises stands in its module."""

from __future__ import annotations

from penstock.images.transforms.base import Transform
from penstock.images.transforms.colour import ColorJitter
from penstock.images.transforms.compose import Compose
from penstock.images.transforms.erasing import RandomErasing
from penstock.images.transforms.geometric import (
    CenterCrop,
    HorizontalFlip,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    VerticalFlip,
)
from penstock.images.transforms.mixing import CutMix, MixUp
from penstock.images.transforms.padding import SquarePad
from penstock.images.transforms.tensors import Normalize, ToTensor

__all__ = [
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "CutMix",
    "HorizontalFlip",
    "MixUp",
    "Normalize",
    "RandomCrop",
    "RandomErasing",
    "RandomResizedCrop",
    "Resize",
    "SquarePad",
    "ToTensor",
    "Transform",
    "VerticalFlip",
]
