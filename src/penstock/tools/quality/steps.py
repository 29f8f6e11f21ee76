"""`measure_steps`: how well the steps of a loader are mixed, with filters, mixtures and packs.

`penstock.Ledger` computes the rows of some steps. They are compared with random rows among those that filters keep. So
every order that a ledger supports can be measured: datasets with their own order, samplers, and filters over them.

>>> from penstock import DataLoader, Mixture
>>> mixture = Mixture([(range(9000), 3), (range(5000), 1)], stop=8000, names=["web", "books"], rank=0, world_size=1)
>>> found = measure_steps(DataLoader(mixture, batch_size=32), ranks=4)
>>> [(source.name, round(source.distance, 1)) for source in found.sources], found.shares.worst < 4
([('web', 0.3), ('books', 0.3)], True)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from penstock.datasets.file_rows import documents_in, file_row_count, file_rows, kept_places, with_an_order
from penstock.datasets.mixed_rows import MixedOrder
from penstock.datasets.mixture import Mixture
from penstock.datasets.packed import PackedDataset
from penstock.datasets.rows import row_count
from penstock.datasets.source_dataset import SourceDataset
from penstock.errors import ConfigError
from penstock.ledger.ledger import Ledger, StepRows
from penstock.loader.dataloader import DataLoader
from penstock.order.mixture import StagedMixture
from penstock.order.permutation import Indices
from penstock.tools.quality.packs import PackSpread, pack_spread
from penstock.tools.quality.shares import ShareQuality, measure_shares

__all__ = ["SourceSpread", "StepQuality", "measure_steps"]

_MOST = 1 << 21  # largest number of measured positions, but at least four steps
_PAIRS = 1 << 15  # number of random pairs of rows


@dataclass(frozen=True)
class SourceSpread:
    """How steps mix the rows of one source. For packs, rows are documents.

    Attributes:
        name: name of the source.
        rows: rows before filters.
        kept: rows that filters keep.
        looked_at: rows in the measured steps.
        distance: mean distance in the file from a row to the next one of the step, as a share of the file.
        distance_random: the same for random kept rows: 1/3 without a filter.
        correlation: correlation between position in the epoch and row number: 0 if they are independent.
        correlation_random: standard deviation of the correlation for random rows.
        neighbours: share of a step's rows whose next kept row in the file is in the same step.
        neighbours_random: the same for random rows.
        packs: spread of document lengths over batches; None without packs.
    """

    name: str
    rows: int
    kept: int
    looked_at: int
    distance: float
    distance_random: float
    correlation: float
    correlation_random: float
    neighbours: float
    neighbours_random: float
    packs: PackSpread | None


@dataclass(frozen=True)
class StepQuality:
    """How well the steps of a job are mixed.

    Attributes:
        ranks, batch_size: of the measured job.
        epochs: number of measured epochs, starting with the first.
        steps: number of measured steps in all epochs.
        sources: the sources of a mixture, or the dataset as the only source.
        shares: the largest deviation of a rank's share of a source from its weight; None without a mixture.
    """

    ranks: int
    batch_size: int
    epochs: int
    steps: int
    sources: tuple[SourceSpread, ...]
    shares: ShareQuality | None


def measure_steps(
    loader: DataLoader[Any],
    *,
    epochs: int = 2,
    ranks: int | None = None,
    steps: int = 256,
    window: int = 10_000,
) -> StepQuality:
    """Measure how well the steps of a loader's job are mixed.

    Args:
        loader: a loader with an order that `penstock.Ledger` can compute.
        epochs: number of epochs, starting with the first.
        ranks: number of ranks of the job; by default the loader's.
        steps: steps to measure in each epoch, spread evenly; fewer are measured if steps have many samples.
        window: positions of a rank for counting shares of sources.

    Raises:
        ConfigError: an order that cannot be computed, a number that is not positive, or an epoch without steps.

    Cost: the arithmetic of each measured batch, for at most two million positions or four steps; a few seconds.
    """
    for name, value in (("epochs", epochs), ("steps", steps), ("window", window), ("ranks", ranks)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be positive, got {value}")
    ledger = Ledger(loader, world_size=ranks)
    if not ledger.steps_per_epoch:
        raise ConfigError("an epoch of this data has no step, so there is nothing to measure")
    own = with_an_order(ledger.dataset)
    sources = _sources(ledger.dataset if own is None else own)
    size = ledger.world_size * ledger.batch_size
    count = min(steps, ledger.steps_per_epoch, max(4, _MOST // (epochs * size)))
    for epoch in range(epochs):
        for k in range(count):
            step = epoch * ledger.steps_per_epoch + k * ledger.steps_per_epoch // count
            found = ledger.rows(step)
            for number, source in enumerate(sources):
                source.look(found, found.sources == (number if len(sources) > 1 else found.sources))
    mixed = own if isinstance(own, Mixture) else None
    return StepQuality(
        ranks=ledger.world_size,
        batch_size=ledger.batch_size,
        epochs=epochs,
        steps=epochs * count,
        sources=tuple(source.spread(ledger.world_size) for source in sources),
        shares=None if mixed is None else _worst(mixed, epochs, ledger.world_size, window),
    )


def _sources(dataset: Any) -> list[_Source]:
    if isinstance(dataset, Mixture):
        names = dataset.plan.source.names
        return [_Source(str(name), part, False) for name, part in zip(names, dataset.sources, strict=True)]
    ordered = isinstance(dataset, SourceDataset) and not isinstance(dataset, PackedDataset)
    return [_Source(type(dataset).__name__, dataset, ordered)]


def _worst(mixture: Mixture, epochs: int, ranks: int, window: int) -> ShareQuality | None:
    """Return the largest deviation of a rank's share in all epochs."""
    rows, length = mixture.plan.source, mixture.plan.samples
    stages = rows.stages_with(mixture.plan.shown.changes)
    weights = np.array([stage.weights for stage in stages], np.float64)
    weights /= weights.sum(axis=1, keepdims=True)
    found = []
    for epoch in range(epochs if length >= ranks else 0):
        epoch_order = _EpochSources(
            MixedOrder(rows, epoch, stages).mixture, [stage.begin - epoch * length for stage in stages]
        )
        found.append(
            measure_shares(epoch_order.sources, weights, length, stages=epoch_order.stages, ranks=ranks, window=window)
        )
    return max((one for one in found if one is not None), key=lambda one: one.worst, default=None)


class _EpochSources(NamedTuple):
    """The sources of an epoch, and the first positions of its stages, counted from the epoch's start."""

    order: StagedMixture
    begins: list[int]

    def sources(self, positions: Indices) -> Indices:
        return self.order.locate(positions)[0]

    def stages(self, positions: Indices) -> Indices:
        found: Indices = np.searchsorted(self.begins, positions, "right") - 1
        return found


class _Step(NamedTuple):
    """The rows of a source in one step."""

    places: Indices
    positions: Indices
    ranks: Indices


@dataclass
class _Source:
    """Collects the rows of one source, step by step.

    Attributes:
        part: the dataset.
        ordered: whether rows are numbered before filters, as in a dataset with its own order.
    """

    name: str
    part: Any
    ordered: bool
    steps: list[_Step] = field(default_factory=list)

    def look(self, found: StepRows, mine: Any) -> None:
        """Add the rows of a step that belong to this source."""
        rows = found.rows[mine]
        places = kept_places(self.part, rows) if self.ordered else rows
        self.steps.append(_Step(places, found.positions[mine], found.ranks[mine]))

    def in_file(self, places: Indices) -> Indices:
        """Return row numbers before filters."""
        documents = documents_in(self.part)
        return np.asarray(self.part.plan.kept(places) if self.ordered else file_rows(documents, places))

    @property
    def kept(self) -> int:
        """Number of rows that filters keep."""
        return self.part.plan.samples if self.ordered else row_count(documents_in(self.part))

    def spread(self, ranks: int) -> SourceSpread:
        """Return the measurements of this source."""
        rows, kept = max(1, file_row_count(self.part)), self.kept
        seen = [step for step in self.steps if len(step.places)]
        files = [self.in_file(step.places) / rows for step in seen]
        gaps = np.concatenate([np.empty(0), *(np.abs(np.diff(file)) for file in files)])
        chance = np.random.default_rng(1).integers(0, max(1, kept), (2, _PAIRS if kept else 0))
        first, second = (self.in_file(places) / rows for places in chance)
        looked_at = sum(map(len, files))
        distinct = [np.unique(step.places) for step in seen]
        together = sum(int((np.diff(places) == 1).sum()) for places in distinct)
        by_chance = sum(len(places) * (len(places) - 1) for places in distinct) / max(1, kept)
        different = max(1, sum(map(len, distinct)))
        return SourceSpread(
            name=self.name,
            rows=file_row_count(self.part),
            kept=kept,
            looked_at=looked_at,
            distance=float(gaps.mean()) if len(gaps) else 0.0,
            distance_random=float(np.abs(first - second).mean()) if kept else 0.0,
            correlation=_correlation([step.positions for step in seen], files),
            correlation_random=1 / max(1, looked_at) ** 0.5,
            neighbours=together / different,
            neighbours_random=by_chance / different,
            packs=self._packs(ranks) if isinstance(self.part, PackedDataset) else None,
        )

    def _packs(self, ranks: int) -> PackSpread | None:
        batches = np.concatenate([k * ranks + step.ranks for k, step in enumerate(self.steps)])
        pieces = self.part.lengths[np.concatenate([step.places for step in self.steps])]
        # A pack that occurs twice in a batch counts once.
        packs = np.zeros(len(self.steps) * ranks, np.int64)
        for k, step in enumerate(self.steps):
            both = np.unique(np.stack([step.ranks, step.positions]), axis=1)[0]
            packs += np.bincount(k * ranks + both, minlength=len(packs))
        return pack_spread(self.part.lengths, self.part.capacity, batches, pieces, packs)


def _correlation(positions: list[Indices], files: list[Any]) -> float:
    if not files:
        return 0.0
    at, row = np.concatenate(positions).astype(np.float64), np.concatenate(files)
    at, row = at - at.mean(), row - row.mean()
    scale = float(np.sqrt((at * at).sum() * (row * row).sum()))
    return float((at * row).sum()) / scale if scale else 0.0
