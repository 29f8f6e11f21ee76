"""`Transform`, the base class of all steps, and helpers that steps share."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.images.transforms.batch import Batch
from penstock.images.transforms.canvas import ArraySource, Canvas
from penstock.images.transforms.output import Form
from penstock.images.transforms.targets import open_targets
from penstock.images.transforms.view import Fill
from penstock.random import generator

__all__ = [
    "Size",
    "Transform",
    "bernoulli",
    "check_bool",
    "check_fill",
    "check_probability",
    "check_range",
    "check_size",
]

Size = int | tuple[int, int] | list[int]
_MOST = 1 << 31  # OpenCV converts fill values to 32-bit integers first


def check_size(size: Any, name: str = "size") -> tuple[int, int]:
    """Return (height, width) from one int for both, or from two.

    Raises:
        ConfigError: another value, or not positive.
    """
    given = tuple(size) if isinstance(size, list | tuple) else (size,)
    try:
        values = [operator.index(value) for value in (given * 2 if len(given) == 1 else given)]
    except TypeError:
        values = []
    if len(values) != 2 or min(values) < 1 or isinstance(size, bool):
        raise ConfigError(f"{name} must be a positive int or (height, width), got {size!r}")
    return values[0], values[1]


def check_fill(fill: Any) -> Fill:
    """Check and return the value of new pixels: a number for all channels, or one per channel; None is 0.

    Raises:
        ConfigError: another value, such as torchvision's dict of types.
    """
    if fill is None:
        return 0
    values = tuple(fill) if isinstance(fill, list | tuple) else (fill,)
    if not 1 <= len(values) <= 4 or not all(isinstance(value, Real) and abs(float(value)) < _MOST for value in values):
        raise ConfigError(f"fill must be a number, or one for each channel, not {fill!r}")
    numbers = tuple(value if isinstance(value, int) else float(value) for value in values)
    return numbers[0] if len(numbers) == 1 else numbers


def check_probability(p: float) -> float:
    """Check and return a probability.

    Raises:
        ConfigError: it is not between 0 and 1.
    """
    if not 0 <= p <= 1:
        raise ConfigError(f"p must be a probability, between 0 and 1, not {p!r}")
    return float(p)


def check_bool(value: Any, name: str) -> bool:
    """Check and return a bool.

    Raises:
        ConfigError: it is not a bool.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {value!r}")
    return value


def check_range(
    value: float | Sequence[float], name: str, *, centre: float = 0, least: float = -math.inf, most: float = math.inf
) -> tuple[float, float]:
    """Return (min, max) for a number to draw, given so, or as the largest distance from the centre.

    Raises:
        ConfigError: a negative distance, or not two numbers in this order between `least` and `most`.
    """
    ends = tuple(value) if isinstance(value, Sequence) else (max(least, centre - value), centre + value)
    if len(ends) != 2 or not least <= ends[0] <= ends[1] <= most:
        limits = "" if math.isinf(least) else f" from {least:g} to {most:g}"
        raise ConfigError(f"{name} must be one number of 0 or more, or (min, max){limits}, not {value!r}")
    return float(ends[0]), float(ends[1])


class Transform:
    """One step of a chain, which can also be called alone. Subclasses define ``apply`` and ``leaves``.

    Your own steps need not be subclasses: a chain accepts any callable, see `external`.

    >>> HorizontalFlip(p=1)(np.array([[[1], [2]]], np.uint8)).tolist()      # doctest: +SKIP
    [[[2], [1]]]
    """

    pure: bool = True
    """Whether it draws only from `penstock.generator()`, and may be used by several threads at once."""

    def apply(self, canvas: Canvas) -> None:
        """Change the image on the canvas, with its masks and boxes."""
        raise NotImplementedError

    draws: int | None = None
    """The most random numbers that ``plan`` draws for an image; None for steps without ``plan``."""

    def plan(self, batch: Batch) -> None:
        """Change several images as ``apply`` changes one. It counts only in the class that defines ``apply``."""
        raise NotImplementedError

    def leaves(self, form: Form) -> Form:
        """Return the known properties of images after this step, given those before it.

        Raises:
            ConfigError: the step is not possible at this position of a chain.
        """
        return form

    def __call__(self, image: Any, target: Mapping[str, Any] | None = None) -> Any:
        """Transform one image.

        Args:
            image: uint8 (height, width, channels) or (height, width), RGB; or a tensor (channels, height, width); or an
                object with the array interface, such as a Pillow image.
            target: a dict with ``masks`` or ``boxes`` of the image (see `targets`), and any other entries.

        Returns:
            An array like the given one; or a tensor (channels, height, width) if a tensor was given or after
            `ToTensor`. With a target, a tuple with the target, changed in the same way.

        Raises:
            ConfigError: an image with another number of dimensions, or a step that cannot be used alone.
        """
        self.leaves(Form())
        is_tensor = isinstance(image, torch.Tensor)
        pixels = np.asarray(image.permute(1, 2, 0).numpy() if is_tensor and image.ndim == 3 else image)
        flat = pixels.ndim == 2
        if flat:
            pixels = pixels[:, :, None]
        if pixels.ndim != 3:
            raise ConfigError(f"an image must have the shape (height, width, channels), not {pixels.shape}")
        source = ArraySource(np.ascontiguousarray(pixels))
        canvas = Canvas(source, open_targets({} if target is None else target, source.size))
        self.apply(canvas)
        made: Any
        if is_tensor or canvas.conversion is not None:
            made = canvas.tensor
        else:
            made = canvas.pixels[:, :, 0] if flat and canvas.pixels.shape[2] == 1 else canvas.pixels
        if target is None:
            return made
        return made, dict(target) if canvas.targets is None else canvas.targets.close()

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({values})"


def bernoulli(p: float) -> bool:
    """Return True with probability `p`. Always one draw, so that later draws do not depend on `p`."""
    return bool(generator().random() < p)
