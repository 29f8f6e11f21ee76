"""`BatchSampler`: torch's batch sampler as a plan over the plan of its sampler; and whether its order is computable."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.utils.data

from penstock.errors import SamplerError
from penstock.order.permutation import Indices
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import Batch, BatchEpochPlan, EpochPlan, ForwardEpoch, RankPartition, length_of
from penstock.plan.iteration import CountedIterator, batch_blocks
from penstock.plan.wrapper import OuterPlan
from penstock.samplers.base import EpochBatchSampler, EpochSampler
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.external import ExternalSampler
from penstock.samplers.identity import own_order
from penstock.samplers.plan_of import plan_of
from penstock.samplers.sequential import SequentialSampler
from penstock.wording import kind_text

__all__ = ["BatchSampler", "batch_plan_of", "has_own_order", "sampler_of", "why_not_computable"]


class BatchSampler(OuterPlan[BatchEpochPlan], EpochBatchSampler, torch.utils.data.BatchSampler):
    """Consecutive indices of a sampler, ``batch_size`` at a time.

    Args:
        sampler: a Penstock sampler, or any iterable of indices.
        batch_size: positive.
        drop_last: leave out the last batch if it is not full.

    Raises:
        SamplerError: the batch size is not a positive integer, or drop_last is not a bool (torch's messages).

    The state is the state of the sampler, counted in samples, so it also resumes exactly with another batch size.
    For the samplers of Penstock and torch it is a few integers. It is elastic if the sampler's state is. For any other
    iterable see `penstock.samplers.external`.

    >>> list(BatchSampler(range(10), batch_size=4, drop_last=False))
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def __init__(self, sampler: Iterable[Any], batch_size: int, drop_last: bool) -> None:
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size <= 0:
            raise SamplerError(f"batch_size should be a positive integer value, but got batch_size={batch_size}")
        if not isinstance(drop_last, bool):
            raise SamplerError(f"drop_last should be a boolean value, but got drop_last={drop_last}")
        super().__init__()
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._plan = self._read_sampler()

    @property
    def inner(self) -> EpochSampler | ExternalSampler:
        """The plan of the sampler, or of its batches for a sampler of another library."""
        # A program may have assigned another sampler.
        if self._sampler_read is not self.sampler:
            self._plan = self._read_sampler()
        return self._plan

    def _read_sampler(self) -> EpochSampler | ExternalSampler:
        self._sampler_read = sampler = self.sampler
        plan = plan_of(sampler)
        return ExternalSampler(sampler, self.batch_size, self.drop_last) if plan is None else plan

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler."""
        self.inner.set_epoch(epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state at the next ``iter()``. It is the state of the sampler.

        Raises:
            StateError: the state belongs to other data or to another order.
        """
        self.inner.load_state_dict(state)

    def _epoch_shown(self) -> int:
        return self.inner.epoch

    # As a plan.

    def inside(self, run: BatchEpochPlan) -> Any:
        """Return the plan of the samples of an epoch; the batches themselves for a sampler of another library."""
        return run.samples if isinstance(run, _Batches | _ForwardBatches) else run

    def bind(self, cursor: Cursor, entropy: Any) -> BatchEpochPlan:
        """Return the batches of the cursor's epoch, from the cursor on."""
        inner = self.inner
        if isinstance(inner, ExternalSampler):
            # A program may have assigned other values.
            inner.batch_size, inner.drop_last = self.batch_size, self.drop_last
        run = inner.bind(cursor, entropy)
        if isinstance(run, ForwardEpoch):
            return _ForwardBatches(run, self.batch_size, self.drop_last)
        return _Batches(run, self.batch_size, self.drop_last) if isinstance(run, EpochPlan) else run

    def _iterate(self, run: BatchEpochPlan) -> CountedIterator[list[Any]]:
        if isinstance(run, _Batches):
            return CountedIterator(lists for lists, _ in run.blocks())
        return super()._iterate(run)


class TorchBatches(BatchSampler):
    """The plan of a ``torch.utils.data.BatchSampler``. It reads torch's attributes, which programs may assign."""

    def __init__(self, batches: torch.utils.data.BatchSampler) -> None:
        self._batches = batches
        super().__init__(batches.sampler, batches.batch_size, batches.drop_last)

    @property
    def inner(self) -> EpochSampler | ExternalSampler:
        """The plan of the sampler, as in `BatchSampler`, with one attribute to look up: it is asked for each batch."""
        if self._sampler_read is not self._batches.sampler:
            self._plan = self._read_sampler()
        return self._plan

    @property
    def sampler(self) -> Any:
        """The sampler of torch's batch sampler."""
        return self._batches.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        pass

    @property
    def batch_size(self) -> int:
        """The batch size of torch's batch sampler."""
        return self._batches.batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        pass

    @property
    def drop_last(self) -> bool:
        """``drop_last`` of torch's batch sampler."""
        return self._batches.drop_last

    @drop_last.setter
    def drop_last(self, drop_last: bool) -> None:
        pass


class _Batches(BatchEpochPlan):
    """The batches of an epoch plan of samples."""

    def __init__(self, samples: EpochPlan, batch_size: int, drop_last: bool) -> None:
        self.samples = samples
        self._batch_size = batch_size
        self._drop_last = drop_last
        self.seed, self.epoch = samples.seed, samples.epoch
        self.per_rank, self.one_by_one = samples.per_rank, samples.one_by_one

    @property
    def place(self) -> Any:
        """The position of the dataset."""
        return self.samples.place

    def __len__(self) -> int:
        samples = len(self.samples)
        return samples // self._batch_size if self._drop_last else -(-samples // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return itertools.chain.from_iterable(itertools.starmap(zip, self.blocks()))

    def blocks(self) -> Iterator[tuple[list[list[Any]], Indices]]:
        return batch_blocks(self.samples, self._batch_size, drop_last=self._drop_last)

    @property
    def rank_partition(self) -> RankPartition | None:
        share = self.samples.rank_partition
        return None if share is None else share._replace(batch_size=self._batch_size, drop_last=self._drop_last)

    def cursor(self, count: int) -> Cursor:
        return self.samples.cursor(min(count * self._batch_size, length_of(self.samples)))

    def exhaust(self) -> None:
        self.samples.exhaust()


class _ForwardBatches(BatchEpochPlan):
    """The batches of samples that become known while they are read."""

    one_by_one = True

    def __init__(self, samples: ForwardEpoch, batch_size: int, drop_last: bool) -> None:
        self.samples = samples
        self._batch_size = batch_size
        self._drop_last = drop_last
        self.seed, self.epoch = samples.seed, samples.epoch

    @property
    def place(self) -> Any:
        """The position of the dataset for the last batch."""
        return self.samples.place

    def __len__(self) -> int:
        samples = len(self.samples)
        return samples // self._batch_size if self._drop_last else -(-samples // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for indices, positions in self.samples.read(self._batch_size):
            if len(indices) == self._batch_size or not self._drop_last:
                yield indices.tolist(), positions

    def cursor(self, count: int) -> Cursor:
        return self.samples.cursor(min(count * self._batch_size, length_of(self.samples)))


def batch_plan_of(batches: Iterable[Any]) -> EpochBatchSampler:
    """Return the plan of a batch sampler: of Penstock, of torch, or of another library (an `ExternalSampler`).

    >>> inner = torch.utils.data.SequentialSampler(range(3))
    >>> type(batch_plan_of(torch.utils.data.BatchSampler(inner, 2, False))).__name__
    'TorchBatches'
    """
    # A user's subclass with its own __iter__ may yield other batches than the plan.
    if isinstance(batches, EpochBatchSampler) and type(batches).__iter__ is EpochBatchSampler.__iter__:
        return batches
    if type(batches) is torch.utils.data.BatchSampler:
        return TorchBatches(batches)
    return ExternalSampler(batches)


def sampler_of(plan: EpochBatchSampler) -> Any:
    """Return the sampler inside a plan of batches, or the plan itself if it is a batch sampler."""
    return plan.sampler if isinstance(plan, BatchSampler) else plan


def has_own_order(plan: EpochBatchSampler, samples: Any) -> bool:
    """Return whether a plan uses the dataset's own order."""
    return own_order(samples) is not None and isinstance(sampler_of(plan), SequentialSampler)


def why_not_computable(plan: EpochBatchSampler | None, samples: Any) -> str | None:
    """Return why the order of a loader's batches cannot be computed; None if it can.

    Args:
        plan: plan of the batches.
        samples: the map-style dataset.
    """
    if plan is None:
        return "a ledger needs an order that can be computed, and the order of a stream is known only by reading it"
    if has_own_order(plan, samples):
        return None
    sampler = sampler_of(plan)
    if own_order(samples) is not None or not isinstance(sampler, EpochSampler | EpochBatchSampler):
        return f"a ledger does not know the order of {kind_text(sampler)}"
    if plan.key_seed is None and not isinstance(sampler, SequentialSampler | DistributedSampler):
        return "without a seed the rows of an epoch cannot be computed: pass seed= to the sampler"
    return None
