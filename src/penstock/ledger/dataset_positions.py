"""Positions and rows of the datasets with their own order, see `penstock.ledger.positions`.

A module of its own because a ledger of a sampler needs neither our datasets nor the packages that these import.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np

from penstock.datasets.mixed_rows import MixedOrder, MixedRows
from penstock.datasets.mixture import Mixture
from penstock.datasets.packed import PackedDataset
from penstock.datasets.packs import PackPlan
from penstock.datasets.source_dataset import EpochVaryingDataset, SourceDataset
from penstock.errors import ConfigError
from penstock.ledger.positions import Positions, RowsAt
from penstock.order import Partition
from penstock.order.mixture import WeightStage, counts_before
from penstock.order.permutation import Indices
from penstock.plan.share import MiniEpoch
from penstock.wording import kind_text

__all__ = ["positions_of_dataset"]


def positions_of_dataset(
    dataset: SourceDataset, epoch: int, partition: Partition, changes: tuple[WeightStage, ...]
) -> Positions:
    """Return the positions of a dataset with its own order.

    Args:
        dataset: the dataset of any rank.
        epoch: the epoch.
        partition: the partition of a mini-epoch; packs that are distributed by cost depend on it.
        changes: changes of a mixture's weights.
    """
    if isinstance(dataset, Mixture):
        return _Mixed(dataset, epoch, changes)
    if isinstance(dataset, PackedDataset):
        return _Packed(dataset, epoch, partition)
    return Positions(dataset.plan.rows_in(MiniEpoch(epoch, 0, dataset.plan.samples)), partition.n)


class _Packed(Positions):
    """Packs of documents."""

    def __init__(self, dataset: PackedDataset, epoch: int, partition: Partition) -> None:
        self._dataset, self._epoch = dataset, epoch
        plan = cast(PackPlan, dataset.plan)
        super().__init__(plan.dealt(plan.rows_in(MiniEpoch(epoch, 0, plan.samples)), partition), plan.samples)

    def rows(self, positions: Indices) -> RowsAt:
        found = self._dataset.documents(self._order[positions % max(1, self._samples)], self._epoch)
        at = np.repeat(np.arange(len(positions)), np.diff(found.splits))
        return RowsAt(found.rows, at, positions[at], np.full(len(at), -1))

    def _find(self, row: int) -> list[int]:
        if not 0 <= row < len(self._dataset.lengths):
            return []
        return [int(self._order.inverse[int(pack)]) for pack in self._dataset.packs_of(row, self._epoch)]


class _Mixed(Positions):
    """A mixture of rows or of packs."""

    def __init__(self, dataset: Mixture, epoch: int, changes: tuple[WeightStage, ...]) -> None:
        self._rows: MixedRows = dataset.plan.source
        stages = self._rows.stages_with(changes)
        super().__init__(MixedOrder(self._rows, epoch, stages), len(self._rows))
        self._had = counts_before(stages, epoch, len(self._rows))

    def rows(self, positions: Indices) -> RowsAt:
        none = np.empty(0, np.int64)
        parts = [(none, none, none)]
        for turn in self._order.turns(positions % max(1, self._samples)):
            dataset, rows, at = self._rows.datasets[turn.source], turn.rows, turn.places
            if isinstance(dataset, PackedDataset):
                found = dataset.documents(rows, turn.turn)
                rows, at = found.rows, np.repeat(at, np.diff(found.splits))
            parts.append((rows, at, np.full(len(rows), turn.source)))
        rows, at, sources = (np.concatenate(part) for part in zip(*parts, strict=True))
        if len(at) == len(positions):  # one row each: no sort is needed
            in_order = np.empty_like(at)
            in_order[at] = np.arange(len(at))
            return RowsAt(rows[in_order], np.arange(len(at)), positions, sources[in_order])
        in_order = np.argsort(at, kind="stable")
        at = at[in_order]
        return RowsAt(rows[in_order], at, positions[at], sources[in_order])

    def find(self, row: int, source: int | str) -> list[int]:
        source = self._number(source)
        dataset, size = self._rows.datasets[source], self._rows.sizes[source]
        had, mixture = self._had[source], self._order.mixture
        epoch_has = mixture.counts(len(self._rows))[source]
        found = []
        for turn in range(had // size, (had + epoch_has - 1) // size + 1):
            for own in self._own(dataset, row, source, turn):
                ordinal = turn * size + int(self._rows.turn_order(source, turn).inverse[own]) - had
                if 0 <= ordinal < epoch_has:
                    found.append(mixture.position(source, ordinal))
        return found

    def _number(self, source: int | str) -> int:
        """Return the number of a source given by number or name."""
        names = self._rows.names
        if isinstance(source, str) and source in names:
            return names.index(source)
        if isinstance(source, str) or not 0 <= source < len(names):
            raise ConfigError(
                f"a row of a mixture belongs to a source: pass source= as 0 to {len(names) - 1} or one of "
                f"{', '.join(map(str, names))}, got {source!r}"
            )
        return source

    def _own(self, dataset: Any, row: int, source: int, turn: int) -> Iterable[int]:
        """Return the source's samples that contain a row of the data."""
        if isinstance(dataset, PackedDataset):
            return dataset.packs_of(row, turn).tolist() if 0 <= row < len(dataset.lengths) else []
        if isinstance(dataset, EpochVaryingDataset):
            raise ConfigError(
                f"a ledger does not know the rows of {kind_text(dataset)}: use a source with its own order"
            )
        if not 0 <= row < self._rows.sizes[source]:
            return []
        excluded = self._rows.excluded[source]
        return [row] if excluded is None else excluded.places_of(row, self._rows.seed_of(source), turn)
