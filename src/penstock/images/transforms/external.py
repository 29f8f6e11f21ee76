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
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.images.transforms.base import Transform
from penstock.images.transforms.canvas import Canvas
from penstock.images.transforms.output import Form
from penstock.images.transforms.targets import Targets
from penstock.random import generator

__all__ = ["adapt"]

_INPUTS = {"PILToTensor": "pillow", "ToImage": "array", "ToPILImage": "array", "ToTensor": "array"}
"""Inputs of torchvision's transforms that do not take tensors."""
_MASKS = frozenset({"uint8", "uint16", "int16", "float32", "float64"})
"""Dtypes of masks that OpenCV supports. All others become float64 meanwhile, which is exact up to 2**53."""
_THREAD = threading.local()
"""``copies``: this thread's copies of pipelines, with and without boxes."""


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
        return _Albumentations(transform)
    return _Function(transform, tensors="torchvision" in home)


class _External(Transform):
    def __init__(self, function: Any) -> None:
        self.function = function

    def leaves(self, form: Form) -> Form:
        return form._replace(size=None, dtype=None)

    def __repr__(self) -> str:
        return repr(self.function)


class _Function(_External):
    """A callable ``image -> image``, which takes tensors or arrays."""

    def __init__(self, function: Any, *, tensors: bool) -> None:
        super().__init__(function)
        self.pure = bool(getattr(function, "pure", False))
        first = function
        while tensors and getattr(first, "transforms", None):  # the first step of a chain
            first = first.transforms[0]
        self.input_kind = _INPUTS.get(type(first).__name__, "tensor") if tensors else "array"

    def apply(self, canvas: Canvas) -> None:
        if canvas.targets is not None:
            raise ConfigError(
                f"{self.function!r} gets only the image and cannot transform masks and boxes: use a transform "
                "of Penstock or albumentations, or leave masks and boxes out of the target"
            )
        if self.input_kind == "tensor" or canvas.conversion is not None:
            image: Any = canvas.tensor.contiguous()
        elif self.input_kind == "pillow":
            from PIL import Image

            image = Image.fromarray(canvas.pixels)
        else:
            image = canvas.pixels
        _set_image(canvas, self.function(image))


def _set_image(canvas: Canvas, made: Any) -> None:
    """Set the image of the canvas to the result of an external transform.

    Raises:
        ConfigError: the result is not an image.
    """
    if isinstance(made, torch.Tensor):
        if made.ndim != 3:
            raise ConfigError(f"a transform returned a tensor of the shape {tuple(made.shape)}, not (channels, h, w)")
        canvas.tensor = made.as_subclass(torch.Tensor)
        return
    array = np.asarray(made) if hasattr(made, "__array_interface__") else None
    if array is None or array.dtype == object or array.ndim not in (2, 3):
        raise ConfigError(f"a transform returned {type(made).__name__}, not an array, a tensor or an image")
    if array is not canvas.pixels:  # it may be read-only, a view, or reused by the transform
        array = np.array(array, order="C")
    canvas.pixels = array if array.ndim == 3 else array[:, :, None]


class _Albumentations(_External):
    """A transform or pipeline of albumentations, which takes masks and boxes, too."""

    def apply(self, canvas: Canvas) -> None:
        inputs: dict[str, Any] = {"image": canvas.render()}
        targets = canvas.targets or Targets({}, (), None)
        pipeline = self._pipeline(boxes=targets.boxes is not None)
        pipeline.set_random_seed(int(generator().integers(2**32)))
        masks = [mask for mask in targets.masks if mask.size]  # leave out masks of no objects
        if masks:
            inputs["masks"] = [mask if mask.dtype.name in _MASKS else mask.astype(np.float64) for mask in masks]
        if targets.boxes is not None:
            targets.keep_boxes(targets.boxes, canvas.size)
            inputs["bboxes"] = targets.boxes
            inputs["penstock_boxes"] = np.arange(len(targets.boxes))
        found = pipeline(**inputs)
        _set_image(canvas, found["image"])
        moved = iter(found["masks"] if masks else ())
        targets.masks = tuple(
            np.asarray(next(moved)).astype(mask.dtype, copy=False)
            if mask.size
            else np.empty((*canvas.size, 0), mask.dtype)
            for mask in targets.masks
        )
        if targets.boxes is not None:
            targets.kept = targets.kept[np.asarray(found["penstock_boxes"], np.int64)]
            targets.boxes = np.asarray(found["bboxes"], np.float64).reshape(-1, 4)

    def _pipeline(self, *, boxes: bool) -> Any:
        """Return this thread's copy; for boxes one that takes them in pixels, and returns the indices of the rest.

        Raises:
            ConfigError: the pipeline has its own parameters of boxes.
        """
        if boxes and "bboxes" in getattr(self.function, "processors", {}):
            raise ConfigError(
                "leave bbox_params out of this pipeline: Penstock passes it the boxes of the target in pixels"
            )
        if not hasattr(_THREAD, "copies"):
            _THREAD.copies = WeakKeyDictionary()
        copies = _THREAD.copies.setdefault(self, {})
        if boxes not in copies:
            copies[boxes] = copy.deepcopy(self.function)
            if boxes:
                albumentations = import_module("albumentations")
                params = albumentations.BboxParams(format="pascal_voc", label_fields=["penstock_boxes"])
                copies[boxes] = albumentations.Compose([copies[boxes]], bbox_params=params)
        return copies[boxes]
