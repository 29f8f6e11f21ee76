"""Where a loader's batches come from: one interface over our samplers, foreign ones, and data sets with an order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, cast

import numpy as np
from torch.utils.data import DistributedSampler as TorchDistributedSampler
from torch.utils.data import Subset

from penstock.errors import ConfigError, PartitionError
from penstock.loader.fetch import Task
from penstock.order.hashing import mix
from penstock.random import sample_keys
from penstock.samplers.base import Batch, BatchPass, EpochBatchSampler
from penstock.samplers.batch import BatchSampler
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.sequential import SequentialSampler
from penstock.state import STATE_VERSION, State, check_state, read_int

__all__ = ["batch_source", "plan", "refuse_double_split", "stream_source"]


def batch_source(sampler: Iterable[Any], batch_sampler: Iterable[Any] | None) -> EpochBatchSampler:
    """The batches of a map-style loader: of its batch sampler, or single indices where batching is off."""
    if batch_sampler is None:
        return BatchSampler(sampler, 1, False)
    return batch_sampler if isinstance(batch_sampler, EpochBatchSampler) else _Foreign(batch_sampler)


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
    inner = sampler
    while (deeper := getattr(inner, "batch_sampler", None) or getattr(inner, "sampler", None)) is not None:
        inner = deeper
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if getattr(dataset, "splits_by_rank", False) and isinstance(inner, TorchDistributedSampler | DistributedSampler):
        raise PartitionError(
            f"{type(dataset).__name__} holds this rank's share already, and {type(inner).__name__} would split it once "
            "more: leave the sampler out, or put it over the Manifest"
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
    for number, (indices, positions) in enumerate(run, getattr(run, "first_batch", 0)):
        if positions is None:
            places = (np.int64(number) << 24) + np.arange(len(indices), dtype=np.int64)
            yield Task(indices, sample_keys(local, run.epoch, places), place)
        else:
            yield Task(indices, sample_keys(seed if elastic else local, run.epoch, positions), place)


class _Foreign(EpochBatchSampler):
    """A batch sampler that is not ours: any iterable of lists. What has been had is skipped on resume."""

    def __init__(self, batch_sampler: Iterable[Any]) -> None:
        super().__init__()
        self.batch_sampler = batch_sampler

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)

    def _build(self, resume: State | None) -> BatchPass:
        return _ForeignPass(self.batch_sampler, self.epoch, 0 if resume is None else int(resume["batches"]))

    def _check(self, state: Mapping[str, Any]) -> State:
        check_state(state, {"version": STATE_VERSION}, of="batch sampler")
        for name in ("epoch", "batches"):
            read_int(state, name, of="batch sampler")
        return dict(state)


class _ForeignPass:
    seed: int | None = None

    def __init__(self, batches: Iterable[Any], epoch: int, skip: int) -> None:
        self._batches = batches
        self._skip = self.first_batch = skip
        self.epoch = epoch

    def __len__(self) -> int:
        return max(0, len(cast(Sized, self._batches)) - self._skip)

    def __iter__(self) -> Iterator[Batch]:
        for batch in itertools.islice(iter(self._batches), self._skip, None):
            yield list(batch), None

    def state(self, count: int) -> State:
        return {"version": STATE_VERSION, "epoch": self.epoch, "batches": self._skip + count}
