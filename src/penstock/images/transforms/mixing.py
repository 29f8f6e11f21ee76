"""`MixUp` and `CutMix`: two samples of a batch made into one, images and labels alike.

    loader = DataLoader(dataset, batch_size=64, seed=0, collate_fn=MixUp(num_classes=1000))
    for images, labels in loader:          # labels (64, 1000), float32

As ``collate_fn`` they draw from the generator of the batch, so what is mixed repeats with the seed. They can also be
called with a finished batch. Sample i is mixed with sample i - 1, as in torchvision.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.data import default_collate

from penstock.errors import ConfigError
from penstock.random import generator

__all__ = ["CutMix", "MixUp"]


def _collate(samples: list[Any]) -> list[Any]:
    """As torch's default function; images that lie as (height, width, channels) stay so."""
    images = [sample[0] for sample in samples]
    if all(image.ndim == 3 and not image.is_contiguous() for image in images):
        stacked = torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
        return [stacked, *default_collate([sample[1:] for sample in samples])]
    collated: list[Any] = default_collate(samples)
    return collated


class _Mix:
    """What the two share.

    Args:
        alpha: both parameters of the Beta distribution that the share of the first image is drawn from.
        num_classes: of labels that are class numbers; None for labels that have a column for each class already.
        labels_getter: nothing but ``"default"``: labels are the second part of a batch.
        p: probability that a batch is mixed; otherwise only its labels change, to columns.
    """

    pure = True

    def __init__(
        self, *, alpha: float = 1.0, num_classes: int | None = None, labels_getter: str = "default", p: float = 1.0
    ) -> None:
        if labels_getter != "default":
            raise ConfigError(
                f"labels_getter={labels_getter!r}: labels are the second part of a batch here, as with 'default'; put "
                "them there in the collate_fn or after the loader"
            )
        if not alpha > 0:
            raise ConfigError(f"alpha must be positive, got {alpha!r}")
        if num_classes is not None and num_classes < 1:
            raise ConfigError(f"num_classes must be positive, got {num_classes!r}")
        if not 0 <= p <= 1:
            raise ConfigError(f"p is a probability, between 0 and 1, not {p!r}")
        self.alpha = float(alpha)
        self.num_classes = num_classes
        self.p = float(p)

    def __call__(self, batch: Any) -> tuple[Any, ...]:
        """``(images, labels, ...)``: of a finished batch, or of a list of samples, which is collated first.

        Raises:
            ConfigError: labels that are no class numbers below `num_classes`, and no columns either.
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
                f"{type(self).__name__} mixes labels that are a tensor, not {type(labels).__name__}: of what target= "
                "gives, put the class numbers there in the collate_fn"
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
        raise NotImplementedError


class MixUp(_Mix):
    """Each image becomes a weighted mean of itself and the one before it; so do the labels.

    Args:
        alpha: both parameters of the Beta distribution that the weight is drawn from, one for the batch.
        num_classes: of labels that are class numbers; None for labels that have a column for each class already.
        labels_getter: nothing but ``"default"``: labels are the second part of a batch.
        p: probability that a batch is mixed; otherwise only its labels change, to columns.

    Raises:
        ConfigError: an `alpha` or `num_classes` that is not positive, a `labels_getter`, or no probability.
    """

    def _mix(self, images: torch.Tensor, share: float) -> tuple[torch.Tensor, float]:
        if images.dtype.is_floating_point:
            return torch.lerp(images.roll(1, 0), images, share), share
        mixed = torch.empty_like(images)
        for number in range(len(images)):  # image by image: floats of one image at a time
            mean = torch.lerp(images[number - 1].float(), images[number].float(), share)
            mixed[number] = mean.round_()
        return mixed, share


class CutMix(_Mix):
    """In each image a rectangle is that of the one before it; labels are mixed by its area.

    Args:
        alpha: both parameters of the Beta distribution that the area is drawn from, one for the batch.
        num_classes: of labels that are class numbers; None for labels that have a column for each class already.
        labels_getter: nothing but ``"default"``: labels are the second part of a batch.
        p: probability that a batch is mixed; otherwise only its labels change, to columns.

    Raises:
        ConfigError: an `alpha` or `num_classes` that is not positive, a `labels_getter`, or no probability.
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
