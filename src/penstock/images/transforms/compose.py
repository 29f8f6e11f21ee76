"""`Compose`, a chain of transforms: Penstock's, torchvision's, albumentations', and any callable.

    chain = Compose([RandomResizedCrop(224), HorizontalFlip(), ToTensor(), Normalize(MEAN, STD)])
    tensor = chain(image)                        # from an array (height, width, channels), RGB
    tensor, target = chain(image, {"masks": (mask,), "boxes": boxes})

Penstock's transforms draw from `penstock.generator()`, so in a loader with a seed they depend only on (seed, epoch,
position). Consecutive geometric steps are combined to one resampling of one box. An `ImageDataset` decodes only that
box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from penstock.errors import ConfigError
from penstock.images.transforms.base import Transform
from penstock.images.transforms.batch import Batch
from penstock.images.transforms.canvas import Canvas
from penstock.images.transforms.external import adapt
from penstock.images.transforms.output import Form

__all__ = ["Compose"]


class Compose(Transform):
    """Several transforms, one after the other.

    Args:
        transforms: Penstock's transforms (`Transform`), and any callable that takes an image: see `external.adapt`.

    Raises:
        ConfigError: a step is not callable, or the order of steps is not possible.

    Attributes:
        pure: whether all steps draw only from `penstock.generator()` and may be used by several threads.
        form: the known properties of the resulting images.
        draws: the most random numbers that a `Batch` of images draws for each; None if a step cannot be planned.

    A chain can be pickled if its steps can.
    """

    def __init__(self, transforms: Iterable[Callable[..., Any]]) -> None:
        if not isinstance(transforms, Iterable):
            raise ConfigError(
                f"a transform is a list of steps, or one step that can be called with an image, not {transforms!r}"
            )
        self.transforms = list(transforms)
        self._steps: list[Transform] = []
        for step in self.transforms:
            if isinstance(step, Compose):
                self._steps.extend(step._steps)
            else:
                self._steps.append(step if isinstance(step, Transform) else adapt(step))
        self.pure = all(step.pure for step in self._steps)
        self.form = self.leaves(Form())
        draws = [_most_draws(step) for step in self._steps]
        own = type(self).apply is not Compose.apply
        self.draws = None if own or None in draws else sum(number for number in draws if number is not None)

    def leaves(self, form: Form) -> Form:
        for step in self._steps:
            form = step.leaves(form)
        return form

    def apply(self, canvas: Canvas) -> None:
        for step in self._steps:
            step.apply(canvas)

    def plan(self, batch: Batch) -> None:
        for step in self._steps:
            step.plan(batch)

    def __repr__(self) -> str:
        return f"Compose({self.transforms!r})"


def _most_draws(step: Transform) -> int | None:
    """Return how many random numbers a step draws if it has a plan; None if its class has another ``apply``."""
    owner = next(kind for kind in type(step).__mro__ if "apply" in vars(kind))
    return step.draws if "plan" in vars(owner) else None
