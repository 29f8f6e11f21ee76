"""`transform_image`: transforms a single image, outside a dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.images.transforms.canvas import ArraySource, Canvas
from penstock.images.transforms.targets import close_target, open_canvas

__all__ = ["transform_image"]


def transform_image(apply: Callable[[Canvas], None], image: Any, target: Mapping[str, Any] | None) -> Any:
    """Apply a transform's ``apply`` to an image, and to its target if given; return the results.

    Raises:
        ConfigError: the image has another number of dimensions.
    """
    given = image.permute(1, 2, 0).numpy() if isinstance(image, torch.Tensor) and image.ndim == 3 else image
    pixels = np.asarray(given)
    flat = pixels.ndim == 2
    if flat:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3:
        raise ConfigError(f"an image must have the shape (height, width, channels), not {pixels.shape}")
    belongs = dict(target) if target is not None else {}
    canvas = open_canvas(ArraySource(np.ascontiguousarray(pixels)), belongs)
    apply(canvas)
    made: Any
    if isinstance(image, torch.Tensor) or canvas.conversion is not None:
        made = canvas.tensor
    else:
        found = canvas.pixels
        made = found[:, :, 0] if flat and found.shape[2] == 1 else found
    return made if target is None else (made, close_target(canvas, belongs))
