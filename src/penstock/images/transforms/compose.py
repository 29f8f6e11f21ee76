"""`Compose`, a chain of transforms: ours, torchvision's, albumentations', and any callable.

    chain = Compose([RandomResizedCrop(224), HorizontalFlip(), ToTensor(), Normalize(MEAN, STD)])
    tensor = chain(image)                        # of an array (height, width, channels), RGB
    tensor, target = chain(image, {"masks": (mask,), "boxes": boxes})

Ours draw from `penstock.generator()`, so within a loader with a seed they are a function of (seed, epoch, position).
Steps of geometry that follow each other are one resampling of one box. In an `ImageDataset` only that box is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.images.transforms.base import Transform
from penstock.images.transforms.canvas import Array, Canvas
from penstock.images.transforms.foreign import adapt
from penstock.images.transforms.output import Form
from penstock.images.transforms.targets import close_target, open_canvas

__all__ = ["Compose"]


class Compose(Transform):
    """Several transforms, one after the other.

    Args:
        transforms: ours (`Transform`), and anything that is called with an image: see `foreign.adapt` for what it gets.

    Raises:
        ConfigError: something that cannot be called, or steps in an order that makes no sense.

    Attributes:
        pure: whether every step is: draws from `penstock.generator()` alone, and may be used by several threads.
        form: what is known of every image that leaves.

    A chain can be pickled if its steps can.
    """

    def __init__(self, transforms: Iterable[Callable[..., Any]]) -> None:
        if not isinstance(transforms, Iterable):
            raise ConfigError(f"Compose takes a list of transforms, not {transforms!r}")
        self.transforms = list(transforms)
        self._steps: list[Transform] = []
        for step in self.transforms:
            if isinstance(step, Compose):
                self._steps.extend(step._steps)
            else:
                self._steps.append(step if isinstance(step, Transform) else adapt(step))
        self.pure = all(step.pure for step in self._steps)
        self.form = self.leaves(Form())

    def leaves(self, form: Form) -> Form:
        for step in self._steps:
            form = step.leaves(form)
        return form

    def apply(self, canvas: Canvas) -> None:
        for step in self._steps:
            step.apply(canvas)

    def __call__(self, image: Any, target: Mapping[str, Any] | None = None) -> Any:
        """Of one image by hand.

        Args:
            image: uint8 (height, width, channels) or (height, width), RGB; or a tensor (channels, height, width); or
                what has an array, as images of Pillow do.
            target: a dict with ``masks`` or ``boxes`` that belong to the image (see `targets`), and anything else.

        Returns:
            An array like the one that came, or a tensor (channels, height, width) where a tensor came, and after
            `ToTensor`; with a target also that, changed in the same way.

        Raises:
            ConfigError: an image of another number of dimensions.
        """
        given = image.permute(1, 2, 0).numpy() if isinstance(image, torch.Tensor) and image.ndim == 3 else image
        pixels = np.asarray(given)
        flat = pixels.ndim == 2
        if flat:
            pixels = pixels[:, :, None]
        if pixels.ndim != 3:
            raise ConfigError(f"an image has the shape (height, width, channels), not {pixels.shape}")
        belongs = dict(target) if target is not None else {}
        canvas = open_canvas(Array(np.ascontiguousarray(pixels)), belongs)
        self.apply(canvas)
        made: Any
        if isinstance(image, torch.Tensor) or canvas.conversion is not None:
            made = canvas.tensor
        else:
            found = canvas.pixels
            made = found[:, :, 0] if flat and found.shape[2] == 1 else found
        return made if target is None else (made, close_target(canvas, belongs))

    def __repr__(self) -> str:
        return f"Compose({self.transforms!r})"
