"""`Ledger`: which rows were in which step of a job, computed from the plan. Nothing is logged.

ledger = Ledger(loader, state=state)
ledger.rows(12_345)                 # the global batch of that step: rows, ranks, keys of generators
ledger.steps(777)                   # the steps with row 777 in the current epoch
ledger.seen(777, until=12_345)      # how often the row was delivered before that step

A step is one batch of all ranks together, counted from the start of epoch 0. Its positions follow from the job's layout
in that step (`penstock.ledger.layouts`), and their rows from the order (`positions`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.hashing import sample_keys
from penstock.ledger.layouts import Layout, Layouts, Stretch, steps_per_epoch, whole
from penstock.ledger.positions import BatchPositions, Positions
from penstock.order.permutation import Indices
from penstock.plan.class_plan import ClassBatchPlan
from penstock.plan.cursor import Cursor, read_int, read_mapping, unpack
from penstock.plan.reader import Draws
from penstock.plan.share import ShareCursor
from penstock.samplers.base import EpochBatchSampler
from penstock.samplers.batch import has_own_order, sampler_of, why_not_computable
from penstock.wording import kind_text

if TYPE_CHECKING:
    from penstock.loader.dataloader import DataLoader

__all__ = ["Ledger", "Occurrence", "StepRows"]


class StepRows(NamedTuple):
    """The rows of a step, for one rank or for all.

    Attributes:
        epoch: epoch of the step.
        rows: rows of the data in batch order, rank after rank: int64 of shape (rows,). For packs, the rows of their
            documents.
        ranks: rank of each row.
        positions: position of each row's sample in the job's epoch; for a document, the position of its pack.
        sources: number of each row's source in a mixture; -1 without a mixture.
        keys: key of each row's generator, see `penstock.generator`: uint64; None without a seed.
    """

    epoch: int
    rows: Indices
    ranks: Indices
    positions: Indices
    sources: Indices
    keys: npt.NDArray[np.uint64] | None


class Occurrence(NamedTuple):
    """One occurrence of a row: a step of the job, its epoch and the rank that receives the row."""

    step: int
    epoch: int
    rank: int


class Ledger:
    """The rows of every step of a loader's job.

    Args:
        loader: a loader over a dataset with its own order (`penstock.RankDataset`, `Mixture`, `PackedDataset`, ...), or
            with a seeded Penstock sampler.
        state: a state of the loader or of the run in question; by default the loader's current state. It is read, not
            loaded. It contains the job's ranks and batch sizes over time. The dataset may exclude other rows than the
            state.
        world_size: number of ranks, for a job that never changed it; by default from the state or the loader.

    Raises:
        ConfigError: the order cannot be computed, as for a stream, an unseeded sampler, another library's sampler or
            loader; or ``world_size=`` contradicts a state that contains the ranks.
        StateError: a state of other data or another order.

    A state without layouts (from an older version), or a loader without a loaded state, counts as a job that always had
    the loader's layout. Steps after the state have its last layout.

    Some questions raise ConfigError: about steps with other rows, because other rows were excluded or the data has
    grown (use a loader over the rows of that time), and about epochs that were read in windows of shards, see
    `penstock.ShardDataset`.

    Cost: the arithmetic of one batch per question, for any number of rows or ranks; `seen` pays it for each epoch. To
    find a row in torch's orders, or in orders that draw rows repeatedly, the ledger scans the whole order.

    >>> from penstock import DataLoader, DistributedSampler
    >>> sampler = DistributedSampler(range(100), num_replicas=2, rank=0, seed=1)
    >>> ledger = Ledger(DataLoader(range(100), batch_size=10, sampler=sampler))
    >>> ledger.steps_per_epoch, len(ledger.rows(7).rows), len(ledger.rows(7, rank=1).rows)
    (5, 20, 10)
    >>> found = ledger.rows(7)
    >>> ledger.steps(int(found.rows[0]), epoch=1)
    [Occurrence(step=7, epoch=1, rank=0)]
    """

    def __init__(
        self, loader: DataLoader[Any], *, state: Mapping[str, Any] | None = None, world_size: int | None = None
    ) -> None:
        consumer = getattr(loader, "consumer", None)
        if consumer is None:
            raise ConfigError(
                f"Ledger takes a penstock.DataLoader, got {type(loader).__module__}.{type(loader).__name__}: batches "
                "of other loaders are known only by reading them"
            )
        plan = consumer.plan
        self.dataset: Any = consumer.samples
        """The loader's map-style dataset."""
        if reason := why_not_computable(plan, self.dataset):
            raise ConfigError(reason)
        assert plan is not None
        self._plan: EpochBatchSampler = plan
        self._seed = loader.seed
        self._own = has_own_order(plan, self.dataset)
        self._changes = getattr(self.dataset.plan, "changes", ()) if self._own else ()
        # The first epoch that was not read in windows of shards.
        self._windows_until = 0
        if state is None and world_size is None:
            state = consumer.state_dict()
        elif state is not None:
            state = unpack(state, of="DataLoader")
        self._job, self._epoch = Layouts(), plan.epoch
        self.step = 0
        """The next step of the loader or of the state."""
        if state is not None:
            consumer.check(state)
            self._read(state)
        if not self._job.layouts:
            first = whole(self._now)
            self._job = Layouts([first if world_size is None else first._replace(ranks=world_size)])
        elif world_size is not None:
            raise ConfigError("the state says how many ranks the job had in each step: omit world_size=")

    def _read(self, state: Mapping[str, Any]) -> None:
        """Take layouts, epoch and step from a state."""
        sampler = read_mapping(state, "sampler", of="DataLoader")
        if "windows" in sampler:
            self._windows_until = read_int(sampler, "windows", of="DataLoader")
        # First, because it may count the samples of uncounted shards. Excluded rows are checked for each step, and the
        # plan is the loader's.
        cursor = self._plan.read({name: sampler[name] for name in sampler if name not in ("excluded", "windows")})
        self._job, self._epoch = Layouts.read(state, self._now.parts), cursor.epoch
        self._changes = cursor.place.changes if isinstance(cursor, ShareCursor) else ()
        here = self._layout_at(cursor)
        step = (self._job if self._job.layouts else self._job.followed(here)).step_of(here)
        self.step = step if self._job.next_step is None else self._job.next_step

    @cached_property
    def _now(self) -> Layout:
        """How a whole epoch is distributed to ranks by the loader."""
        return self._layout_at(Cursor())

    def _layout_at(self, cursor: Cursor) -> Layout:
        """Return how the rest of an epoch is distributed to ranks by the loader."""
        layout = self._plan.bind(cursor, Draws()).layout
        if layout is None and self._own:
            raise ConfigError(
                f"epoch {cursor.epoch} is read in windows of shards that had not been counted before, and a ledger "
                "knows only other epochs: use a state of a later epoch, or a loader over a ShardSet"
            )
        if layout is None:
            raise ConfigError(f"a ledger does not know the batches of {kind_text(sampler_of(self._plan))}")
        return layout

    # The layouts.

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of the job's steps, oldest first."""
        return self._job.layouts

    def layout(self, step: int) -> Layout:
        """Return the layout of a step."""
        return self._job.layout(step)

    @property
    def world_size(self) -> int:
        """Number of ranks in the job's last layout."""
        return self.layouts[-1].ranks

    @property
    def batch_size(self) -> int:
        """Samples per rank and batch in the last layout; 1 if batches have no fixed size."""
        return self.layouts[-1].batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps per whole epoch in the last layout."""
        return steps_per_epoch(self.layouts[-1])

    def _same_rows(self, stretch: Stretch) -> None:
        """Refuse a stretch in which the job had other rows, or another order, than the loader."""
        now = self._now
        if stretch.epoch < self._windows_until:
            raise ConfigError(
                f"epoch {stretch.epoch} of the job was read in windows of shards that had not been counted before: a "
                f"ledger knows the rows from epoch {self._windows_until} on"
            )
        if stretch.samples != now.samples:
            raise ConfigError(
                f"in step {stretch.step} the job had {stretch.samples} samples per epoch, and the loader has "
                f"{now.samples}: use a ledger of a loader over the data of that time"
            )
        if stretch.excluded != now.excluded:
            raise ConfigError(
                f"in step {stretch.step} the job excluded other rows than the loader; the hashes are "
                f"{stretch.excluded or 'none'} and {now.excluded or 'none'}: use a ledger of a loader with the "
                "exclude= of that time"
            )

    def _data(self, stretch: Stretch) -> Positions:
        if self._own:
            from penstock.ledger.dataset_positions import positions_of_dataset

            return positions_of_dataset(self.dataset, stretch.epoch, stretch.partition(), self._changes)
        run = sampler_of(self._plan).bind(Cursor(epoch=stretch.epoch), Draws())
        return BatchPositions(run) if isinstance(run, ClassBatchPlan) else Positions(run.order, run.partition.n)

    def begin(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and its first position in the job's epoch."""
        stretch = self._job.at(step)
        return stretch.epoch, stretch.position(step)

    def step_from(self, position: int, *, epoch: int) -> int:
        """Return the first step that contains a position of an epoch or a later one, since the last may be dropped."""
        step = 0
        for stretch, step in self._job.in_epoch(epoch):
            found = stretch.step_at(max(position, stretch.first))
            if position < stretch.partition().end and found < step:
                return found
        return step

    # Queries.

    def rows(self, step: int, *, rank: int | None = None) -> StepRows:
        """Return the rows of a step.

        Args:
            step: step of the job, counted from 0 over all epochs.
            rank: a single rank; None for all ranks.

        Raises:
            ConfigError: the step or the rank does not exist.
        """
        stretch = self._job.at(step)
        self._same_rows(stretch)
        if rank is not None and not 0 <= operator.index(rank) < stretch.ranks:
            raise ConfigError(f"rank {rank} is outside the world of {stretch.ranks}, which step {step} had")
        where, of_rank = stretch.positions(step, rank)
        found = self._data(stretch).rows(where)
        seed = self._seed if self._seed is not None else self._plan.key_seed
        keys = None if seed is None else sample_keys(seed, stretch.epoch, found.positions)
        return StepRows(stretch.epoch, found.rows, of_rank[found.at], found.positions, found.sources, keys)

    def steps(self, row: int, *, source: int | str = -1, epoch: int | None = None) -> list[Occurrence]:
        """Return the occurrences of a row in an epoch.

        There may be several: padding or a mixture repeats rows, and a document may be cut into several packs.

        Args:
            row: row of the data as in `rows`; for packs, the row of a document.
            source: number or name of the row's source in a mixture.
            epoch: the epoch; by default the current one, or that of the state.
        """
        return sorted(self._occurrences(row, source, self._epoch if epoch is None else epoch))

    def _occurrences(self, row: int, source: int | str, epoch: int) -> Iterator[Occurrence]:
        """Yield the occurrences of a row in an epoch."""
        for stretch, end in self._job.in_epoch(epoch):
            self._same_rows(stretch)
            for found in self._data(stretch).find(row, source):
                # Padding repeats the first positions.
                for position in range(found, stretch.partition().end, max(1, stretch.samples)):
                    place = stretch.locate(position)
                    if place is not None and place[0] < end:
                        step, rank = place
                        yield Occurrence(step, epoch, rank)

    def seen(self, row: int, *, until: int, source: int | str = -1) -> int:
        """Return how often the steps before a step contain a row, also those left out by `DataLoader.skip`.

        Arguments as in `steps`.
        """
        last = self._job.at(until).epoch
        every = (found for epoch in range(last + 1) for found in self._occurrences(row, source, epoch))
        return sum(found.step < until for found in every)
