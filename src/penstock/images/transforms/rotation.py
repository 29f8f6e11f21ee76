"""`Rotate`: turns an image around its centre."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.images.transforms.base import Transform, bernoulli, check_probability, check_range
from penstock.images.transforms.border import check_fill
from penstock.images.transforms.canvas import Canvas
from penstock.images.transforms.geometric import check_filter
from penstock.random import generator

__all__ = ["Rotate", "matrix_around", "rotation"]


def matrix_around(x: float, y: float, linear: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return a linear map (2, 2) as the matrix (2, 3) for `Canvas.warp` that leaves a point where it is."""
    linear = np.asarray(linear, np.float64)
    return np.column_stack([linear, np.array([x, y]) - linear @ (x, y)])


def rotation(degrees: float, height: int, width: int) -> npt.NDArray[np.float64]:
    """Return the matrix for `Canvas.warp` that turns an image counterclockwise around its centre."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return matrix_around((width - 1) / 2, (height - 1) / 2, [[cos, -sin], [sin, cos]])


class Rotate(Transform):
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
        self.interpolation = check_filter(interpolation)
        self.fill = check_fill(fill)
        self.p = check_probability(p)

    def apply(self, canvas: Canvas) -> None:
        if self.p < 1 and not bernoulli(self.p):
            return
        matrix = rotation(generator().uniform(*self.degrees), *canvas.size)
        canvas.warp(matrix, interpolation=self.interpolation, fill=self.fill)
