"""Random operations, as in torchvision: `Rotate`, and the policies `RandAugment`, `TrivialAugment` and `AutoAugment`.

The policies' operations and strengths are those of the papers (Cubuk et al. 2019 and 2020, Müller and Hutter 2021).
They use OpenCV's look-ups and warps. Geometric operations apply to masks and boxes, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.images.transforms.base import Transform, bernoulli, check_fill, check_probability, check_range
from penstock.images.transforms.canvas import Canvas
from penstock.images.transforms.colour import COLOURS, bytes_of
from penstock.images.transforms.geometric import check_filter
from penstock.random import generator

__all__ = ["AutoAugment", "RandAugment", "Rotate", "TrivialAugment"]


def _around(x: float, y: float, linear: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return a linear map (2, 2) as the matrix (2, 3) for `Canvas.warp` that leaves a point where it is."""
    linear = np.asarray(linear, np.float64)
    return np.column_stack([linear, np.array([x, y]) - linear @ (x, y)])


def _rotation(degrees: float, height: int, width: int) -> npt.NDArray[np.float64]:
    """Return the matrix for `Canvas.warp` that turns an image counterclockwise around its centre."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return _around((width - 1) / 2, (height - 1) / 2, [[cos, -sin], [sin, cos]])


_MOVES: dict[str, Callable[[float, int, int], npt.NDArray[Any]]] = {
    "shearx": lambda value, *_: _around(-0.5, -0.5, [[1, value], [0, 1]]),
    "sheary": lambda value, *_: _around(-0.5, -0.5, [[1, 0], [value, 1]]),
    "translatex": lambda value, *_: np.array([[1, 0, -value], [0, 1, 0.0]]),
    "translatey": lambda value, *_: np.array([[1, 0, 0.0], [0, 1, -value]]),
    "rotate": _rotation,
}
"""Matrices for `Canvas.warp` by name, from value, height and width. Shears keep the upper left corner."""
_COMMON = ("identity", *_MOVES, *COLOURS)[:-1]  # "invert" is in AutoAugment only
_SIGNED = frozenset({*_MOVES, "brightness", "color", "contrast", "sharpness"})
_STRONGEST = {"shearx": (0.3, 0.99), "sheary": (0.3, 0.99), "rotate": (30, 135), "posterize": (4, 6)}
"""Largest strengths: of RandAugment and AutoAugment, and of TrivialAugment. All others are 0.9 and 0.99."""

_POLICIES = """
imagenet                           | cifar10                            | svhn
posterize 0.4 8, rotate 0.6 9      | invert 0.1 -, contrast 0.2 6       | shearx 0.9 4, invert 0.2 -
solarize 0.6 5, autocontrast 0.6 - | rotate 0.7 2, translatex 0.3 9     | sheary 0.9 8, invert 0.7 -
equalize 0.8 -, equalize 0.6 -     | sharpness 0.8 1, sharpness 0.9 3   | equalize 0.6 -, solarize 0.6 6
posterize 0.6 7, posterize 0.6 6   | sheary 0.5 8, translatey 0.7 9     | invert 0.9 -, equalize 0.6 -
equalize 0.4 -, solarize 0.2 4     | autocontrast 0.5 -, equalize 0.9 - | equalize 0.6 -, rotate 0.9 3
equalize 0.4 -, rotate 0.8 8       | sheary 0.2 7, posterize 0.3 7      | shearx 0.9 4, autocontrast 0.8 -
solarize 0.6 3, equalize 0.6 -     | color 0.4 3, brightness 0.6 7      | sheary 0.9 8, invert 0.4 -
posterize 0.8 5, equalize 1.0 -    | sharpness 0.3 9, brightness 0.7 9  | sheary 0.9 5, solarize 0.2 6
rotate 0.2 3, solarize 0.6 8       | equalize 0.6 -, equalize 0.5 -     | invert 0.9 -, autocontrast 0.8 -
equalize 0.6 -, posterize 0.4 6    | contrast 0.6 7, sharpness 0.6 5    | equalize 0.6 -, rotate 0.9 3
rotate 0.8 8, color 0.4 0          | color 0.7 7, translatex 0.5 8      | shearx 0.9 4, solarize 0.3 3
rotate 0.4 9, equalize 0.6 -       | equalize 0.3 -, autocontrast 0.4 - | sheary 0.8 8, invert 0.7 -
equalize 0.0 -, equalize 0.8 -     | translatey 0.4 3, sharpness 0.2 6  | equalize 0.9 -, translatey 0.6 6
invert 0.6 -, equalize 1.0 -       | brightness 0.9 6, color 0.2 8      | invert 0.9 -, equalize 0.6 -
color 0.6 4, contrast 1.0 8        | solarize 0.5 2, invert 0.0 -       | contrast 0.3 3, rotate 0.8 4
rotate 0.8 8, color 1.0 2          | equalize 0.2 -, autocontrast 0.6 - | invert 0.8 -, translatey 0.0 2
color 0.8 8, solarize 0.8 7        | equalize 0.2 -, equalize 0.6 -     | sheary 0.7 6, solarize 0.4 8
sharpness 0.4 7, invert 0.6 -      | color 0.9 9, equalize 0.6 -        | invert 0.6 -, rotate 0.8 4
shearx 0.6 5, equalize 1.0 -       | autocontrast 0.8 -, solarize 0.2 8 | sheary 0.3 7, translatex 0.9 3
color 0.4 0, equalize 0.6 -        | brightness 0.1 3, color 0.7 0      | shearx 0.1 6, invert 0.6 -
equalize 0.4 -, solarize 0.2 4     | solarize 0.4 5, autocontrast 0.9 - | solarize 0.7 2, translatey 0.6 7
solarize 0.6 5, autocontrast 0.6 - | translatey 0.9 9, translatey 0.7 9 | sheary 0.8 4, invert 0.8 -
invert 0.6 -, equalize 1.0 -       | autocontrast 0.9 -, solarize 0.8 3 | shearx 0.7 9, translatey 0.8 3
color 0.6 4, contrast 1.0 8        | equalize 0.8 -, invert 0.1 -       | sheary 0.8 5, autocontrast 0.7 -
equalize 0.8 -, equalize 0.6 -     | translatey 0.7 9, autocontrast 0.9 - | shearx 0.7 2, invert 0.1 -
"""
"""AutoAugment's pairs of operations (arXiv 1805.09501, appendix), each with a probability and a strength of 0 to 9.

The paper lists strengths even for operations without one (``-``); they have no effect, as in torchvision.
"""


class _Operations(Transform):
    """Base class of steps that apply operations by name."""

    _wide = False

    def __init__(self, interpolation: Any, fill: float | Sequence[float] | None) -> None:
        self.interpolation = check_filter(interpolation)
        self.fill = check_fill(fill)

    def _operate(self, canvas: Canvas, name: str, value: float) -> None:
        """Apply an operation with a strength in its own unit: pixels, degrees, bits, or a change of the factor."""
        if name in _MOVES:
            matrix = _MOVES[name](value, *canvas.size)
            canvas.warp(matrix, interpolation=self.interpolation, fill=self.fill)
        elif name != "identity":
            canvas.pixels = COLOURS[name](bytes_of(canvas, name), value)

    def _operate_share(self, canvas: Canvas, name: str, share: float) -> None:
        """Apply an operation with a share, 0 to 1, of its largest strength."""
        strongest = _STRONGEST.get(name, (0.9, 0.99))[self._wide]
        if name == "posterize":
            value = float(8 - round(strongest * share))
        elif name == "solarize":
            value = 255 * (1 - share)
        elif name in ("translatex", "translatey"):
            side = canvas.size[1 if name == "translatex" else 0]
            value = float(int((32 if self._wide else 150 / 331 * side) * share))
        else:
            value = strongest * share
        if name in _SIGNED and generator().random() < 0.5:
            value = -value
        self._operate(canvas, name, value)


class Rotate(_Operations):
    """Rotate the image around its centre and keep its size, as torchvision's RandomRotation.

    Args:
        degrees: the counterclockwise angle is drawn from ``(-degrees, degrees)``, or from ``(min, max)``.
        interpolation: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``, or torchvision's InterpolationMode.
        expand: must be False: images keep their size.
        center: must be None: the centre of the image.
        fill: value of pixels from outside, or one per channel. It is zero for masks.
        p: probability of the rotation.

    Raises:
        ConfigError: `degrees` is negative, `expand` or `center` is given, the filter is unknown, or `p` is not a
            probability.
    """

    def __init__(
        self,
        degrees: float | Sequence[float],
        interpolation: Any = "nearest",
        expand: bool = False,
        center: Sequence[float] | None = None,
        fill: float | Sequence[float] | None = 0,
        p: float = 1.0,
    ) -> None:
        if expand or center is not None:
            raise ConfigError(
                f"expand={expand!r}, center={center!r}: Rotate turns around the centre and keeps the size; "
                "use torchvision's RandomRotation in the chain for other options"
            )
        self.degrees = check_range(degrees, "degrees")
        super().__init__(interpolation, fill)
        self.p = check_probability(p)

    def apply(self, canvas: Canvas) -> None:
        if self.p < 1 and not bernoulli(self.p):
            return
        self._operate(canvas, "rotate", generator().uniform(*self.degrees))


class RandAugment(_Operations):
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
            self._operate_share(canvas, name, self.magnitude / (self.num_magnitude_bins - 1))


class TrivialAugment(_Operations):
    """Apply one random operation, out of 14, of random strength; torchvision's TrivialAugmentWide.

    Args:
        num_magnitude_bins: number of strengths.
        interpolation, fill: filter and fill value of geometric operations.

    Raises:
        ConfigError: less than two strengths, or an unknown filter; (when called) the pixels are not uint8.
    """

    _wide = True

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
        self._operate_share(canvas, name, share)


class AutoAugment(_Operations):
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
        names, *pairs = ([part.strip() for part in line.split("|")] for line in _POLICIES.strip().splitlines())
        if self.policy not in names:
            raise ConfigError(f"policy must be one of {', '.join(map(repr, names))}, not {policy!r}")
        super().__init__(interpolation, fill)
        self._pairs = [pair[names.index(self.policy)].split(", ") for pair in pairs]

    def apply(self, canvas: Canvas) -> None:
        for step in self._pairs[int(generator().integers(len(self._pairs)))]:
            name, probability, strength = step.split()
            if generator().random() < float(probability):
                self._operate_share(canvas, name, 0.0 if strength == "-" else int(strength) / 9)
