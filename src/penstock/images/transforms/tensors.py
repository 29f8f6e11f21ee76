"""`ToTensor` and `Normalize`. They only record the conversion; `output` applies it to the pixels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from penstock.errors import ConfigError
from penstock.images.transforms.base import Transform, check_bool
from penstock.images.transforms.batch import Batch
from penstock.images.transforms.canvas import Canvas
from penstock.images.transforms.output import BYTES, Form, normalize

__all__ = ["Normalize", "ToTensor"]

_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class ToTensor(Transform):
    """Convert to a float tensor (channels, height, width): bytes 0..255 become 0..1, other numbers are unchanged.

    Args:
        dtype: ``torch.float32``, ``float16``, ``bfloat16`` or ``float64``.
        channels_last: memory layout: True: (height, width, channels), torch's ``channels_last``, which is faster to
            create, and faster for most networks; False: (channels, height, width).

    Raises:
        ConfigError: another dtype.

    Without this step, an `ImageDataset` returns uint8 images. Together with a following `Normalize` it is one table
    look-up per byte: torchvision's arithmetic in float32, rounded once to `dtype`.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, channels_last: bool = True) -> None:
        if dtype not in _TYPES:
            raise ConfigError(
                f"dtype must be one of {', '.join(map(str, _TYPES))}, not {dtype!r}; for uint8 leave ToTensor out"
            )
        self.dtype = dtype
        self.channels_last = channels_last

    def apply(self, canvas: Canvas) -> None:
        if canvas.after:
            canvas.render()
        self.plan(canvas)

    draws = 0

    def plan(self, batch: Batch | Canvas) -> None:
        before = batch.conversion or BYTES
        batch.conversion = before._replace(dtype=self.dtype, channels_last=self.channels_last)

    def leaves(self, form: Form) -> Form:
        return form._replace(dtype=self.dtype, channels_last=self.channels_last)


class Normalize(Transform):
    """Compute ``(value - mean) / std`` for each channel, of the values 0..1 from `ToTensor`.

    Args:
        mean, std: one number per channel, in the order red, green, blue; or one for all.
        inplace: no effect: a chain copies nothing, and the caller's image is never changed.

    Raises:
        ConfigError: the numbers do not match, or a `std` is zero; in a chain: no `ToTensor` before it; when called: the
            image has another number of channels.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], inplace: bool = False) -> None:
        self.mean = tuple(map(float, mean))
        self.std = tuple(map(float, std))
        self.inplace = check_bool(inplace, "inplace")
        if not self.mean or len(self.mean) != len(self.std) or 0 in self.std:
            raise ConfigError(f"mean and std need one number for each channel, and std no zero: {mean!r}, {std!r}")

    def apply(self, canvas: Canvas) -> None:
        conversion = canvas.conversion
        if conversion is not None and not conversion.mean and not canvas.after:
            canvas.conversion = conversion._replace(mean=self.mean, std=self.std)
        else:
            canvas.after.append(partial(normalize, mean=self.mean, std=self.std))

    draws = 0

    def plan(self, batch: Batch) -> None:
        conversion = batch.conversion
        if conversion is not None and not conversion.mean and len(self.mean) in (1, batch.channels):
            batch.conversion = conversion._replace(mean=self.mean, std=self.std)
        else:
            batch.decline(~batch.declined)

    def leaves(self, form: Form) -> Form:
        if form.dtype is torch.uint8:
            raise ConfigError("Normalize works on floats: put ToTensor() before it")
        return form
