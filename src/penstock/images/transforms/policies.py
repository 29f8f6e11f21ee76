"""`RandAugment`, `TrivialAugment` and `AutoAugment`: random operations of random strength, as in torchvision.

Operations and strengths are those of the papers (Cubuk et al. 2019 and 2020, Müller and Hutter 2021). They use OpenCV's
look-ups and warps, because albumentations has no such policies. Images are uint8; three channels are RGB. Geometric
operations apply to masks and boxes, too. Draws come from `penstock.generator()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.images.transforms.base import Transform
from penstock.images.transforms.border import check_fill
from penstock.images.transforms.canvas import Canvas
from penstock.images.transforms.colour import brightness, bytes_of, contrast, look_up, saturation
from penstock.images.transforms.geometric import check_filter
from penstock.images.transforms.rotation import matrix_around, rotation
from penstock.images.transforms.tables import POLICIES, pairs_of
from penstock.images.transforms.view import Filter, Pixels
from penstock.random import generator

__all__ = ["AutoAugment", "RandAugment", "TrivialAugment"]

_LEVELS = np.arange(256, dtype=np.float64)
_SIGNED = frozenset({"shearx", "sheary", "translatex", "translatey", "rotate"} | {"brightness", "color", "contrast"})
_COMMON = (
    *("identity", "shearx", "sheary", "translatex", "translatey", "rotate", "brightness", "color", "contrast"),
    *("sharpness", "posterize", "solarize", "autocontrast", "equalize"),
)


def sharpness(image: Pixels, factor: float) -> Pixels:
    """Blend with a smoothed image, or extrapolate from it; the outermost pixels are unchanged."""
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13
    smooth = image.copy()
    inner = cv2.filter2D(image, -1, kernel)
    smooth[1:-1, 1:-1] = inner.reshape(image.shape)[1:-1, 1:-1]
    cv2.addWeighted(image, factor, smooth, 1 - factor, 0, dst=smooth)
    return smooth


def autocontrast(image: Pixels, _: float) -> Pixels:
    """Stretch each channel to 0..255."""
    for channel in range(image.shape[2]):
        plane = image[:, :, channel : channel + 1]
        low, high = int(plane.min()), int(plane.max())
        if low < high:
            image[:, :, channel] = look_up(plane.copy(), (_LEVELS - low) * (255 / (high - low)))[:, :, 0]
    return image


def equalize(image: Pixels, _: float) -> Pixels:
    """Equalise the histogram of each channel."""
    for channel in range(image.shape[2]):
        plane = np.ascontiguousarray(image[:, :, channel : channel + 1])
        counts = np.bincount(plane.reshape(-1), minlength=256)
        step = int(counts.sum() - counts[np.flatnonzero(counts)[-1]]) // 255
        if step:
            below = np.cumsum(counts) - counts
            image[:, :, channel] = look_up(plane, np.floor((below + step // 2) / step))[:, :, 0]
    return image


_PIXELS: dict[str, Callable[[Pixels, float], Pixels]] = {
    "identity": lambda image, _: image,
    "brightness": lambda image, change: brightness(image, 1 + change),
    "color": lambda image, change: saturation(image, 1 + change),
    "contrast": lambda image, change: contrast(image, 1 + change),
    "sharpness": lambda image, change: sharpness(image, 1 + change),
    "posterize": lambda image, bits: look_up(image, np.floor(_LEVELS / 2 ** (8 - bits)) * 2 ** (8 - bits)),
    "solarize": lambda image, level: look_up(image, np.where(level <= _LEVELS, 255 - _LEVELS, _LEVELS)),
    "autocontrast": autocontrast,
    "equalize": equalize,
    "invert": lambda image, _: look_up(image, 255 - _LEVELS),
}


_MOVES: dict[str, Callable[[float, int, int], npt.NDArray[Any]]] = {
    "shearx": lambda value, *_: matrix_around(-0.5, -0.5, [[1, value], [0, 1]]),
    "sheary": lambda value, *_: matrix_around(-0.5, -0.5, [[1, 0], [value, 1]]),
    "translatex": lambda value, *_: np.array([[1, 0, -value], [0, 1, 0.0]]),
    "translatey": lambda value, *_: np.array([[1, 0, 0.0], [0, 1, -value]]),
    "rotate": rotation,
}
"""Matrices for `Canvas.warp` by name, from value, height and width. Shears keep the upper left corner."""


def apply_operation(canvas: Canvas, name: str, value: float, *, interpolation: Filter, fill: Any) -> None:
    """Apply an operation by name, with a strength in its own unit: pixels, degrees, bits, or a change of the factor.

    Raises:
        ConfigError: the operation changes colours and the pixels are not uint8.
    """
    if name in _MOVES:
        canvas.warp(_MOVES[name](value, *canvas.size), interpolation=interpolation, fill=fill)
    elif name != "identity":
        canvas.pixels = _PIXELS[name](bytes_of(canvas, name), value)


class _Policy(Transform):
    def __init__(self, interpolation: Any, fill: float | Sequence[float] | None) -> None:
        self.interpolation = check_filter(interpolation)
        self.fill = check_fill(fill)

    def _do(self, canvas: Canvas, name: str, share: float, *, wide: bool = False) -> None:
        """Apply an operation with a strength between 0 and 1."""
        height, width = canvas.size
        strongest = {
            "shearx": 0.99 if wide else 0.3,
            "sheary": 0.99 if wide else 0.3,
            "translatex": 32 if wide else 150 / 331 * width,
            "translatey": 32 if wide else 150 / 331 * height,
            "rotate": 135 if wide else 30,
        }
        if name == "posterize":
            value = float(8 - round((6 if wide else 4) * share))
        elif name == "solarize":
            value = 255 * (1 - share)
        else:
            value = strongest.get(name, 0.99 if wide else 0.9) * share
            if name.startswith("translate"):
                value = float(int(value))
        if (name in _SIGNED or name == "sharpness") and generator().random() < 0.5:
            value = -value
        apply_operation(canvas, name, value, interpolation=self.interpolation, fill=self.fill)


class RandAugment(_Policy):
    """Apply several random operations, out of 14, of the same strength.

    Args:
        num_ops: number of operations.
        magnitude: their strength, from 0 to below `num_magnitude_bins`.
        num_magnitude_bins: number of strengths.
        interpolation, fill: filter and fill value of geometric operations.

    Raises:
        ConfigError: a number is negative or too large, or the filter is unknown; (when called) the pixels are not
            uint8.
    """

    def __init__(
        self,
        num_ops: int = 2,
        magnitude: int = 9,
        num_magnitude_bins: int = 31,
        interpolation: Any = "nearest",
        fill: float | Sequence[float] | None = None,
    ) -> None:
        if num_ops < 0 or not 0 <= magnitude < num_magnitude_bins or num_magnitude_bins < 2:
            raise ConfigError(f"num_ops={num_ops}, magnitude={magnitude}: 0 <= magnitude < {num_magnitude_bins}")
        super().__init__(interpolation, fill)
        self.num_ops, self.magnitude, self.num_magnitude_bins = num_ops, magnitude, num_magnitude_bins

    def apply(self, canvas: Canvas) -> None:
        for _ in range(self.num_ops):
            name = _COMMON[int(generator().integers(len(_COMMON)))]
            self._do(canvas, name, self.magnitude / (self.num_magnitude_bins - 1))


class TrivialAugment(_Policy):
    """Apply one random operation, out of 14, of random strength; torchvision's TrivialAugmentWide.

    Args:
        num_magnitude_bins: number of strengths.
        interpolation, fill: filter and fill value of geometric operations.

    Raises:
        ConfigError: less than two strengths, or an unknown filter; (when called) the pixels are not uint8.
    """

    def __init__(
        self,
        num_magnitude_bins: int = 31,
        interpolation: Any = "nearest",
        fill: float | Sequence[float] | None = None,
    ) -> None:
        if num_magnitude_bins < 2:
            raise ConfigError(f"num_magnitude_bins must be at least 2, got {num_magnitude_bins}")
        super().__init__(interpolation, fill)
        self.num_magnitude_bins = num_magnitude_bins

    def apply(self, canvas: Canvas) -> None:
        name = _COMMON[int(generator().integers(len(_COMMON)))]
        share = int(generator().integers(self.num_magnitude_bins)) / (self.num_magnitude_bins - 1)
        self._do(canvas, name, share, wide=True)


class AutoAugment(_Policy):
    """Apply a random pair of operations from a dataset's policy of 25 pairs.

    Args:
        policy: dataset of the policy: ``"imagenet"``, ``"cifar10"`` or ``"svhn"``, or torchvision's AutoAugmentPolicy.
        interpolation, fill: filter and fill value of geometric operations.

    Raises:
        ConfigError: another policy, or an unknown filter; (when called) the pixels are not uint8.
    """

    def __init__(
        self,
        policy: Any = "imagenet",
        interpolation: Any = "nearest",
        fill: float | Sequence[float] | None = None,
    ) -> None:
        self.policy = getattr(policy, "value", policy)
        if not isinstance(self.policy, str) or self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(map(repr, POLICIES))}, not {policy!r}")
        super().__init__(interpolation, fill)
        self._pairs = pairs_of(self.policy)

    def apply(self, canvas: Canvas) -> None:
        pair = self._pairs[int(generator().integers(len(self._pairs)))]
        for name, probability, share in pair:
            if generator().random() < probability:
                self._do(canvas, name, share)
