"""`MixUp` and `CutMix`: mix pairs of samples in a batch, both images and labels.

    loader = DataLoader(dataset, batch_size=64, seed=0, collate_fn=MixUp(num_classes=1000))
    for images, labels in loader:          # labels (64, 1000), float32

As ``collate_fn`` they draw from the generator of the batch, so the result depends only on the seed. They can also be
called with a finished batch. Sample i is mixed with sample i - 1, as in torchvision.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.data import default_collate

from penstock.errors import ConfigError
from penstock.images.transforms.base import check_probability
from penstock.random import generator

__all__ = ["CutMix", "MixUp"]


def _collate(samples: list[Any]) -> list[Any]:
    """Collate as torch does by default, but keep the memory layout (height, width, channels) of images."""
    images = [sample[0] for sample in samples]
    collated: list[Any]
    if all(isinstance(image, torch.Tensor) and image.ndim == 3 and not image.is_contiguous() for image in images):
        stacked = torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
        collated = [stacked, *default_collate([sample[1:] for sample in samples])]
    else:
        collated = default_collate(samples)
    return collated


class _Mix:
    """Base class of both: what is not the mixing of images."""

    pure = True

    def __init__(
        self, *, alpha: float = 1.0, num_classes: int | None = None, labels_getter: str = "default", p: float = 1.0
    ) -> None:
        if labels_getter != "default":
            raise ConfigError(
                f"labels_getter={labels_getter!r}: only 'default' is supported, where labels are the second element of "
                "a batch; put them there in the collate_fn or after the loader"
            )
        if not alpha > 0:
            raise ConfigError(f"alpha must be positive, got {alpha!r}")
        if num_classes is not None and num_classes < 1:
            raise ConfigError(f"num_classes must be positive, got {num_classes!r}")
        self.alpha = float(alpha)
        self.num_classes = num_classes
        self.p = check_probability(p)

    def __call__(self, batch: Any) -> tuple[Any, ...]:
        """Mix a batch, or a list of samples, which is collated first; return ``(images, labels, ...)``.

        Raises:
            ConfigError: labels are neither class numbers below `num_classes` nor columns.
        """
        if isinstance(batch, list) and batch and isinstance(batch[0], tuple | list):
            batch = _collate(batch)
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise ConfigError(f"{type(self).__name__} takes batches (images, labels, ...), not {type(batch).__name__}")
        images, labels, *others = batch
        columns = self._columns(labels)
        if self.p == 1 or generator().random() < self.p:
            share = float(generator().beta(self.alpha, self.alpha))
            images, share = self._mix(images, share)
            columns = columns * share + columns.roll(1, 0) * (1 - share)
        return images, columns, *others

    def _columns(self, labels: Any) -> torch.Tensor:
        if not isinstance(labels, torch.Tensor):
            raise ConfigError(
                f"{type(self).__name__} needs labels as a tensor, not {type(labels).__name__}: with target=, put the "
                "class numbers there in the collate_fn"
            )
        if labels.ndim == 2 and labels.dtype.is_floating_point:
            return labels
        if labels.ndim != 1 or labels.dtype.is_floating_point or self.num_classes is None:
            raise ConfigError(
                f"{type(self).__name__} needs class numbers and num_classes=, or float labels (batch, classes); got "
                f"labels of the shape {tuple(labels.shape)} and {labels.dtype}, num_classes={self.num_classes}"
            )
        labels = labels.long()
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes:
            raise ConfigError(f"labels from {int(labels.min())} to {int(labels.max())}, num_classes={self.num_classes}")
        return torch.nn.functional.one_hot(labels, self.num_classes).float()

    def _mix(self, images: torch.Tensor, share: float) -> tuple[torch.Tensor, float]:
        """Return mixed images, and the share that they have of their own."""
        raise NotImplementedError


class MixUp(_Mix):
    """Replace each image, and its label, by a weighted mean of itself and the previous one in the batch.

    Args:
        alpha: both parameters of the Beta distribution of the weight, which is drawn once per batch.
        num_classes: number of classes, if labels are class numbers; None for labels with a column per class.
        labels_getter: must be ``"default"``: labels are the second element of a batch.
        p: probability that a batch is mixed. In any case labels become columns.

    Raises:
        ConfigError: `alpha` or `num_classes` is not positive, `labels_getter` is given, or `p` is not a probability.
    """

    def _mix(self, images: torch.Tensor, share: float) -> tuple[torch.Tensor, float]:
        if images.dtype.is_floating_point:
            return torch.lerp(images.roll(1, 0), images, share), share
        mixed = torch.empty_like(images)
        for number in range(len(images)):  # one by one, so that only one image is float at a time
            mean = torch.lerp(images[number - 1].float(), images[number].float(), share)
            mixed[number] = mean.round_()
        return mixed, share


class CutMix(_Mix):
    """Replace a rectangle in each image by that of the previous one in the batch; mix labels by its area.

    Arguments are those of `MixUp`; `alpha` is for the distribution of the area, which is drawn once per batch.
    """

    def _mix(self, images: torch.Tensor, share: float) -> tuple[torch.Tensor, float]:
        height, width = images.shape[-2:]
        random = generator().random
        x, y, half = int(random() * width), int(random() * height), 0.5 * math.sqrt(1 - share)
        tall, wide = int(half * height), int(half * width)
        top, bottom = max(0, y - tall), min(height, y + tall)
        left, right = max(0, x - wide), min(width, x + wide)
        mixed = images.clone()
        mixed[..., top:bottom, left:right] = images.roll(1, 0)[..., top:bottom, left:right]
        return mixed, 1 - (bottom - top) * (right - left) / (height * width)
