"""`Canvas`: an image that passes through a chain. Geometric steps are recorded; pixels are computed when needed.

The canvas also holds the image's masks and boxes, which follow its geometry: masks with nearest interpolation, boxes by
their corners.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import cv2
import numpy as np
import numpy.typing as npt
import torch

from penstock.images.transforms.border import Border, fill_bits, fill_values
from penstock.images.transforms.output import BYTES, Conversion, convert, output_memory
from penstock.images.transforms.view import Filter, Pixels, View, render
from penstock.stages import stage

__all__ = ["ArraySource", "Canvas", "PixelSource"]


class PixelSource(Protocol):
    """A source of pixels."""

    size: tuple[int, int]
    """(height, width) of the whole image."""

    def draw(self, view: View) -> Pixels:
        """Return the pixels of a view, in new memory."""

    def draw_converted(self, view: View, conversion: Conversion, out: npt.NDArray[Any]) -> bool:
        """Write a view's converted pixels, as bits, to `out`; return False if the source does not support it."""


class ArraySource:
    """A `PixelSource` of pixels in memory: (height, width, channels)."""

    def __init__(self, pixels: Pixels) -> None:
        self.pixels = pixels
        self.size = pixels.shape[0], pixels.shape[1]

    def draw(self, view: View) -> Pixels:
        """Return the pixels of a view."""
        with stage("resize"):
            return render(self.pixels, view.box, view)

    def draw_converted(self, view: View, conversion: Conversion, out: npt.NDArray[Any]) -> bool:
        """Return False: the pixels exist already."""
        return False


class Canvas:
    """The state of an image in a chain.

    Args:
        source: the source of the image's pixels.
        masks: arrays (height, width) or (height, width, channels) of the image's size.
        boxes: (n, 4) of left, top, right, bottom in the image's pixels.
        out: memory for the result, used if its shape (in memory) and dtype match.

    Attributes:
        size: current (height, width) of the image.
        conversion: the conversion of the pixels at the end; None: no conversion.
        after: functions that then change the tensor (channels, height, width) in place.
    """

    def __init__(
        self,
        source: PixelSource,
        *,
        masks: tuple[Pixels, ...] = (),
        boxes: npt.NDArray[Any] | None = None,
        out: torch.Tensor | None = None,
    ) -> None:
        self._source = source
        self.size = source.size
        self._pending = True  # whether the view is not rendered yet
        height, width = source.size
        self._view = View((0.0, 0.0, float(width), float(height)), source.size)
        self._border: Border | None = None  # around the view
        self.masks = masks
        self.boxes = None if boxes is None else np.array(boxes, np.float64).reshape(-1, 4)
        self.out = out
        self.conversion: Conversion | None = None
        self.after: list[Callable[[torch.Tensor], object]] = []
        self.kept: npt.NDArray[np.int64] | None = None if boxes is None else np.arange(len(self.boxes))  # type: ignore[arg-type]
        """Indices of the given boxes that are left. Boxes outside a crop are removed."""

    @property
    def view(self) -> View:
        """The current view. An image with a border, or a changed tensor, is rendered first: the view is all of it."""
        if self.after:
            self.tensor = self.tensor
        elif self._border is not None:
            self.pixels = self.pixels
        return self._view

    @property
    def unseen(self) -> View | None:
        """The view of the original source, if it is not rendered and nothing else was changed; else None."""
        alone = self._border is None and not self.after and not self.masks and self.boxes is None
        return self._view if self._pending and alone and not isinstance(self._source, ArraySource) else None

    @property
    def pixels(self) -> Pixels:
        """The current image, (height, width, channels). It may be changed in place."""
        if self._pending:
            drawn = self._source.draw(self._view)
            self.pixels = drawn if self._border is None else self._border.around(drawn)
        return self._pixels

    @pixels.setter
    def pixels(self, pixels: Pixels) -> None:
        if self._pending and (self.masks or self.boxes is not None):
            self._settle()
        self._pixels = pixels
        self._pending = False
        self._source = ArraySource(pixels)
        self.size = self._source.size
        self._view, self._border = View.of(self.size), None

    def look(self, view: View) -> None:
        """Set the view of the image, which was made of `view`."""
        if view is not self._view:
            self._view, self.size = view, view.size
            self._pending = True

    def mirror(self, *, upside_down: bool = False) -> None:
        """Mirror the image left to right, or upside down."""
        view, border = self._view, self._border
        if border is not None and not self.after:
            self._view = view.mirror(upside_down=upside_down)
            self._border = border.mirror(upside_down=upside_down)
        else:
            self.look(self.view.mirror(upside_down=upside_down))

    def finish(self) -> None:
        """Apply pending geometry, so that masks and boxes match the image."""
        if self._pending and (self.masks or self.boxes is not None):
            self.pixels = self.pixels

    def pad(
        self, left: int, top: int, right: int, bottom: int, *, mode: int = cv2.BORDER_CONSTANT, fill: Any = 0
    ) -> None:
        """Add a border to the image: numbers of pixels, OpenCV's border mode, and one value or one per channel.

        The border of masks is zero; boxes are shifted.
        """
        pixels = self.pixels
        if self.after:
            self.tensor = self.tensor
            pixels = self.pixels
        border = Border(left, top, right, bottom, fill)
        self.pixels = border.around(pixels, mode)
        self.masks = tuple(_padded(mask, border) for mask in self.masks)
        if self.boxes is not None:
            self.boxes = self.boxes + np.array([left, top, left, top])

    def window(
        self, top: int, left: int, height: int, width: int, *, mode: int = cv2.BORDER_CONSTANT, fill: Any = 0
    ) -> None:
        """Crop the image to a part, in its pixels. Parts outside the image get a border, see `pad`."""
        tall, wide = self.size
        over = max(0, -left), max(0, -top), max(0, left + width - wide), max(0, top + height - tall)
        seen = height - over[1] - over[3], width - over[0] - over[2]
        # A constant border is drawn around the visible part without rendering the image first. That is impossible with
        # boxes, which are clipped at the whole, or after a resize, which uses pixels beside the visible ones.
        view = self.view
        plain = mode == cv2.BORDER_CONSTANT and self.boxes is None and not view.resized
        if plain and min(seen) > 0:
            self.look(view.crop(max(0, top), max(0, left), *seen))
            if any(over):
                self._border, self.size = Border(*over, fill), (height, width)
            return
        if any(over):
            self.pad(*over, mode=mode, fill=fill)
        self.look(self.view.crop(top + over[1], left + over[0], height, width))

    def warp(self, matrix: npt.NDArray[Any], *, interpolation: Filter, fill: Any = 0) -> None:
        """Warp the image with a matrix (2, 3) that maps positions in the result to positions before; keep the size.

        Pixels from outside are `fill`, zero in masks. Boxes become the bounding boxes of their moved corners.
        """
        if self.after:
            self.tensor = self.tensor
        pixels = self.pixels
        height, width = self.size
        value = fill_values(fill, pixels.shape[2])
        flags = {"nearest": cv2.INTER_NEAREST, "bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}[interpolation]
        made = cv2.warpAffine(pixels, matrix, (width, height), flags=flags | cv2.WARP_INVERSE_MAP, borderValue=value)
        self.pixels = made if made.ndim == 3 else made[:, :, None]
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
            self.keep_boxes(np.concatenate([moved.min(axis=1), moved.max(axis=1)], axis=1))

    def resize(self, change: Callable[[View], View | None]) -> None:
        """Change the view by a function, which returns None if the view must be rendered first."""
        view = change(self.view)
        if view is None:
            self.pixels = self.pixels
            view = change(self.view)
            assert view is not None
        self.look(view)

    @property
    def tensor(self) -> torch.Tensor:
        """The finished image as a tensor (channels, height, width)."""
        conversion, out, tensor = self.conversion, self.out, None
        if self._pending and not (self.masks or self.boxes is not None or isinstance(self._source, ArraySource)):
            tensor = self._draw(conversion or BYTES)
        if tensor is None and conversion is not None:
            pixels = self.pixels
            with stage("normalize"):
                tensor = convert(pixels, conversion, out)
        elif tensor is None:
            memory = torch.from_numpy(np.require(self.pixels, requirements=["C", "W"]))
            if out is not None and out.shape == memory.shape and out.dtype is memory.dtype:
                np.copyto(out.numpy(), self.pixels)  # torch would wake a thread on every core
                memory = out
            tensor = memory.permute(2, 0, 1)
        after, self.after = self.after, []
        for step in after:
            step(tensor)
        return tensor

    @tensor.setter
    def tensor(self, tensor: torch.Tensor) -> None:
        conversion = self.conversion
        floating = tensor.dtype.is_floating_point
        found = tensor.detach().permute(1, 2, 0)
        self.pixels = np.array((found.float() if floating else found).numpy(), order="C")
        last = conversion.channels_last if conversion is not None else not tensor.is_contiguous()
        self.conversion = Conversion(tensor.dtype, last) if floating else None
        self.after = []

    def _draw(self, conversion: Conversion) -> torch.Tensor | None:
        """Render view, border and conversion in one pass; None if the source cannot."""
        last, border = conversion.channels_last, self._border
        memory, bits = output_memory(conversion, self.size, 3, self.out)
        if border is not None:
            bits[...] = fill_bits(border.fill, conversion)
            inside = border.inside(self.size)
            bits = bits[inside] if last else bits[:, *inside]
        if not self._source.draw_converted(self._view, conversion, bits):
            return None
        return memory.permute(2, 0, 1) if last else memory

    def _settle(self) -> None:
        """Apply the image's pending geometry to masks and boxes."""
        view, border = self._view, self._border
        if view != View.of(self._source.size):
            self.masks = tuple(_mask(mask, view) for mask in self.masks)
            if self.boxes is not None:
                ends = view.points(self.boxes.reshape(-1, 2)).reshape(-1, 2, 2)
                self.keep_boxes(np.concatenate([ends.min(axis=1), ends.max(axis=1)], axis=1))
        if border is not None:
            self.masks = tuple(_padded(mask, border) for mask in self.masks)

    def keep_boxes(self, boxes: npt.NDArray[np.float64]) -> None:
        """Clip moved boxes to the image, and remove empty ones."""
        height, width = self.size
        boxes = boxes.clip(0, [width, height, width, height])
        assert self.kept is not None
        there = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
        self.boxes, self.kept = boxes[there], self.kept[there]


def _padded(mask: Pixels, border: Border) -> Pixels:
    """Return a mask with a border of zeros."""
    ends = (border.top, border.bottom), (border.left, border.right)
    return np.pad(mask, ends if mask.ndim == 2 else (*ends, (0, 0)))


def _mask(mask: Pixels, view: View) -> Pixels:
    """Return a view of a mask of any dtype, with nearest interpolation."""
    (left, top, right, bottom), (height, width) = view.box, view.size
    rows = (top + (np.arange(height) + 0.5) * ((bottom - top) / height)).astype(np.int64).clip(0, mask.shape[0] - 1)
    columns = (left + (np.arange(width) + 0.5) * ((right - left) / width)).astype(np.int64).clip(0, mask.shape[1] - 1)
    sideways, upside_down = view.flipped
    made: Pixels = mask[rows[::-1] if upside_down else rows][:, columns[::-1] if sideways else columns]
    return made
