"""An image on its way through a chain: steps of geometry are noted, and pixels made when a step looks at them.

Masks and boxes that belong to the image lie on the same canvas and follow its geometry: masks by their nearest pixel,
boxes by their corners.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import cv2
import numpy as np
import numpy.typing as npt
import torch

from penstock.images.transforms.border import Border, colour, fill_values
from penstock.images.transforms.output import Conversion, as_bits, convert, look_up_table, place
from penstock.images.transforms.view import Filter, Pixels, View, render
from penstock.stages import stage

__all__ = ["Array", "Canvas", "Source"]


class Source(Protocol):
    """Where pixels come from."""

    size: tuple[int, int]
    """(height, width) of the whole."""

    def draw(self, view: View, out: Pixels | None) -> Pixels:
        """The pixels of a view: in `out` if that is given and has their shape and type, else in new memory."""

    def lies_in(self, out: Pixels) -> bool:
        """Whether this memory may be that of the source itself."""

    def draw_converted(self, view: View, conversion: Conversion, out: npt.NDArray[Any]) -> bool:
        """Whether what becomes of a view's pixels was drawn, as bits, in `out`; if not, these are made first."""


class Array:
    """Pixels that are there already, as a `Source`: (height, width, channels)."""

    def __init__(self, pixels: Pixels) -> None:
        self.pixels = pixels
        self.size = pixels.shape[0], pixels.shape[1]

    def draw(self, view: View, out: Pixels | None) -> Pixels:
        """The pixels of a view."""
        if out is not None and (out.shape[2] != self.pixels.shape[2] or out.dtype != self.pixels.dtype):
            out = None
        if out is not None and self.lies_in(out):
            out = None
        with stage("resize"):
            return render(self.pixels, view.box, view, out=out)

    def lies_in(self, out: Pixels) -> bool:
        """Whether this memory may be that of the pixels."""
        return np.may_share_memory(out, self.pixels)

    def draw_converted(self, view: View, conversion: Conversion, out: npt.NDArray[Any]) -> bool:
        """False: the pixels are there already."""
        return False


class Canvas:
    """What a chain works on.

    Args:
        source: of the image.
        masks: arrays (height, width) or (height, width, channels) of the image's size.
        boxes: (n, 4) of left, top, right, bottom in the image's pixels.
        out: where the image should end up if it has this shape (as in memory) and type then.

    Attributes:
        conversion: what becomes of the pixels in the end; None: they stay as they are.
        after: what is to be done to the tensor (channels, height, width) then.
    """

    def __init__(
        self,
        source: Source,
        *,
        masks: tuple[Pixels, ...] = (),
        boxes: npt.NDArray[Any] | None = None,
        out: torch.Tensor | None = None,
    ) -> None:
        self._source = source
        self._pending = True  # whether the view is still to be made
        self._view = View.of(source.size)
        self._border: Border | None = None  # around the view
        self.masks = masks
        self.boxes = None if boxes is None else np.array(boxes, np.float64).reshape(-1, 4)
        self.out = out
        self._into: Pixels | None = None  # `out` as an array, once pixels were made there
        self.conversion: Conversion | None = None
        self.after: list[Callable[[torch.Tensor], object]] = []
        self.kept: npt.NDArray[np.int64] | None = None if boxes is None else np.arange(len(self.boxes))  # type: ignore[arg-type]
        """Which of the boxes given are still there: those that a crop leaves nothing of are not."""

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the image as it is now."""
        border, (height, width) = self._border, self._view.size
        if border is None:
            return height, width
        return height + border.top + border.bottom, width + border.left + border.right

    @property
    def view(self) -> View:
        """What the image is a view of. One with a border is all of its pixels."""
        if self._border is not None:
            self.finish()
        return self._view

    @property
    def unseen(self) -> View | None:
        """The view that the image is of its source, if nobody has looked at its pixels; None if there is more to it."""
        alone = self._border is None and not self.after and not self.masks and self.boxes is None
        return self._view if self._pending and alone and not isinstance(self._source, Array) else None

    @property
    def pixels(self) -> Pixels:
        """The image as it is now, (height, width, channels), to be changed at will."""
        if self._pending:
            self._render()
        return self._pixels

    @pixels.setter
    def pixels(self, pixels: Pixels) -> None:
        if self._pending:
            self._settle()
        self._pixels = pixels
        self._pending = False
        self._view, self._border = View.of((pixels.shape[0], pixels.shape[1])), None
        self._source = Array(pixels)

    def look(self, view: View) -> None:
        """From now on the image is this view of it."""
        if view is not self.view:
            if self.after:
                self.tensor = self.tensor
            self._view = view
            self._pending = True

    def mirror(self, *, upside_down: bool = False) -> None:
        """The image mirrored left to right, or upside down."""
        view, border = self._view, self._border
        if border is not None and not self.after:
            self._view = view.mirror(upside_down=upside_down)
            self._border = border.mirror(upside_down=upside_down)
        else:
            self.look(self.view.mirror(upside_down=upside_down))

    def finish(self) -> None:
        """Masks and boxes are as the image is, whether or not its pixels have been looked at."""
        if self._pending:
            self.pixels = self.pixels

    def pad(
        self, left: int, top: int, right: int, bottom: int, *, mode: int = cv2.BORDER_CONSTANT, fill: Any = 0
    ) -> None:
        """A border around the image, of so many pixels, in one of OpenCV's ways, of one value or one for each channel.
        That of masks is zero; boxes move along.
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
        """A part of the image, in its pixels. Where it reaches beyond the image, it has a border, see `pad`."""
        tall, wide = self.size
        over = max(0, -left), max(0, -top), max(0, left + width - wide), max(0, top + height - tall)
        seen = height - over[1] - over[3], width - over[0] - over[2]
        # A plain border is drawn around what is seen of the image. Boxes are to be clipped by the whole, and a resize
        # looks at pixels beside those that are seen.
        plain = mode == cv2.BORDER_CONSTANT and self.boxes is None and not self.view.resized
        if plain and min(seen) > 0:
            self.look(self.view.crop(max(0, top), max(0, left), *seen))
            self._border = Border(*over, fill) if any(over) else None
            return
        if any(over):
            self.pad(*over, mode=mode, fill=fill)
        self.look(self.view.crop(top + over[1], left + over[0], height, width))

    def warp(self, matrix: npt.NDArray[Any], *, interpolation: Filter, fill: Any = 0) -> None:
        """Pixels moved: (2, 3), from positions in the result to positions before; the size stays. What was outside is
        `fill`, of masks zero. Boxes become the boxes around their corners.
        """
        pixels = self.pixels
        height, width = self.size
        value = fill_values(fill, pixels.shape[2])
        flags = {"nearest": cv2.INTER_NEAREST, "bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}[interpolation]
        made = cv2.warpAffine(pixels, matrix, (width, height), flags=flags | cv2.WARP_INVERSE_MAP, borderValue=value)
        self.pixels = made if made.ndim == 3 else made[:, :, None]
        if self.masks:
            y, x = np.mgrid[:height, :width]
            column, row = np.rint(np.einsum("ij,jhw->ihw", matrix, np.stack([x, y, np.ones_like(x)]))).astype(np.int64)
            inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
            found = row.clip(0, height - 1), column.clip(0, width - 1)
            self.masks = tuple(
                np.where(inside if mask.ndim == 2 else inside[:, :, None], mask[found], 0).astype(mask.dtype)
                for mask in self.masks
            )
        if self.boxes is not None:
            forward = np.linalg.inv(np.vstack([matrix, [0, 0, 1]]))[:2]
            corners = self.boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2) - 0.5
            moved = corners @ forward[:, :2].T + forward[:, 2] + 0.5
            self._keep_boxes(np.concatenate([moved.min(axis=1), moved.max(axis=1)], axis=1))

    def resize(self, change: Callable[[View], View | None]) -> None:
        """Change the view by a step that may have to see the pixels of the view before."""
        view = change(self.view)
        if view is None:
            self.pixels = self.pixels
            view = change(self.view)
            assert view is not None
        self.look(view)

    @property
    def tensor(self) -> torch.Tensor:
        """The image as a tensor (channels, height, width), all that was to be done to it done."""
        conversion, out = self.conversion, self.out
        tensor = None if conversion is None else self._draw_converted(conversion)
        if tensor is None and conversion is not None:
            pixels = self.pixels
            with stage("normalize"):
                tensor = convert(pixels, conversion, out)
        elif tensor is None:
            tensor = self._memory(self.pixels, out).permute(2, 0, 1)
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

    def _draw_converted(self, conversion: Conversion) -> torch.Tensor | None:
        """The tensor, of pixels that nobody has looked at; None where they have to be made first."""
        seen = not self._pending or isinstance(self._source, Array)
        if seen or self.masks or self.boxes is not None:
            return None
        last, border = conversion.channels_last, self._border
        memory = place(conversion, self.size, 3, self.out)
        bits = as_bits(memory)
        if border is not None:
            values = look_up_table(conversion, 3)[np.arange(3), colour(border.fill)]
            bits[...] = values if last else values[:, None, None]
            inside = border.inside(self.size)
            bits = bits[inside] if last else bits[:, *inside]
        if not self._source.draw_converted(self._view, conversion, bits):
            return None
        return memory.permute(2, 0, 1) if last else memory

    def _memory(self, pixels: Pixels, out: torch.Tensor | None) -> torch.Tensor:
        if out is not None and pixels is self._into:
            return out
        if not pixels.flags.c_contiguous or not pixels.flags.writeable:
            pixels = np.array(pixels, order="C")
        memory = torch.from_numpy(pixels)
        if out is None or out.shape != memory.shape or out.dtype is not memory.dtype:
            return memory
        return out if out.data_ptr() == memory.data_ptr() else out.copy_(memory)

    def _render(self) -> None:
        out, into = self.out, None
        if out is not None and self.conversion is None and out.dtype is torch.uint8 and out.shape[:2] == self.size:
            into = out.numpy()
        border = self._border
        made = self._source.draw(self._view, into) if border is None else self._bordered(border, into)
        self.pixels = made
        self._into = into if made is into else None

    def _bordered(self, border: Border, into: Pixels | None) -> Pixels:
        """The view drawn inside of its border."""
        whole = into
        if whole is None or whole.shape[2] != 3 or self._source.lies_in(whole):
            whole = np.empty((*self.size, 3), np.uint8)
        whole[...] = colour(border.fill)
        part = whole[border.inside(self.size)]
        made = self._source.draw(self._view, part)
        return whole if made is part else border.around(made)

    def _settle(self) -> None:
        """Give masks and boxes the geometry that the image has got."""
        view, border = self._view, self._border
        if (self.masks or self.boxes is not None) and view != View.of(self._source.size):
            self.masks = tuple(_mask(mask, view) for mask in self.masks)
            if self.boxes is not None:
                self._settle_boxes(view)
        if border is not None:
            self.masks = tuple(_padded(mask, border) for mask in self.masks)
        self._pending = False

    def _settle_boxes(self, view: View) -> None:
        assert self.boxes is not None
        ends = view.points(self.boxes.reshape(-1, 2)).reshape(-1, 2, 2)
        self._keep_boxes(np.concatenate([ends.min(axis=1), ends.max(axis=1)], axis=1))

    def _keep_boxes(self, boxes: npt.NDArray[np.float64]) -> None:
        """What is inside of the image of boxes that have moved; those of which nothing is are left out."""
        height, width = self.size
        boxes = boxes.clip(0, [width, height, width, height])
        assert self.kept is not None
        there = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
        self.boxes, self.kept = boxes[there], self.kept[there]


def _padded(mask: Pixels, border: Border) -> Pixels:
    """A mask with a border of zeros."""
    ends = (border.top, border.bottom), (border.left, border.right)
    return np.pad(mask, ends if mask.ndim == 2 else (*ends, (0, 0)))


def _mask(mask: Pixels, view: View) -> Pixels:
    """A view of a mask of any type: of each pixel the nearest one."""
    (left, top, right, bottom), (height, width) = view.box, view.size
    rows = (top + (np.arange(height) + 0.5) * ((bottom - top) / height)).astype(np.int64).clip(0, mask.shape[0] - 1)
    columns = (left + (np.arange(width) + 0.5) * ((right - left) / width)).astype(np.int64).clip(0, mask.shape[1] - 1)
    sideways, upside_down = view.flipped
    made: Pixels = mask[rows[::-1] if upside_down else rows][:, columns[::-1] if sideways else columns]
    return made
