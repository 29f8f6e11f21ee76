"""Tails of samplers and data sets by themselves, for programs with another loader than ours."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import penstock as ps

from .data import Sources
from .samplers import HUGE, groups_of, weights_of

__all__ = ["resumed_cases", "torch_resumed_cases"]

Cases = dict[str, Callable[[], Any]]
Make = Callable[[int, int], Any]
"""Makes a sampler, of rank and world size."""
N = 97
WORLDS = (1, 1), (2, 3), (3, 1)
"""Ranks before and after; the first alone where a state belongs to one stream."""


def resumed_cases(sources: Sources) -> Cases:
    """Return what follows the states of samplers with a seed, and of data sets of ours."""
    found: Cases = {}
    for kind, remainder in (
        ("global", "pad"),
        ("global", "drop"),
        ("global", "uneven"),
        ("block", "pad"),
        ("none", "pad"),
    ):
        found |= _cases(f"distributed {kind} {remainder}", partial(_distributed, kind, remainder))
    found |= _cases(
        "batches", lambda rank, world: ps.BatchSampler(_distributed("global", "pad", rank, world), 4, False)
    )
    for order in "completion", "first":
        found |= _cases(f"grouped {order}", partial(_grouped, order))
    found |= _cases("iterations", lambda rank, world: ps.IterationBasedBatchSampler(_grouped("first", rank, world), 60))
    found |= _cases("infinite", lambda rank, world: ps.InfiniteSampler(range(N), seed=3, rank=rank, world_size=world))
    found |= _cases("sequential", lambda rank, world: ps.SequentialSampler(range(N)), elastic=False)
    for count, replacement in (None, False), (250, False), (80, True):
        make = partial(ps.RandomSampler, range(N), replacement, count, shuffle="global", seed=3)
        name = f"random num_samples={count} replacement={replacement}"
        found |= _cases(name, lambda rank, world, make=make: make(), elastic=False)
    for replacement in True, False:
        make = partial(ps.WeightedRandomSampler, weights_of(N), 60, replacement, seed=3)
        found |= _cases(f"weighted replacement={replacement}", lambda rank, world, make=make: make(), elastic=False)
    for before, after in WORLDS:
        found[f"alone: distributed n=1e9, {before} ranks to {after}"] = partial(
            _tails,
            lambda rank, world: ps.DistributedSampler(range(HUGE), world, rank, "global", 3),
            before,
            after,
            (300,),
        )
        found[f"alone: RankDataset, {before} ranks to {after}"] = partial(_of_dataset, sources, before, after)
    return found


def torch_resumed_cases() -> Cases:
    """Return what follows the states of samplers whose order torch's generators make."""
    found = _cases("distributed", lambda rank, world: ps.DistributedSampler(range(N), world, rank, True, 3))
    drawn: dict[str, Callable[[], Any]] = {
        "random": lambda: ps.RandomSampler(range(N)),
        "random generator": lambda: ps.RandomSampler(range(N), generator=torch.Generator().manual_seed(8)),
        "random replacement": lambda: ps.RandomSampler(range(N), True, 80),
        "weighted": lambda: ps.WeightedRandomSampler(weights_of(N), 80),
        "batches of random": lambda: ps.BatchSampler(ps.RandomSampler(range(N)), 4, False),
    }
    for name, make in drawn.items():
        found |= _cases(name, lambda rank, world, make=make: make(), elastic=False)
    return found


def _distributed(kind: str, remainder: str, rank: int, world: int) -> Any:
    blocks: dict[str, Any] = {"block_size": 16, "window": 3} if kind == "block" else {}
    return ps.DistributedSampler(range(N), world, rank, kind, 3, remainder=remainder, **blocks)


def _grouped(order: str, rank: int, world: int) -> Any:
    return ps.GroupedBatchSampler(_distributed("global", "pad", rank, world), groups_of(N), 4, order=order)


def _cases(name: str, make: Make, *, elastic: bool = True) -> Cases:
    return {
        f"alone: {name}, {before} ranks to {after}": partial(_tails, make, before, after)
        for before, after in (WORLDS if elastic else WORLDS[:1])
    }


def _tails(make: Make, before: int, after: int, counts: tuple[int, ...] = (0, 1, 9, 1000)) -> list[Any]:
    """Return the rest of an epoch and the next one, on every rank, from states after so many items."""
    found = []
    for count, rank in itertools.product(counts, range(after)):
        torch.default_generator.manual_seed(11)
        sampler = make(0, before)
        sampler.set_epoch(1)
        items = iter(sampler)
        if count:
            for _ in itertools.islice(items, count):
                pass
        state = json.dumps(sampler.state_dict())
        torch.default_generator.manual_seed(99)
        fresh = make(rank, after)
        fresh.load_state_dict(json.loads(state))
        rest = list(itertools.islice(fresh, 300))
        torch.default_generator.manual_seed(5)
        fresh.set_epoch(2)
        found.append([rest, list(itertools.islice(fresh, 300))])
    return found


def _of_dataset(sources: Sources, before: int, after: int) -> list[Any]:
    """Return a data set's rows from the state after 5 samples of the second mini-epoch, and those of the next."""
    found = []
    for remainder, rank in itertools.product(("pad", "drop", "uneven"), range(after)):
        options: dict[str, Any] = {"mini_epochs": 3, "seed": 5, "remainder": remainder}
        dataset = ps.RankDataset(sources.manifest, rank=0, world_size=before, **options)
        dataset.set_epoch(1)
        dataset.set_mini_epoch(1)
        fresh = ps.RankDataset(sources.manifest, rank=rank, world_size=after, **options)
        fresh.load_state_dict(json.loads(json.dumps(dataset.state_dict(5))))
        rest = [row for *_, row in fresh.__getitems__(list(range(len(fresh))))]
        fresh.next_mini_epoch()
        found.append([rest, [row for *_, row in fresh.__getitems__(list(range(len(fresh))))]])
    return found
