"""`RandomErasing` and `CoarseDropout`: replace rectangles of an image by other values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import cv2
import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import ConfigError
from penstock.images.transforms.base import Transform, bernoulli, check_bool, check_fill, check_probability
from penstock.images.transforms.canvas import Canvas
from penstock.images.transforms.geometric import check_interval, draw_sides
from penstock.images.transforms.view import fill_values
from penstock.random import generator

__all__ = ["CoarseDropout", "RandomErasing"]


class RandomErasing(Transform):
    """Replace a rectangle of random position, area and aspect ratio by a value.

    Args:
        p: probability.
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest height over width, drawn uniformly on a log scale.
        value: one number, or one per channel, in the image's unit at this position of the chain: 0..255 for bytes,
            otherwise floats; or ``"random"``: normally distributed noise (uniform for bytes).
        inplace: no effect: a chain copies nothing, and the caller's image is never changed.

    Raises:
        ConfigError: `p` is not a probability, shares are not positive, or the value is unknown.

    If ten draws do not fit into the image, nothing is erased.
    """

    def __init__(
        self,
        p: float = 0.5,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: float | Sequence[float] | Literal["random"] = 0.0,
        inplace: bool = False,
    ) -> None:
        self.p = check_probability(p)
        self.scale = check_interval(scale, "scale")
        self.ratio = check_interval(ratio, "ratio")
        if isinstance(value, str) and value != "random":
            raise ConfigError(f"value must be a number, one for each channel, or 'random', not {value!r}")
        self.value = value
        self.inplace = check_bool(inplace, "inplace")

    def apply(self, canvas: Canvas) -> None:
        if not bernoulli(self.p):
            return
        height, width = canvas.size
        for tall, wide in draw_sides(height * width, self.scale, self.ratio, generator().random):
            if 0 < tall < height and 0 < wide < width:
                random = generator().random
                top, left = int(random() * (height - tall + 1)), int(random() * (width - wide + 1))
                self._erase(canvas, slice(top, top + tall), slice(left, left + wide))
                return

    def _erase(self, canvas: Canvas, rows: slice, columns: slice) -> None:
        floating = canvas.conversion is not None
        if isinstance(self.value, str):
            shape = canvas.drawn.shape[2], rows.stop - rows.start, columns.stop - columns.start
            rng = generator()
            noise = rng.standard_normal(shape, np.float32) if floating else rng.integers(0, 256, shape, np.uint8)
            value = torch.from_numpy(noise)
        else:
            value = torch.tensor(self.value, dtype=torch.float32).reshape(-1, 1, 1)

        def erase(tensor: torch.Tensor) -> None:
            if len(value) not in (1, len(tensor)):
                raise ConfigError(f"RandomErasing has {len(value)} values for an image of {len(tensor)} channels")
            tensor[:, rows, columns] = value

        if floating:
            canvas.after.append(erase)
        else:
            erase(torch.from_numpy(canvas.pixels).permute(2, 0, 1))


class CoarseDropout(Transform):
    """Replace several small rectangles by a value.

    Args:
        max_holes, max_height, max_width: the largest number of rectangles, and of pixels of their sides.
        min_holes, min_height, min_width: the smallest numbers; None: the same as the largest.
        fill_value: the new value, one number or one per channel, 0..255 for bytes.
        p: probability.

    Raises:
        ConfigError: a number is below one, or `p` is not a probability.

    Masks are unchanged. Boxes shrink to their visible part, and covered ones are removed.
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

    @staticmethod
    def _range(least: int | None, most: int, name: str) -> tuple[int, int]:
        found = (most if least is None else least), most
        if not 1 <= found[0] <= found[1]:
            raise ConfigError(f"{name}: the minimum must be at least 1 and at most the maximum, got {found!r}")
        return found

    def apply(self, canvas: Canvas) -> None:
        if not bernoulli(self.p):
            return
        pixels = canvas.render()
        height, width, channels = pixels.shape
        value = fill_values(self.fill_value, channels)
        hidden = np.zeros((height, width), bool)
        integers = generator().integers
        for _ in range(integers(*self.holes, endpoint=True)):
            tall = min(height, int(integers(*self.height, endpoint=True)))
            wide = min(width, int(integers(*self.width, endpoint=True)))
            top, left = int(integers(height - tall + 1)), int(integers(width - wide + 1))
            cv2.rectangle(pixels, (left, top), (left + wide - 1, top + tall - 1), value, cv2.FILLED)
            hidden[top : top + tall, left : left + wide] = True
        targets = canvas.targets
        if targets is not None and targets.boxes is not None:
            visible = np.array([_visible(box, hidden) for box in targets.boxes]).reshape(-1, 4)
            targets.keep_boxes(visible, canvas.size)


def _visible(box: npt.NDArray[np.float64], hidden: npt.NDArray[np.bool_]) -> tuple[float, ...]:
    """Return the part of a box (left, top, right, bottom) in which pixels are visible, or an empty one."""
    left, top, right, bottom = box.clip(0, [hidden.shape[1], hidden.shape[0]] * 2).tolist()
    x, y = math.floor(left), math.floor(top)
    rows, columns = np.nonzero(~hidden[y : math.ceil(bottom), x : math.ceil(right)])
    if not len(rows):
        return 0.0, 0.0, 0.0, 0.0
    first, last = (x + int(columns.min()), y + int(rows.min())), (x + int(columns.max()) + 1, y + int(rows.max()) + 1)
    return max(left, first[0]), max(top, first[1]), min(right, last[0]), min(bottom, last[1])
