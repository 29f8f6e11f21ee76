"""`data_plan`: a run's use of each source of its data, with filters, mixtures with a schedule, and packs.

    stages of weights (`penstock.order.mixture`) -> samples of each source before a position of the job
    samples of a source / its length            -> its epochs, and the position of its first repeat

No data is read and no batch is built: the plan is arithmetic on the dataset that training uses. Data without a mixture
is one source.

>>> from penstock import DataLoader, Mixture
>>> mixture = Mixture([(range(900), 3), (range(500), 1)], stop=800, names=["web", "books"], rank=0, world_size=1)
>>> web, books = data_plan(DataLoader(mixture, batch_size=10), epochs=2).sources
>>> web.had, web.again, books.had, books.never
(1200, 1200, 400, 100)
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.datasets.file_rows import documents_in, file_row_count, filters_in, with_an_order
from penstock.datasets.mixed_rows import MixedOrder
from penstock.datasets.mixture import Mixture
from penstock.datasets.packed import PackedDataset
from penstock.datasets.rows import row_count
from penstock.datasets.source_dataset import SourceDataset
from penstock.errors import ConfigError
from penstock.ledger.ledger import Ledger
from penstock.loader.dataloader import DataLoader
from penstock.order.mixture import (
    BlockMixture,
    StagedMixture,
    WeightStage,
    WeightStages,
    boundary,
    counts_before,
)
from penstock.wording import kind_text

__all__ = ["DataPlan", "SourcePlan", "StagePlan", "data_plan"]

_POINTS = 120  # points of the curve of shares


@dataclass(frozen=True)
class SourcePlan:
    """A run's use of one source.

    Attributes:
        name: name of the source.
        rows: rows before filters; for packs, documents.
        kept: rows that filters keep.
        excluded: kept rows that ``exclude=`` replaces by other rows.
        samples: samples of the source: the kept rows, or their packs.
        had: samples of the source in the run. Samples that ``drop_last`` or ``remainder="drop"`` leaves out at the end
            of an epoch count; repeats by padding do not.
        by_stage: the same number by stage of the weights.
        passes: epochs of the source in the run: ``had / samples``.
        never: samples that do not occur in the run. Excluded samples do not count here.
        again: the position of the job at which a sample first repeats; None if none repeats.
        again_step: the step with this position; None also if it is left out at the end of the last epoch.
        tokens: tokens of its documents in the run, from the mean of packs; None without packs.
    """

    name: str
    rows: int
    kept: int
    excluded: int
    samples: int
    had: int
    by_stage: tuple[int, ...]
    passes: float
    never: int
    again: int | None
    again_step: int | None
    tokens: int | None


@dataclass(frozen=True)
class StagePlan:
    """A section of the run with constant weights.

    Attributes:
        begin, end: positions of the job.
        step: the step with the first position. If the change is inside the step, it has samples of the stage before,
            too. None if the whole stage is left out at the end of the last epoch.
        bound: the position at which ``set_weights(at=begin)`` would set the same weights: the end of a block, so that
            earlier samples stay the same. A schedule changes them at ``begin`` itself.
        shares: share of each source by its weight.
    """

    begin: int
    end: int
    step: int | None
    bound: int
    shares: tuple[float, ...]


@dataclass(frozen=True)
class DataPlan:
    """The plan of a run, source by source.

    Attributes:
        unit: the kind of a sample: "sample" or "pack".
        samples: samples of an epoch over all ranks.
        epochs, ranks, batch_size: of the planned run.
        steps_per_epoch: number of batches of the rank with the most batches.
        sources, stages: see their classes.
        block_size: positions of the largest block of the mixture; ``set_weights`` rounds to ends of blocks.
        bound: upper limit of a source's deviation in samples from its weight, at any point of an epoch.
        steps, curve: steps, and the actual share of each source from each of them to the next.
        state_bytes: size of the dataset's state as JSON.
        filter_bytes: size of all filters, mapped once per machine.
    """

    unit: str
    samples: int
    epochs: int
    ranks: int
    batch_size: int
    steps_per_epoch: int
    sources: tuple[SourcePlan, ...]
    stages: tuple[StagePlan, ...]
    block_size: int
    bound: int
    steps: tuple[int, ...]
    curve: tuple[tuple[float, ...], ...]
    state_bytes: int
    filter_bytes: int


def data_plan(loader: DataLoader[Any], *, epochs: int = 3, ranks: int | None = None) -> DataPlan:
    """Plan a run's use of each source of its data.

    Args:
        loader: over a dataset with its own order: `penstock.RankDataset`, `TableDataset`, `Mixture`, `PackedDataset`,
            and filters of these.
        epochs: number of epochs to plan, starting with the first.
        ranks: number of ranks of the job; by default the loader's.

    Raises:
        ConfigError: data without its own order, or numbers that are not positive.

    The plan includes changes of weights by ``set_weights`` or from a loaded state. Cost: some milliseconds for each
    stage, for any number of samples; O(1) memory.
    """
    for name, value in (("epochs", epochs), ("ranks", ranks)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be positive, got {value}")
    ledger = Ledger(loader, world_size=ranks)
    dataset = with_an_order(ledger.dataset)
    if dataset is None:
        raise ConfigError(
            f"{kind_text(ledger.dataset)} has no order of its own, so each epoch uses every sample once, and "
            "there is nothing to plan: use a Mixture, packs, a RankDataset, a TableDataset, ..., or filters of these"
        )
    if not dataset.plan.samples or not ledger.steps_per_epoch:
        raise ConfigError("an epoch of this data has no step, so there is nothing to plan")
    return _Run(dataset, ledger, epochs).plan()


class _Run:
    """Computes the stages and sources of a run."""

    def __init__(self, dataset: SourceDataset, ledger: Ledger, epochs: int) -> None:
        self._dataset, self._ledger, self._epochs = dataset, ledger, epochs
        self._length: int = dataset.plan.samples
        if isinstance(dataset, Mixture):
            rows = dataset.plan.source
            self._stages: WeightStages = rows.stages_with(dataset.plan.shown.changes)
            self._names, self._sizes, self._parts = rows.names, rows.sizes, dataset.sources
            marks = rows.excluded_marks()
        else:
            self._stages = (WeightStage(0, (1,)),)
            self._names, self._sizes, self._parts = [type(dataset).__name__], [self._length], [dataset]
            marks = [dataset.plan.excluded_mark]
        self._excluded = [0 if mark is None else mark[0] for mark in marks]

    def plan(self) -> DataPlan:
        ledger, steps = self._ledger, self._steps
        return DataPlan(
            unit="pack" if any(isinstance(part, PackedDataset) for part in self._parts) else "sample",
            samples=self._length,
            epochs=self._epochs,
            ranks=ledger.world_size,
            batch_size=ledger.batch_size,
            steps_per_epoch=ledger.steps_per_epoch,
            sources=tuple(map(self._source, range(len(self._sizes)))),
            stages=tuple(map(self._stage, self._bounds)),
            block_size=max(BlockMixture(stage.weights).block_size for stage in self._stages),
            bound=max(self._mixture(epoch).bound for epoch in {begin // self._length for begin, _ in self._bounds}),
            steps=steps,
            curve=tuple(map(self._shares, itertools.pairwise((*steps, self._last)))),
            state_bytes=len(json.dumps(self._dataset.state_dict())),
            filter_bytes=sum(kept.nbytes for part in self._parts for kept in filters_in(part)),
        )

    def _mixture(self, epoch: int) -> StagedMixture:
        if isinstance(self._dataset, Mixture):
            return MixedOrder(self._dataset.plan.source, epoch, self._stages).mixture
        return StagedMixture(self._stages, self._length, epoch)

    def _before(self, position: int) -> tuple[int, ...]:
        """Return the samples of each source before a position of the job."""
        epoch, place = divmod(position, self._length)
        before = counts_before(self._stages, epoch, self._length)
        inside = self._mixture(epoch).counts(place) if place else (0,) * len(before)
        return tuple(a + b for a, b in zip(before, inside, strict=True))

    @cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        """First and end position of each stage of the run."""
        last = self._epochs * self._length
        begins = [stage.begin for stage in self._stages if stage.begin < last]
        return list(itertools.pairwise([*begins, last]))

    # Sources.

    def _source(self, number: int) -> SourcePlan:
        part, size = self._parts[number], self._sizes[number]
        by_stage = tuple(self._before(end)[number] - self._before(begin)[number] for begin, end in self._bounds)
        had = sum(by_stage)
        again = self._again(number) if had > size else None
        documents, tokens = documents_in(part), None
        if isinstance(part, PackedDataset):
            tokens = round(had * part.capacity * part.fill)
        return SourcePlan(
            name=str(self._names[number]),
            rows=file_row_count(part),
            kept=row_count(documents),
            excluded=self._excluded[number],
            samples=size,
            had=had,
            by_stage=by_stage,
            passes=had / size if size else 0.0,
            never=max(0, size - had),
            again=again,
            again_step=None if again is None else self._step(again),
            tokens=tokens,
        )

    def _again(self, number: int) -> int:
        """Return the position of the job at which a source first repeats."""
        low, high, size = 0, self._epochs, self._sizes[number]
        # Bisect for the last epoch that begins before it.
        while high - low > 1:
            middle = (low + high) // 2
            if counts_before(self._stages, middle, self._length)[number] <= size:
                low = middle
            else:
                high = middle
        had = counts_before(self._stages, low, self._length)[number]
        return low * self._length + self._mixture(low).position(number, size - had)

    # Steps.

    @property
    def _last(self) -> int:
        """Number of steps of the run."""
        return self._epochs * self._ledger.steps_per_epoch

    def _step(self, position: int) -> int | None:
        epoch, place = divmod(position, self._length)
        step = self._ledger.step_from(place, epoch=epoch)
        return step if step < self._last else None

    def _stage(self, bounds: tuple[int, int]) -> StagePlan:
        begin, end = bounds
        weights = next(stage.weights for stage in self._stages if stage.begin == begin)
        earlier = tuple(stage for stage in self._stages if stage.begin < begin)
        return StagePlan(
            begin=begin,
            end=end,
            step=self._step(begin),
            bound=boundary(earlier, self._length, begin) if earlier else begin,
            shares=tuple(weight / sum(weights) for weight in weights),
        )

    @cached_property
    def _steps(self) -> tuple[int, ...]:
        begins = (self._step(begin) for begin, _ in self._bounds)
        points = {k * self._last // _POINTS for k in range(_POINTS)} | {step for step in begins if step is not None}
        return tuple(sorted(points))

    def _shares(self, steps: tuple[int, int]) -> tuple[float, ...]:
        """Return the share of each source between two steps."""
        first, last = map(self._position, steps)
        if first == last:
            # These steps have only padding, which repeats the start of the epoch.
            epoch, place = self._ledger.begin(steps[0])
            first = epoch * self._length + place % self._length
            last = min(first + self._ledger.world_size * self._ledger.batch_size, (epoch + 1) * self._length)
        begin, end = self._before(first), self._before(last)
        counts = [b - a for a, b in zip(begin, end, strict=True)]
        return tuple(count / max(1, sum(counts)) for count in counts)

    def _position(self, step: int) -> int:
        if step == self._last:
            return self._epochs * self._length
        epoch, place = self._ledger.begin(step)
        return epoch * self._length + min(place, self._length)
