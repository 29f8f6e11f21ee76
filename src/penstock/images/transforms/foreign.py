"""Transforms of other people in a chain: they get what they expect, and draw what the sample's key says.

    torchvision      a uint8 or float tensor (channels, height, width); its ``ToTensor``, ``ToImage`` and
                     ``ToPILImage`` an array; masks and boxes as ``tv_tensors``
    albumentations   ``image=`` an array (height, width, channels), with ``mask=``/``masks=`` and ``bboxes=`` where the
                     pipeline has ``bbox_params``
    any callable     the array (height, width, channels), after `ToTensor` the tensor (channels, height, width)

Each returns an array, a tensor or an image of Pillow, and the chain goes on from there. Albumentations' generators are
seeded from the sample's own, with one copy of the pipeline for each thread. All others draw from the global generators
of Python, NumPy and torch: these are seeded for each sample by the loader (``seed=``), inline and in processes, so such
a chain is not `pure`; a callable that draws from `penstock.generator()` alone may say ``pure = True``.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.images.transforms.base import Transform
from penstock.images.transforms.canvas import Canvas
from penstock.images.transforms.output import Form
from penstock.random import generator

__all__ = ["Albumentations", "Callable_", "adapt"]

_WANT_ARRAYS = frozenset({"PILToTensor", "ToImage", "ToPILImage", "ToTensor"})


def adapt(transform: Any) -> Transform:
    """A transform of another library, or any callable, as a step of ours.

    Raises:
        ConfigError: it cannot be called.
    """
    if not callable(transform):
        raise ConfigError(f"a transform is something that is called with an image, not {transform!r}")
    if isinstance(transform, type):
        raise ConfigError(f"{transform.__name__} is a class: give an instance of it, {transform.__name__}(...)")
    home = {kind.__module__.partition(".")[0] for kind in type(transform).__mro__}
    if "albumentations" in home:
        return Albumentations(transform)
    return Callable_(transform, tensors="torchvision" in home)


class Callable_(Transform):
    """A callable ``image -> image``.

    Args:
        function: is called.
        tensors: whether with tensors rather than arrays.
    """

    def __init__(self, function: Callable[[Any], Any], *, tensors: bool = False) -> None:
        self.function = function
        first: Any = function
        while tensors and getattr(first, "transforms", None):  # the first of a chain
            first = first.transforms[0]
        self.tensors = tensors and type(first).__name__ not in _WANT_ARRAYS
        self.pure = bool(getattr(function, "pure", False))

    def apply(self, canvas: Canvas) -> None:
        if canvas.masks or canvas.boxes is not None:
            raise ConfigError(
                f"{self.function!r} gets the image alone, and could not take its masks and boxes along: use a "
                "transform of Penstock or albumentations there, or leave masks and boxes out of the target"
            )
        if self.tensors or canvas.conversion is not None:
            put(canvas, self.function(canvas.tensor.contiguous()))
        else:
            put(canvas, self.function(canvas.pixels))

    def leaves(self, form: Form) -> Form:
        return Form(None, None, form.channels_last)

    def __repr__(self) -> str:
        return repr(self.function)


def put(canvas: Canvas, made: Any) -> None:
    """Go on with what a foreign transform returned.

    Raises:
        ConfigError: it is no image.
    """
    if isinstance(made, torch.Tensor):
        if made.ndim != 3:
            raise ConfigError(f"a transform returned a tensor of the shape {tuple(made.shape)}, not (channels, h, w)")
        canvas.tensor = made.as_subclass(torch.Tensor)
        return
    array = made if isinstance(made, np.ndarray) else np.asarray(made) if hasattr(made, "__array_interface__") else None
    if array is None or array.dtype == object or array.ndim not in (2, 3):
        raise ConfigError(f"a transform returned {type(made).__name__}, not an array, a tensor or an image")
    canvas.pixels = array if array.ndim == 3 else array[:, :, None]


class Albumentations(Transform):
    """A transform or pipeline of albumentations.

    Args:
        pipeline: is called with ``image=``, and with masks and boxes where there are any.
    """

    pure = True

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self._here = _Copies()

    def __getstate__(self) -> dict[str, Any]:
        return {"pipeline": self.pipeline}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.pipeline = state["pipeline"]
        self._here = _Copies()

    def apply(self, canvas: Canvas) -> None:
        pipeline = self._here.of(self.pipeline)
        pipeline.set_random_seed(int(generator().integers(2**32)))
        inputs: dict[str, Any] = {"image": np.ascontiguousarray(canvas.pixels)}
        if canvas.masks:
            inputs["masks"] = list(canvas.masks)
        if canvas.boxes is not None:
            self._check_boxes(pipeline)
            inputs["bboxes"] = canvas.boxes
            inputs["penstock_boxes"] = np.arange(len(canvas.boxes))
        found = pipeline(**inputs)
        image = found["image"]
        masks = tuple(found["masks"]) if canvas.masks else ()
        if canvas.boxes is not None and canvas.kept is not None:
            boxes = np.asarray(found["bboxes"], np.float64).reshape(-1, 4)
            canvas.kept = canvas.kept[np.asarray(found["penstock_boxes"], np.int64)]
            canvas.boxes = boxes
        put(canvas, image)
        canvas.masks = masks

    def _check_boxes(self, pipeline: Any) -> None:
        raise ConfigError(f"{pipeline!r} cannot take boxes along here: use Penstock's geometry for them")

    def leaves(self, form: Form) -> Form:
        return Form(None, None, form.channels_last)

    def __repr__(self) -> str:
        return repr(self.pipeline)


class _Copies(threading.local):
    """A pipeline's copy that belongs to this thread."""

    copy: Any = None

    def of(self, pipeline: Any) -> Any:
        if self.copy is None:
            self.copy = copy.deepcopy(pipeline)
        return self.copy
