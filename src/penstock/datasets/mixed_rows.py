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
from penstock.datasets.rows import load_rows, row_count
from penstock.datasets.source_dataset import EpochVaryingDataset
from penstock.errors import ConfigError
from penstock.hashing import mix
from penstock.manifest.indices import by_part
from penstock.order import make_order
from penstock.order.mixture import (
    MIXTURE_ORDER,
    StagedMixture,
    WeightStage,
    WeightStages,
    counts_before,
)
from penstock.order.permutation import Indices
from penstock.samplers.identity import fingerprint_of
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
        self.shuffle, self._block, self.seed = shuffle, block, seed
        for _, weights in stages:
            self.check_weights(weights)
        # Sources after the last one with a weight are left out.
        count = max(number + 1 for _, weights in stages for number, weight in enumerate(weights) if weight)
        identity = {
            "sources": self.identities()[:count],
            "order": MIXTURE_ORDER,
            "weights": proportions.weights[:count],
            "length": proportions.length,
            "shuffle": shuffle,
            **block,
        }
        if len(stages) > 1:
            identity["schedule"] = [[stage.begin, stage.weights[:count]] for stage in stages[1:]]
        self.fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True).encode())

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
        return self.load([Turn(number, 0, *found) for number, *found in by_part(self.starts, rows)], None)

    # Rows by position.

    def stages_with(self, changes: Sequence[WeightStage]) -> WeightStages:
        """Return all weights with these changes. A change replaces an earlier one at the same position."""
        return tuple(sorted({stage.begin: stage for stage in (*self.stages, *changes)}.values()))

    def order(self, epoch: int, changes: tuple[WeightStage, ...] = ()) -> MixedOrder:
        """Return the rows at the positions of an epoch."""
        return MixedOrder(self, epoch, self.stages_with(changes))

    def seed_of(self, number: int) -> int:
        """Return the seed of a source's orders."""
        return mix(self.seed, number)

    def turn_order(self, number: int, turn: int) -> Any:
        """Return the order of pass number ``turn`` through a source."""
        return make_order(self.shuffle, self.sizes[number], seed=self.seed_of(number), epoch=turn, **self._block)

    # Items.

    def load(self, turns: list[Turn], keys: Sequence[int] | None) -> list[Any]:
        """Return the items of turns, in the order of their ``places``.

        Each source loads its items in one call; a source whose rows change with each pass, in one call per pass.
        """
        items: list[Any] = [None] * sum(len(turn.places) for turn in turns)
        calls: dict[tuple[int, int], list[Turn]] = {}
        for turn in turns:
            varies = isinstance(self.datasets[turn.source], EpochVaryingDataset)
            calls.setdefault((turn.source, turn.turn if varies else 0), []).append(turn)
        for (number, turn_number), parts in calls.items():
            places = np.concatenate([part.places for part in parts]).tolist()
            rows = np.concatenate([part.rows for part in parts]).tolist()
            mine = None if keys is None else [keys[at] for at in places]
            dataset, name = self.datasets[number], self.names[number]
            with stage(name):
                if isinstance(dataset, EpochVaryingDataset):
                    found = dataset.load_pass(turn_number, rows, mine)
                else:
                    found = load_rows(dataset, rows, mine, name=name)
            for at, item in zip(places, found, strict=True):
                items[at] = item
        return items

    # Statistics and identity.

    def statistics(self, epoch: int, consumed: int, changes: tuple[WeightStage, ...]) -> list[SourceStatistics]:
        """Return the statistics of each source, see `Mixture.statistics`."""
        stages, length = self.stages_with(changes), len(self)
        weights = [stage.weights for stage in stages if stage.begin <= epoch * length + consumed][-1]
        order = MixedOrder(self, epoch, stages)
        per_epoch, counts = order.mixture.counts(length), order.mixture.counts(consumed)
        found = []
        for number, (name, size) in enumerate(zip(self.names, self.sizes, strict=True)):
            had = order.before[number] + counts[number]
            share = weights[number] / sum(weights)
            found.append(SourceStatistics(name, size, share, per_epoch[number], had, had / size))
        return found

    def excluded_marks(self) -> list[ExclusionMark | None]:
        """Return number and hash of the excluded rows of each source, excluded by the mixture or the source."""
        own = (getattr(getattr(dataset, "plan", None), "excluded_mark", None) for dataset in self.datasets)
        pairs = zip(self.excluded, own, strict=True)
        return [inside if excluded is None else excluded.mark for excluded, inside in pairs]

    def identities(self) -> list[Any]:
        """Return the length and the fingerprint of each source."""
        return [[size, fingerprint_of(dataset)] for size, dataset in zip(self.sizes, self.datasets, strict=True)]


class MixedOrder:
    """The order of one epoch: ``order[positions]`` returns rows over all sources.

    Attributes:
        mixture: the source at each position.
        before: number of samples of each source in earlier epochs.
    """

    def __init__(self, rows: MixedRows, epoch: int, stages: WeightStages) -> None:
        self._rows = rows
        self.mixture = _mixture(stages, len(rows), epoch, rows.seed)
        self.before = counts_before(stages, epoch, len(rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, positions: Any) -> Any:
        places = np.asarray(positions, dtype=np.int64)
        found = np.empty(places.size, np.int64)
        for number, _, at, rows in self.turns(places.reshape(-1)):
            found[at] = rows + self._rows.starts[number]
        return found.reshape(places.shape) if places.ndim else int(found[0])

    def turns(self, positions: Indices) -> Iterator[Turn]:
        """Yield the rows at positions, int64 of shape (n,), grouped by source and pass."""
        mixed = self._rows
        numbers, ordinals = self.mixture.locate(positions)
        ends = np.bincount(numbers, minlength=len(mixed.sizes)).cumsum().tolist()
        by_source = np.argsort(numbers.astype(np.min_scalar_type(len(mixed.sizes))), kind="stable")
        for number, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
            if begin == end:
                continue
            places, size = by_source[begin:end], mixed.sizes[number]
            # The samples of earlier epochs may exceed 64 bits, so they are added as a Python int.
            before, begun = divmod(self.before[number], size)
            inside = ordinals[places] + begun
            rounds = inside // size
            inside -= rounds * size
            turns = [int(rounds[0])] if rounds.min() == rounds.max() else np.unique(rounds).tolist()
            for turn in turns:
                here: Any = slice(None) if len(turns) == 1 else rounds == turn
                rows = mixed.turn_order(number, before + turn)[inside[here]]
                excluded = mixed.excluded[number]
                if excluded is not None:
                    rows = excluded.replace(rows, mixed.seed_of(number), before + turn)
                yield Turn(number, before + turn, places[here], rows)


@lru_cache(maxsize=8)
def _mixture(stages: WeightStages, length: int, epoch: int, seed: int) -> StagedMixture:
    return StagedMixture(stages, length, epoch, seed)
