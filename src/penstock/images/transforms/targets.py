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

import cv2
import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import ConfigError
from penstock.images.transforms.view import Border, Pixels, View

__all__ = ["Targets", "open_targets"]

_WITH_BOXES = ("labels", "areas", "area", "scores", "iscrowd")


def open_targets(target: Mapping[str, Any], size: tuple[int, int]) -> Targets | None:
    """Return the masks and boxes of an image of (height, width) pixels; None without any.

    Raises:
        ConfigError: a mask has another size than the image, or boxes are not (n, 4), ordered and finite.
    """
    given, boxes = target.get("masks", ()), target.get("boxes")
    if given is None:
        raise ConfigError("masks is None: leave the key out if there are no masks")
    masks = tuple(_planes(mask) for mask in (given if isinstance(given, Sequence) else (given,)))
    for mask in masks:
        if mask.shape[:2] != size:
            raise ConfigError(f"a mask of {mask.shape[:2]} (height, width) over an image of {size}")
    if boxes is not None:
        boxes = np.asarray(boxes)
        if boxes.size and (boxes.ndim != 2 or boxes.shape[1] != 4):
            raise ConfigError(f"boxes must be (n, 4): left, top, right, bottom; not {boxes.shape}")
        if boxes.size and not ((boxes[:, :2] <= boxes[:, 2:]).all() and np.isfinite(boxes).all()):
            raise ConfigError(
                f"boxes must be finite left, top, right, bottom in pixels, left <= right and top <= bottom: {boxes}"
            )
    return Targets(target, masks, boxes) if masks or boxes is not None else None


class Targets:
    """Masks and boxes of an image, which follow its geometry: masks pixel by pixel, boxes by their corners.

    Args:
        target: the dict that contains them.
        masks: arrays (height, width) or (height, width, n).
        boxes: (n, 4) of left, top, right, bottom in the image's pixels.
    """

    def __init__(self, target: Mapping[str, Any], masks: tuple[Pixels, ...], boxes: npt.NDArray[Any] | None) -> None:
        self._given = target
        self.masks = masks
        self.boxes = None if boxes is None else np.array(boxes, np.float64).reshape(-1, 4)
        self.kept = np.arange(0 if self.boxes is None else len(self.boxes))
        """Indices of the given boxes that are left. Boxes outside a crop are removed."""

    def look(self, view: View) -> None:
        """Apply the view of the image. Around boxes it has no border."""
        self.masks = tuple(_seen(mask, view) for mask in self.masks)
        if self.boxes is not None:
            ends = view.points(self.boxes.reshape(-1, 2)).reshape(-1, 2, 2)
            self.keep_boxes(np.concatenate([ends.min(axis=1), ends.max(axis=1)], axis=1), view.size)

    def pad(self, border: Border) -> None:
        """Add a border to the image. That of masks is zero; boxes are shifted."""
        self.masks = tuple(_padded(mask, border) for mask in self.masks)
        if self.boxes is not None:
            self.boxes = self.boxes + np.array([border.left, border.top] * 2)

    def warp(self, matrix: npt.NDArray[Any], size: tuple[int, int]) -> None:
        """Apply `Canvas.warp` to an image of this size. Masks are zero where pixels come from outside."""
        height, width = size
        if self.masks:
            # OpenCV moves the positions as it moves the pixels, also where two are equally near.
            y, x = np.mgrid[:height, :width]
            positions = np.stack([y, x, np.ones_like(x)], axis=2).astype(np.float32)
            nearest = cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP
            moved = cv2.warpAffine(positions, matrix, (width, height), flags=nearest).astype(np.int64)
            row, column, inside = moved.transpose(2, 0, 1)
            self.masks = tuple(
                np.where(inside if mask.ndim == 2 else inside[:, :, None], mask[row, column], 0).astype(mask.dtype)
                for mask in self.masks
            )
        if self.boxes is not None:
            forward = np.linalg.inv(np.vstack([matrix, [0, 0, 1]]))[:2]
            corners = self.boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2) - 0.5
            moved = corners @ forward[:, :2].T + forward[:, 2] + 0.5
            self.keep_boxes(np.concatenate([moved.min(axis=1), moved.max(axis=1)], axis=1), size)

    def keep_boxes(self, boxes: npt.NDArray[np.float64], size: tuple[int, int]) -> None:
        """Replace the boxes by moved ones, clipped to the image, without empty ones."""
        boxes = boxes.clip(0, [size[1], size[0]] * 2)
        there = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
        self.boxes, self.kept = boxes[there], self.kept[there]

    def close(self) -> dict[str, Any]:
        """Return the dict with the changed masks and boxes, in the types of the given ones."""
        made = dict(self._given)
        if "masks" in made:
            given: Any = made["masks"]
            several = isinstance(given, Sequence)
            made["masks"] = type(given)(map(_like, self.masks, given)) if several else _like(self.masks[0], given)
        if self.boxes is None:
            return made
        before = made["boxes"]
        count = len(before)
        if isinstance(before, torch.Tensor):
            kind = before.dtype if before.dtype.is_floating_point else torch.float32
            made["boxes"] = torch.from_numpy(self.boxes).to(kind)
        else:
            dtype = np.asarray(before).dtype
            made["boxes"] = self.boxes.astype(dtype if np.issubdtype(dtype, np.floating) else np.float32)
        if len(self.kept) < count:
            for name in (*_WITH_BOXES, "masks"):
                value = made.get(name)
                if isinstance(value, np.ndarray | torch.Tensor) and value.ndim and len(value) == count:
                    if name != "masks" or value.ndim == 3:
                        made[name] = value[self.kept]
                elif isinstance(value, list | tuple | range) and len(value) == count:
                    chosen = [value[number] for number in self.kept]
                    made[name] = tuple(chosen) if isinstance(value, tuple) else chosen
        return made


def _seen(mask: Pixels, view: View) -> Pixels:
    """Return a view of a mask of any dtype, with nearest interpolation."""
    (left, top, right, bottom), (height, width) = view.box, view.size
    rows = (top + (np.arange(height) + 0.5) * ((bottom - top) / height)).astype(np.int64).clip(0, mask.shape[0] - 1)
    columns = (left + (np.arange(width) + 0.5) * ((right - left) / width)).astype(np.int64).clip(0, mask.shape[1] - 1)
    sideways, upside_down = view.flipped
    made: Pixels = mask[rows[::-1] if upside_down else rows][:, columns[::-1] if sideways else columns]
    return made if view.border is None else _padded(made, view.border)


def _padded(mask: Pixels, border: Border) -> Pixels:
    """Return a mask with a border of zeros."""
    ends = (border.top, border.bottom), (border.left, border.right)
    return np.pad(mask, ends if mask.ndim == 2 else (*ends, (0, 0)))


def _planes(mask: Any) -> Pixels:
    """Return a mask as (height, width), or as (height, width, n) for n planes."""
    array = np.asarray(mask)
    if array.ndim not in (2, 3):
        raise ConfigError(f"a mask must be (height, width) or (n, height, width), not {array.shape}")
    return array if array.ndim == 2 else array.transpose(1, 2, 0)


def _like(mask: Pixels, before: Any) -> Any:
    ordered = np.ascontiguousarray(mask if mask.ndim == 2 else mask.transpose(2, 0, 1))
    return torch.from_numpy(ordered) if isinstance(before, torch.Tensor) else ordered
