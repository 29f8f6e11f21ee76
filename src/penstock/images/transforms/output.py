"""From uint8 pixels to the tensor that leaves: scaled, normalised, in any float type and either layout, in one pass.

Of 8 bits there are 256 values, so the result of scaling and normalising is looked up: exactly what torchvision's
arithmetic in float32 gives, rounded once to the type wanted, without an array in between.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import ConfigError
from penstock.images.transforms.view import Pixels

__all__ = ["Conversion", "Form", "as_bits", "check_channels", "convert", "look_up_table", "place"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.float64}
"""Types that OpenCV moves about, by their bytes: it knows nothing of bfloat16."""


class Form(NamedTuple):
    """What is known of every image that leaves a step.

    Attributes:
        size: (height, width); None if images differ.
        dtype: None if it is not known.
        channels_last: whether images lie as (height, width, channels) in memory.
    """

    size: tuple[int, int] | None = None
    dtype: torch.dtype | None = torch.uint8
    channels_last: bool = True

    @property
    def row(self) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape, as it lies in memory, and type of an image of three channels; None if that is not known."""
        if self.size is None or self.dtype is None:
            return None
        return ((*self.size, 3) if self.channels_last else (3, *self.size)), self.dtype


class Conversion(NamedTuple):
    """What becomes of the pixels in the end.

    Attributes:
        dtype: of the tensor; bytes stay what they are, for any other type they are brought to 0..1.
        channels_last: how it lies in memory.
        mean, std: of each channel, after scaling to 0..1; empty for none.
    """

    dtype: torch.dtype
    channels_last: bool
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


@lru_cache(maxsize=64)
def _table(conversion: Conversion, channels: int) -> npt.NDArray[Any]:
    """(256, channels): the bits of the result for each value of each channel."""
    if conversion.dtype is torch.uint8:
        return np.arange(256, dtype=np.uint8)[:, None].repeat(channels, 1)
    values = torch.arange(256, dtype=torch.float32).div(255).repeat(channels, 1)
    if conversion.mean:
        mean, std = (torch.tensor(v, dtype=torch.float32)[:, None] for v in (conversion.mean, conversion.std))
        values = values.sub(mean).div(std)
    found = values.to(conversion.dtype).T.contiguous()
    bits = _BITS[conversion.dtype.itemsize]
    table: npt.NDArray[Any] = found.view(bits).numpy()
    return table


@lru_cache(maxsize=64)
def look_up_table(conversion: Conversion, channels: int) -> npt.NDArray[Any]:
    """The same as (channels, 256), for `draw_region`.

    Raises:
        ConfigError: means for another number of channels.
    """
    if conversion.mean:
        check_channels(conversion.mean, channels)
    return np.ascontiguousarray(_table(conversion, channels).T)


def place(conversion: Conversion, size: tuple[int, int], channels: int, out: torch.Tensor | None) -> torch.Tensor:
    """`out`, if it has the shape in memory and the type of a result of this size; else new memory."""
    shape = (*size, channels) if conversion.channels_last else (channels, *size)
    if out is None or out.shape != shape or out.dtype is not conversion.dtype:
        return torch.empty(shape, dtype=conversion.dtype)
    return out


def as_bits(memory: torch.Tensor) -> npt.NDArray[Any]:
    """The memory of a tensor as numbers that NumPy knows: it knows nothing of bfloat16."""
    bits: npt.NDArray[Any] = memory.view(_BITS[memory.dtype.itemsize]).numpy()
    return bits


def check_channels(mean: tuple[float, ...], channels: int) -> None:
    """One number for all channels, or one for each.

    Raises:
        ConfigError: another number of them.
    """
    if len(mean) not in (1, channels):
        raise ConfigError(
            f"Normalize has {len(mean)} means, and the image {channels} channels: give one for each, or one"
        )


def convert(pixels: Pixels, conversion: Conversion, out: torch.Tensor | None) -> torch.Tensor:
    """The tensor (channels, height, width), written to `out` if that has the shape and type; else new memory.

    `out` has the shape of the memory: (height, width, channels) or (channels, height, width).

    Raises:
        ConfigError: means for another number of channels.
    """
    height, width, channels = pixels.shape
    if conversion.mean:
        check_channels(conversion.mean, channels)
    out = place(conversion, (height, width), channels, out)
    if pixels.dtype == np.uint8:
        _look_up(pixels, conversion, out)
    else:  # what is no byte is not scaled
        values = torch.from_numpy(np.ascontiguousarray(pixels)).to(torch.float32)
        if conversion.mean:
            values = (values - torch.tensor(conversion.mean)) / torch.tensor(conversion.std)
        out.copy_(values if conversion.channels_last else values.permute(2, 0, 1))
    return out.permute(2, 0, 1) if conversion.channels_last else out


def _look_up(pixels: Pixels, conversion: Conversion, out: torch.Tensor) -> None:
    channels = pixels.shape[2]
    table = _table(conversion, channels)
    bits = as_bits(out)
    if conversion.channels_last:
        target = bits if channels > 1 else bits[:, :, 0]
        cv2.LUT(pixels if channels > 1 else pixels[:, :, 0], table.reshape(256, 1, channels), dst=target)
        return
    for channel in range(channels):
        plane = cv2.extractChannel(pixels, channel)
        cv2.LUT(plane, np.ascontiguousarray(table[:, channel]).reshape(256, 1), dst=bits[channel])
