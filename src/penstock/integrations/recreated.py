"""A loader that Lightning has made from another one reads the order and the share of that one.

See `penstock.loader.recreate` for how Lightning does this.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch.utils.data

from penstock import distributed
from penstock.errors import PartitionError
from penstock.loader.who_splits import splits_by_rank
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.random import RandomSampler

if TYPE_CHECKING:
    from penstock.loader.dataloader import DataLoader

__all__ = ["take_place"]


def take_place(made: DataLoader[Any], other: DataLoader[Any]) -> None:
    """Let a new loader take over the order and the share of the old one, if it has one of ours.

    Raises:
        PartitionError: the old sampler already splits by rank, and Lightning's batches would split again.
    """
    sampler = _replacement(made, other)
    if sampler is None:
        return
    # torch refuses assignments to these two.
    vars(made)["sampler"] = sampler
    if made.batch_sampler is not None:
        batches: Any = copy.copy(made.batch_sampler)
        batches.sampler = sampler
        vars(made)["batch_sampler"] = batches
    made._set_up()


def _replacement(made: DataLoader[Any], other: DataLoader[Any]) -> Any:
    """Return the sampler that keeps the old loader's order and share in a loader that Lightning created from it.

    None keeps Lightning's sampler, for data without one of our orders that is not split yet.

    Args:
        made: the new loader with Lightning's sampler.
        other: the old loader.

    Raises:
        PartitionError: the old sampler already splits by rank, and Lightning's batches would split again.
    """
    batches = made.batch_sampler
    given: Any = getattr(batches, "sampler", made.sampler)
    own: Any = getattr(other.batch_sampler, "sampler", other.sampler)
    if not isinstance(given, torch.utils.data.DistributedSampler) or own is given:
        return None
    if splits_by_rank(other, ranks=distributed.ranks()):
        if batches is not None and type(batches).__iter__ is not torch.utils.data.BatchSampler.__iter__:
            raise PartitionError(
                f"this {type(own).__name__} already splits by rank, and Lightning would split its share again to "
                "predict: pass use_distributed_sampler=False to the Trainer"
            )
        return own
    if type(given) is not torch.utils.data.DistributedSampler:
        return None
    options: dict[str, Any] = {"num_replicas": given.num_replicas, "rank": given.rank, "drop_last": given.drop_last}
    dataset: Any = other.dataset
    if other.config.shuffle == "none":
        # Lightning treats the name of an order as True.
        return DistributedSampler(dataset, shuffle=False, **options)
    permutes = isinstance(own, RandomSampler) and not own.replacement and own.num_samples == len(own.data_source)
    if not given.shuffle or not permutes or own.seed is None:
        return None
    return DistributedSampler(
        dataset, shuffle=own.shuffle, seed=own.seed, block_size=own.block_size, window=own.window, **options
    )
