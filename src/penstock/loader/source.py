"""Where a loader's batches come from: one interface over our samplers, foreign ones, and data sets with an order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from penstock import distributed
from penstock.errors import ConfigError, PartitionError
from penstock.loader.foreign import source_of
from penstock.loader.ranks import holds_a_share
from penstock.loader.work import Task
from penstock.order.hashing import mix
from penstock.random import packed_sample_keys
from penstock.samplers.base import BatchPass, EpochBatchSampler
from penstock.samplers.batch import BatchSampler
from penstock.samplers.sequential import SequentialSampler
from penstock.samplers.shares import dealer

__all__ = ["batch_source", "plan", "refuse_double_split", "stream_source"]


_LARGEST_GROUP = 64
_KEYS = 8192  # computed at a time


def batch_source(sampler: Iterable[Any], batch_sampler: Iterable[Any] | None) -> EpochBatchSampler:
    """The batches of a map-style loader: of its batch sampler, or single indices where batching is off."""
    return source_of(BatchSampler(sampler, 1, False) if batch_sampler is None else batch_sampler)


def stream_source(dataset: Any, batch_size: int | None, drop_last: bool) -> EpochBatchSampler:
    """The batches of an iterable data set that has its samples as a map-style one too, such as `MPDataset`.

    Raises:
        ConfigError: the loader's batch size is another than the data set's.
    """
    if batch_size != dataset.batch_size:
        raise ConfigError(
            f"the loader's batch_size is {batch_size} and the data set's is {dataset.batch_size}: the data set deals "
            "whole batches to workers, so give both the same"
        )
    return BatchSampler(SequentialSampler(dataset.samples), dataset.batch_size, drop_last or dataset.drop_last)


def refuse_double_split(dataset: Any, sampler: Any) -> None:
    """Raise if both the data set and the sampler deal samples to ranks."""
    if not holds_a_share(dataset):
        return
    second = dealer(sampler, ranks=distributed.current().world_size)
    if second is not None:
        raise PartitionError(
            f"{type(dataset).__name__} holds this rank's share already, and {type(second).__name__} would split it "
            "once more: leave the sampler out, or put it over the Manifest"
        )


def plan(run: BatchPass, seed: int, *, rank: int, place: Any, elastic: bool) -> Iterator[Task]:
    """The batches of a pass with the keys of their samples.

    Args:
        run: the pass. A sampler that is not ours knows no global positions: there the key is (seed, epoch, rank, batch,
            number in the batch), which repeats but is not elastic.
        seed: of the keys.
        rank: whose share it is (the data-parallel rank, which is not always the global one).
        place: where the data set stands, if it keeps a place of its own.
        elastic: False over one rank's share, where positions are those of other samples on other ranks.
    """
    local = mix(seed, rank)
    batches = iter(run)
    number = getattr(run, "first_batch", 0)
    group, left = 1, _length(run)
    while taken := list(itertools.islice(batches, max(1, min(group, left - 1)))):
        left -= len(taken)  # what draws from a generator does so at its end: not to be reached before it is asked for
        if taken[0][1] is None:
            indices = taken[0][0]
            places = (np.int64(number) << 24) + np.arange(len(indices), dtype=np.int64)
            yield Task(indices, packed_sample_keys(local, run.epoch, places), place)
            number += 1
            continue
        # Keys of several batches cost little more than those of one. The first ones are wanted at once.
        positions = np.concatenate([batch[1] for batch in taken])
        keys = packed_sample_keys(seed if elastic else local, run.epoch, positions)
        begin = 0
        for indices, _ in taken:
            yield Task(indices, keys[begin : begin + len(indices)], place)
            begin += len(indices)
        number += len(taken)
        group = min(_LARGEST_GROUP, group * 2, max(1, _KEYS // max(1, len(taken[0][0]))))


def _length(run: BatchPass) -> int:
    """Batches of a pass; many if it is endless."""
    try:
        return len(run)
    except TypeError:
        return 1 << 62
