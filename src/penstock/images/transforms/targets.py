"""Targets of an image: a dict with masks and boxes, to which geometric transforms apply, too.

    {"masks": (mask,), "boxes": boxes, "labels": labels, ...}

``masks`` are arrays or tensors of the image's size: (height, width) or (n, height, width), or a sequence of these; they
are resampled with nearest interpolation. ``boxes`` are (n, 4) of left, top, right, bottom, arrays or tensors. Boxes
outside a crop are removed, and so are their entries in ``labels``, ``areas``, ``area``, ``scores``, ``iscrowd`` and
stacked masks of the same n. Other entries are unchanged. Types are kept, but boxes of integers become float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.images.transforms.canvas import Canvas, PixelSource

__all__ = ["close_target", "open_canvas"]

_WITH_BOXES = ("labels", "areas", "area", "scores", "iscrowd")


def open_canvas(source: PixelSource, target: Mapping[str, Any], out: torch.Tensor | None = None) -> Canvas:
    """Return a canvas with an image and its target.

    Raises:
        ConfigError: a mask has another size than the image, or boxes are not (n, 4), ordered and finite.
    """
    if not target:
        return Canvas(source, out=out)
    given = target.get("masks", ())
    if given is None:
        raise ConfigError("masks is None: leave the key out if there are no masks")
    masks = tuple(_planes(mask) for mask in (given if isinstance(given, Sequence) else (given,)))
    for mask in masks:
        if mask.shape[:2] != source.size:
            raise ConfigError(f"a mask of {mask.shape[:2]} (height, width) over an image of {source.size}")
    boxes = target.get("boxes")
    if boxes is not None:
        boxes = np.asarray(boxes)
        if boxes.size and (boxes.ndim != 2 or boxes.shape[1] != 4):
            raise ConfigError(f"boxes must be (n, 4): left, top, right, bottom; not {boxes.shape}")
        if boxes.size and not ((boxes[:, :2] <= boxes[:, 2:]).all() and np.isfinite(boxes).all()):
            raise ConfigError(
                f"boxes must be finite left, top, right, bottom in pixels, left <= right and top <= bottom: {boxes}"
            )
    return Canvas(source, masks=masks, boxes=boxes, out=out)


def close_target(canvas: Canvas, target: Mapping[str, Any]) -> dict[str, Any]:
    """Return the target after the changes of the canvas."""
    made = dict(target)
    canvas.finish()
    kept = canvas.kept
    if "masks" in target:
        given: Any = target["masks"]
        several = isinstance(given, Sequence)
        made["masks"] = type(given)(map(_like, canvas.masks, given)) if several else _like(canvas.masks[0], given)
    if canvas.boxes is None or kept is None:
        return made
    before = target["boxes"]
    count = len(before)
    if isinstance(before, torch.Tensor):
        kind = before.dtype if before.dtype.is_floating_point else torch.float32
        made["boxes"] = torch.from_numpy(canvas.boxes).to(kind)
    else:
        dtype = np.asarray(before).dtype
        made["boxes"] = canvas.boxes.astype(dtype if np.issubdtype(dtype, np.floating) else np.float32)
    if len(kept) < count:
        for name in (*_WITH_BOXES, "masks"):
            value = made.get(name)
            if isinstance(value, np.ndarray | torch.Tensor) and value.ndim and len(value) == count:
                if name != "masks" or value.ndim == 3:
                    made[name] = value[kept]
            elif isinstance(value, list | tuple | range) and len(value) == count:
                chosen = [value[number] for number in kept]
                made[name] = tuple(chosen) if isinstance(value, tuple) else chosen
    return made


def _planes(mask: Any) -> np.ndarray[Any, Any]:
    """Return a mask as (height, width), or as (height, width, n) for n planes."""
    array = np.asarray(mask)
    if array.ndim not in (2, 3):
        raise ConfigError(f"a mask must be (height, width) or (n, height, width), not {array.shape}")
    return array if array.ndim == 2 else array.transpose(1, 2, 0)


def _like(mask: np.ndarray[Any, Any], before: Any) -> Any:
    ordered = np.ascontiguousarray(mask if mask.ndim == 2 else mask.transpose(2, 0, 1))
    return torch.from_numpy(ordered) if isinstance(before, torch.Tensor) else ordered
