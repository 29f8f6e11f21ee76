"""The source of a loader's batches: the plan of its sampler or dataset, and the requests made from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy.typing as npt
from torch.utils.data import IterableDataset

from penstock.errors import ConfigError
from penstock.hashing import packed_sample_keys
from penstock.loader.messages import BatchRequest
from penstock.plan.epoch import BatchEpochPlan, EpochPlan
from penstock.samplers.base import EpochBatchSampler
from penstock.samplers.batch import BatchSampler, batch_plan_of
from penstock.samplers.sequential import SequentialSampler
from penstock.sources.batched import StreamDataset

__all__ = ["plan_of_batches", "plan_requests"]

_EPOCHS = 1 << 62


def plan_of_batches(loader: Any) -> EpochBatchSampler | None:
    """Return the plan of a loader's batches; None for an iterable dataset that only the dataset can order.

    Raises:
        ConfigError: the batch sizes of the loader and of a dataset that makes batches, such as `MPDataset`, differ.
    """
    dataset = loader.dataset
    if isinstance(dataset, StreamDataset):
        size = dataset.batch_size
        if loader.batch_size != size:
            raise ConfigError(
                f"the loader's batch_size is {loader.batch_size} and the dataset's is {size}: pass equal sizes, "
                "because the dataset assigns whole batches to workers"
            )
        return BatchSampler(SequentialSampler(dataset.samples), size, loader.drop_last or dataset.drop_last)
    if isinstance(dataset, IterableDataset):
        return None
    if loader.batch_sampler is None:
        return BatchSampler(loader.sampler, 1, False)
    return batch_plan_of(loader.batch_sampler)


def plan_requests(run: BatchEpochPlan, seed: int, *, under: EpochPlan | None = None) -> Iterator[BatchRequest]:
    """Yield the batches of an epoch plan as requests, with the keys of their samples.

    Args:
        run: the epoch plan.
        seed: seed of the keys.
        under: epoch plan of a dataset with its own order, to which a user's sampler applies.
    """
    # torch's samplers accept negative epochs, but keys are hashes of non-negative numbers.
    epoch = run.epoch % _EPOCHS
    # In blocks, because several batches cost little more than one.
    for rows, positions in run.blocks():
        # The position to send to workers. It may still change for batches that are not planned yet.
        place = run.place if under is None else under.place
        packed = rows if isinstance(rows, list) else _rows_of(rows)
        for indices, keys in zip(packed, _rows_of(packed_sample_keys(seed, epoch, positions)), strict=True):
            yield BatchRequest(indices, keys, place)


def _rows_of(numbers: npt.NDArray[Any]) -> list[bytes]:
    """Return the rows of an array as bytes: slices of bytes are cheaper to make, and to send, than rows of arrays."""
    data, size = numbers.tobytes(), numbers[0].nbytes
    return [data[at * size : (at + 1) * size] for at in range(len(numbers))]
