"""`Transform`, what every step of a chain is, and what steps share."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from penstock.errors import ConfigError
from penstock.images.transforms.canvas import Canvas
from penstock.images.transforms.output import Form
from penstock.images.transforms.single import transform_image
from penstock.random import generator

__all__ = ["Size", "Transform", "chance", "draws", "pair", "switch"]

Size = int | tuple[int, int] | list[int]


def pair(size: Any, name: str = "size") -> tuple[int, int]:
    """(height, width) from one number for both, or from two.

    Raises:
        ConfigError: it is neither, or not positive.
    """
    given = tuple(size) if isinstance(size, list | tuple) else (size,)
    try:
        values = [operator.index(value) for value in (given * 2 if len(given) == 1 else given)]
    except TypeError:
        values = []
    if len(values) != 2 or min(values) < 1:
        raise ConfigError(f"{name} must be positive, (height, width) or one int, got {size!r}")
    return values[0], values[1]


def chance(p: float) -> float:
    """A probability.

    Raises:
        ConfigError: it is none.
    """
    if not 0 <= p <= 1:
        raise ConfigError(f"p is a probability, between 0 and 1, not {p!r}")
    return float(p)


def switch(value: Any, name: str) -> bool:
    """True or False.

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is True or False, not {value!r}")
    return value


class Transform:
    """One step of a chain, and by itself a chain of one. Subclasses define ``apply`` and say what they leave.

    A step of your own need not be one: any callable can stand in a chain, see `foreign`.

    >>> HorizontalFlip(p=1)(np.array([[[1], [2]]], np.uint8)).tolist()      # doctest: +SKIP
    [[[2], [1]]]
    """

    pure: bool = True
    """Whether it draws from `penstock.generator()` alone, and may be used by several threads at once."""

    def apply(self, canvas: Canvas) -> None:
        """Change the image on the canvas, and what belongs to it."""
        raise NotImplementedError

    def leaves(self, form: Form) -> Form:
        """What is known of every image afterwards, from what was known before.

        Raises:
            ConfigError: it makes no sense at this place of a chain.
        """
        return form

    def __call__(self, image: Any, target: Mapping[str, Any] | None = None) -> Any:
        """Transform one image by hand.

        Args:
            image: uint8 (height, width, channels) or (height, width), RGB; or a tensor (channels, height, width); or an
                object with an array, such as an image of Pillow.
            target: a dict with ``masks`` or ``boxes`` that belong to the image (see `targets`), and anything else.

        Returns:
            An array like the given one, or a tensor (channels, height, width) where a tensor was given, and after
            `ToTensor`; with a target also that, changed in the same way.

        Raises:
            ConfigError: an image of another number of dimensions, or a step that makes no sense by itself.
        """
        self.leaves(Form())
        return transform_image(self.apply, image, target)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({values})"


def draws(p: float) -> bool:
    """Whether something of this probability happens now. One draw, whatever `p` is, so that others stay the same."""
    return bool(generator().random() < p)
