"""Samplers and batch samplers with torch's interface and an exact state.

Every sampler has ``state_dict``, ``load_state_dict`` and ``set_epoch``. Its ``len`` is always exact, even after
`set_epoch` and after a resume. Its memory does not grow with the dataset, unless its documentation says so.

Each name is imported at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy

__all__ = [
    "BatchSampler",
    "DistributedSampler",
    "EpochBatchSampler",
    "EpochSampler",
    "GroupedBatchSampler",
    "InfiniteSampler",
    "IterationBasedBatchSampler",
    "RandomSampler",
    "SequentialSampler",
    "TokenBudgetBatchSampler",
    "WeightedRandomSampler",
    "aspect_ratio_groups",
    "make_batch_data_sampler",
    "make_data_sampler",
]

if TYPE_CHECKING:
    from penstock.compat.maskrcnn_benchmark import aspect_ratio_groups, make_batch_data_sampler, make_data_sampler
    from penstock.samplers.base import EpochBatchSampler, EpochSampler
    from penstock.samplers.batch import BatchSampler
    from penstock.samplers.distributed import DistributedSampler
    from penstock.samplers.grouped import GroupedBatchSampler
    from penstock.samplers.infinite import InfiniteSampler
    from penstock.samplers.iterations import IterationBasedBatchSampler
    from penstock.samplers.random import RandomSampler
    from penstock.samplers.sequential import SequentialSampler
    from penstock.samplers.token_budget import TokenBudgetBatchSampler
    from penstock.samplers.weighted import WeightedRandomSampler

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        ".compat.maskrcnn_benchmark": ["aspect_ratio_groups", "make_batch_data_sampler", "make_data_sampler"],
        "base": ["EpochBatchSampler", "EpochSampler"],
        "batch": ["BatchSampler"],
        "distributed": ["DistributedSampler"],
        "grouped": ["GroupedBatchSampler"],
        "infinite": ["InfiniteSampler"],
        "iterations": ["IterationBasedBatchSampler"],
        "random": ["RandomSampler"],
        "sequential": ["SequentialSampler"],
        "token_budget": ["TokenBudgetBatchSampler"],
        "weighted": ["WeightedRandomSampler"],
    },
)
