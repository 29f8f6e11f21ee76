"""Every plan there is, as one table: what reads or makes plans is tested over all of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data
from state_support import IteratorSampler, StatefulBatches, StatefulSampler

import penstock as ps
from penstock.integrations.dispatch_batches import DispatchedBatches
from penstock.manifest import Manifest
from penstock.plan.reader import Plan
from penstock.samplers import (
    BatchSampler,
    DistributedSampler,
    GroupedBatchSampler,
    InfiniteSampler,
    IterationBasedBatchSampler,
    RandomSampler,
    SequentialSampler,
    TokenBudgetBatchSampler,
    WeightedRandomSampler,
)
from penstock.samplers.batch import batch_plan_of, plan_of

__all__ = ["BATCHES", "CASES", "SAMPLES", "Case", "N", "Told", "of_generator"]

N = 37
WEIGHTS = np.random.default_rng(0).exponential(size=N)
GROUPS = (np.arange(N) * 7) % 3
LENGTHS = (np.arange(N) * 11) % 29 + 3
Make = Callable[[int, int, Manifest], Any]


class Told(NamedTuple):
    """A plan, and the object by which its user tells it of epochs and states."""

    plan: Plan[Any]
    by: Any


class Case(NamedTuple):
    """How a plan is made, and in what it differs from most.

    Attributes:
        new: ``new(world, rank, manifest)`` makes the plan, or the data set or sampler whose plan it is.
        chance: what an epoch begins with: "" for nothing, "global" for a draw from torch's global generator, "own" for
            one from a generator of the user's.
        ranks: whether ranks share the samples out; otherwise each rank has them all.
        endless: no epoch ends.
        moves: reading it moves an object of the user's, of which there is one.
        local: indices are numbers in this rank's share.
        filled: the last round repeats samples in their own positions.
    """

    new: Make
    chance: str = ""
    ranks: bool = False
    endless: bool = False
    moves: bool = False
    local: bool = False
    filled: bool = False

    def make(self, manifest: Manifest, world: int = 1, rank: int = 0) -> Told:
        """Return a new plan over equal data."""
        made = self.new(world, rank, manifest)
        if isinstance(made, ps.RankDataset | ps.PackedDataset):
            return Told(made.plan, made)
        return Told(made, made)


class Seeded:
    """Somebody's sampler: it shuffles the same way at each ``iter()``, and has neither a state nor epochs."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(random.Random(8).sample(self.items, len(self.items)))


class ByEpoch(Seeded):
    """Its order follows from the epoch that it was told, and it says which one that is."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(random.Random(self.epoch).sample(self.items, len(self.items)))


def of_generator() -> torch.Generator:
    """Return a generator that begins elsewhere after another `torch.manual_seed`: a state has what a resume needs."""
    return torch.Generator().manual_seed(torch.initial_seed() % 1000)


def _dealt(world: int, rank: int, shuffle: Any = "global", n: int = N, **options: Any) -> DistributedSampler:
    return DistributedSampler(range(n), world, rank, shuffle, 3, **options)


def _torchs(world: int, rank: int, **options: Any) -> Any:
    data: Any = range(N)
    return torch.utils.data.DistributedSampler(data, world, rank, seed=3, **options)


def _share(world: int, rank: int, manifest: Manifest, **options: Any) -> ps.RankDataset:
    return ps.RankDataset(manifest, rank=rank, world_size=world, seed=3, **options)


def _packs(world: int, rank: int, **options: Any) -> ps.PackedDataset:
    """Return packs, which are as many as documents: two of these do not fit into one."""
    return ps.PackedDataset([[1, 2, 3]] * N, 5, lengths=[3] * N, rank=rank, world_size=world, seed=3, **options)


def _of_share(world: int, rank: int, manifest: Manifest) -> SequentialSampler:
    return SequentialSampler(_share(world, rank, manifest, mini_epochs=3))


def _grouped(sampler: Any, size: int = 4, **options: Any) -> GroupedBatchSampler:
    return GroupedBatchSampler(sampler, GROUPS, size, **options)


def _budget(world: int, rank: int, **options: Any) -> TokenBudgetBatchSampler:
    return TokenBudgetBatchSampler(LENGTHS, 60, classes=5, seed=3, world_size=world, rank=rank, **options)


def _alone(sampler: Any, **options: Any) -> GroupedBatchSampler:
    return _grouped(sampler, world_size=1, rank=0, **options)


def _batched(sampler: Any, size: int = 4, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(sampler, size, drop_last)


def _iterations(sampler: Any, count: int = 25, start: int = 0) -> IterationBasedBatchSampler:
    return IterationBasedBatchSampler(sampler, count, start)


def _deal(sampler: Any, world: int, rank: int, *, split: bool = False, even: bool = False, size: int = 4) -> Any:
    return DispatchedBatches(_batched(sampler, size), rank, world, split=split, even=even)


_GLOBAL: dict[str, Any] = {"shuffle": "global", "seed": 4}
_data = torch.utils.data

SAMPLES: dict[str, Case] = {
    "sequential": Case(lambda w, r, m: SequentialSampler(range(N))),
    "random": Case(lambda w, r, m: RandomSampler(range(N)), "global"),
    "random, 80": Case(lambda w, r, m: RandomSampler(range(N), num_samples=80), "global"),
    "random, replacement": Case(lambda w, r, m: RandomSampler(range(N), True, 50), "global"),
    "random, generator": Case(lambda w, r, m: RandomSampler(range(N), generator=of_generator()), "own"),
    "random, generator, 80": Case(lambda w, r, m: RandomSampler(range(N), False, 80, generator=of_generator()), "own"),
    "random, generator, replacement": Case(
        lambda w, r, m: RandomSampler(range(N), True, 50, generator=of_generator()), "own"
    ),
    "random, global": Case(lambda w, r, m: RandomSampler(range(N), **_GLOBAL)),
    "random, block": Case(lambda w, r, m: RandomSampler(range(N), shuffle="block", block_size=5, window=2)),
    "random, global, 20": Case(lambda w, r, m: RandomSampler(range(N), num_samples=20, **_GLOBAL)),
    "random, global, 80": Case(lambda w, r, m: RandomSampler(range(N), num_samples=80, **_GLOBAL)),
    "random, global, twice": Case(lambda w, r, m: RandomSampler(range(N), num_samples=2 * N, **_GLOBAL)),
    "random, global, replacement": Case(lambda w, r, m: RandomSampler(range(N), True, 50, **_GLOBAL)),
    "distributed, torch's order": Case(lambda w, r, m: _dealt(w, r, True), ranks=True),
    "distributed, global": Case(lambda w, r, m: _dealt(w, r), ranks=True),
    "distributed, block": Case(lambda w, r, m: _dealt(w, r, "block", block_size=4, window=3), ranks=True),
    "distributed, none": Case(lambda w, r, m: _dealt(w, r, False), ranks=True),
    "distributed, uneven": Case(lambda w, r, m: _dealt(w, r, remainder="uneven"), ranks=True),
    "distributed, drop": Case(lambda w, r, m: _dealt(w, r, drop_last=True), ranks=True),
    "distributed, few": Case(lambda w, r, m: _dealt(w, r, n=2), ranks=True),
    "infinite": Case(lambda w, r, m: InfiniteSampler(range(N), rank=r, world_size=w), ranks=True, endless=True),
    "infinite, torch's order": Case(
        lambda w, r, m: InfiniteSampler(range(N), shuffle=True, rank=r, world_size=w), ranks=True, endless=True
    ),
    "weighted, seed": Case(lambda w, r, m: WeightedRandomSampler(WEIGHTS, 60, seed=2)),
    "weighted": Case(lambda w, r, m: WeightedRandomSampler(WEIGHTS, 60), "global"),
    "weighted, generator": Case(lambda w, r, m: WeightedRandomSampler(WEIGHTS, 60, generator=of_generator()), "own"),
    "weighted, once": Case(lambda w, r, m: WeightedRandomSampler(WEIGHTS, 30, False, seed=2)),
    "torch, sequential": Case(lambda w, r, m: plan_of(_data.SequentialSampler(range(N)))),
    "torch, random": Case(lambda w, r, m: plan_of(_data.RandomSampler(range(N))), "global"),
    "torch, replacement": Case(lambda w, r, m: plan_of(_data.RandomSampler(range(N), True, 50)), "global"),
    "torch, random, generator": Case(
        lambda w, r, m: plan_of(_data.RandomSampler(range(N), generator=of_generator())), "own"
    ),
    "torch, replacement, generator": Case(
        lambda w, r, m: plan_of(_data.RandomSampler(range(N), True, 50, of_generator())), "own"
    ),
    "torch, distributed": Case(lambda w, r, m: plan_of(_torchs(w, r)), ranks=True),
    "torch, distributed, drop": Case(lambda w, r, m: plan_of(_torchs(w, r, drop_last=True)), ranks=True),
    "torch, distributed, in order": Case(lambda w, r, m: plan_of(_torchs(w, r, shuffle=False)), ranks=True),
    "torch, subset": Case(lambda w, r, m: plan_of(_data.SubsetRandomSampler(range(9, N))), "global"),
    "torch, subset, generator": Case(
        lambda w, r, m: plan_of(_data.SubsetRandomSampler(range(9, N), of_generator())), "own"
    ),
    "torch, weighted": Case(lambda w, r, m: plan_of(_data.WeightedRandomSampler(WEIGHTS.tolist(), 60)), "global"),
    "torch, weighted, generator": Case(
        lambda w, r, m: plan_of(_data.WeightedRandomSampler(WEIGHTS.tolist(), 60, True, of_generator())), "own"
    ),
    "share": Case(_share, ranks=True, local=True),
    "share, mini-epochs": Case(lambda w, r, m: _share(w, r, m, mini_epochs=3), ranks=True, local=True),
    "share, uneven": Case(lambda w, r, m: _share(w, r, m, mini_epochs=2, remainder="uneven"), ranks=True, local=True),
    "share, by node": Case(
        lambda w, r, m: _share(w, r, m, locality="node", shuffle="block", block_size=3),
        ranks=True,
        local=True,
    ),
    "share, by node, mini-epochs": Case(
        lambda w, r, m: _share(w, r, m, locality="node", mini_epochs=3),
        ranks=True,
        local=True,
    ),
    "packs": Case(lambda w, r, m: _packs(w, r), ranks=True, local=True),
    "packs, blocks, mini-epochs": Case(
        lambda w, r, m: _packs(w, r, order="block", block_size=7, mini_epochs=3), ranks=True, local=True
    ),
    "share, sequential": Case(_of_share, ranks=True, local=True),
}
"""Plans of samples."""

BATCHES: dict[str, Case] = {
    "batch": Case(lambda w, r, m: _batched(_dealt(w, r)), ranks=True),
    "batch, drop": Case(lambda w, r, m: _batched(_dealt(w, r), drop_last=True), ranks=True),
    "batch, random": Case(lambda w, r, m: _batched(RandomSampler(range(N))), "global"),
    "batch, generator": Case(lambda w, r, m: _batched(RandomSampler(range(N), generator=of_generator())), "own"),
    "batch, infinite": Case(
        lambda w, r, m: _batched(InfiniteSampler(range(N), rank=r, world_size=w)), ranks=True, endless=True
    ),
    "batch, torch's distributed": Case(
        lambda w, r, m: batch_plan_of(_data.BatchSampler(_torchs(w, r), 4, False)), ranks=True
    ),
    "batch, torch's random": Case(lambda w, r, m: _batched(_data.RandomSampler(range(N))), "global"),
    "batch, torch's subset, generator": Case(
        lambda w, r, m: _batched(_data.SubsetRandomSampler(range(9, N), of_generator())), "own"
    ),
    "batch, share by node": Case(
        lambda w, r, m: _batched(SequentialSampler(_share(w, r, m, locality="node"))),
        ranks=True,
        local=True,
    ),
    "batch, share": Case(lambda w, r, m: _batched(_of_share(w, r, m)), ranks=True, local=True),
    "grouped": Case(lambda w, r, m: _grouped(_dealt(w, r)), ranks=True),
    "grouped, first": Case(lambda w, r, m: _grouped(_dealt(w, r), order="first"), ranks=True),
    "grouped, drop": Case(lambda w, r, m: _grouped(_dealt(w, r), 3, drop_last=True), ranks=True),
    "grouped, uneven": Case(lambda w, r, m: _grouped(_dealt(w, r, remainder="uneven")), ranks=True),
    "grouped, random": Case(lambda w, r, m: _alone(RandomSampler(range(N))), "global"),
    "grouped, generator": Case(
        lambda w, r, m: _alone(RandomSampler(range(N), True, 50, generator=of_generator()), drop_last=True), "own"
    ),
    "grouped, weighted": Case(lambda w, r, m: _alone(WeightedRandomSampler(WEIGHTS, 60, seed=2))),
    "grouped, class": Case(lambda w, r, m: _grouped(_dealt(w, r), order="class"), ranks=True),
    "grouped, class, drop": Case(lambda w, r, m: _grouped(_dealt(w, r), order="class", drop_last=True), ranks=True),
    "grouped, class, uneven": Case(
        lambda w, r, m: _grouped(_dealt(w, r, remainder="uneven"), order="class"), ranks=True
    ),
    "grouped, class, random": Case(lambda w, r, m: _alone(RandomSampler(range(N), **_GLOBAL), order="class")),
    "token budget": Case(lambda w, r, m: _budget(w, r), ranks=True),
    "token budget, drop": Case(lambda w, r, m: _budget(w, r, drop_last=True), ranks=True),
    "token budget, uneven": Case(lambda w, r, m: _budget(w, r, remainder="uneven"), ranks=True),
    "iterations": Case(lambda w, r, m: _iterations(_batched(_dealt(w, r))), ranks=True),
    "iterations, start": Case(lambda w, r, m: _iterations(_batched(_dealt(w, r)), 25, 13), ranks=True),
    "iterations, grouped": Case(lambda w, r, m: _iterations(_grouped(_dealt(w, r))), ranks=True),
    "iterations, random": Case(lambda w, r, m: _iterations(_batched(RandomSampler(range(N))), 8), "global"),
    "iterations, generator": Case(
        lambda w, r, m: _iterations(_batched(RandomSampler(range(N), generator=of_generator()))), "own"
    ),
    "iterations, weighted": Case(lambda w, r, m: _iterations(_alone(WeightedRandomSampler(WEIGHTS, 40, seed=2)))),
    "iterations, torch's distributed": Case(lambda w, r, m: _iterations(_batched(_torchs(w, r))), ranks=True),
    "iterations, external": Case(lambda w, r, m: _iterations(_batched(Seeded(range(N))), 15)),
    "iterations, external, start": Case(lambda w, r, m: _iterations(_batched(Seeded(range(N))), 15, 3)),
    "dealt": Case(lambda w, r, m: _deal(RandomSampler(range(N), **_GLOBAL), w, r), ranks=True),
    "dealt, even": Case(
        lambda w, r, m: _deal(RandomSampler(range(N), **_GLOBAL), w, r, even=True), ranks=True, filled=True
    ),
    "dealt, split": Case(
        lambda w, r, m: _deal(RandomSampler(range(N), **_GLOBAL), w, r, split=True, size=4 * w), ranks=True
    ),
    "dealt, random": Case(lambda w, r, m: _deal(RandomSampler(range(N)), w, r), "global"),
    "dealt, torch's subset": Case(
        lambda w, r, m: _deal(_data.SubsetRandomSampler(range(9, N)), w, r, even=True), "global"
    ),
    "dealt, list": Case(lambda w, r, m: _deal(list(range(N)), w, r, even=True), ranks=True, filled=True),
    "external, lists": Case(lambda w, r, m: batch_plan_of([[3, 1], [4], [1, 5, 9], [2, 6]])),
    "external, list": Case(lambda w, r, m: _batched(list(range(N)))),
    "external, seeded": Case(lambda w, r, m: _batched(Seeded(range(N)))),
    "external, drop": Case(lambda w, r, m: _batched(Seeded(range(N)), drop_last=True)),
    "external, strings": Case(lambda w, r, m: _batched(Seeded([f"n{index}" for index in range(N)]))),
    "external, by epoch": Case(lambda w, r, m: _batched(ByEpoch(range(N)))),
    "external, stateful": Case(lambda w, r, m: _batched(StatefulSampler(N)), moves=True),
    "external, iterator": Case(lambda w, r, m: _batched(IteratorSampler(N)), moves=True),
    "external, batches": Case(lambda w, r, m: batch_plan_of(StatefulBatches(N)), moves=True),
}
"""Plans of batches."""

CASES = SAMPLES | BATCHES
