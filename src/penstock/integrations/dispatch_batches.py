"""`DispatchedBatches`: the batches of one sampler, split across ranks by whole batches, as Accelerate splits them.

    batches of the epoch   0 1 2 3 4 5 6 ...
    rank 0 of 3            0     3     6          a round is one batch per rank
    rank 1 of 3              1     4
    rank 2 of 3                2     5

Samples keep their global positions, so their random draws are those of a run on one rank. The state is the sampler's
state after whole rounds, so a job with any number of ranks can resume from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import Batch, BatchEpochPlan, length_of
from penstock.plan.reader import Draws, OuterPlan
from penstock.samplers.base import EpochBatchSampler

__all__ = ["DispatchedBatches"]


class DispatchedBatches(OuterPlan[BatchEpochPlan], EpochBatchSampler):
    """The batches of one rank, from a batch sampler that is the same on all ranks.

    Args:
        batches: a Penstock batch sampler.
        rank, world: this rank, and the number of ranks.
        split: split each batch into ``world`` equal parts, instead of assigning whole batches.
        even: pad the last round with samples from the beginning of the epoch, so that all ranks have the same number
            of batches of the same size. Without it, the last ranks may have one batch less and the last batches may be
            smaller. A sampler with ``drop_last`` drops an incomplete round.

    Raises:
        ConfigError: ``even`` or ``split`` is set, but the batch sampler has no ``batch_size``.
    """

    def __init__(self, batches: EpochBatchSampler, rank: int, world: int, *, split: bool, even: bool) -> None:
        super().__init__()
        if (even or split) and not getattr(batches, "batch_size", None):
            raise ConfigError(
                f"{type(batches).__name__} has no batch_size, so the last batches cannot be padded: use "
                "DataLoaderConfiguration(even_batches=False), without split_batches"
            )
        self.batch_sampler = batches
        self.sampler: Any = getattr(batches, "sampler", None)
        self.batch_size: int = getattr(batches, "batch_size", 0)
        self.drop_last = bool(getattr(batches, "drop_last", False))
        self.process_index = rank
        self.num_processes = world  # Accelerate reads this name and the next two
        self.split_batches = split
        self.even_batches = even

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. The epoch of a state just loaded keeps its position."""
        self.batch_sampler.set_epoch(epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of any number of ranks at the next ``iter()``.

        Raises:
            StateError: the state belongs to other data or to another order.
        """
        self.batch_sampler.load_state_dict(state)

    @property
    def inner(self) -> EpochBatchSampler:
        """The batch sampler of all ranks."""
        return self.batch_sampler

    def bind(self, cursor: Cursor, draws: Draws) -> BatchEpochPlan:
        """Return the plan of this rank's batches in the cursor's epoch, from the cursor on."""
        inner = self.batch_sampler
        return _DispatchedPlan(self, inner.bind(cursor, draws), inner.bind(cursor.whole(), draws.again()))


class _DispatchedPlan(BatchEpochPlan):
    """The plan of one rank's batches in one epoch: of all ranks' batches from the cursor on, ``run``.

    Padding is taken from the plan of the ``whole`` epoch.
    """

    def __init__(self, dispatched: DispatchedBatches, run: BatchEpochPlan, whole: BatchEpochPlan) -> None:
        self._dispatched = dispatched
        self.run = run
        self._whole = whole
        self._round = 1 if dispatched.split_batches else dispatched.num_processes
        self.seed, self.epoch = run.seed, run.epoch
        self.per_rank, self.one_by_one = run.per_rank, run.one_by_one

    @property
    def start(self) -> Cursor:
        """The start of the epoch."""
        return self.run.start

    def after(self, count: int) -> Cursor:
        """Return the start of the next epoch."""
        return self.run.after(self.before(count))

    @property
    def place(self) -> Any:
        """The dataset's position."""
        return self.run.place

    def __len__(self) -> int:
        rounds, rest = divmod(len(self.run), self._round)
        if not rest or self._dispatched.drop_last:
            return rounds
        return rounds + (self._dispatched.even_batches or self._dispatched.process_index < rest)

    def cursor(self, count: int) -> Cursor:
        return self.run.cursor(self.before(count))

    def before(self, count: int) -> int:
        """Return the batches consumed by all ranks when this rank has consumed ``count``."""
        return min(count * self._round, length_of(self.run))

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.run)
        now = list(itertools.islice(batches, self._round))
        while now:
            following = list(itertools.islice(batches, self._round))
            batch = self._mine(now, last=not following)
            if batch is not None:
                yield batch
            now = following

    def _mine(self, batches: list[Batch], *, last: bool) -> Batch | None:
        """Return this rank's batch of a round, or None if it has none."""
        dispatched = self._dispatched
        rank, world = dispatched.process_index, dispatched.num_processes
        size = dispatched.batch_size // world if dispatched.split_batches else dispatched.batch_size
        part = slice(rank * size, (rank + 1) * size)
        if last and sum(len(indices) for indices, _ in batches) < world * size:
            if dispatched.drop_last:
                return None
            if dispatched.even_batches:
                # Pad from the beginning of the epoch, repeatedly if the epoch is short.
                padding = itertools.chain.from_iterable(itertools.repeat(self._whole))
                indices: list[Any] = []
                positions = []
                for more, places in itertools.chain(batches, padding):
                    indices += more
                    positions.append(places)
                    if len(indices) >= world * size:
                        break
                return indices[part], np.concatenate(positions)[part]
        if dispatched.split_batches:
            found, places = batches[0]
            return (found[part], places[part]) if found[part] else None
        return batches[rank] if rank < len(batches) and batches[rank][0] else None
