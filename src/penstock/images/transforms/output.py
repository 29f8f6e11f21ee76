"""Convert uint8 pixels to the output tensor in one pass: scale and normalise, in any float dtype and either layout.

Bytes have 256 values, so scaling and normalising is a table look-up: exactly torchvision's arithmetic in float32,
rounded once to the output dtype, without an intermediate array.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import ConfigError
from penstock.images.transforms.view import Fill, Pixels, fill_values

__all__ = [
    "BYTES",
    "Conversion",
    "Form",
    "as_bits",
    "convert",
    "fill_bits",
    "look_up_table",
    "normalize",
    "output_memory",
]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.float64}
"""Dtypes that OpenCV can copy, by item size. It does not support bfloat16."""


class Form(NamedTuple):
    """Known properties of all images after a step.

    Attributes:
        size: (height, width); None if images differ.
        dtype: dtype of the images; None if it is not known.
        channels_last: whether the memory layout is (height, width, channels).
        channels: number of channels, unless a step of another library changes it.
    """

    size: tuple[int, int] | None = None
    dtype: torch.dtype | None = torch.uint8
    channels_last: bool = True
    channels: int = 3

    @property
    def row(self) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape (in memory) and dtype of an image; None if they are not known."""
        if self.size is None or self.dtype is None:
            return None
        return ((*self.size, self.channels) if self.channels_last else (self.channels, *self.size)), self.dtype


class Conversion(NamedTuple):
    """The conversion of pixels at the end of a chain.

    Attributes:
        dtype: dtype of the tensor; uint8 keeps the values, other dtypes scale them to 0..1.
        channels_last: whether the memory layout is (height, width, channels).
        mean, std: per channel, applied after scaling to 0..1; empty for no normalisation.
    """

    dtype: torch.dtype
    channels_last: bool
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


BYTES = Conversion(torch.uint8, channels_last=True)
"""The conversion of a chain without `ToTensor`: none."""


@lru_cache(maxsize=64)
def look_up_table(conversion: Conversion, channels: int) -> npt.NDArray[Any]:
    """Return (channels, 256): the bits of the result for each value of each channel.

    Raises:
        ConfigError: the number of means does not match the channels.
    """
    if conversion.dtype is torch.uint8:
        return np.arange(256, dtype=np.uint8)[None].repeat(channels, 0)
    values = torch.arange(256, dtype=torch.float32).div(255).repeat(channels, 1)
    if conversion.mean:
        normalize(values, conversion.mean, conversion.std)
    return as_bits(values.to(conversion.dtype))


@lru_cache(maxsize=64)
def fill_bits(fill: Fill, conversion: Conversion, channels: int = 3) -> npt.NDArray[Any]:
    """Return the value of a border after a conversion, as bits, in the shape that fills an image.

    It is what OpenCV rounds `fill` to. One value if all are equal, which NumPy fills faster.
    """
    rounded = np.rint(fill_values(fill, channels)[:channels]).clip(0, 255).astype(np.uint8)
    values: npt.NDArray[Any] = look_up_table(conversion, channels)[np.arange(channels), rounded]
    if (values == values[0]).all():
        return values[:1]
    return values if conversion.channels_last else values[:, None, None]


def output_memory(
    conversion: Conversion, size: tuple[int, int], channels: int, out: torch.Tensor | None
) -> tuple[torch.Tensor, npt.NDArray[Any]]:
    """Return `out` if its shape (in memory) and dtype match a result of this size, else new memory; and its bits."""
    shape = (*size, channels) if conversion.channels_last else (channels, *size)
    if out is None or out.shape != shape or out.dtype is not conversion.dtype:
        out = torch.empty(shape, dtype=conversion.dtype)
    return out, as_bits(out)


def as_bits(memory: torch.Tensor) -> npt.NDArray[Any]:
    """Return the memory of a tensor as an array of another dtype, since NumPy does not support bfloat16."""
    bits: npt.NDArray[Any] = memory.view(_BITS[memory.dtype.itemsize]).numpy()
    return bits


def normalize(values: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """Compute ``(value - mean) / std`` in place, of values whose first dimension is the channels.

    Raises:
        ConfigError: neither one mean for all channels, nor one per channel, or the values are not floats.
    """
    if not values.dtype.is_floating_point:
        raise ConfigError(f"Normalize works on floats, and the image is {values.dtype}: put ToTensor() before it")
    if len(mean) not in (1, len(values)):
        raise ConfigError(
            f"Normalize has {len(mean)} means, and the image {len(values)} channels: pass one for each, or one"
        )
    shape = -1, *[1] * (values.ndim - 1)
    values.sub_(torch.tensor(mean, dtype=values.dtype).view(shape))
    values.div_(torch.tensor(std, dtype=values.dtype).view(shape))


def convert(pixels: Pixels, conversion: Conversion, out: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor (channels, height, width), in `out` if its shape and dtype match; else in new memory.

    `out` has the shape in memory: (height, width, channels) or (channels, height, width).

    Raises:
        ConfigError: the number of means does not match the channels.
    """
    height, width, channels = pixels.shape
    out, bits = output_memory(conversion, (height, width), channels, out)
    made = out.permute(2, 0, 1) if conversion.channels_last else out
    if pixels.dtype != np.uint8:  # only bytes are scaled
        values = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1).to(torch.float32, copy=True)
        if conversion.mean:
            normalize(values, conversion.mean, conversion.std)
        return made.copy_(values)
    table = look_up_table(conversion, channels)
    if conversion.channels_last and channels > 1:
        cv2.LUT(pixels, np.ascontiguousarray(table.T).reshape(256, 1, channels), dst=bits)
    else:
        for channel, plane in enumerate(bits.reshape(channels, height, width)):
            cv2.LUT(cv2.extractChannel(pixels, channel), table[channel].reshape(256, 1), dst=plane)
    return made
