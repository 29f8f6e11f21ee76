"""Batches within a token budget: `ClassBatches` over `LengthClasses`, and a bound on their padding."""

from __future__ import annotations

import numpy as np

from penstock.order.class_batches import ClassBatches
from penstock.order.length_classes import LengthClasses

__all__ = ["budget_batches", "most_padding"]


def budget_batches(
    classes: LengthClasses, *, max_batch: int | None = None, drop_too_long: bool = False, drop_last: bool = False
) -> ClassBatches:
    """Return batches whose padded size, longest length x number of samples, is at most the limit of the classes.

    Args:
        classes: of the samples; their limit is the budget.
        max_batch: the largest number of samples in a batch.
        drop_too_long: leave out samples above the limit; otherwise each is a batch of its own.
        drop_last: leave out the one batch that may be partial.
    """
    sizes = np.maximum(1, classes.limit // classes.longest)
    if max_batch is not None:
        sizes = np.minimum(sizes, max_batch)
    starts = np.concatenate([[0], np.cumsum(classes.samples)])
    # Class 0 has the samples that are too long.
    first = 1 if drop_too_long else 0
    return ClassBatches(starts[first:], sizes[first:], fill=True, drop_last=drop_last)


def most_padding(classes: LengthClasses, batches: ClassBatches) -> float:
    """Return an upper bound on the fraction of padding in all batches.

    It assumes that each batch has a sample of the greatest length of its class.

    Args:
        classes: of the samples.
        batches: of these classes, made without ``drop_last``.

    >>> from penstock.order.length_classes import classes_of
    >>> classes = classes_of(np.array([8, 10, 9, 10]), 20, 1)
    >>> round(most_padding(classes, budget_batches(classes)), 3)
    0.075
    """
    longest = classes.longest[len(classes) - len(batches.sizes) :]
    padded = int((longest * batches.samples).sum())
    real = int(classes.tokens[len(classes) - len(batches.sizes) :].sum())
    return 1 - real / padded if padded else 0.0
