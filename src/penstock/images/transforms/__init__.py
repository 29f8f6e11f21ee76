"""Image transforms: `Compose` and its steps. Import from here; each module documents its guarantees.

    chain = Compose([RandomResizedCrop(224), HorizontalFlip(), ToTensor(torch.bfloat16), Normalize(MEAN, STD)])
    dataset = ImageDataset("train.txt", transform=chain)         # or the list alone

Names, arguments and defaults are torchvision's if it has the transform: `HorizontalFlip`, `VerticalFlip`, `Rotate` and
`TrivialAugment` have its names, too. Penstock's transforms draw only from `penstock.generator()`. Before `ToTensor`,
steps work on uint8 images (height, width, 3), RGB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.images.transforms.base import Transform
from penstock.images.transforms.colour import ColorJitter
from penstock.images.transforms.compose import Compose
from penstock.images.transforms.erasing import CoarseDropout, RandomErasing
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
from penstock.images.transforms.policies import AutoAugment, RandAugment, TrivialAugment
from penstock.images.transforms.rotation import Rotate
from penstock.images.transforms.tensors import Normalize, ToTensor
from penstock.lazy import missing

__all__ = [
    "AutoAugment",
    "CenterCrop",
    "CoarseDropout",
    "ColorJitter",
    "Compose",
    "CutMix",
    "HorizontalFlip",
    "MixUp",
    "Normalize",
    "RandAugment",
    "RandomCrop",
    "RandomErasing",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomVerticalFlip",
    "Resize",
    "Rotate",
    "SquarePad",
    "ToTensor",
    "Transform",
    "TrivialAugment",
    "TrivialAugmentWide",
    "VerticalFlip",
]

# torchvision's names.
RandomHorizontalFlip = HorizontalFlip
RandomVerticalFlip = VerticalFlip
RandomRotation = Rotate
TrivialAugmentWide = TrivialAugment

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        from penstock.images.transforms.torchvision_names import instead_of

        instead = instead_of(name)
        hint = "" if instead is None else f"; {instead}"
        raise missing(AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}"))
