"""Orders: the indices of every sampler, and of the orders and partitions beneath them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils.data

import penstock as ps

__all__ = ["order_cases", "torch_order_cases"]

Cases = dict[str, Callable[[], Any]]
EPOCHS = 0, 1, 7
WORLDS = 1, 2, 3
REMAINDERS = "pad", "drop", "uneven"
SIZES = 0, 1, 2, 97, 1000
HUGE = 10**9
BLOCK: dict[str, dict[str, Any]] = {
    "global": {},
    "block": {"block_size": 16, "window": 3},
    "none": {},
    "torch": {},
}


def groups_of(n: int) -> np.ndarray:
    """Return a group for each sample: three groups of different sizes."""
    return (np.arange(n) * np.arange(n) // 3) % 5 % 3


def weights_of(n: int) -> np.ndarray:
    """Return small integers, whose sums are exact: an alias table then is the same on every machine."""
    return (np.arange(n) * 7 % 11).astype(np.float64)


def over_epochs(make: Callable[[], Any], epochs: Iterable[int] = EPOCHS, take: int | None = None) -> list[Any]:
    """Return what one sampler yields in each epoch, and once more in the last, in which nothing may have moved."""
    sampler, found = make(), []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        found.append(list(itertools.islice(sampler, take)))
    return [*found, list(itertools.islice(sampler, take))]


def of_ranks(make: Callable[[int, int], Any], *worlds: int, take: int | None = None) -> list[Any]:
    """Return what the samplers of all ranks yield, epoch by epoch, for each world size."""
    return [over_epochs(partial(make, world, rank), take=take) for world in worlds for rank in range(world)]


def drawn(make: Callable[[], Any], seed: int = 11) -> list[Any]:
    """Return two passes, drawn from torch's global generator."""
    torch.default_generator.manual_seed(seed)
    sampler = make()
    return [list(sampler), list(sampler)]


def order_cases() -> Cases:
    """Return the orders of ours: the same with every version of torch."""
    return {
        **_distributed(("global", "block", "none")),
        **_distributed_options(),
        **_huge(),
        **_random(),
        **_batches(),
        **_grouped("global", "none"),
        **_iterations(),
        **_infinite("global", "block", "none"),
        **_weighted(),
        **_factories(),
    }


def torch_order_cases() -> Cases:
    """Return the orders that torch's generators make."""
    return {
        **_distributed(("torch",)),
        **_grouped("torch"),
        **_infinite("torch"),
        **_random_torch(),
    }


def _shuffle(kind: str) -> bool | str:
    return True if kind == "torch" else kind


def _rank_sampler(kind: str, n: int, world: int, rank: int, seed: int = 3, **options: Any) -> ps.DistributedSampler:
    return ps.DistributedSampler(range(n), world, rank, _shuffle(kind), seed, **{**BLOCK[kind], **options})


def _distributed(kinds: tuple[str, ...]) -> Cases:
    cases: Cases = {}
    for kind, remainder, n in itertools.product(kinds, REMAINDERS, SIZES):
        make = partial(_rank_sampler, kind, n, remainder=remainder)
        cases[f"distributed {kind} {remainder} n={n}"] = partial(of_ranks, make, *WORLDS)
    return cases


def _distributed_options() -> Cases:
    def drop(kind: str, world: int, rank: int) -> Any:
        return ps.DistributedSampler(range(97), world, rank, kind, 3, True)

    cases: Cases = {f"distributed {kind} drop_last": partial(of_ranks, partial(drop, kind), 3) for kind in BLOCK}
    del cases["distributed torch drop_last"]
    for seed in 0, 1, 2**63 - 1:
        cases[f"distributed global seed={seed}"] = partial(of_ranks, partial(_rank_sampler, "global", 97, seed=seed), 2)
    for blocks in {"block_size": 10, "window": 1}, {"block_size": 1, "window": 4}, {"block_size": 200}:
        make = partial(_rank_sampler, "block", 97, block_size=16, window=None)
        cases[f"distributed block {blocks}"] = partial(of_ranks, partial(make, **blocks), 2)
    cases["distributed False is none"] = partial(
        of_ranks, lambda world, rank: ps.DistributedSampler(range(97), world, rank, False), 3
    )
    return cases


def _huge() -> Cases:
    cases: Cases = {}
    for kind in "global", "block", "none":
        make = partial(ps.DistributedSampler, range(HUGE), 3, 1, kind, 5)
        cases[f"distributed {kind} n=1e9, its head"] = partial(over_epochs, make, take=300)
        for n in 1, 97, HUGE, 2**40 + 15:
            cases[f"make_order {kind} n={n}"] = partial(_spread, kind, n)
    for remainder in REMAINDERS:
        cases[f"Partition strided {remainder}"] = partial(_positions, remainder)
    for n in 1, 2, 97, 1000, HUGE + 7:
        cases[f"Permutation n={n}"] = partial(_permuted, n)
    return cases


def _spread(kind: str, n: int) -> list[Any]:
    positions = np.unique(np.linspace(0, n - 1, 200).astype(np.int64))
    return [ps.make_order(kind, n, seed=seed, epoch=epoch)[positions] for seed in (0, 9) for epoch in EPOCHS]


def _permuted(n: int) -> list[Any]:
    positions = np.unique(np.linspace(0, n - 1, 200).astype(np.int64))
    return [ps.Permutation(n, key)[positions] for key in (0, 1, 2**63)]


def _positions(remainder: str) -> list[Any]:
    found = []
    for n, world, minis in itertools.product((0, 1, 97, HUGE), WORLDS, (1, 4)):
        for consumed in (0, 40):
            for rank, mini in itertools.product(range(world), range(minis)):
                part = ps.Partition(
                    *(n, world, rank),
                    mini_epochs=minis,
                    mini_epoch=mini,
                    remainder=remainder,
                    consumed=consumed,
                )
                head = np.arange(min(len(part), 20))
                found.append((len(part), part[head], part[len(part) - 1 - head]))
    return found


def _random() -> Cases:
    cases: Cases = {}
    for kind, n, count in itertools.product(("global", "block"), (1, 97, 1000), (None, 25, 250)):
        make = partial(ps.RandomSampler, range(n), False, count, shuffle=kind, seed=4, **BLOCK[kind])
        cases[f"random {kind} n={n} num_samples={count}"] = partial(over_epochs, make)
    for n, count in itertools.product((1, 97), (None, 250)):
        make = partial(ps.RandomSampler, range(n), True, count, shuffle="global", seed=4)
        cases[f"random replacement n={n} num_samples={count}"] = partial(over_epochs, make)
    for n in 0, 1, 97:
        cases[f"sequential n={n}"] = partial(over_epochs, partial(ps.SequentialSampler, range(n)))
    make = partial(ps.RandomSampler, range(HUGE), shuffle="global")
    cases["random global n=1e9, its head"] = partial(over_epochs, make, take=300)
    return cases


def _random_torch() -> Cases:
    cases: Cases = {}
    for replacement, n, count in itertools.product((False, True), (1, 97, 1000), (None, 25, 250)):
        name = f"random torch{' replacement' if replacement else ''} n={n} num_samples={count}"
        make = partial(ps.RandomSampler, range(n), replacement, count)
        cases[name] = partial(drawn, make)
        cases[f"{name} generator"] = partial(drawn, lambda make=make: make(generator=torch.Generator().manual_seed(8)))
    make = partial(ps.WeightedRandomSampler, weights_of(97), 120)
    cases["weighted, key from torch's generator"] = partial(drawn, make)
    cases["weighted, key from a generator"] = partial(drawn, lambda: make(generator=torch.Generator().manual_seed(8)))
    cases["batches of random torch"] = partial(drawn, lambda: ps.BatchSampler(ps.RandomSampler(range(97)), 4, False))
    cases["grouped over random torch"] = partial(
        drawn,
        lambda: ps.GroupedBatchSampler(ps.RandomSampler(range(97)), groups_of(97), 4, world_size=1, rank=0),
    )
    cases["iterations over random torch"] = partial(
        drawn, lambda: ps.IterationBasedBatchSampler(ps.BatchSampler(ps.RandomSampler(range(97)), 4, False), 60)
    )
    return cases


def _batches() -> Cases:
    cases: Cases = {}
    for size, drop in itertools.product((1, 4, 97, 100), (False, True)):
        make = partial(ps.RandomSampler, range(97), shuffle="global", seed=4)
        cases[f"batches of {size} drop_last={drop}"] = partial(
            over_epochs, lambda make=make, size=size, drop=drop: ps.BatchSampler(make(), size, drop)
        )
        cases[f"batches of {size} drop_last={drop} over a rank's share"] = partial(
            of_ranks,
            lambda world, rank, size=size, drop=drop: ps.BatchSampler(
                _rank_sampler("global", 97, world, rank), size, drop
            ),
            3,
        )
    cases["batches of a list"] = partial(over_epochs, lambda: ps.BatchSampler(list(range(0, 97, 3)), 4, False))
    return cases


def _grouped(*kinds: str) -> Cases:
    cases: Cases = {}
    for kind, order, drop, remainder in itertools.product(kinds, ("completion", "first"), (False, True), REMAINDERS):
        if drop and remainder != "pad":
            continue  # drop_last says what becomes of the remainder
        cases[f"grouped {kind} {order} {remainder} drop_last={drop}"] = partial(
            of_ranks,
            lambda world, rank, kind=kind, order=order, drop=drop, remainder=remainder: ps.GroupedBatchSampler(
                _rank_sampler(kind, 97, world, rank, remainder=remainder),
                groups_of(97),
                4,
                drop_last=drop,
                order=order,
            ),
            *WORLDS,
        )
    if "none" in kinds:
        cases |= _grouped_streams()
    return cases


def _grouped_streams() -> Cases:
    """Groups over streams that are the whole job's."""

    def over(stream: Callable[[], Any], order: str) -> Callable[[int, int], Any]:
        return lambda world, rank: ps.GroupedBatchSampler(
            stream(), groups_of(97), 4, order=order, world_size=world, rank=rank
        )

    streams: dict[str, Callable[[], Any]] = {
        "random": lambda: ps.RandomSampler(range(97), shuffle="global", seed=2),
        "replacement": lambda: ps.RandomSampler(range(97), True, 80, shuffle="global", seed=2),
        "weighted": lambda: ps.WeightedRandomSampler(weights_of(97), 80, seed=2),
    }
    return {
        f"grouped over {name} {order}": partial(of_ranks, over(stream, order), 2)
        for name, stream in streams.items()
        for order in ("completion", "first")
    }


def _iterations() -> Cases:
    def batches(world: int, rank: int) -> Any:
        return ps.BatchSampler(_rank_sampler("global", 97, world, rank), 4, False)

    def grouped(world: int, rank: int) -> Any:
        return ps.GroupedBatchSampler(_rank_sampler("global", 97, world, rank), groups_of(97), 4)

    def weighted(world: int, rank: int) -> Any:
        sampler = ps.WeightedRandomSampler(weights_of(97), 80, seed=2)
        return ps.GroupedBatchSampler(sampler, groups_of(97), 4, world_size=world, rank=rank)

    def listed(world: int, rank: int) -> Any:
        return [[a, a + 1] for a in range(rank, 20, world)]

    cases: Cases = {}
    for inner in batches, grouped, weighted, listed:
        for start in 0, 13:
            cases[f"iterations over {inner.__name__}, from {start} to 40"] = partial(
                of_ranks,
                lambda world, rank, inner=inner, start=start: ps.IterationBasedBatchSampler(
                    inner(world, rank), 40, start
                ),
                2,
            )
    return cases


def _infinite(*kinds: str) -> Cases:
    cases: Cases = {}
    for kind, n in itertools.product(kinds, (2, 97)):
        cases[f"infinite {kind} n={n}"] = partial(
            of_ranks,
            lambda world, rank, kind=kind, n=n: ps.InfiniteSampler(
                range(n), shuffle=_shuffle(kind), seed=3, rank=rank, world_size=world, **BLOCK[kind]
            ),
            *WORLDS,
            take=2 * n + 3,
        )
    return cases


def _weighted() -> Cases:
    cases: Cases = {}
    for replacement, n, count in itertools.product((True, False), (2, 97, 1000), (1, 50, 2000)):
        weights = weights_of(n)
        if not replacement and count > np.count_nonzero(weights):
            continue
        make = partial(ps.WeightedRandomSampler, weights, count, replacement, seed=6)
        cases[f"weighted replacement={replacement} n={n} num_samples={count}"] = partial(over_epochs, make)
    return cases


def _factories() -> Cases:
    def made(shuffle: bool | str, **options: Any) -> Any:
        class Sized:
            group_ids = groups_of(97)

            def __len__(self) -> int:
                return 97

        data = Sized()
        sampler = ps.make_data_sampler(data, shuffle, False, seed=2)
        return ps.make_batch_data_sampler(data, sampler, images_per_batch=4, **options)

    settings: dict[str, dict[str, Any]] = {
        "plain": {"aspect_grouping": False},
        "grouped": {"aspect_grouping": True},
        "iterations": {"aspect_grouping": True, "num_iters": 40, "start_iter": 7},
    }
    return {
        f"factories {name} shuffle={shuffle}": partial(over_epochs, partial(made, shuffle, **options))
        for name, options in settings.items()
        for shuffle in (True, False, "block")
    }
