"""`Ledger`: which rows were in which step of a job, answered from the plan alone. Nothing is logged.

ledger = Ledger(loader)
ledger.rows(12_345)                 # the global batch of that step: rows, ranks, keys of generators
ledger.steps(777)                   # where row 777 comes in the present epoch
ledger.seen(777, until=12_345)      # how often it was had before

A step is a batch of all ranks together, counted from the beginning of epoch 0. Its positions follow from the layout
(`penstock.order.Partition`), and the rows at them from the order (`data_positions`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock import distributed
from penstock.errors import ConfigError
from penstock.loader.data_positions import DataPositions, positions_of_dataset, positions_of_order
from penstock.loader.dataloader import DataLoader
from penstock.order import Partition
from penstock.order.permutation import Indices
from penstock.plan.class_plan import ClassBatchPlan
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import PartitionedOrder
from penstock.random import sample_keys
from penstock.samplers.base import EpochBatchSampler, EpochSampler
from penstock.samplers.batch import BatchSampler
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.identity import own_order
from penstock.samplers.sequential import SequentialSampler

__all__ = ["Ledger", "Occurrence", "StepRows"]


class StepRows(NamedTuple):
    """What a step has, of one rank or of all of them.

    Attributes:
        epoch: which epoch the step is in.
        rows: of the data, in the order in which batches have them, rank after rank: int64 of shape (rows,). Of packs:
            the rows of the documents in them.
        ranks: the rank of each row.
        positions: the position in the job's epoch of each row's sample; of documents, that of their pack.
        sources: the number of each row's source in a mixture; -1 where there is none.
        keys: of the samples' generators, see `penstock.generator`, one for each row; None without a seed.
    """

    epoch: int
    rows: Indices
    ranks: Indices
    positions: Indices
    sources: Indices
    keys: list[int] | None


class Occurrence(NamedTuple):
    """Where a row comes: the step of the job, and the rank that has it."""

    step: int
    epoch: int
    rank: int


class Ledger:
    """The rows of every step of a loader's job.

    Args:
        loader: over a data set with an order of its own (`penstock.RankDataset`, `Mixture`, `PackedDataset`, ...), or
            with a sampler of ours that has a seed.
        world_size: ranks of the job; by default those that the loader has.

    Raises:
        ConfigError: an order that nobody can compute: of a stream, of a sampler without a seed or of another library.

    A question about another number of ranks or another batch size is one for another ledger: a job that changed is
    asked with the layout that it had in that step. Weights of a mixture that were changed are in the state that the
    loader has loaded.

    Cost: one batch of arithmetic a question, whatever the number of rows or ranks; `steps` costs one for each
    mini-epoch, and `seen` that for each epoch.
    Where a row stands in an order of torch's, or in one that draws rows more than once, takes a pass over the order.

    >>> from penstock import DataLoader, DistributedSampler
    >>> sampler = DistributedSampler(range(100), num_replicas=2, rank=0, seed=1)
    >>> ledger = Ledger(DataLoader(range(100), batch_size=10, sampler=sampler))
    >>> ledger.steps_per_epoch, len(ledger.rows(7).rows), len(ledger.rows(7, rank=1).rows)
    (5, 20, 10)
    >>> found = ledger.rows(7)
    >>> ledger.steps(int(found.rows[0]), epoch=1)
    [Occurrence(step=7, epoch=1, rank=0)]
    """

    def __init__(self, loader: DataLoader[Any], *, world_size: int | None = None) -> None:
        plan = loader.pipeline.position.plan
        if plan is None:
            raise ConfigError(
                "a ledger needs an order that is arithmetic: that of a stream is known only by reading it"
            )
        self._dataset: Any = loader.pipeline.position.samples
        self._plan: EpochBatchSampler = plan
        self._seed = loader.seed
        self._sampler: Any = plan.sampler if isinstance(plan, BatchSampler) else plan
        own = own_order(self._dataset)
        self._own = own is not None and isinstance(self._sampler, SequentialSampler)
        if not self._own and (own is not None or not isinstance(self._sampler, EpochSampler | EpochBatchSampler)):
            raise ConfigError(f"a ledger does not know the order of a {type(self._sampler).__name__}")
        drawn = not isinstance(self._sampler, SequentialSampler | DistributedSampler)
        if not self._own and drawn and self._plan.key_seed is None:
            raise ConfigError("without a seed nobody can compute which rows an epoch had: give the sampler one")
        self.world_size = self._ranks() if world_size is None else world_size
        self.batch_size: int = plan.batch_size if isinstance(plan, BatchSampler) else 1
        self._drop_last = isinstance(plan, BatchSampler) and bool(plan.drop_last)
        self._batches = [self._count(part) for part in range(self._parts)]

    def _ranks(self) -> int:
        if self._own:
            return int(self._dataset.plan.world.world_size)
        run = self._run(0)
        partition = run.partition if isinstance(run, PartitionedOrder) else getattr(run, "_partition", None)
        return partition.world_size if partition is not None else distributed.current().world_size

    @property
    def _parts(self) -> int:
        """Mini-epochs of an epoch."""
        return int(self._dataset.mini_epochs) if self._own else 1

    @property
    def dataset(self) -> Any:
        """The loader's data set."""
        return self._dataset

    @property
    def steps_per_epoch(self) -> int:
        """Steps of each epoch."""
        return sum(self._batches)

    # The layout.

    def _run(self, epoch: int) -> Any:
        """Return the sampler's epoch plan."""
        return self._sampler.bind(Cursor(epoch=epoch), None)

    def _partition(self, rank: int, part: int = 0) -> Partition:
        """Return the positions of a rank in a mini-epoch: of samples, or of batches that a plan has by itself."""
        if self._own:
            plan = self._dataset.plan
            n, remainder = plan.samples, plan.remainder
        else:
            run = self._run(0)
            if isinstance(run, ClassBatchPlan):
                n, remainder = run.total, run._partition.remainder
            elif isinstance(run, PartitionedOrder):
                n, remainder = run.partition.n, run.partition.remainder
            else:
                raise ConfigError(f"a ledger does not know the batches of a {type(self._sampler).__name__}")
        return Partition(n, self.world_size, rank, mini_epochs=self._parts, mini_epoch=part, remainder=remainder)

    def _count(self, part: int) -> int:
        """Return the batches of a mini-epoch, of the rank that has most."""
        samples = len(self._partition(0, part))
        return samples // self.batch_size if self._drop_last else -(-samples // self.batch_size)

    def _positions(self, rank: int, part: int, number: int) -> Indices:
        """Return the positions of a rank's batch in a mini-epoch; none if it has no such batch."""
        begin = number * self.batch_size
        positions = self._partition(rank, part).positions(begin, begin + self.batch_size)
        return positions[:0] if self._drop_last and len(positions) < self.batch_size else positions

    def _locate(self, step: int) -> tuple[int, int, int]:
        """Return the epoch of a step, its mini-epoch, and its number in that."""
        if step < 0 or not self.steps_per_epoch:
            raise ConfigError(f"steps are counted from 0 on, and an epoch has {self.steps_per_epoch}, got step {step}")
        epoch, rest = divmod(step, self.steps_per_epoch)
        for part, count in enumerate(self._batches):
            if rest < count:
                return epoch, part, rest
            rest -= count
        raise AssertionError(step)

    def _data(self, epoch: int, part: int) -> DataPositions:
        if self._own:
            return positions_of_dataset(self._dataset, epoch, self._partition(0, part))
        return positions_of_order(self._run(epoch).order)

    def begin(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and the position in the job's epoch at which it begins."""
        epoch, part, number = self._locate(step)
        whole = self._partition(0, part)
        return epoch, whole.begin + number * self.batch_size * self.world_size

    def step_from(self, position: int, *, epoch: int) -> int:
        """Return the first step that has a position of an epoch, or one behind it: the last ones may be left out."""
        before = epoch * self.steps_per_epoch
        for part, count in enumerate(self._batches):
            whole = self._partition(0, part)
            if position < whole.end:
                local = max(0, position - whole.begin) // self.world_size
                return before + min(local // self.batch_size, count)
            before += count
        return before

    # Questions.

    def rows(self, step: int, *, rank: int | None = None) -> StepRows:
        """Return the rows of a step.

        Args:
            step: of the job, from 0 on, all epochs counted.
            rank: whose batch; None for all ranks.

        Raises:
            ConfigError: a step or rank that there is not.
        """
        epoch, part, number = self._locate(step)
        if rank is not None and not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside the world of {self.world_size}")
        ranks = range(self.world_size) if rank is None else [rank]
        positions = [self._positions(r, part, number) for r in ranks]
        of_rank = np.repeat(list(ranks), list(map(len, positions)))
        where = np.concatenate(positions) if positions else np.empty(0, np.int64)
        if not self._own and isinstance(run := self._run(epoch), ClassBatchPlan):
            return self._of_batches(run, epoch, where, of_rank)
        n = max(1, self._partition(0, part).n)
        found = self._data(epoch, part).rows(where % n)
        keys = self._keys(epoch, where)
        return StepRows(
            epoch,
            found.rows,
            of_rank[found.at],
            where[found.at],
            found.sources,
            None if keys is None else [keys[at] for at in found.at.tolist()],
        )

    def _of_batches(self, run: ClassBatchPlan, epoch: int, numbers: Indices, ranks: Indices) -> StepRows:
        """Return the rows of batches that a sampler makes by itself."""
        batches, none = run.numbered(numbers), np.empty(0, np.int64)
        rows = np.concatenate([none, *(np.array(indices, np.int64) for indices, _ in batches)])
        positions = np.concatenate([none, *(positions for _, positions in batches)])
        sizes = [len(indices) for indices, _ in batches]
        return StepRows(
            epoch, rows, np.repeat(ranks, sizes), positions, np.full(len(rows), -1), self._keys(epoch, positions)
        )

    def _keys(self, epoch: int, positions: Indices) -> list[int] | None:
        seed = self._seed if self._seed is not None else self._plan.key_seed
        return None if seed is None else sample_keys(seed, epoch, positions)

    def steps(self, row: int, *, source: int = -1, epoch: int | None = None) -> list[Occurrence]:
        """Return where a row of the data comes in an epoch: several times where padding or a mixture repeats it, or
        where a document is cut into several packs.

        Args:
            row: of the data, as `rows` gives them; of packs, the row of a document.
            source: the number of its source in a mixture.
            epoch: by default the present one.
        """
        epoch = self._plan.epoch if epoch is None else epoch
        if not self._own and isinstance(run := self._run(epoch), ClassBatchPlan):
            found = [(number, 0) for number in run.numbers_of(row)]
        else:
            found = [(at, part) for part in range(self._parts) for at in self._data(epoch, part).find(row, source)]
        return sorted(at for position, part in found for at in self._of_position(position, epoch, part))

    def _of_position(self, position: int, epoch: int, part: int) -> list[Occurrence]:
        """Return the steps in a mini-epoch of a position and of those that repeat it."""
        found, whole = [], self._partition(0, part)
        first = epoch * self.steps_per_epoch + sum(self._batches[:part])
        repeats = range(position, whole.end, max(1, whole.n))
        for place in (place for place in repeats if place >= whole.begin):
            local, rank = divmod(place - whole.begin, self.world_size)
            batch = local // self.batch_size
            if len(self._positions(rank, part, batch)):
                found.append(Occurrence(first + batch, epoch, rank))
        return found

    def seen(self, row: int, *, until: int, source: int = -1) -> int:
        """Return how often the job has had a row before a step. See `steps`."""
        last = until // max(1, self.steps_per_epoch)
        every = (self.steps(row, source=source, epoch=epoch) for epoch in range(last + 1))
        return sum(occurrence.step < until for found in every for occurrence in found)
