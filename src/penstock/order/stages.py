"""`StagedMixture`: the order of a mixture whose weights change at positions of the job.

Positions of the job count through all epochs: position p of epoch e is ``e * length + p``. A stage is the range of
positions with the same weights. The part of a stage in one epoch is a segment, with its own `BlockMixture`::

    epoch 0           epoch 1            epoch 2
    |-- stage 0 --|-- stage 1 ------------------------ ...
    | segment | seg |    segment       |    segment

If a stage begins at the end of a block, the positions before it do not change: the blocks of a segment count from its
origin, and only its last block depends on the end of the segment. The number of samples of each source before an epoch
is a sum over stages, for any epoch.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.errors import OrderError
from penstock.hashing import derive_key
from penstock.order.mixture import MIXTURE_ORDER, BlockMixture, exact_counts
from penstock.order.permutation import Indices

__all__ = [
    "StagedMixture",
    "WeightStage",
    "WeightStages",
    "boundary",
    "changed",
    "check_stages",
    "counts_before",
    "staged_counts",
]


class WeightStage(NamedTuple):
    """The weights of all sources from a position of the job on; weight 0 leaves a source out."""

    begin: int
    weights: tuple[int, ...]


WeightStages = tuple[WeightStage, ...]
"""Stages in ascending order; the first begins at 0."""


class _Segment(NamedTuple):
    """The part of an epoch in one stage, from ``origin`` on, and the number of samples of each source before it."""

    origin: int
    length: int
    weights: tuple[int, ...]
    before: tuple[int, ...]


def check_stages(stages: WeightStages) -> None:
    """Raise unless stages are valid.

    Raises:
        OrderError: no stage begins at 0, positions do not ascend, or weights are invalid.
    """
    if not stages or stages[0].begin != 0:
        raise OrderError(f"the first weights must begin at position 0, got {stages[0].begin if stages else 'none'}")
    for stage, following in itertools.pairwise(stages):
        if following.begin <= stage.begin:
            raise OrderError(f"weights must begin at ascending positions, got {stage.begin} and then {following.begin}")
    for _, weights in stages:
        if min(weights) < 0 or not any(weights):
            raise OrderError(f"weights must be 0 or more, and at least one positive: got {list(weights)}")
        BlockMixture(_present(weights)[1])


def changed(stages: WeightStages, change: WeightStage) -> WeightStages:
    """Return the stages with one more, which replaces a stage with the same beginning.

    >>> changed((WeightStage(0, (1, 1)), WeightStage(90, (1, 3))), WeightStage(40, (2, 1)))[1]
    WeightStage(begin=40, weights=(2, 1))
    """
    return tuple(sorted((*(stage for stage in stages if stage.begin != change.begin), change)))


def staged_counts(weights: Sequence[int], length: int) -> tuple[int, ...]:
    """Return the number of samples of each source in ``length`` positions; 0 for a source with weight 0."""
    sources, present = _present(weights)
    counts = [0] * len(weights)
    for source, count in zip(sources, exact_counts(present, length), strict=True):
        counts[source] = count
    return tuple(counts)


def counts_before(stages: WeightStages, epoch: int, length: int) -> tuple[int, ...]:
    """Return the number of samples of each source in all epochs before one, as Python integers. Costs O(stages)."""
    had = [0] * len(stages[0].weights)
    for number, stage in enumerate(stages):
        begin, end = stage.begin, epoch * length
        if number + 1 < len(stages):
            end = min(end, stages[number + 1].begin)
        head = min(-begin % length, end - begin) if length else 0
        if end <= begin:
            break
        whole, tail = divmod(end - begin - head, length)
        for times, part in ((1, head), (whole, length), (1, tail)):
            if times and part:
                had = [h + times * c for h, c in zip(had, staged_counts(stage.weights, part), strict=True)]
    return tuple(had)


class StagedMixture:
    """The sources at the positions of one epoch. Each segment has the guarantees of `BlockMixture`.

    Args:
        stages: see `check_stages`.
        length: number of positions of each epoch.
        epoch: number of the epoch.
        seed: seed of the order.

    Cost: O(stages) memory.
    """

    def __init__(self, stages: WeightStages, length: int, epoch: int = 0, seed: int = 0) -> None:
        self.length = length
        self._epoch, self._seed = epoch, seed
        self._count = len(stages[0].weights)
        self.segments = list(_segments(stages, length, epoch))
        self._origins = [segment.origin for segment in self.segments]
        self._mixtures: dict[int, BlockMixture] = {}

    @property
    def bound(self) -> int:
        """Upper bound on the error of a source's count in any prefix of a segment, in samples; never reached."""
        return max(self.mixture(number).bound for number in range(len(self.segments)))

    def mixture(self, number: int) -> BlockMixture:
        """Return the mixture of a segment, over the sources with a positive weight."""
        found = self._mixtures.get(number)
        if found is None:
            segment = self.segments[number]
            stream = MIXTURE_ORDER if segment.origin == 0 else f"{MIXTURE_ORDER} at {segment.origin}"
            key = derive_key(self._seed, self._epoch, stream)
            found = BlockMixture(_present(segment.weights)[1], key, length=segment.length)
            self._mixtures[number] = found
        return found

    @cached_property
    def _sources(self) -> list[Indices]:
        """The numbers of the sources in each segment."""
        return [np.array(_present(segment.weights)[0], dtype=np.int64) for segment in self.segments]

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the source at each position of the epoch, and the number of its samples before: int64 arrays."""
        if len(self.segments) == 1 and len(self._sources[0]) == self._count:
            return self.mixture(0).locate(positions)
        numbers = np.searchsorted(self._origins, positions, "right") - 1
        sources, ordinals = np.empty_like(positions), np.empty_like(positions)
        for number in range(int(numbers.min(initial=0)), int(numbers.max(initial=-1)) + 1):
            here = np.flatnonzero(numbers == number)
            segment = self.segments[number]
            found, before = self.mixture(number).locate(positions[here] - segment.origin)
            sources[here] = own = self._sources[number][found]
            ordinals[here] = before + np.array(segment.before)[own]
        return sources, ordinals

    def counts(self, position: int) -> tuple[int, ...]:
        """Return the number of samples of each source before a position; the end of the epoch is allowed, too."""
        number = max(0, bisect.bisect_right(self._origins, position) - 1)
        segment = self.segments[number]
        counts = list(segment.before)
        inside = self.mixture(number).counts(position - segment.origin)
        for source, count in zip(self._sources[number].tolist(), inside, strict=True):
            counts[source] += count
        return tuple(counts)

    def position(self, source: int, ordinal: int) -> int:
        """Return the position of a source's sample with ``ordinal`` samples of that source before it in the epoch.

        Raises:
            OrderError: the source has no such sample in this epoch.
        """
        for number, segment in enumerate(self.segments):
            counts = staged_counts(segment.weights, segment.length)
            if 0 <= ordinal - segment.before[source] < counts[source]:
                inside = self._sources[number].tolist().index(source)
                found = self.mixture(number).position(inside, ordinal - segment.before[source])
                return segment.origin + found
        has = self.counts(self.length)[source]
        raise OrderError(f"source {source} has {has} samples in the epoch, so it has no sample {ordinal}")


def boundary(stages: WeightStages, length: int, at: int) -> int:
    """Return the first position of the job, from ``at`` on, at which new weights change nothing before it.

    This is the end of a block (not of the last block of a segment), or the end of the segment.
    """
    epoch, place = divmod(at, length)
    segment = [segment for segment in _segments(stages, length, epoch) if segment.origin <= place][-1]
    size = BlockMixture(_present(segment.weights)[1]).block_size
    blocks = -(-(place - segment.origin) // size)
    if blocks <= max(0, segment.length // size - 1):
        return epoch * length + segment.origin + blocks * size
    return epoch * length + segment.origin + segment.length


def _present(weights: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the sources with a positive weight, and their weights."""
    sources = [source for source, weight in enumerate(weights) if weight]
    return sources, [weights[source] for source in sources]


def _segments(stages: WeightStages, length: int, epoch: int) -> list[_Segment]:
    begin, end = epoch * length, (epoch + 1) * length
    first = max(0, bisect.bisect_right([stage.begin for stage in stages], begin) - 1)
    had = tuple([0] * len(stages[0].weights))
    segments: list[_Segment] = []
    for number in range(first, len(stages)):
        stop = min(end, stages[number + 1].begin) if number + 1 < len(stages) else end
        origin = max(begin, stages[number].begin)
        if segments and origin >= end:
            break
        segment = _Segment(origin - begin, stop - origin, stages[number].weights, had)
        segments.append(segment)
        counts = staged_counts(segment.weights, segment.length)
        had = tuple(h + c for h, c in zip(had, counts, strict=True))
    return segments
