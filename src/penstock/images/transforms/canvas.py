"""`Canvas`: an image that passes through a chain. Geometric steps are recorded; pixels are computed when needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import cv2
import numpy as np
import numpy.typing as npt
import torch

from penstock.images.transforms.output import BYTES, Conversion, convert, fill_bits, output_memory
from penstock.images.transforms.targets import Targets
from penstock.images.transforms.view import WARP, Border, Fill, Filter, Pixels, View, fill_values, padded, render
from penstock.stages import stage

__all__ = ["ArraySource", "Canvas", "PixelSource"]


class PixelSource(Protocol):
    """A source of pixels."""

    size: tuple[int, int]
    """(height, width) of the whole image."""

    def draw(self, view: View) -> Pixels:
        """Return the pixels of a view, without its border, in new memory."""

    def draw_converted(self, view: View, conversion: Conversion, out: npt.NDArray[Any]) -> bool:
        """Write them, converted, as bits, to `out`; return False if the source does not support it."""


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
        targets: the masks and boxes that follow its geometry; None: there are none.
        out: memory for the result, used if its shape (in memory) and dtype match.

    Attributes:
        size: current (height, width) of the image.
        conversion: the conversion of the pixels at the end; None: no conversion.
        after: functions that then change the tensor (channels, height, width) in place.
    """

    def __init__(self, source: PixelSource, targets: Targets | None = None, out: torch.Tensor | None = None) -> None:
        self._source = source
        self.size = source.size
        self._pending = True  # whether the view is not drawn yet
        self._view = View.of(source.size)
        self.targets = targets
        self.out = out
        self.conversion: Conversion | None = None
        self.after: list[Callable[[torch.Tensor], object]] = []

    @property
    def view(self) -> View:
        """The current view. An image with a border, or a changed tensor, is drawn first: the view is all of it."""
        if self.after or self._view.border is not None:
            self.render()
        return self._view

    @property
    def unseen(self) -> View | None:
        """The view of the original source, if it is not drawn and nothing else was changed; else None."""
        alone = self._view.border is None and not self.after and self.targets is None
        return self._view if self._pending and alone and not isinstance(self._source, ArraySource) else None

    def render(self) -> Pixels:
        """Compute the image so far; return its pixels (height, width, channels), which may be changed in place."""
        if self.after:
            tensor = self.tensor
            if self.conversion is None:  # arrays of floats, from another library
                self.pixels = tensor.permute(1, 2, 0).numpy()
            else:
                self.tensor = tensor
        return self.drawn

    @property
    def drawn(self) -> Pixels:
        """The pixels of the current view, before `conversion` and `after`."""
        if self._pending:
            view = self._view
            if self.targets is not None and view != View.of(self._source.size):
                self.targets.look(view)
            drawn = self._source.draw(view)
            self.pixels = drawn if view.border is None else padded(drawn, view.border, view.fill)
        return self._pixels

    @property
    def pixels(self) -> Pixels:
        """The result of `render`. Setting it replaces the image."""
        return self.render()

    @pixels.setter
    def pixels(self, pixels: Pixels) -> None:
        self._pixels = pixels
        self._pending = False
        self._source = ArraySource(pixels)
        self.size = self._source.size
        self._view = View.of(self.size)

    def look(self, view: View) -> None:
        """Set the view of the image, which was made of `view`."""
        if view is not self._view:
            self._view, self.size, border = view, view.size, view.border
            if border is not None:
                self.size = view.size[0] + border.top + border.bottom, view.size[1] + border.left + border.right
            self._pending = True

    def mirror(self, *, upside_down: bool = False) -> None:
        """Mirror the image left to right, or upside down."""
        self.look((self.view if self.after else self._view).mirror(upside_down=upside_down))

    def resize(self, height: int, width: int, *, interpolation: Filter, antialias: bool) -> None:
        """Resize the image. One that was resized before is drawn first."""
        view = self.view
        if (height, width) == view.size:
            return
        if view.resized:
            self.render()
            view = self.view
        self.look(View(view.box, (height, width), view.flipped, True, interpolation, antialias))

    def window(
        self, top: int, left: int, height: int, width: int, *, mode: int = cv2.BORDER_CONSTANT, fill: Fill = 0
    ) -> None:
        """Crop the image to a part, in its pixels. Parts outside the image get a border.

        That is OpenCV's border `mode`, and one value or one per channel. The border of masks is zero.
        """
        view, (tall, wide) = self.view, self.size
        border = Border(max(0, -left), max(0, -top), max(0, left + width - wide), max(0, top + height - tall))
        seen = height - border.top - border.bottom, width - border.left - border.right
        # A constant border is drawn around the visible part without drawing the image first. That is impossible with
        # boxes, which are clipped at the whole, or after a resize, which uses pixels beside the visible ones.
        plain = mode == cv2.BORDER_CONSTANT and not view.resized
        if plain and min(seen) > 0 and (self.targets is None or self.targets.boxes is None):
            view = view.crop(max(0, top), max(0, left), *seen)
            self.look(View(*view[:6], border, fill) if any(border) else view)
            return
        if any(border):
            self.pixels = padded(self.render(), border, fill, mode)
            if self.targets is not None:
                self.targets.pad(border)
        self.look(self.view.crop(top + border.top, left + border.left, height, width))

    def warp(self, matrix: npt.NDArray[Any], *, interpolation: Filter, fill: Fill = 0) -> None:
        """Warp the image with a matrix (2, 3) that maps positions in the result to positions before; keep the size.

        Pixels from outside are `fill`, zero in masks. Boxes become the bounding boxes of their moved corners.
        """
        pixels = self.render()
        height, width = self.size
        value = fill_values(fill, pixels.shape[2])
        flags = WARP[interpolation] | cv2.WARP_INVERSE_MAP
        made = cv2.warpAffine(pixels, matrix, (width, height), flags=flags, borderValue=value)
        self.pixels = made if made.ndim == 3 else made[:, :, None]
        if self.targets is not None:
            self.targets.warp(matrix, self.size)

    @property
    def tensor(self) -> torch.Tensor:
        """The finished image as a tensor (channels, height, width)."""
        conversion, out, tensor = self.conversion, self.out, None
        if self._pending and self.targets is None and not isinstance(self._source, ArraySource):
            tensor = self._draw(conversion or BYTES)
        if tensor is None and conversion is not None:
            pixels = self.drawn
            with stage("normalize"):
                tensor = convert(pixels, conversion, out)
        elif tensor is None:
            memory = torch.from_numpy(np.require(self.drawn, requirements=["C", "W"]))
            if out is not None and out.shape == memory.shape and out.dtype is memory.dtype:
                np.copyto(out.numpy(), self.drawn)  # torch would wake a thread on every core
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
        """Draw the view inside its border and convert it, in one pass; return None if the source cannot."""
        last, view = conversion.channels_last, self._view
        memory, bits = output_memory(conversion, self.size, 3, self.out)
        if view.border is not None:
            bits[...] = fill_bits(view.fill, conversion)
            left, top, right, bottom = view.border
            inside = slice(top, self.size[0] - bottom), slice(left, self.size[1] - right)
            bits = bits[inside] if last else bits[:, *inside]
        if not self._source.draw_converted(view, conversion, bits):
            return None
        return memory.permute(2, 0, 1) if last else memory
