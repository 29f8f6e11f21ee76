"""`make_data_sampler` and `make_batch_data_sampler`: the factories of maskrcnn-benchmark, with Penstock's samplers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.errors import SamplerError
from penstock.order.permutation import Indices
from penstock.samplers.base import EpochBatchSampler, EpochSampler
from penstock.samplers.batch import BatchSampler
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.grouped import GroupedBatchSampler, group_ids_of
from penstock.samplers.iterations import IterationBasedBatchSampler
from penstock.samplers.random import RandomSampler
from penstock.samplers.sequential import SequentialSampler
from penstock.wording import kind_text

if TYPE_CHECKING:
    from penstock.images.sizes import Sizes

__all__ = ["aspect_ratio_groups", "make_batch_data_sampler", "make_data_sampler"]


def make_data_sampler(dataset: Sized, shuffle: bool | str, distributed: bool, *, seed: int = 0) -> EpochSampler:
    """Return a sampler over a dataset, for one process or for all ranks.

    Args:
        dataset: anything with a length.
        shuffle: True means ``"global"`` here: a function of (seed, epoch), so that ``start_iter`` alone resumes a run.
        distributed: split the samples among the ranks (of torch.distributed, else of RANK and WORLD_SIZE).
        seed: the same on all ranks.

    >>> type(make_data_sampler(range(10), shuffle=True, distributed=False)).__name__
    'RandomSampler'
    """
    kind: bool | str = "global" if shuffle is True else shuffle or "none"
    if distributed:
        return DistributedSampler(dataset, shuffle=kind, seed=seed)
    if kind == "none":
        return SequentialSampler(dataset)
    return RandomSampler(dataset, shuffle=kind, seed=seed)


def make_batch_data_sampler(
    dataset: Any,
    sampler: Iterable[int],
    aspect_grouping: bool | float | Sequence[float],
    images_per_batch: int,
    num_iters: int | None = None,
    start_iter: int = 0,
    *,
    sizes: Sizes | str | os.PathLike[str] | None = None,
) -> EpochBatchSampler:
    """Return a batch sampler over a sampler, optionally grouped by aspect ratio and for a number of iterations.

    Args:
        dataset: the source of the groups, unless ``sizes`` is passed, see `aspect_ratio_groups`.
        sampler: from `make_data_sampler`, or another of Penstock; without groups, any sampler.
        aspect_grouping: False: no groups. True: two groups, images wider than high and the others. Otherwise the
            bounds of height / width between the groups.
        images_per_batch: samples in a batch of one rank.
        num_iters, start_iter: see `IterationBasedBatchSampler`; by default one epoch.
        sizes: a `penstock.images.sizes.Sizes`, or the path of its file.

    Raises:
        SamplerError: a dataset without sizes, or a start_iter without num_iters.

    Grouped batches are in the order of their first members, as in maskrcnn-benchmark. This takes O(N) memory.
    """
    batches: EpochBatchSampler
    if aspect_grouping:
        bounds = list(aspect_grouping) if isinstance(aspect_grouping, Sequence) else [float(aspect_grouping)]
        groups = aspect_ratio_groups(dataset, bounds, sizes=sizes)
        batches = GroupedBatchSampler(sampler, groups, images_per_batch, order="first")
    else:
        if sizes is not None:
            raise SamplerError("sizes= needs aspect_grouping=, which is off")
        batches = BatchSampler(sampler, images_per_batch, drop_last=False)
    if num_iters is not None:
        return IterationBasedBatchSampler(batches, num_iters, start_iter)
    if start_iter:
        raise SamplerError(f"start_iter={start_iter} needs num_iters=")
    return batches


def aspect_ratio_groups(
    dataset: Any, bounds: Sequence[float] = (1.0,), *, sizes: Sizes | str | os.PathLike[str] | None = None
) -> npt.NDArray[Any]:
    """Return the group of every image: the number of bounds that are at most its height / width (``bisect_right``).

    Sizes are read from ``sizes``, else from the dataset. A dataset has ``group_ids`` (an array of the groups, or a
    function that returns it), or ``get_img_info(i) -> {"height": ..., "width": ...}``, which is called for every image.

    Raises:
        SamplerError: the dataset has neither, or an image has no height or width.
        StateError: the sizes were measured from another manifest.
    """
    if sizes is not None:
        return np.asarray(group_ids_of(sizes, bounds, data=dataset))
    if hasattr(dataset, "group_ids"):
        return np.asarray(dataset.group_ids() if callable(dataset.group_ids) else dataset.group_ids)
    if not hasattr(dataset, "get_img_info"):
        raise SamplerError(
            f"{kind_text(dataset)} has neither group_ids nor get_img_info(i): pass as sizes= the file that "
            "`penstock manifest sizes` writes"
        )
    infos = (dataset.get_img_info(i) for i in range(len(dataset)))
    shapes = np.array([(float(info["height"]), float(info["width"])) for info in infos]).reshape(-1, 2)
    if (shapes <= 0).any():
        raise SamplerError(f"image {int(np.flatnonzero((shapes <= 0).any(axis=1))[0])} has no height or width")
    groups: Indices = np.searchsorted(np.sort(np.asarray(bounds, float)), shapes[:, 0] / shapes[:, 1], side="right")
    return groups
