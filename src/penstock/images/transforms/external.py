"""Adapters for transforms of other libraries: inputs in the form they expect, and seeds from the sample's key.

    torchvision      a uint8 or float tensor (channels, height, width); but ``ToTensor``, ``ToImage`` and
                     ``ToPILImage`` get an array, and ``PILToTensor`` a Pillow image
    albumentations   ``image=`` is an array (height, width, channels), with ``masks=`` and ``bboxes=`` from the target;
                     pipelines must not have ``bbox_params``
    any callable     the array (height, width, channels), after `ToTensor` the tensor (channels, height, width)

Each returns an array, a tensor or a Pillow image, and the chain continues with it. Albumentations' generators are
seeded from the sample's generator, with one copy of the pipeline per thread. All others draw from the global generators
of Python, NumPy and torch. The loader (``seed=``) seeds these for each sample, inline and in processes, so such a chain
is not `pure`. A callable that draws only from `penstock.generator()` may set ``pure = True``.
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

__all__ = ["Albumentations", "FunctionTransform", "adapt"]

_WANT_ARRAYS = frozenset({"PILToTensor", "ToImage", "ToPILImage", "ToTensor"})


def adapt(transform: Any) -> Transform:
    """Wrap a transform of another library, or any callable, as a `Transform`.

    Raises:
        ConfigError: it is not callable.
    """
    if not callable(transform):
        raise ConfigError(f"a transform must be callable with an image, not {transform!r}")
    if isinstance(transform, type):
        raise ConfigError(f"{transform.__name__} is a class: pass an instance, {transform.__name__}(...)")
    home = {kind.__module__.partition(".")[0] for kind in type(transform).__mro__}
    if "albumentations" in home:
        return Albumentations(transform)
    return FunctionTransform(transform, tensors="torchvision" in home)


class FunctionTransform(Transform):
    """A callable ``image -> image``.

    Args:
        function: the callable.
        tensors: whether it takes tensors instead of arrays.

    Raises:
        ConfigError: (when called) the target has masks or boxes, which it cannot transform, or it returns no image.
    """

    def __init__(self, function: Callable[[Any], Any], *, tensors: bool = False) -> None:
        self.function = function
        first: Any = function
        while tensors and getattr(first, "transforms", None):  # the first step of a chain
            first = first.transforms[0]
        self.input_kind = "tensor" if tensors else "array"
        if tensors and type(first).__name__ in _WANT_ARRAYS:
            self.input_kind = "pillow" if type(first).__name__ == "PILToTensor" else "array"
        self.pure = bool(getattr(function, "pure", False))

    def apply(self, canvas: Canvas) -> None:
        if canvas.masks or canvas.boxes is not None:
            raise ConfigError(
                f"{self.function!r} gets only the image and cannot transform masks and boxes: use a transform "
                "of Penstock or albumentations, or leave masks and boxes out of the target"
            )
        if self.input_kind == "tensor" or canvas.conversion is not None:
            set_result(canvas, self.function(canvas.tensor.contiguous()))
        elif self.input_kind == "pillow":
            from PIL import Image

            set_result(canvas, self.function(Image.fromarray(canvas.pixels)))
        else:
            set_result(canvas, self.function(canvas.pixels))

    def leaves(self, form: Form) -> Form:
        return Form(None, None, form.channels_last)

    def __repr__(self) -> str:
        return repr(self.function)


def set_result(canvas: Canvas, made: Any) -> None:
    """Set the image of the canvas to the result of an external transform.

    Raises:
        ConfigError: the result is not an image.
    """
    if isinstance(made, torch.Tensor):
        if made.ndim != 3:
            raise ConfigError(f"a transform returned a tensor of the shape {tuple(made.shape)}, not (channels, h, w)")
        canvas.tensor = made.as_subclass(torch.Tensor)
        return
    array = made if isinstance(made, np.ndarray) else np.asarray(made) if hasattr(made, "__array_interface__") else None
    if array is None or array.dtype == object or array.ndim not in (2, 3):
        raise ConfigError(f"a transform returned {type(made).__name__}, not an array, a tensor or an image")
    if array is not canvas.pixels:  # it may be read-only, a view, or reused by the transform
        array = np.array(array, order="C")
    canvas.pixels = array if array.ndim == 3 else array[:, :, None]


_CARRIED = {"bool": np.uint8, "int8": np.int16, "float16": np.float32} | dict.fromkeys(
    ("int32", "uint32", "int64", "uint64"), np.float64
)
"""Dtypes of masks that OpenCV does not support, and dtypes that hold their values (64 bits: up to 2**53)."""


class Albumentations(Transform):
    """A transform or pipeline of albumentations.

    Args:
        pipeline: called with ``image=``, and with masks and boxes if the target has any.

    Raises:
        ConfigError: (when called) the pipeline has ``bbox_params`` and the target has boxes, or it returns no image.

    Each thread copies the pipeline at first use.
    """

    pure = True

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self._copies = _Copies()

    def __getstate__(self) -> dict[str, Any]:
        return {"pipeline": self.pipeline}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.pipeline = state["pipeline"]
        self._copies = _Copies()

    def apply(self, canvas: Canvas) -> None:
        pipeline = self._copies.of(self.pipeline, boxes=canvas.boxes is not None)
        pipeline.set_random_seed(int(generator().integers(2**32)))
        inputs: dict[str, Any] = {"image": canvas.pixels}
        masks = [mask for mask in canvas.masks if mask.size]  # leave out masks of no objects
        if masks:
            inputs["masks"] = [mask.astype(_CARRIED.get(mask.dtype.name, mask.dtype), copy=False) for mask in masks]
        if canvas.boxes is not None:
            height, width = canvas.size
            inputs["bboxes"] = canvas.boxes.clip(0, [width, height, width, height])  # as Penstock's steps do
            inputs["penstock_boxes"] = np.arange(len(canvas.boxes))
        found = pipeline(**inputs)
        set_result(canvas, found["image"])
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
    """This thread's copies of a pipeline, for images with and without boxes."""

    def __init__(self) -> None:
        self.copies: dict[bool, Any] = {}

    def of(self, pipeline: Any, *, boxes: bool) -> Any:
        if boxes not in self.copies:
            made = copy.deepcopy(pipeline)
            self.copies[boxes] = _with_boxes(made) if boxes else made
        return self.copies[boxes]


def _with_boxes(pipeline: Any) -> Any:
    """Return a pipeline that takes boxes in pixels and returns the indices of the remaining ones.

    Raises:
        ConfigError: the pipeline has its own parameters of boxes.
    """
    albumentations = import_module("albumentations")
    if "bboxes" in getattr(pipeline, "processors", {}):
        raise ConfigError(
            "leave bbox_params out of this pipeline: Penstock passes it the boxes of the target in pixels"
        )
    params = albumentations.BboxParams(format="pascal_voc", label_fields=["penstock_boxes"])
    return albumentations.Compose([pipeline], bbox_params=params)
