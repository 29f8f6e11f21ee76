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
    SquarePad,
    VerticalFlip,
)
from penstock.images.transforms.mixing import CutMix, MixUp
from penstock.images.transforms.policies import AutoAugment, RandAugment, Rotate, TrivialAugment
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

# Torchvision's names that are missing here: what to use instead, and those to take from torchvision.
_TENSOR = "images are arrays until ToTensor(dtype), which is ToImage() and ToDtype(dtype, scale=True)"
_INSTEAD = {
    "AutoAugmentPolicy": "policy= takes 'imagenet', 'cifar10' or 'svhn'",
    "ConvertImageDtype": _TENSOR,
    "InterpolationMode": "interpolation= takes 'nearest', 'bilinear' or 'bicubic'",
    "Lambda": "a chain takes the function itself",
    "PILToTensor": _TENSOR,
    "Pad": "SquarePad pads to a square, RandomCrop(size, padding=) before a crop; or put torchvision's in the chain",
    "ToDtype": _TENSOR,
    "ToImage": _TENSOR,
    "ToPILImage": _TENSOR,
    "ToPureTensor": _TENSOR,
}
_OTHERS = """
    AugMix ElasticTransform FiveCrop GaussianBlur GaussianNoise Grayscale JPEG LinearTransformation
    RandomAdjustSharpness RandomAffine RandomApply RandomAutocontrast RandomChannelPermutation RandomChoice
    RandomEqualize RandomGrayscale RandomInvert RandomIoUCrop RandomOrder RandomPerspective RandomPhotometricDistort
    RandomPosterize RandomResize RandomShortestSize RandomSolarize RandomZoomOut RGB ScaleJitter TenCrop
"""

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        hint = ""
        if name in _INSTEAD:
            hint = f"; {_INSTEAD[name]}"
        elif name in _OTHERS.split():
            hint = f"; put torchvision's in the chain: Compose([..., torchvision.transforms.v2.{name}(...), ...])"
        raise missing(AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}"))
