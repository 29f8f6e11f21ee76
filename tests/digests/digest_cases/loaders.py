"""Loaders of every kind, each a function of rank and world size; made anew whenever one is run or resumed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.utils.data

import penstock as ps

from .data import ROWS, Draws, Faulty, GlobalDraws, Sources, draw
from .samplers import groups_of, weights_of

__all__ = ["POSITIONS", "Loader", "loaders", "torch_loaders"]


POSITIONS = "begin", "first", "middle", "last", "end"
"""Where a state is taken: the last one stands behind the last batch, and the end behind the loop."""


class Loader(NamedTuple):
    """How a loader is made, and what it can do."""

    make: Callable[[int, int], ps.DataLoader[Any]]
    """Of rank and world size."""
    elastic: bool = False
    """Whether its state loads on another number of ranks."""
    epochs: bool = True
    """Whether `set_epoch` chooses the order."""
    keys: bool = True
    """Whether the items hold draws of the sample's own generator that a seed decides."""
    dealt: bool = False
    """Whether each rank gets a share, though a state fits the same ranks alone."""
    tails: tuple[str, ...] = POSITIONS
    """Where states are taken that lead to the same rest in another process."""
    take: int | None = None
    """Batches to take of one that never ends."""


def loaders(sources: Sources) -> dict[str, Loader]:
    """Return loaders whose order follows from a seed."""
    return {
        **_plain(),
        **_shuffled(),
        **_sampled(),
        **_batch_sampled(),
        **_bad_samples(),
        **_shares(sources),
        **_streams(sources),
    }


def _draws(options: dict[str, Any], dataset: Any = None) -> ps.DataLoader[Any]:
    return ps.DataLoader(Draws() if dataset is None else dataset, **{"batch_size": 4, **options})


def _of(dataset: Callable[[], Any] = Draws, **options: Any) -> Callable[[int, int], ps.DataLoader[Any]]:
    """Return how to make a loader that is the same on each rank."""
    return lambda rank, world: _draws(options, dataset())


def _plain() -> dict[str, Loader]:
    return {
        "sequential seed": Loader(_of(seed=3)),
        "sequential seed, drop_last": Loader(_of(seed=3, drop_last=True)),
        "sequential seed, no batches": Loader(_of(seed=3, batch_size=None)),
        "sequential seed, global generators": Loader(_of(GlobalDraws, seed=3)),
    }


def _shuffled() -> dict[str, Loader]:
    found: dict[str, Loader] = {}
    found["shuffle=True seed"] = Loader(_of(shuffle=True, seed=3))
    for shuffle in "global", "block":
        for options in {}, {"drop_last": True}, {"batch_size": None}, {"batch_size": 100}:
            name = "".join(f", {key}={value}" for key, value in options.items())
            found[f"shuffle={shuffle} seed{name}"] = Loader(_of(shuffle=shuffle, seed=3, **options))
    found["shuffle=global without a seed"] = Loader(_of(shuffle="global"))
    found["shuffle=global seed=0, global generators"] = Loader(_of(GlobalDraws, shuffle="global", seed=0))
    found["shuffle=global seed, a subset"] = Loader(
        _of(lambda: torch.utils.data.Subset(Draws(), range(7, 50, 2)), shuffle="global", seed=3)
    )
    found["shuffle=global seed, a collate function that draws"] = Loader(
        _of(shuffle="global", seed=3, collate_fn=_collate_and_draw)
    )
    return found


def _collate_and_draw(samples: list[dict[str, int]]) -> dict[str, Any]:
    return {**torch.utils.data.default_collate(samples), "collated": draw()}


def _sampled() -> dict[str, Loader]:
    def distributed(shuffle: str, seed: int | None, remainder: str, drop_last: bool, rank: int, world: int) -> Any:
        blocks = {"block_size": 8, "window": 3} if shuffle == "block" else {}
        sampler = ps.DistributedSampler(range(ROWS), world, rank, shuffle, 5, remainder=remainder, **blocks)
        return _draws({"sampler": sampler, "seed": seed, "drop_last": drop_last})

    found = {
        f"distributed {shuffle} {remainder} loader's seed={seed} drop_last={drop}": Loader(
            partial(distributed, shuffle, seed, remainder, drop), elastic=True
        )
        for shuffle, seed, remainder, drop in (
            ("global", None, "pad", False),
            ("global", 8, "drop", True),
            ("global", None, "uneven", False),
            ("block", None, "pad", False),
            ("none", None, "pad", False),
        )
    }
    weights, once = weights_of(ROWS), {"replacement": False}
    samplers: dict[str, Callable[[], Any]] = {
        "random global": lambda: ps.RandomSampler(range(ROWS), shuffle="global", seed=5),
        "random global 25": lambda: ps.RandomSampler(range(ROWS), False, 25, shuffle="global", seed=5),
        "random global 150": lambda: ps.RandomSampler(range(ROWS), False, 150, shuffle="global", seed=5),
        "random replacement": lambda: ps.RandomSampler(range(ROWS), True, 50, shuffle="global", seed=5),
        "weighted": lambda: ps.WeightedRandomSampler(weights, 50, seed=5),
        "weighted once": lambda: ps.WeightedRandomSampler(weights, 20, **once, seed=5),
    }
    for name, make in samplers.items():
        found[f"sampler {name}"] = Loader(lambda rank, world, make=make: _draws({"sampler": make()}))
    found["sampler infinite"] = Loader(
        lambda rank, world: _draws({"sampler": ps.InfiniteSampler(range(ROWS), seed=5, rank=rank, world_size=world)}),
        elastic=True,
        tails=("begin", "first", "middle"),
        take=40,
    )
    found["sampler a list"] = Loader(_of(sampler=list(range(0, ROWS, 2)), seed=3))
    return found


def _batch_sampled() -> dict[str, Loader]:
    def rank_sampler(rank: int, world: int) -> Any:
        return ps.DistributedSampler(range(ROWS), world, rank, "global", 5)

    def batches(rank: int, world: int) -> Any:
        return ps.BatchSampler(rank_sampler(rank, world), 4, False)

    def torch_batches(rank: int, world: int) -> Any:
        return torch.utils.data.BatchSampler(rank_sampler(rank, world), 4, False)

    def grouped(rank: int, world: int, **options: Any) -> Any:
        return ps.GroupedBatchSampler(rank_sampler(rank, world), groups_of(ROWS), 4, **options)

    def weighted(rank: int, world: int) -> Any:
        sampler = ps.WeightedRandomSampler(weights_of(ROWS), 50, seed=5)
        return ps.GroupedBatchSampler(sampler, groups_of(ROWS), 4, world_size=world, rank=rank)

    def iterations(inner: Callable[[int, int], Any], start: int, rank: int, world: int) -> Any:
        return ps.IterationBasedBatchSampler(inner(rank, world), 40, start)

    makers: dict[str, tuple[Callable[[int, int], Any], bool]] = {
        "batches": (batches, True),
        "torch's BatchSampler over ours": (torch_batches, True),
        "grouped": (grouped, True),
        "grouped first": (partial(grouped, order="first"), True),
        "grouped drop_last": (partial(grouped, drop_last=True), True),
        "grouped weighted": (weighted, True),
        "iterations": (partial(iterations, batches, 0), True),
        "iterations from 13": (partial(iterations, batches, 13), False),
        "iterations grouped": (partial(iterations, grouped, 0), True),
    }

    def made(make: Callable[[int, int], Any], seed: int | None, rank: int, world: int) -> Any:
        return ps.DataLoader(Draws(), batch_sampler=make(rank, world), seed=seed)

    found = {
        f"batch_sampler {name}{'' if seed is None else ' seed'}": Loader(partial(made, make, seed), elastic=elastic)
        for name, (make, elastic) in makers.items()
        for seed in ((None, 8) if name in ("batches", "grouped") else (None,))
    }
    lists = [[a, a + 7, a + 1] for a in range(0, 50, 3)]
    found["batch_sampler a list seed"] = Loader(lambda rank, world: ps.DataLoader(Draws(), batch_sampler=lists, seed=8))
    return found


def _bad_samples() -> dict[str, Loader]:
    return {
        f"on_error={action}": Loader(_of(Faulty, shuffle="global", seed=3, on_error=action))
        for action in ("skip", "replace")
    }


def _row(record: Any) -> dict[str, int]:
    """Return the row that a record of any source holds, and a draw."""
    if isinstance(record, dict):
        row = record["row"] if "row" in record else int(record["__key__"])
    else:
        row = record.row if hasattr(record, "row") else _first(record)
    return {"index": int(row), "own": draw()}


def _first(record: Any) -> Any:
    values = record[0] if isinstance(record, tuple) else record
    return values.flatten()[-1]


def _shares(sources: Sources) -> dict[str, Loader]:
    def share(make: Callable[..., Any], options: dict[str, Any], loader: dict[str, Any], rank: int, world: int) -> Any:
        dataset = make(load=_row, rank=rank, world_size=world, **{"seed": 5, **options})
        return _draws(loader, dataset)

    families = sources.families()
    few = "first", "middle", "end"
    found = {
        name: Loader(partial(share, make, {}, {}), elastic=True, tails=POSITIONS if name == "rank" else few)
        for name, make in families.items()
    }
    rank: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "mini_epochs=3": ({"mini_epochs": 3}, {}),
        "mini_epochs=3 drop": ({"mini_epochs": 3, "remainder": "drop"}, {"drop_last": True}),
        "mini_epochs=3 uneven": ({"mini_epochs": 3, "remainder": "uneven"}, {}),
        "group=5": ({"group": 5}, {}),
        "block": ({"shuffle": "block", "block_size": 8, "window": 2}, {}),
        "none uneven": ({"shuffle": "none", "remainder": "uneven"}, {}),
    }
    for name, (options, loader) in rank.items():
        found[f"rank {name}"] = Loader(partial(share, families["rank"], options, loader), elastic=True)

    def shuffled_share(rank: int, world: int) -> Any:
        dataset = ps.RankDataset(sources.manifest, load=_row, rank=rank, world_size=world, seed=5)
        return _draws({"sampler": ps.RandomSampler(dataset, shuffle="global", seed=2)}, dataset)

    found["rank under a sampler of its own"] = Loader(shuffled_share)
    return found


def _streams(sources: Sources) -> dict[str, Loader]:
    def mp(drop: bool, rank: int, world: int) -> Any:
        dataset = ps.MPDataset(
            sources.manifest, batch_size=4, drop_last=drop, load=_row, rank=rank, world_size=world, seed=5
        )
        return _draws({}, dataset)

    def stream(options: dict[str, Any], rank: int, world: int) -> Any:
        return _draws({}, ps.StreamShards(sources.shards, load=_row, seed=5, rank=rank, world_size=world, **options))

    return {
        "mp": Loader(partial(mp, False), elastic=True),
        "mp drop_last": Loader(partial(mp, True), elastic=True),
        "stream of shards": Loader(partial(stream, {}), dealt=True),
        "stream of shards, buffer": Loader(partial(stream, {"buffer_bytes": 60}), dealt=True),
        "stream of shards, none": Loader(partial(stream, {"shuffle": "none"}), dealt=True),
    }


def torch_loaders() -> dict[str, Loader]:
    """Return loaders whose order torch's generators make."""
    return {**_drawn_by_ours(), **_samplers_of_torch()}


def _over(make: Callable[[], Any], **options: Any) -> Callable[[int, int], ps.DataLoader[Any]]:
    return lambda rank, world: _draws({"sampler": make(), **options})


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(8)


def _drawn_by_ours() -> dict[str, Loader]:
    n = range(ROWS)
    free: dict[str, Any] = {"epochs": False}
    return {
        "no shuffle": Loader(_of(), **free),
        "shuffle": Loader(_of(shuffle=True), **free),
        "shuffle drop_last": Loader(_of(shuffle=True, drop_last=True), **free),
        "shuffle no batches": Loader(_of(shuffle=True, batch_size=None), **free),
        "shuffle generator": Loader(lambda rank, world: _draws({"shuffle": True, "generator": _generator()}), **free),
        "random": Loader(_over(lambda: ps.RandomSampler(n)), **free),
        "random generator": Loader(_over(lambda: ps.RandomSampler(n, generator=_generator())), **free),
        "random replacement": Loader(_over(lambda: ps.RandomSampler(n, True, 50)), **free),
        "random 150": Loader(_over(lambda: ps.RandomSampler(n, False, 150)), **free),
        "weighted": Loader(_over(lambda: ps.WeightedRandomSampler(weights_of(ROWS), 50)), **free),
        "distributed": Loader(
            lambda rank, world: _draws({"sampler": ps.DistributedSampler(n, world, rank, True, 5)}), elastic=True
        ),
        "infinite": Loader(
            lambda rank, world: _draws(
                {"sampler": ps.InfiniteSampler(n, shuffle=True, seed=5, rank=rank, world_size=world)}
            ),
            elastic=True,
            tails=("begin", "first", "middle"),
            take=40,
        ),
    }


def _samplers_of_torch() -> dict[str, Loader]:
    data, n = torch.utils.data, range(ROWS)
    weights = torch.arange(1, ROWS + 1, dtype=torch.float64).tolist()
    # The seed of a pass that has not begun is torch's to draw.
    begun = "first", "middle", "last"
    foreign: dict[str, Any] = {"epochs": False, "keys": False, "tails": begun}
    # What a resume of these does is no promise: they have no state.
    stateless = {**foreign, "tails": ()}
    return {
        "torch RandomSampler": Loader(_over(lambda: data.RandomSampler(n)), **foreign),
        "torch RandomSampler generator": Loader(
            _over(lambda: data.RandomSampler(n, generator=_generator())), **foreign
        ),
        "torch RandomSampler 150": Loader(_over(lambda: data.RandomSampler(n, num_samples=150)), **foreign),
        "torch RandomSampler replacement": Loader(_over(lambda: data.RandomSampler(n, True, 50)), **foreign),
        "torch SequentialSampler": Loader(_over(lambda: data.SequentialSampler(n)), **foreign),
        "torch DistributedSampler": Loader(
            _over(lambda: data.DistributedSampler(n, 3, 1, seed=5)), keys=False, tails=begun
        ),
        "torch DistributedSampler no shuffle": Loader(
            _over(lambda: data.DistributedSampler(n, 3, 1, shuffle=False)), keys=False, tails=begun
        ),
        "torch BatchSampler": Loader(
            lambda rank, world: ps.DataLoader(
                Draws(), batch_sampler=data.BatchSampler(data.RandomSampler(n), 4, drop_last=True)
            ),
            **foreign,
        ),
        "torch SubsetRandomSampler": Loader(_over(lambda: data.SubsetRandomSampler(range(5, 40))), **stateless),
        "torch WeightedRandomSampler": Loader(_over(lambda: data.WeightedRandomSampler(weights, 50)), **stateless),
    }
