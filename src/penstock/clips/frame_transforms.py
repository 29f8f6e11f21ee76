"""Applies image transforms to the frames of a clip, with the same crop and flip for all frames.

Each frame is converted to RGB, and then resized, cropped, flipped and normalised straight into the batch.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import av
import cv2
import numpy as np
import numpy.typing as npt
import torch
from av.video.reformatter import VideoReformatter

from penstock.errors import ImageError
from penstock.images import native
from penstock.images.transforms import Compose
from penstock.images.transforms.canvas import Canvas
from penstock.images.transforms.output import Conversion, as_bits, look_up_table
from penstock.images.transforms.view import Pixels, View, render
from penstock.random import call_in_scope, generator
from penstock.stages import stage

__all__ = ["FrameSource", "draw_clip", "rgb"]

_TURNS = {90: cv2.ROTATE_90_COUNTERCLOCKWISE, 180: cv2.ROTATE_180, 270: cv2.ROTATE_90_CLOCKWISE}


_GBR = (2, 0, 1)
"""Indices of red, green and blue in FFmpeg's format gbrp."""
_HALVED = ("yuv420p", "yuvj420p")


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.reformatter = VideoReformatter()
        self.as_planes: dict[tuple[Any, ...], bool] = {}
        """By kind of frame: whether conversion plane by plane yields the same pixels."""


_thread_state = _ThreadState()


class _ForkSafeLock:
    """A lock that is free after a fork."""

    def __init__(self) -> None:
        self.renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """Replace the lock by a free one."""
        self.held = threading.RLock()


_lock = _ForkSafeLock()


def rgb(frame: Any, rotation: int = 0) -> npt.NDArray[np.uint8]:
    """Return the pixels of a frame, turned for display: uint8 (height, width, 3), perhaps with gaps between rows.

    The values equal PyAV's ``to_ndarray(format="rgb24")``.
    """
    made = _reformatted(frame, "rgb24")
    pixels = _rows(made, 0)[:, : 3 * made.width].reshape(made.height, made.width, 3)
    return pixels if not rotation else np.asarray(cv2.rotate(pixels, _TURNS[rotation]))


def planes(frame: Any) -> list[npt.NDArray[np.uint8]] | None:
    """Return red, green and blue of a frame, uint8 (height, width) each, without rotation.

    Return None where this is slower than `rgb`, or yields other pixels.
    """
    # FFmpeg has a fast path for these formats only, and it rounds the last pixels of a row differently.
    name, width = frame.format.name, frame.width
    if name not in _HALVED or width % 16 or frame.height % 2:
        return None
    kind = name, width, frame.color_range, frame.colorspace
    if kind not in _thread_state.as_planes:
        # The available paths depend on the CPU, too, so compare them once.
        noise = np.random.default_rng(0).integers(0, 256, (48, width), np.uint8)
        tried = av.VideoFrame.from_ndarray(noise, format=name)
        tried.color_range, tried.colorspace = frame.color_range, frame.colorspace
        _thread_state.as_planes[kind] = np.array_equal(np.dstack(_planes(tried)), rgb(tried))
    return _planes(frame) if _thread_state.as_planes[kind] else None


def _planes(frame: Any) -> list[npt.NDArray[np.uint8]]:
    made = _reformatted(frame, "gbrp")
    return [_rows(made, number)[:, : made.width] for number in _GBR]


def _reformatted(frame: Any, name: str) -> Any:
    # FFmpeg's conversion threads do not survive a fork.
    return _thread_state.reformatter.reformat(frame, format=name, threads=1)


def _rows(frame: Any, number: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of a plane as rows."""
    plane = frame.planes[number]
    return np.frombuffer(cast(memoryview, plane), np.uint8).reshape(-1, plane.line_size)[: frame.height]


class FrameSource:
    """A frame as the source of a canvas.

    Args:
        frame: a PyAV frame.
        rotation: degrees, counterclockwise, by which to turn it.
    """

    def __init__(self, frame: Any, rotation: int) -> None:
        self._frame, self._rotation = frame, rotation
        turned = rotation in (90, 270)
        self.size = (frame.width, frame.height) if turned else (frame.height, frame.width)

    @cached_property
    def pixels(self) -> npt.NDArray[np.uint8]:
        """The pixels, see `rgb`."""
        with stage("decode"):
            return rgb(self._frame, self._rotation)

    def draw(self, view: View) -> Pixels:
        """Return the pixels of a view."""
        with stage("resize"):
            return render(self.pixels, view.box, view)

    def draw_converted(self, view: View, conversion: Conversion, out: npt.NDArray[Any]) -> bool:
        """Write the converted pixels of a view to `out` in one pass; return False if that is not possible."""
        plain = conversion.dtype is torch.uint8
        if plain and not conversion.channels_last and self._copied(view, out):
            return True
        if not native.is_available() or view.interpolation == "nearest":
            return False
        pixels = self.pixels
        with stage("resize"):
            native.resize(
                pixels,
                view.box,
                out,
                interpolation=view.interpolation,
                antialias=view.antialias,
                flipped=view.flipped,
                table=None if plain else look_up_table(conversion, 3),
                planar=not conversion.channels_last,
            )
        return True

    def _copied(self, view: View, out: npt.NDArray[Any]) -> bool:
        """Copy a view that needs no resize to `out`, plane by plane; return False for other views."""
        left, top, right, bottom = map(int, view.box)
        whole = all(float(edge).is_integer() for edge in view.box)
        if not whole or view.size != (bottom - top, right - left):
            return False
        sideways, upside_down = view.flipped
        rows, columns = slice(None, None, -1 if upside_down else 1), slice(None, None, -1 if sideways else 1)
        with stage("decode"):
            found = None if self._rotation else planes(self._frame)
        # Splitting and copying takes half the time of copying each channel of interleaved pixels.
        parts = cv2.split(self.pixels[top:bottom, left:right]) if found is None else found
        with stage("resize"):
            for plane, place in zip(parts, out, strict=True):
                part = plane if found is None else plane[top:bottom, left:right]
                np.copyto(place, part[rows, columns])
        return True


def draw_clip(
    frames: Sequence[Any], transform: Compose, out: torch.Tensor | None = None, *, rotation: int = 0
) -> torch.Tensor:
    """Return a clip: (frames, channels, height, width), contiguous.

    Args:
        frames: PyAV frames.
        transform: uses the same random draws for all frames.
        out: the memory to use, if shape and dtype match the result.
        rotation: degrees, counterclockwise, by which to turn frames.

    Raises:
        ImageError: the transform returns frames of different sizes.
    """
    key = int(generator().integers(1 << 63))
    drawn = _ClipBuilder(len(frames), transform, out)
    # Impure transforms draw from global generators, which are reset for each frame: one clip at a time.
    with contextlib.nullcontext() if transform.pure else _lock.held:
        globals_before = None if transform.pure else _globals()
        for number, frame in enumerate(frames):
            if number and globals_before is not None:
                _set_globals(globals_before)
            picture = FrameSource(frame, rotation)
            if not drawn.redraw(number, picture):
                call_in_scope(key, partial(drawn.draw, number), picture)
    assert drawn.clip is not None
    return drawn.clip


class _FrameView(NamedTuple):
    """The result of transforms that only choose a view of a frame, for reuse with the next frames.

    Attributes:
        size: (height, width) of the frame.
        view: the chosen view.
        conversion: the conversion of the view's pixels.
        bits: (frames, channels, height, width), the memory of the clip.
    """

    size: tuple[int, int]
    view: View
    conversion: Conversion
    bits: npt.NDArray[Any]


class _ClipBuilder:
    """Builds a clip frame by frame.

    Args:
        count: number of frames.
        transform: applied to each frame.
        out: the memory to use, if shape and dtype match the result.
    """

    def __init__(self, count: int, transform: Compose, out: torch.Tensor | None) -> None:
        self.clip = out
        self._count, self._transform = count, transform
        self._choice: _FrameView | None = None

    def draw(self, number: int, picture: FrameSource) -> None:
        """Apply the transform to a frame and write the result to the clip."""
        with stage("augment"):
            canvas = Canvas(picture)
            self._transform.apply(canvas)
            conversion = (canvas.conversion or Conversion(torch.uint8, False))._replace(channels_last=False)
            canvas.conversion, view = conversion, canvas.unseen
            if not number and view is not None:
                clip = self._memory((3, *view.size), conversion.dtype)
                if self._transform.pure:
                    self._choice = _FrameView(picture.size, view, conversion, as_bits(clip))
            canvas.out = None if self.clip is None else self.clip[number]
            made = canvas.tensor
        clip = self.clip if number and self.clip is not None else self._memory(tuple(made.shape), made.dtype)
        if made.shape != clip.shape[1:]:
            sizes = f"{tuple(clip.shape[1:])} and {tuple(made.shape)}"
            raise ImageError(
                f"the transform returns frames of different sizes, {sizes}: end it with a step of fixed size"
            )
        if made.data_ptr() != clip[number].data_ptr():
            clip[number].copy_(made)

    def redraw(self, number: int, picture: FrameSource) -> bool:
        """Write a frame with the view of the first one; return False if that is not possible."""
        choice = self._choice
        if choice is None or picture.size != choice.size:
            return False
        with stage("augment"):
            return picture.draw_converted(choice.view, choice.conversion, choice.bits[number])

    def _memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of the clip; allocate it if shape or dtype differ."""
        if self.clip is None or (tuple(self.clip.shape[1:]), self.clip.dtype) != (shape, dtype):
            self.clip = torch.empty((self._count, *shape), dtype=dtype)
        return self.clip


def _globals() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_globals(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
