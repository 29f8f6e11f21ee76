"""Frames to the pixels of a clip: a chain of transforms for images, the same crop and flip for all frames of it.

Each frame is made RGB, and from there resized, cropped, flipped and normalised where the batch is to be.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import cv2
import numpy as np
import numpy.typing as npt
import torch
from av.video.reformatter import VideoReformatter

from penstock.errors import ImageError
from penstock.images import native
from penstock.images.resize import resize
from penstock.images.transforms import Compose
from penstock.images.transforms.canvas import Canvas
from penstock.images.transforms.output import Conversion, look_up_table
from penstock.images.transforms.view import Pixels, View, render
from penstock.random import call_in_scope, generator
from penstock.stages import stage

__all__ = ["Picture", "draw_clip", "rgb"]

_TURNS = {90: cv2.ROTATE_90_COUNTERCLOCKWISE, 180: cv2.ROTATE_180, 270: cv2.ROTATE_90_CLOCKWISE}


class _Here(threading.local):
    def __init__(self) -> None:
        self.reformatter = VideoReformatter()


_here = _Here()


def rgb(frame: Any, rotation: int = 0) -> npt.NDArray[np.uint8]:
    """Return the pixels of a frame, turned to be looked at: uint8 (height, width, 3), rows perhaps not adjacent.

    They are those of PyAV's ``to_ndarray(format="rgb24")``.
    """
    # FFmpeg's own threads for this do not live on in a fork.
    made = _here.reformatter.reformat(frame, format="rgb24", threads=1)
    plane = made.planes[0]
    rows: npt.NDArray[np.uint8] = np.frombuffer(cast(memoryview, plane), np.uint8).reshape(-1, plane.line_size)
    pixels = rows[: made.height, : 3 * made.width].reshape(made.height, made.width, 3)
    return pixels if not rotation else np.asarray(cv2.rotate(pixels, _TURNS[rotation]))


class Picture:
    """A frame as the source of a canvas.

    Args:
        frame: PyAV's.
        rotation: degrees, counterclockwise, by which it is to be turned.
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

    def draw(self, view: View, out: Pixels | None) -> Pixels:
        """The pixels of a view."""
        if out is not None and (out.shape[2] != 3 or out.dtype != np.uint8):
            out = None
        with stage("resize"):
            return render(self.pixels, view.box, view, out=out)

    def lies_in(self, out: Pixels) -> bool:
        """False: they are FFmpeg's."""
        return False

    def draw_converted(self, view: View, conversion: Conversion, out: npt.NDArray[Any]) -> bool:
        """Whether the extension has made what becomes of a view's pixels, in one pass."""
        plain = conversion.dtype is torch.uint8
        if plain and not conversion.channels_last and self._copied(view, out):
            return True
        if not native.is_available() or view.interpolation == "nearest":
            return False
        pixels = self.pixels
        with stage("resize"):
            resize(
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
        """Whether a view is some pixels as they are, which were put there plane by plane."""
        left, top, right, bottom = map(int, view.box)
        whole = all(float(edge).is_integer() for edge in view.box)
        if not whole or view.size != (bottom - top, right - left):
            return False
        sideways, upside_down = view.flipped
        rows, columns = slice(None, None, -1 if upside_down else 1), slice(None, None, -1 if sideways else 1)
        part = self.pixels[top:bottom, left:right]
        with stage("resize"):
            # To split and then to copy takes half the time of taking out channel by channel.
            for plane, place in zip(cv2.split(part), out, strict=True):
                np.copyto(place, plane[rows, columns])
        return True


def draw_clip(
    frames: Sequence[Any], transform: Compose, out: torch.Tensor | None = None, *, rotation: int = 0
) -> torch.Tensor:
    """Return a clip: (frames, channels, height, width), contiguous.

    Args:
        frames: PyAV's.
        transform: draws the same for all of them.
        out: where it is to be, if it has this shape and type then.
        rotation: degrees, counterclockwise, by which frames are to be turned.

    Raises:
        ImageError: the transform makes frames of different sizes.
    """
    key = int(generator().integers(1 << 63))
    globals_before = None if transform.pure else _globals()
    clip: torch.Tensor | None = out
    for number, frame in enumerate(frames):
        if number and globals_before is not None:
            _set_globals(globals_before)
        place = None if clip is None else clip[number]
        made = call_in_scope(key, _drawn(transform, place), Picture(frame, rotation))
        if clip is None or (not number and (made.shape, made.dtype) != (clip.shape[1:], clip.dtype)):
            clip = torch.empty((len(frames), *made.shape), dtype=made.dtype)
        if made.shape != clip.shape[1:]:
            sizes = f"{tuple(clip.shape[1:])} and {tuple(made.shape)}"
            raise ImageError(f"the transform makes frames of one clip {sizes}: put a step of one size at its end")
        if place is None or made.data_ptr() != place.data_ptr():
            clip[number].copy_(made)
    assert clip is not None
    return clip


def _drawn(transform: Compose, place: torch.Tensor | None) -> Callable[[Picture], torch.Tensor]:
    """What makes a tensor of a frame."""

    def draw(picture: Picture) -> torch.Tensor:
        with stage("augment"):
            canvas = Canvas(picture, out=place)
            transform.apply(canvas)
            conversion = canvas.conversion or Conversion(torch.uint8, False)
            canvas.conversion = conversion._replace(channels_last=False)
            return canvas.tensor

    return draw


def _globals() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_globals(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
