"""`MixedRows`: the rows of several datasets, one dataset after the other, and their order in an epoch.

    position of an epoch          -> source, number of its samples before (`penstock.order.mixture`)
    number of its samples before  -> pass through the source, position in that pass -> row of the source

In each epoch, a source continues where it stopped in the epoch before. Each pass through a source (a *turn*) has
a different order.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from penstock.datasets.mixing import Proportions, SourceStatistics
from penstock.datasets.rows import has_rows, load_rows, row_count
from penstock.datasets.source_dataset import EpochVaryingDataset
from penstock.errors import ConfigError
from penstock.hashing import mix
from penstock.order import make_order
from penstock.order.mixture import (
    MIXTURE_ORDER,
    StagedMixture,
    WeightStage,
    WeightStages,
    counts_before,
)
from penstock.order.permutation import Indices
from penstock.random import sample_scope
from penstock.samplers.identity import fingerprint_of
from penstock.sources.batched import BatchedDataset
from penstock.stages import stage
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.plan.exclusion import ExcludedRows, ExclusionMark

__all__ = ["MixedOrder", "MixedRows", "Turn"]


class Turn(NamedTuple):
    """The rows at some positions that belong to one pass through one source.

    Attributes:
        source: number of the source.
        turn: number of the pass through the source, from 0.
        places: indices into the requested positions.
        rows: rows of the source.
    """

    source: int
    turn: int
    places: Indices
    rows: Indices


class MixedRows:
    """The rows of all sources, one source after the other, as the rows of one source.

    Args:
        datasets: the sources.
        names: names of the sources.
        proportions: the initial weights, and the length of an epoch.
        stages: all weights.
        shuffle, block: the order within each source, see `penstock.order.make_order`.
        seed: seed of all orders.
        excluded: rows of each source to replace with others; None for none. They are not part of the fingerprint.
    """

    def __init__(
        self,
        datasets: list[Any],
        names: list[str],
        proportions: Proportions,
        stages: WeightStages,
        shuffle: str,
        block: dict[str, int],
        seed: int,
        excluded: Sequence[ExcludedRows | None],
    ) -> None:
        self.datasets, self.names = datasets, names
        self.excluded = list(excluded)
        self.sizes = list(map(row_count, datasets))
        self.starts = np.cumsum([0, *self.sizes[:-1]], dtype=np.int64)
        self.proportions, self.stages = proportions, stages
        self.shuffle, self._block, self._seed = shuffle, block, seed
        for _, weights in stages:
            self.check_weights(weights)
        self.fingerprint = self._identity()

    def __len__(self) -> int:
        return self.proportions.length

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Return False: a mixture cannot grow."""
        return False

    def __repr__(self) -> str:
        return f"<{counted(len(self.datasets), 'source')}: {', '.join(map(str, self.names))}>"

    def check_weights(self, weights: Sequence[int]) -> None:
        """Check that no empty source has a weight.

        Raises:
            ConfigError: a source without samples has a weight.
        """
        for number, (weight, size) in enumerate(zip(weights, self.sizes, strict=True)):
            if weight and not size:
                raise ConfigError(f"source {number} is empty: leave it out, or give it a weight of 0")

    def records(self, rows: Indices) -> list[Any]:
        """Return the items of rows."""
        numbers = self.starts.searchsorted(rows, "right") - 1
        inside = rows - self.starts[numbers]
        return [self._load_one(number, row) for number, row in zip(numbers.tolist(), inside.tolist(), strict=True)]

    # Rows by position.

    def stages_with(self, changes: Sequence[WeightStage]) -> WeightStages:
        """Return all weights with these changes. A change replaces an earlier one at the same position."""
        return tuple(sorted({stage.begin: stage for stage in (*self.stages, *changes)}.values()))

    def order(self, epoch: int, changes: tuple[WeightStage, ...] = ()) -> MixedOrder:
        """Return the rows at the positions of an epoch."""
        return MixedOrder(self, epoch, self.stages_with(changes))

    def turns(self, mixture: StagedMixture, had: Sequence[int], positions: Indices) -> Iterator[Turn]:
        """Yield the rows at positions of an epoch, grouped by source and pass.

        Args:
            mixture: the mixture of the epoch.
            had: number of samples of each source in earlier epochs.
            positions: int64 of shape (n,).
        """
        numbers, ordinals = mixture.locate(positions)
        ends = np.bincount(numbers, minlength=len(had)).cumsum().tolist()
        by_source = np.argsort(numbers.astype(np.min_scalar_type(len(had))), kind="stable")
        for number, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
            if begin == end:
                continue
            places = by_source[begin:end]
            # The samples of earlier epochs may exceed 64 bits, so they are added as a Python int.
            before, begun = divmod(had[number], self.sizes[number])
            inside = ordinals[places] + begun
            rounds = inside // self.sizes[number]
            inside -= rounds * self.sizes[number]
            turns = [int(rounds[0])] if rounds.min() == rounds.max() else np.unique(rounds).tolist()
            for turn in turns:
                here: Any = slice(None) if len(turns) == 1 else rounds == turn
                rows = self.turn_order(number, before + turn)[inside[here]]
                excluded = self.excluded[number]
                if excluded is not None:
                    rows = excluded.replace(rows, self.seed_of(number), before + turn)
                yield Turn(number, before + turn, places[here], rows)

    def seed_of(self, number: int) -> int:
        """Return the seed of a source's orders."""
        return mix(self._seed, number)

    def turn_order(self, number: int, turn: int) -> Any:
        """Return the order of pass number ``turn`` through a source."""
        return make_order(self.shuffle, self.sizes[number], seed=self.seed_of(number), epoch=turn, **self._block)

    def mixture(self, epoch: int, stages: WeightStages) -> StagedMixture:
        """Return the source at each position of an epoch."""
        return _mixture(stages, len(self), epoch, self._seed)

    # Items.

    def load(self, turns: list[Turn], keys: Sequence[int] | None) -> list[Any]:
        """Return the items of turns, in the order of their ``places``.

        Each source loads its items in one call; a source whose rows change with each pass, in one call per pass.
        """
        items: list[Any] = [None] * sum(len(turn.places) for turn in turns)
        for number, turn, places, rows in self._grouped(turns):
            mine = None if keys is None else [keys[at] for at in places.tolist()]
            with stage(self.names[number]):
                found = self._load(number, turn, rows.tolist(), mine)
            for at, item in zip(places.tolist(), found, strict=True):
                items[at] = item
        return items

    def _grouped(self, turns: list[Turn]) -> list[Turn]:
        found: dict[tuple[int, int], list[Turn]] = {}
        for turn in turns:
            varies = isinstance(self.datasets[turn.source], EpochVaryingDataset)
            found.setdefault((turn.source, turn.turn if varies else 0), []).append(turn)
        return [
            Turn(*key, *(np.concatenate(parts) for parts in zip(*(part[2:] for part in group), strict=True)))
            if len(group) > 1
            else group[0]
            for key, group in found.items()
        ]

    def _load(self, number: int, turn: int, rows: list[int], keys: Sequence[int] | None) -> list[Any]:
        dataset = self.datasets[number]
        if isinstance(dataset, EpochVaryingDataset):
            return dataset.load_pass(turn, rows, keys)
        if has_rows(dataset):
            return load_rows(dataset, rows, keys)
        if isinstance(dataset, BatchedDataset) and dataset.load_samples is not None:  # type: ignore[attr-defined]
            return list(dataset.load_samples(rows, keys))  # type: ignore[attr-defined]
        if keys is None:
            return [self._load_one(number, row) for row in rows]
        items = []
        with sample_scope(0) as scope:
            for row, key in zip(rows, keys, strict=True):
                scope.move(key)
                items.append(self._load_one(number, row))
        return items

    def _load_one(self, number: int, row: int) -> Any:
        try:
            return self.datasets[number][row]
        except Exception as error:
            error.add_note(f"while loading sample {row} of {self.names[number]}")
            raise

    # Statistics and identity.

    def statistics(self, epoch: int, consumed: int, changes: tuple[WeightStage, ...]) -> list[SourceStatistics]:
        """Return the statistics of each source, see `Mixture.statistics`."""
        stages, length = self.stages_with(changes), len(self)
        weights = [stage.weights for stage in stages if stage.begin <= epoch * length + consumed][-1]
        mixture, before = self.mixture(epoch, stages), counts_before(stages, epoch, length)
        per_epoch, counts = mixture.counts(length), mixture.counts(consumed)
        found = []
        for number, (name, size) in enumerate(zip(self.names, self.sizes, strict=True)):
            had = before[number] + counts[number]
            share = weights[number] / sum(weights)
            found.append(SourceStatistics(name, size, share, per_epoch[number], had, had / size))
        return found

    def _identity(self) -> str:
        """Return a hash of sources and order, leaving out the sources after the last one with a weight."""
        count = max(number + 1 for stage in self.stages for number, weight in enumerate(stage.weights) if weight)
        identity = {
            "sources": self.identities()[:count],
            "order": MIXTURE_ORDER,
            "weights": self.proportions.weights[:count],
            "length": self.proportions.length,
            "shuffle": self.shuffle,
            **self._block,
        }
        if len(self.stages) > 1:
            identity["schedule"] = [[stage.begin, stage.weights[:count]] for stage in self.stages[1:]]
        return xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True).encode())

    def excluded_marks(self) -> list[ExclusionMark | None]:
        """Return number and hash of the excluded rows of each source, excluded by the mixture or the source."""
        own = (getattr(getattr(dataset, "plan", None), "excluded_mark", None) for dataset in self.datasets)
        pairs = zip(self.excluded, own, strict=True)
        return [inside if excluded is None else excluded.mark for excluded, inside in pairs]

    def identities(self) -> list[Any]:
        """Return the length and the fingerprint of each source."""
        return [[size, fingerprint_of(dataset)] for size, dataset in zip(self.sizes, self.datasets, strict=True)]


class MixedOrder:
    """The order of one epoch: ``order[positions]`` returns rows over all sources."""

    def __init__(self, rows: MixedRows, epoch: int, stages: WeightStages) -> None:
        self._rows = rows
        self.mixture = rows.mixture(epoch, stages)
        self._consumed = counts_before(stages, epoch, len(rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, positions: Any) -> Any:
        places = np.asarray(positions, dtype=np.int64)
        found = np.empty(places.size, np.int64)
        for number, _, at, rows in self.turns(places.reshape(-1)):
            found[at] = rows + self._rows.starts[number]
        return found.reshape(places.shape) if places.ndim else int(found[0])

    def turns(self, positions: Indices) -> Iterator[Turn]:
        """Yield the rows at positions, grouped by source and pass."""
        return self._rows.turns(self.mixture, self._consumed, positions)


@lru_cache(maxsize=8)
def _mixture(stages: WeightStages, length: int, epoch: int, seed: int) -> StagedMixture:
    return StagedMixture(stages, length, epoch, seed)
