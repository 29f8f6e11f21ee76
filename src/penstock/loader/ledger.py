"""`Ledger`: which rows were in which step of a job, answered from the plan alone. Nothing is logged.

ledger = Ledger(loader, state=state)
ledger.rows(12_345)                 # the global batch of that step: rows, ranks, keys of generators
ledger.steps(777)                   # where row 777 comes in the present epoch
ledger.seen(777, until=12_345)      # how often it was had before

A step is a batch of all ranks together, counted from the beginning of epoch 0. Its positions follow from how the job
was dealt in that step (`penstock.loader.layouts`), and the rows at them from the order (`data_positions`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import ConfigError
from penstock.loader.data_positions import (
    DataPositions,
    check_no_source,
    positions_of_dataset,
    positions_of_order,
)
from penstock.loader.dataloader import DataLoader
from penstock.loader.history import History
from penstock.loader.layouts import Layout, Layouts, Stretch
from penstock.loader.source import has_own_order, sampler_of, why_unknown
from penstock.order.permutation import Indices
from penstock.plan.class_plan import ClassBatchPlan
from penstock.plan.cursor import Cursor, read_int, read_mapping
from penstock.plan.epoch import Dealt
from penstock.plan.share import ShareCursor
from penstock.plan.windows import WindowPlan
from penstock.random import sample_keys
from penstock.samplers.base import EpochBatchSampler

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
        skipped: whether the job passed over this step, so that nobody had these rows in it.
    """

    epoch: int
    rows: Indices
    ranks: Indices
    positions: Indices
    sources: Indices
    keys: list[int] | None
    skipped: bool = False


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
        state: of the loader, or of the run that is asked about; by default where the loader is. It is read and not
            loaded, and says how many ranks and which batch size the job had, from when on, and which steps it passed
            over. The data set may exclude other rows than the state says.
        world_size: ranks of a job that always had so many; by default as the state or the loader says.

    Raises:
        ConfigError: an order that nobody can compute: of a stream, of a sampler without a seed or of another library;
            ``world_size=`` beside a state that says it.
        StateError: a state of other data, or another order.

    A state from before states said it, and a loader that has loaded none, count as of a job that always had the layout
    that the loader has. Steps behind the state have its last one. Questions about steps that had other rows, since
    other ones were excluded or the data has grown, are a ConfigError: ask with a loader over the rows from then. So are
    those about epochs that were read in windows of shards, see `penstock.ShardDataset`.

    Cost: one batch of arithmetic a question, whatever the number of rows or ranks; `seen` costs one for each epoch.
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

    def __init__(
        self, loader: DataLoader[Any], *, state: Mapping[str, Any] | None = None, world_size: int | None = None
    ) -> None:
        position = loader.pipeline.position
        plan = position.plan
        self.dataset: Any = position.samples
        """The loader's map-style data set."""
        if reason := why_unknown(plan, self.dataset):
            raise ConfigError(reason)
        assert plan is not None
        self._plan: EpochBatchSampler = plan
        self._seed = loader.seed
        self._own = has_own_order(plan, self.dataset)
        self._changes = getattr(self.dataset.plan, "changes", ()) if self._own else ()
        self._windows_until = 0  # the first epoch that was not read in windows
        if state is None and world_size is None:
            state = position.state_dict()
        cursor = None
        if state is not None:
            position.check(state)
            # Shards that nobody has counted are counted for that, so it comes first.
            cursor = self._cursor_of(state)
        self._now = self._dealt(Cursor())
        nothing = Layouts(parts=self._now.parts)
        self._history, self._epoch = History(skip=loader.config.skip, layouts=nothing), plan.epoch
        if state is not None and cursor is not None:
            self._read(state, cursor)
        if not self._history.layouts.layouts:
            first = Layout.of(0, self._now).whole
            ranks = first.ranks if world_size is None else world_size
            always = Layouts([first._replace(ranks=ranks)], self._now.parts)
            self._history = replace(self._history, layouts=always)
        elif world_size is not None:
            raise ConfigError("the state says how many ranks the job had in each step: leave world_size= out")

    def _cursor_of(self, state: Mapping[str, Any]) -> Cursor:
        """Return where the order is, in a state."""
        sampler = read_mapping(state, "sampler", of="DataLoader")
        if "windows" in sampler:
            self._windows_until = read_int(sampler, "windows", of="DataLoader")
        # Rows that were excluded since, or are no more, are a question of steps; and the plan is the loader's.
        return self._plan.read({name: sampler[name] for name in sampler if name not in ("excluded", "windows")})

    def _read(self, state: Mapping[str, Any], cursor: Cursor) -> None:
        """Take over what a state says."""
        history = self._history.read(state)
        self._changes = cursor.place.changes if isinstance(cursor, ShareCursor) else ()
        layouts, here = history.layouts, self._dealt(cursor)
        first = (layouts if layouts.layouts else layouts.followed(here)).step_of(here)
        first = first if history.stood is None else history.stood
        self._history, self._epoch = replace(history, first=first, origin=first), cursor.epoch

    def _dealt(self, cursor: Cursor) -> Dealt:
        """Return how the job's ranks share what is left of an epoch."""
        dealt = self._plan.bind(cursor, None).dealt
        if dealt is None and self._own and isinstance(self.dataset.plan, WindowPlan):
            raise ConfigError(
                f"epoch {cursor.epoch} is read in windows of shards that nobody had counted before, and a ledger knows "
                "other epochs alone: ask with a state of a later one, or with a loader over a ShardSet"
            )
        if dealt is None:
            raise ConfigError(f"a ledger does not know the batches of a {type(sampler_of(self._plan)).__name__}")
        return dealt

    # The layouts.

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """How the job's steps were dealt, oldest first."""
        return self._history.layouts.layouts

    @property
    def step(self) -> int:
        """The step that comes next, where the loader or the state is."""
        return self._history.first

    def layout(self, step: int) -> Layout:
        """Return how a step was dealt."""
        return self._history.layouts.at(step).layout

    @property
    def world_size(self) -> int:
        """Ranks of the job, in its last layout."""
        return self.layouts[-1].ranks

    @property
    def batch_size(self) -> int:
        """Samples of a rank's batch, in the last layout; 1 where batches are no fixed number of them."""
        return self.layouts[-1].batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps of each whole epoch, in the last layout."""
        return self.layouts[-1].steps_per_epoch(self._now.parts)

    def _same_rows(self, stretch: Stretch) -> None:
        """Refuse to answer about steps in which the job had other rows than the loader has, or in another order."""
        layout, now = stretch.layout, self._now
        if stretch.epoch < self._windows_until:
            raise ConfigError(
                f"epoch {stretch.epoch} of the job was read in windows of shards that nobody had counted before: a "
                f"ledger knows the rows from epoch {self._windows_until} on"
            )
        if layout.samples != now.partition.n:
            raise ConfigError(
                f"in step {stretch.first} the job had epochs of {layout.samples}, and the loader has ones of "
                f"{now.partition.n}: ask a ledger of a loader over the data from then"
            )
        if layout.excluded != now.excluded:
            raise ConfigError(
                f"in step {stretch.first} the job left out other rows than the loader, by their hashes "
                f"{layout.excluded or 'none'} and {now.excluded or 'none'}: ask a ledger of a loader with the exclude= "
                "from then"
            )

    def _same_nodes(self) -> None:
        """Refuse to answer about rows that were dealt to other nodes."""
        plan = self.dataset.plan
        if plan.locality is None or all(layout.ranks == plan.world.world_size for layout in self.layouts):
            return
        raise ConfigError(
            f"locality='node' deals rows by the ranks of a job, which had {_listed(self.layouts)}, and the loader is "
            f"one of {plan.world.world_size}: a ledger knows the rows of a job that always had the loader's ranks"
        )

    def _data(self, stretch: Stretch) -> DataPositions:
        if self._own:
            self._same_nodes()
            return positions_of_dataset(self.dataset, stretch.epoch, stretch.partition(), self._changes)
        return positions_of_order(self._run(stretch.epoch).order)

    def _run(self, epoch: int) -> Any:
        """Return the sampler's epoch plan."""
        return sampler_of(self._plan).bind(Cursor(epoch=epoch), None)

    def begin(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and the position in the job's epoch at which it begins."""
        stretch = self._history.layouts.at(step)
        return stretch.epoch, stretch.position(step)

    def step_from(self, position: int, *, epoch: int) -> int:
        """Return the first step that has a position of an epoch, or one behind it: the last ones may be left out."""
        step = 0
        for stretch in self._history.layouts.in_epoch(epoch):
            number = stretch.number(max(position, stretch.position(stretch.first)))
            if position < stretch.partition().end and number < stretch.steps:
                return stretch.first + number
            step = stretch.first + stretch.steps
        return step

    # Questions.

    def rows(self, step: int, *, rank: int | None = None) -> StepRows:
        """Return the rows of a step.

        Args:
            step: of the job, from 0 on, all epochs counted.
            rank: whose batch; None for all ranks.

        Raises:
            ConfigError: a step or rank that there is not.
        """
        stretch = self._history.layouts.at(step)
        self._same_rows(stretch)
        epoch, world_size = stretch.epoch, stretch.layout.ranks
        if rank is not None and not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is outside the world of {world_size}, which step {step} had")
        if rank is None:
            where, of_rank = stretch.all_positions(step)
        else:
            where = stretch.positions(step, rank)
            of_rank = np.full(len(where), rank)
        skipped = self.skipped(step)
        if not self._own and isinstance(run := self._run(epoch), ClassBatchPlan):
            return self._of_batches(run, where, of_rank, skipped)
        found = self._data(stretch).rows(where % max(1, stretch.layout.samples))
        positions = where[found.at]
        keys = self._keys(epoch, positions)
        return StepRows(epoch, found.rows, of_rank[found.at], positions, found.sources, keys, skipped)

    def _of_batches(self, run: ClassBatchPlan, numbers: Indices, ranks: Indices, skipped: bool) -> StepRows:
        """Return the rows of batches that a sampler makes by itself."""
        batches, none = run.numbered(numbers), np.empty(0, np.int64)
        rows = np.concatenate([none, *(np.array(indices, np.int64) for indices, _ in batches)])
        positions = np.concatenate([none, *(positions for _, positions in batches)])
        sizes = [len(indices) for indices, _ in batches]
        no_source, keys = np.full(len(rows), -1), self._keys(run.epoch, positions)
        return StepRows(run.epoch, rows, np.repeat(ranks, sizes), positions, no_source, keys, skipped)

    def _keys(self, epoch: int, positions: Indices) -> list[int] | None:
        seed = self._seed if self._seed is not None else self._plan.key_seed
        return None if seed is None else sample_keys(seed, epoch, positions)

    def steps(self, row: int, *, source: int | str = -1, epoch: int | None = None) -> list[Occurrence]:
        """Return where a row of the data comes in an epoch: several times where padding or a mixture repeats it, or
        where a document is cut into several packs.

        Args:
            row: of the data, as `rows` gives them; of packs, the row of a document.
            source: its source in a mixture: the number, or the name.
            epoch: by default the present one, of the state if one was given.

        Steps that the job passes over are among them, see `skipped`.
        """
        return sorted(self._occurrences(row, source, self._epoch if epoch is None else epoch))

    def _occurrences(self, row: int, source: int | str, epoch: int) -> Iterator[Occurrence]:
        """Yield where a row comes in an epoch."""
        for stretch in self._history.layouts.in_epoch(epoch):
            self._same_rows(stretch)
            for position in self._positions(row, source, stretch):
                if (found := stretch.locate(position)) is not None:
                    step, rank = found
                    yield Occurrence(step, epoch, rank)

    def _positions(self, row: int, source: int | str, stretch: Stretch) -> Iterator[int]:
        """Yield the positions of a row, with those that repeat them."""
        if not self._own and isinstance(run := self._run(stretch.epoch), ClassBatchPlan):
            check_no_source(source)
            found = list(run.numbers_of(row))
        else:
            found = self._data(stretch).find(row, source)
        for position in found:
            yield from range(position, stretch.partition().end, max(1, stretch.layout.samples))

    def skipped(self, step: int) -> bool:
        """Return whether the job has passed over a step, or is going to: nobody has its rows in it."""
        return any(begin <= step < end for begin, end in self._history.passed_before(step + 1))

    def seen(self, row: int, *, until: int, source: int | str = -1) -> int:
        """Return how often the job has had a row before a step; in steps that were passed over, nobody had it. See
        `steps`.
        """
        last = self._history.layouts.at(until).epoch
        every = (found for epoch in range(last + 1) for found in self._occurrences(row, source, epoch))
        return sum(found.step < until and not self.skipped(found.step) for found in every)


def _listed(layouts: tuple[Layout, ...]) -> str:
    return ", then ".join(str(layout.ranks) for layout in layouts)
