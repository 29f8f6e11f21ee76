"""`RandomErasing`: replaces a rectangle of the output tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.images.transforms.base import Transform, bernoulli, check_bool, check_probability
from penstock.images.transforms.canvas import Canvas
from penstock.images.transforms.geometric import check_interval, draw_sides
from penstock.random import generator

__all__ = ["RandomErasing"]


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
        rectangle = self._rectangle(*canvas.size)
        if rectangle is None:
            return
        top, left, height, width = rectangle
        floating = canvas.conversion is not None
        value = self._value(height, width, floating, canvas.pixels.shape[2])

        def erase(tensor: torch.Tensor) -> None:
            tensor[:, top : top + height, left : left + width] = value

        if floating:
            canvas.after.append(erase)
        else:
            erase(torch.from_numpy(canvas.pixels).permute(2, 0, 1))

    def _value(self, height: int, width: int, floating: bool, channels: int) -> torch.Tensor:
        if isinstance(self.value, str):
            shape = (channels, height, width)
            if floating:
                return torch.from_numpy(generator().standard_normal(shape, dtype=np.float32))
            return torch.from_numpy(generator().integers(0, 256, shape, dtype=np.uint8))
        value = torch.tensor(self.value, dtype=torch.float32).reshape(-1, 1, 1)
        if len(value) not in (1, channels):
            raise ConfigError(f"RandomErasing has {len(value)} values for an image of {channels} channels")
        return value

    def _rectangle(self, height: int, width: int) -> tuple[int, int, int, int] | None:
        """Draw (top, left, height, width); None if nothing fits."""
        for tall, wide in draw_sides(height * width, self.scale, self.ratio):
            if 0 < tall < height and 0 < wide < width:
                random = generator().random
                return int(random() * (height - tall + 1)), int(random() * (width - wide + 1)), tall, wide
        return None
