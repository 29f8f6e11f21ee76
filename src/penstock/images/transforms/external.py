"""Transforms of other people in a chain: they get what they expect, and draw what the sample's key says.

    torchvision      a uint8 or float tensor (channels, height, width); its ``ToTensor``, ``ToImage`` and
                     ``ToPILImage`` an array, its ``PILToTensor`` an image of Pillow
    albumentations   ``image=`` an array (height, width, channels), with ``masks=`` and ``bboxes=`` where the target has
                     any; its pipelines are given no ``bbox_params`` for that
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
from importlib import import_module
from typing import Any

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.images.transforms.base import Transform
from penstock.images.transforms.canvas import Canvas
from penstock.images.transforms.output import Form
from penstock.random import generator

__all__ = ["Albumentations", "Function", "adapt"]

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
    return Function(transform, tensors="torchvision" in home)


class Function(Transform):
    """A callable ``image -> image``.

    Args:
        function: is called.
        tensors: whether with tensors rather than arrays.

    Raises:
        ConfigError: (when called) there are masks or boxes, which it could not take along, or it returns no image.
    """

    def __init__(self, function: Callable[[Any], Any], *, tensors: bool = False) -> None:
        self.function = function
        first: Any = function
        while tensors and getattr(first, "transforms", None):  # the first of a chain
            first = first.transforms[0]
        self.wants = "tensor" if tensors else "array"
        if tensors and type(first).__name__ in _WANT_ARRAYS:
            self.wants = "pillow" if type(first).__name__ == "PILToTensor" else "array"
        self.pure = bool(getattr(function, "pure", False))

    def apply(self, canvas: Canvas) -> None:
        if canvas.masks or canvas.boxes is not None:
            raise ConfigError(
                f"{self.function!r} gets the image alone, and could not take its masks and boxes along: use a "
                "transform of Penstock or albumentations there, or leave masks and boxes out of the target"
            )
        if self.wants == "tensor" or canvas.conversion is not None:
            put(canvas, self.function(canvas.tensor.contiguous()))
        elif self.wants == "pillow":
            from PIL import Image

            put(canvas, self.function(Image.fromarray(canvas.pixels)))
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
    if array is not canvas.pixels:  # it may be read-only, a view, or wanted again by whoever returned it
        array = np.array(array, order="C")
    canvas.pixels = array if array.ndim == 3 else array[:, :, None]


_CARRIED = {"bool": np.uint8, "int8": np.int16, "float16": np.float32} | dict.fromkeys(
    ("int32", "uint32", "int64", "uint64"), np.float64
)
"""Types of masks that OpenCV does not move about, and those that hold their values (of 64 bits: up to 2**53)."""


class Albumentations(Transform):
    """A transform or pipeline of albumentations.

    Args:
        pipeline: is called with ``image=``, and with masks and boxes where there are any.

    Raises:
        ConfigError: (when called) the pipeline has ``bbox_params`` of its own and there are boxes, or it returns no
            image.

    Each thread copies the pipeline when it first uses it.
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
        pipeline = self._here.of(self.pipeline, boxes=canvas.boxes is not None)
        pipeline.set_random_seed(int(generator().integers(2**32)))
        inputs: dict[str, Any] = {"image": canvas.pixels}
        masks = [mask for mask in canvas.masks if mask.size]  # of no object there are none
        if masks:
            inputs["masks"] = [mask.astype(_CARRIED.get(mask.dtype.name, mask.dtype), copy=False) for mask in masks]
        if canvas.boxes is not None:
            height, width = canvas.size
            inputs["bboxes"] = canvas.boxes.clip(0, [width, height, width, height])  # as a step of ours would
            inputs["penstock_boxes"] = np.arange(len(canvas.boxes))
        found = pipeline(**inputs)
        put(canvas, found["image"])
        moved = iter(found["masks"] if masks else ())
        canvas.masks = tuple(
            np.asarray(next(moved)).astype(mask.dtype, copy=False)
            if mask.size
            else np.empty((*canvas.size, 0), mask.dtype)
            for mask in canvas.masks
        )
        if canvas.boxes is not None and canvas.kept is not None:
            canvas.kept = canvas.kept[np.asarray(found["penstock_boxes"], np.int64)]
            canvas.boxes = np.asarray(found["bboxes"], np.float64).reshape(-1, 4)

    def leaves(self, form: Form) -> Form:
        return Form(None, None, form.channels_last)

    def __repr__(self) -> str:
        return repr(self.pipeline)


class _Copies(threading.local):
    """Copies of a pipeline that belong to this thread, for images with boxes and for those without."""

    def __init__(self) -> None:
        self.copies: dict[bool, Any] = {}

    def of(self, pipeline: Any, *, boxes: bool) -> Any:
        if boxes not in self.copies:
            made = copy.deepcopy(pipeline)
            self.copies[boxes] = _with_boxes(made) if boxes else made
        return self.copies[boxes]


def _with_boxes(pipeline: Any) -> Any:
    """A pipeline that takes boxes in pixels, and says which are left.

    Raises:
        ConfigError: it takes boxes in a way of its own.
    """
    albumentations = import_module("albumentations")
    if "bboxes" in getattr(pipeline, "processors", {}):
        raise ConfigError("leave bbox_params out of this pipeline: Penstock gives it the boxes of the target in pixels")
    params = albumentations.BboxParams(format="pascal_voc", label_fields=["penstock_boxes"])
    return albumentations.Compose([pipeline], bbox_params=params)
