"""The source of a loader's batches: the plan of its sampler or dataset, and the requests made from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from penstock.errors import ConfigError
from penstock.loader.messages import BatchRequest
from penstock.plan.epoch import BatchEpochPlan, EpochPlan
from penstock.random import packed_sample_keys
from penstock.samplers.base import EpochBatchSampler
from penstock.samplers.batch import BatchSampler, batch_plan_of
from penstock.samplers.sequential import SequentialSampler

__all__ = ["batch_source", "plan_requests", "stream_source"]


_EPOCHS = 1 << 62


def batch_source(sampler: Iterable[Any], batch_sampler: Iterable[Any] | None) -> EpochBatchSampler:
    """Return the plan of a map-style loader: of its batch sampler, or of single indices without batching."""
    return BatchSampler(sampler, 1, False) if batch_sampler is None else batch_plan_of(batch_sampler)


def stream_source(dataset: Any, batch_size: int | None, drop_last: bool) -> EpochBatchSampler:
    """Return the plan of an iterable dataset that also has its samples as a map-style one, such as `MPDataset`.

    Raises:
        ConfigError: the batch sizes of the loader and the dataset differ.
    """
    if batch_size != dataset.batch_size:
        raise ConfigError(
            f"the loader's batch_size is {batch_size} and the dataset's is {dataset.batch_size}: pass equal sizes, "
            "because the dataset assigns whole batches to workers"
        )
    return BatchSampler(SequentialSampler(dataset.samples), dataset.batch_size, drop_last or dataset.drop_last)


def plan_requests(run: BatchEpochPlan, seed: int, *, under: EpochPlan | None = None) -> Iterator[BatchRequest]:
    """Yield the batches of an epoch plan as requests, with the keys of their samples.

    Args:
        run: the epoch plan.
        seed: seed of the keys.
        under: epoch plan of a dataset with its own order, to which a user's sampler applies.
    """
    # torch's samplers accept negative epochs, but keys are hashes of non-negative numbers.
    epoch = run.epoch % _EPOCHS
    # Computed in blocks, because keys of several batches cost little more than keys of one.
    for lists, positions in run.blocks():
        # The position to send to workers. It may still change for batches that are not planned yet.
        place = run.place if under is None else under.place
        for indices, keys in zip(lists, packed_sample_keys(seed, epoch, positions), strict=True):
            yield BatchRequest(indices, keys, place)
