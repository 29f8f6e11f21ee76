"""`Rotate` and `CoarseDropout`: albumentations' transforms (extra ``augment``) with familiar names and defaults.

They apply to masks and boxes, too. All other transforms of albumentations can be used in a chain directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import cv2

from penstock.errors import ConfigError
from penstock.images.transforms.base import check_probability
from penstock.images.transforms.border import check_fill
from penstock.images.transforms.external import Albumentations
from penstock.images.transforms.geometric import check_filter
from penstock.images.transforms.output import Form

__all__ = ["CoarseDropout", "Rotate"]

_FILTERS = {"nearest": cv2.INTER_NEAREST, "bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}


def _make(name: str, **options: Any) -> Any:
    """Create a transform of albumentations.

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
        return {name: value for name, value in vars(self).items() if name != "_copies"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self).update(state)


class Rotate(_Adapter):
    """Rotate the image around its centre and keep its size, as torchvision's RandomRotation.

    Args:
        degrees: the counterclockwise angle is drawn from ``(-degrees, degrees)``, or from ``(min, max)``.
        interpolation: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``, or torchvision's InterpolationMode.
        expand: must be False: images keep their size.
        center: must be None: the centre of the image.
        fill: value of pixels from outside, or one per channel. It is zero for masks.
        p: probability of the rotation.

    Raises:
        ConfigError: `degrees` is negative, `expand` or `center` is given, the filter is unknown, `p` is not a
            probability, or albumentations is not installed.
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
        limits = (-degrees, degrees) if isinstance(degrees, int | float) else tuple(degrees)
        if len(limits) != 2 or limits[0] > limits[1]:
            raise ConfigError(f"degrees must be one positive number, or (min, max), not {degrees!r}")
        self.degrees, self.interpolation, self.p = limits, check_filter(interpolation), check_probability(p)
        self.fill = check_fill(fill)
        how = {"interpolation": _FILTERS[self.interpolation], "border_mode": cv2.BORDER_CONSTANT, "fill": self.fill}
        super().__init__(_make("Rotate", limit=limits, p=p, **how))


class CoarseDropout(_Adapter):
    """Replace rectangles by a value.

    Args:
        max_holes, max_height, max_width: the largest number of rectangles, and of pixels of their sides.
        min_holes, min_height, min_width: the smallest numbers; None: the same as the largest.
        fill_value: the new value, one number or one per channel.
        p: probability.

    Raises:
        ConfigError: a number is below one, `p` is not a probability, or albumentations is not installed.
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
        self.fill_value = check_fill(fill_value)
        self.p = check_probability(p)
        sides = {"hole_height_range": self.height, "hole_width_range": self.width}
        super().__init__(_make("CoarseDropout", num_holes_range=self.holes, fill=self.fill_value, p=p, **sides))

    @staticmethod
    def _range(least: int | None, most: int, name: str) -> tuple[int, int]:
        found = (most if least is None else least), most
        if not 1 <= found[0] <= found[1]:
            raise ConfigError(f"{name}: the minimum must be at least 1 and at most the maximum, got {found!r}")
        return found
