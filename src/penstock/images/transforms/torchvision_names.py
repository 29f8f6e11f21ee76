"""Names of torchvision that Penstock's transforms do not have, and what to use instead."""

from __future__ import annotations

__all__ = ["instead_of"]

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
_OTHERS = frozenset(
    {"AugMix", "ElasticTransform", "FiveCrop", "GaussianBlur", "GaussianNoise", "Grayscale", "JPEG", "RGB"}
    | {"LinearTransformation", "RandomAdjustSharpness", "RandomAffine", "RandomApply", "RandomAutocontrast"}
    | {"RandomChannelPermutation", "RandomChoice", "RandomEqualize", "RandomGrayscale", "RandomInvert"}
    | {"RandomIoUCrop", "RandomOrder", "RandomPerspective", "RandomPhotometricDistort", "RandomPosterize"}
    | {"RandomResize", "RandomShortestSize", "RandomSolarize", "RandomZoomOut", "ScaleJitter", "TenCrop"}
)


def instead_of(name: str) -> str | None:
    """Return what to use instead of a transform of torchvision; None for any other name."""
    if name in _OTHERS:
        return f"put torchvision's in the chain: Compose([..., torchvision.transforms.v2.{name}(...), ...])"
    return _INSTEAD.get(name)
