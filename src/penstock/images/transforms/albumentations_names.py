"""`Rotate` and `CoarseDropout`: albumentations' (extra ``augment``), with the names and defaults people know.

Masks and boxes follow. Whatever else albumentations has can stand in a chain as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import cv2

from penstock.errors import ConfigError
from penstock.images.transforms.base import chance
from penstock.images.transforms.border import filling
from penstock.images.transforms.external import Albumentations
from penstock.images.transforms.geometric import filter_of
from penstock.images.transforms.output import Form

__all__ = ["CoarseDropout", "Rotate"]

_FILTERS = {"nearest": cv2.INTER_NEAREST, "bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}


def _make(name: str, **options: Any) -> Any:
    """One of albumentations' transforms.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        kind: Callable[..., Any] = getattr(import_module("albumentations"), name)
    except ImportError as error:
        raise ConfigError(f"{name} needs albumentations: pip install 'penstock[augment]'") from error
    return kind(**options)


class _Adapter(Albumentations):
    def leaves(self, form: Form) -> Form:
        return form

    def __repr__(self) -> str:
        names = [name for name in vars(self) if name != "pipeline" and not name.startswith("_")]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_here"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self).update(state)


class Rotate(_Adapter):
    """Turned around its middle; the size stays. torchvision's RandomRotation.

    Args:
        degrees: the angle, against the clock, is drawn from ``(-degrees, degrees)``, or from ``(least, most)``.
        interpolation: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``, or torchvision's name of these.
        expand: nothing but False: images keep their size here.
        center: nothing but None: the middle.
        fill: value of what was outside, or one for each channel. Of masks it is zero.
        p: probability.

    Raises:
        ConfigError: a number of degrees that is negative, `expand` or `center`, an unknown filter, no probability, or
            albumentations is not installed.
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
                f"expand={expand!r}, center={center!r}: Rotate turns around the middle and keeps the size; "
                "torchvision's RandomRotation can do the others, and stand in a chain"
            )
        limits = (-degrees, degrees) if isinstance(degrees, int | float) else tuple(degrees)
        if len(limits) != 2 or limits[0] > limits[1]:
            raise ConfigError(f"degrees is one positive number, or (least, most), not {degrees!r}")
        self.degrees, self.interpolation, self.p = limits, filter_of(interpolation), chance(p)
        self.fill = filling(fill)
        how = {"interpolation": _FILTERS[self.interpolation], "border_mode": cv2.BORDER_CONSTANT, "fill": self.fill}
        super().__init__(_make("Rotate", limit=limits, p=p, **how))


class CoarseDropout(_Adapter):
    """Rectangles replaced by a value.

    Args:
        max_holes, max_height, max_width: the most rectangles, and pixels of their sides.
        min_holes, min_height, min_width: the fewest; None: as many as the most.
        fill_value: what they become, one number or one for each channel.
        p: probability.

    Raises:
        ConfigError: a number below one, no probability, or albumentations is not installed.
    """

    def __init__(
        self,
        max_holes: int = 8,
        max_height: int = 8,
        max_width: int = 8,
        min_holes: int | None = None,
        min_height: int | None = None,
        min_width: int | None = None,
        fill_value: float | Sequence[float] = 0,
        p: float = 0.5,
    ) -> None:
        self.holes = self._range(min_holes, max_holes, "holes")
        self.height = self._range(min_height, max_height, "height")
        self.width = self._range(min_width, max_width, "width")
        self.fill_value = filling(fill_value)
        self.p = chance(p)
        sides = {"hole_height_range": self.height, "hole_width_range": self.width}
        super().__init__(_make("CoarseDropout", num_holes_range=self.holes, fill=self.fill_value, p=p, **sides))

    @staticmethod
    def _range(least: int | None, most: int, name: str) -> tuple[int, int]:
        found = (most if least is None else least), most
        if not 1 <= found[0] <= found[1]:
            raise ConfigError(f"{name}: at least 1, and no more than the most, not {found!r}")
        return found
