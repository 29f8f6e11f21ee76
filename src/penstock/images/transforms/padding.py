"""`SquarePad`: pads an image to a square. This module also checks the arguments of borders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import cv2

from penstock.errors import ConfigError
from penstock.images.transforms.base import Transform, bernoulli, check_probability
from penstock.images.transforms.border import check_fill
from penstock.images.transforms.canvas import Canvas
from penstock.images.transforms.output import Form

__all__ = ["MODES", "SquarePad", "check_padding_mode", "padding_sides"]

MODES = {
    "constant": cv2.BORDER_CONSTANT,
    "edge": cv2.BORDER_REPLICATE,
    "reflect": cv2.BORDER_REFLECT_101,
    "symmetric": cv2.BORDER_REFLECT,
}

_BEFORE = {"center": 0.5, "top_left": 0.0, "bottom_right": 1.0}
"""Shares of the border that are above and left of the image."""


def check_padding_mode(name: Any) -> Literal["constant", "edge", "reflect", "symmetric"]:
    """Check and return the name of a padding mode.

    Raises:
        ConfigError: the mode is unknown.
    """
    if name not in MODES:
        raise ConfigError(f"padding_mode must be one of {', '.join(MODES)}, not {name!r}")
    found: Literal["constant", "edge", "reflect", "symmetric"] = name
    return found


def padding_sides(padding: Any) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) from one, two (left and right, top and bottom) or four numbers, or None.

    Raises:
        ConfigError: another value, or a negative number.
    """
    values = () if padding is None else tuple(padding) if isinstance(padding, list | tuple) else (padding,)
    if len(values) not in (0, 1, 2, 4) or not all(isinstance(value, int) and value >= 0 for value in values):
        raise ConfigError(f"padding must be one, two or four non-negative numbers, not {padding!r}")
    left, top, right, bottom = (values * (4 // len(values))) if values else (0, 0, 0, 0)
    return left, top, right, bottom


class SquarePad(Transform):
    """Pad the shorter side to the length of the longer one.

    Args:
        position: position of the image: ``"center"``, ``"top_left"`` or ``"bottom_right"``.
        padding_mode: ``"constant"``, ``"edge"``, ``"reflect"`` or ``"symmetric"``, as in torchvision's Pad.
        fill: value of a constant border, or one per channel: red, green, blue.
        p: probability of the padding.

    Raises:
        ConfigError: an unknown position or mode, or `p` is not a probability.

    Masks are padded with zeros, and boxes are shifted.
    """

    def __init__(
        self,
        position: Literal["center", "top_left", "bottom_right"] = "center",
        padding_mode: Literal["constant", "edge", "reflect", "symmetric"] = "constant",
        fill: float | Sequence[float] = 0,
        p: float = 1.0,
    ) -> None:
        if position not in _BEFORE:
            raise ConfigError(f"position must be 'center', 'top_left' or 'bottom_right', not {position!r}")
        self.position = position
        self.padding_mode = check_padding_mode(padding_mode)
        self.fill = check_fill(fill)
        self.p = check_probability(p)

    def apply(self, canvas: Canvas) -> None:
        if self.p < 1 and not bernoulli(self.p):
            return
        (height, width), share = canvas.size, _BEFORE[self.position]
        side = max(height, width)
        if height != width:
            top, left = int((side - height) * share), int((side - width) * share)
            canvas.window(-top, -left, side, side, mode=MODES[self.padding_mode], fill=self.fill)

    def leaves(self, form: Form) -> Form:
        if form.size is None:
            return form
        return form._replace(size=(max(form.size),) * 2 if self.p == 1 or form.size[0] == form.size[1] else None)
