"""Changes of the colours of uint8 RGB images, and `ColorJitter`, which draws four of them, as in torchvision.

Brightness and contrast are look-ups, saturation is a 3 x 3 matrix, hue uses 8-bit HSV as in Pillow. A factor of 1 and a
hue of 0 change nothing, so these operations are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.images.transforms.base import Transform, bernoulli, check_probability, check_range
from penstock.images.transforms.canvas import Canvas
from penstock.images.transforms.view import Pixels
from penstock.random import generator

__all__ = ["COLOURS", "ColorJitter", "brightness", "bytes_of", "contrast", "hue", "saturation"]

_VALUES = np.arange(256, dtype=np.float64)
_GREY = np.array([0.299, 0.587, 0.114])
"""Weights of red, green and blue in luminance (ITU-R BT.601), as in Pillow."""


def look_up(image: Pixels, values: npt.NDArray[np.floating[Any]]) -> Pixels:
    """Replace each byte of an image by its value in a table, rounded and clipped to 0..255; in place.

    The table is (256,), or (256, channels).
    """
    table = np.rint(values).clip(0, 255).astype(np.uint8).reshape(256, 1, -1)
    flat = image[:, :, 0] if image.shape[2] == 1 else image
    cv2.LUT(flat, table, dst=flat)
    return image


def brightness(image: Pixels, factor: float) -> Pixels:
    """Multiply every value by a factor; in place, as the functions below."""
    return look_up(image, _VALUES * factor)


def contrast(image: Pixels, factor: float) -> Pixels:
    """Scale the distance of each value from the image's mean luminance by a factor."""
    grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY) if image.shape[2] == 3 else image[:, :, 0]
    mean = float(np.rint(cv2.mean(grey)[0]))
    return look_up(image, _VALUES * factor + mean * (1 - factor))


def saturation(image: Pixels, factor: float) -> Pixels:
    """Scale the distance of each pixel from grey of the same luminance by a factor. Grey images are unchanged."""
    if image.shape[2] == 3:
        image[:] = cv2.transform(image, np.eye(3) * factor + (1 - factor) * _GREY)
    return image


def hue(image: Pixels, turn: float) -> Pixels:
    """Rotate hues by a share of the circle, -0.5 to 0.5. Grey images are unchanged."""
    if image.shape[2] == 3:
        turned = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)
        table = (np.arange(256) + round(turn * 256)).astype(np.uint8)
        turned[:, :, 0] = cv2.LUT(turned[:, :, 0], table)
        cv2.cvtColor(turned, cv2.COLOR_HSV2RGB_FULL, dst=image)
    return image


def sharpness(image: Pixels, factor: float) -> Pixels:
    """Blend with a smoothed image, or extrapolate from it; the outermost pixels are unchanged."""
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13
    smooth = image.copy()
    inner = cv2.filter2D(image, -1, kernel)
    smooth[1:-1, 1:-1] = inner.reshape(image.shape)[1:-1, 1:-1]
    cv2.addWeighted(image, factor, smooth, 1 - factor, 0, dst=smooth)
    return smooth


def autocontrast(image: Pixels) -> Pixels:
    """Stretch each channel to 0..255."""
    values = np.empty((256, image.shape[2]))
    for channel in range(image.shape[2]):
        low, high, _, _ = cv2.minMaxLoc(image[:, :, channel])
        values[:, channel] = (_VALUES - low) * (255 / (high - low)) if low < high else _VALUES
    return look_up(image, values)


def equalize(image: Pixels) -> Pixels:
    """Equalise the histogram of each channel."""
    values = np.empty((256, image.shape[2]))
    for channel in range(image.shape[2]):
        counts = np.bincount(image[:, :, channel].reshape(-1), minlength=256)
        step = int(counts.sum() - counts[np.flatnonzero(counts)[-1]]) // 255
        below = np.cumsum(counts) - counts
        values[:, channel] = np.floor((below + step // 2) / step) if step else _VALUES
    return look_up(image, values)


COLOURS: dict[str, Callable[[Pixels, float], Pixels]] = {
    "brightness": lambda image, change: brightness(image, 1 + change),
    "color": lambda image, change: saturation(image, 1 + change),
    "contrast": lambda image, change: contrast(image, 1 + change),
    "sharpness": lambda image, change: sharpness(image, 1 + change),
    "posterize": lambda image, bits: look_up(image, np.floor(_VALUES / 2 ** (8 - bits)) * 2 ** (8 - bits)),
    "solarize": lambda image, level: look_up(image, np.where(level <= _VALUES, 255 - _VALUES, _VALUES)),
    "autocontrast": lambda image, _: autocontrast(image),
    "equalize": lambda image, _: equalize(image),
    "invert": lambda image, _: look_up(image, 255 - _VALUES),
}
"""The colour operations of policies, by the names of their papers; the value is a change, bits, a level or ignored."""


def bytes_of(canvas: Canvas, name: str) -> Pixels:
    """Return the uint8 pixels of a canvas, which may be changed in place.

    Raises:
        ConfigError: the pixels are no longer uint8.
    """
    conversion = canvas.conversion
    if canvas.after or (conversion is not None and conversion.mean) or canvas.pixels.dtype != np.uint8:
        raise ConfigError(f"{name} needs uint8 images: put it before Normalize, and before steps that return floats")
    return canvas.pixels


class ColorJitter(Transform):
    """Change brightness, contrast, saturation and hue randomly, in random order.

    Args:
        brightness, contrast, saturation: the factor is drawn from ``[max(0, 1 - value), 1 + value]``, or from
            ``(min, max)``; None: no change.
        hue: the rotation is drawn from ``[-value, value]``, at most 0.5, or from ``(min, max)``; None: no change.
        p: probability of a change.

    Raises:
        ConfigError: a number is negative or out of range, or `p` is not a probability; (when called) the pixels are not
            uint8: put this step before `Normalize`, and before steps that return floats.
    """

    def __init__(
        self,
        brightness: float | Sequence[float] | None = None,
        contrast: float | Sequence[float] | None = None,
        saturation: float | Sequence[float] | None = None,
        hue: float | Sequence[float] | None = None,
        p: float = 1.0,
    ) -> None:
        self.brightness = self._factors(brightness, "brightness")
        self.contrast = self._factors(contrast, "contrast")
        self.saturation = self._factors(saturation, "saturation")
        self.hue = check_range(0 if hue is None else hue, "hue", least=-0.5, most=0.5)
        self.p = check_probability(p)

    @staticmethod
    def _factors(value: float | Sequence[float] | None, name: str) -> tuple[float, float]:
        return check_range(0 if value is None else value, name, centre=1, least=0)

    def apply(self, canvas: Canvas) -> None:
        if self.p < 1 and not bernoulli(self.p):
            return
        rng = generator()
        order = rng.permutation(4)
        parts = rng.random(4)  # always all, so that draws do not depend on settings
        steps = (
            (brightness, *self.brightness, 1),
            (contrast, *self.contrast, 1),
            (saturation, *self.saturation, 1),
            (hue, *self.hue, 0),
        )
        if all(low == high == neutral for _, low, high, neutral in steps):
            return
        image = bytes_of(canvas, "ColorJitter")
        for number in order:
            change, low, high, neutral = steps[number]
            value = low + (high - low) * parts[number]
            if value != neutral:
                image = change(image, value)
        canvas.pixels = image
