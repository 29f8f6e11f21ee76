"""`data_plan`: what a run has of each source of its data, through filters, mixtures with a schedule, and packs.

    stages of weights (`penstock.order.stages`) -> samples of each source before a position of the job
    samples of a source / its length            -> how often it is gone through, and where it begins anew

Nothing is read and nothing is carried out: all of it is arithmetic on the data set that training uses. Data without a
mixture are one source.

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
from penstock.datasets.mixture import Mixture
from penstock.datasets.packed import PackedDataset
from penstock.datasets.rows import row_count
from penstock.datasets.source_dataset import SourceDataset
from penstock.errors import ConfigError
from penstock.loader.dataloader import DataLoader
from penstock.loader.ledger import Ledger
from penstock.order.mixture import BlockMixture
from penstock.order.stages import StagedMixture, WeightStage, WeightStages, boundary, counts_before

__all__ = ["DataPlan", "SourcePlan", "StagePlan", "data_plan"]

_POINTS = 120  # of the curve of shares


@dataclass(frozen=True)
class SourcePlan:
    """What a run has of one source.

    Attributes:
        name: of the source.
        rows: before filters; of packs, documents.
        kept: rows that filters keep.
        excluded: of these, rows that nobody gets, by ``exclude=``, and in whose places others stand.
        samples: in the source: the kept rows, or the packs of them.
        had: samples that the run has of it; those at the end of an epoch that ``drop_last`` or ``remainder="drop"``
            leaves out are counted, and those that padding repeats are not.
        by_stage: the same by stage of the weights.
        passes: how often the run goes through the source: ``had / samples``.
        never: samples that the run never has, but for those that are excluded: their places are had.
        again: the position of the job at which a sample comes for the second time; None if none does.
        again_step: that has this position; None also if it is left out at the end of the last epoch.
        tokens: of documents that the run has, on average over packs; None without packs.
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
    """Weights that hold for a part of the run.

    Attributes:
        begin, end: positions of the job.
        step: that has the first position. It has some of the stage before, too, where the change is inside of it.
            None if all of the stage is left out at the end of the last epoch.
        bound: where the same weights would begin by ``set_weights(at=begin)``: at the end of a block, so that what
            comes before stays as it is. A schedule changes them at ``begin`` itself.
        shares: of each source, by its weight.
    """

    begin: int
    end: int
    step: int | None
    bound: int
    shares: tuple[float, ...]


@dataclass(frozen=True)
class DataPlan:
    """A run, source by source.

    Attributes:
        unit: what a sample is: "sample" or "pack".
        samples: in an epoch, of all ranks together.
        epochs, ranks, batch_size: of the run.
        steps_per_epoch: batches of the rank that has most.
        sources, stages: see their classes.
        block_size: positions of the largest block of the mixture, by whose ends changes of weights are rounded.
        bound: no beginning of an epoch is off by so many samples of a source.
        steps, curve: share of each source from one of these steps to the next one, as they are dealt.
        state_bytes: of a state of the data set, as JSON.
        filter_bytes: of all filters: mapped, once a machine.
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
    """Plan what a run has of each source of its data.

    Args:
        loader: over a data set with an order of its own: `penstock.RankDataset`, `TableDataset`, `Mixture`,
            `PackedDataset`, and filters of these.
        epochs: of the run, from the first one.
        ranks: of the job; by default those that the loader has.

    Raises:
        ConfigError: data without an order of their own, or numbers that are not positive.

    Changes of weights that were made by ``set_weights``, or that a loaded state holds, are a part of the plan. Cost:
    some milliseconds for each stage, whatever the number of samples; O(1) memory.
    """
    for name, value in (("epochs", epochs), ("ranks", ranks)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be positive, got {value}")
    ledger = Ledger(loader, world_size=ranks)
    dataset = with_an_order(ledger.dataset)
    if dataset is None:
        raise ConfigError(
            f"a {type(ledger.dataset).__name__} has no order of its own, so it is one source that each epoch goes "
            "through once. A plan is for a Mixture, packs, a RankDataset, a TableDataset, ..., and filters of these"
        )
    if not dataset.plan.samples or not ledger.steps_per_epoch:
        raise ConfigError("an epoch of these data has no step, so there is nothing to plan")
    return _Run(dataset, ledger, epochs).plan()


class _Run:
    """The stages and sources of some epochs."""

    def __init__(self, dataset: SourceDataset, ledger: Ledger, epochs: int) -> None:
        self._dataset, self._ledger, self._epochs = dataset, ledger, epochs
        self._length: int = dataset.plan.samples
        if isinstance(dataset, Mixture):
            rows = dataset.plan.source
            self._stages: WeightStages = rows.stages_with(dataset.plan.changes)
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
            block_size=max(_block_size(stage) for stage in self._stages),
            bound=max(self._mixture(epoch).bound for epoch in {begin // self._length for begin, _ in self._bounds}),
            steps=steps,
            curve=tuple(map(self._shares, itertools.pairwise((*steps, self._last)))),
            state_bytes=len(json.dumps(self._dataset.state_dict())),
            filter_bytes=sum(kept.nbytes for part in self._parts for kept in filters_in(part)),
        )

    def _mixture(self, epoch: int) -> StagedMixture:
        if isinstance(self._dataset, Mixture):
            return self._dataset.plan.source.mixture(epoch, self._stages)  # type: ignore[no-any-return]
        return StagedMixture(self._stages, self._length, epoch)

    def _before(self, position: int) -> tuple[int, ...]:
        """Return the samples of each source before a position of the job."""
        epoch, place = divmod(position, self._length)
        before = counts_before(self._stages, epoch, self._length)
        inside = self._mixture(epoch).counts(place) if place else (0,) * len(before)
        return tuple(a + b for a, b in zip(before, inside, strict=True))

    @cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        """Where the stages of the run begin and end."""
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
        """Return the position of the job at which a source begins anew: of its sample behind the first pass."""
        low, high, size = 0, self._epochs, self._sizes[number]
        # Of the epochs, the last one that begins before that.
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
        """How many steps the run has."""
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
            # Padding alone, which repeats the beginning of its epoch.
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


def _block_size(stage: WeightStage) -> int:
    return BlockMixture([weight for weight in stage.weights if weight]).block_size
