"""Items: what each map-style data set of ours holds on each rank, by index, in each epoch and mini-epoch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import penstock as ps

from .data import Sources, draw

__all__ = ["dataset_cases"]

EPOCHS = 0, 1, 7
ORDERS: dict[str, dict[str, Any]] = {
    "global": {},
    "block": {"shuffle": "block", "block_size": 8, "window": 3},
    "group": {"group": 5},
    "none": {"shuffle": "none"},
}


def dataset_cases(sources: Sources) -> dict[str, Callable[[], Any]]:
    """Return the rows of RankDataset under all options, and the items of the others under a few."""
    cases: dict[str, Callable[[], Any]] = {}
    for order, remainder, minis in itertools.product(ORDERS, ("pad", "drop", "uneven"), (1, 3)):
        options = {**ORDERS[order], "remainder": remainder, "mini_epochs": minis, "seed": 5}
        name = f"rank {order} {remainder} mini_epochs={minis}"
        cases[name] = partial(_of_ranks, partial(ps.RankDataset, sources.manifest, **options), 1, 2, 3)
    for name, make in sources.families().items():
        cases[f"{name}: items"] = partial(_items, make)
        cases[f"{name}: load"] = partial(_items, partial(make, load=_loaded))
        for order in "global", "block", "none":
            made = partial(make, **ORDERS[order], mini_epochs=2, seed=5)
            cases[f"{name} {order} mini_epochs=2"] = partial(_of_ranks, made, 2)
    for order in ORDERS:
        cases[f"mp {order}"] = partial(_streamed, sources, order)
    cases["table of row groups, block"] = partial(_items, partial(ps.TableDataset, sources.parquet, shuffle="block"))
    cases["opened"] = lambda: [
        _items(partial(ps.open, path)) for path in (sources.text, str(sources.mds), sources.arrow)
    ]
    return cases


def _loaded(record: Any) -> tuple[Any, int]:
    return _local(record), draw()


def _local(item: Any) -> Any:
    """Return an item without the folder that it lies in."""
    if isinstance(item, dict):
        return {name: value for name, value in item.items() if name != "__url__"}
    return tuple(item) if isinstance(item, tuple) else item


def _of_ranks(make: Callable[..., Any], *worlds: int) -> list[Any]:
    return [_of_rank(make(rank=rank, world_size=world)) for world in worlds for rank in range(world)]


def _of_rank(dataset: Any) -> list[Any]:
    found = []
    for epoch, mini in itertools.product(EPOCHS, range(dataset.mini_epochs)):
        dataset.set_epoch(epoch)
        dataset.set_mini_epoch(mini)
        found.append([_local(item) for item in dataset.__getitems__(list(range(len(dataset))))])
    return found


def _items(make: Callable[..., Any]) -> list[Any]:
    """Return the items of one rank, asked for one by one."""
    dataset = make()
    return [_local(dataset[index]) for index in range(len(dataset))]


def _streamed(sources: Sources, order: str) -> list[Any]:
    found = []
    for drop, rank in itertools.product((False, True), range(2)):
        options = {**ORDERS[order], "rank": rank, "world_size": 2}
        dataset = ps.MPDataset(sources.manifest, batch_size=4, drop_last=drop, load=_loaded, **options)
        for epoch in EPOCHS:
            dataset.set_epoch(epoch)
            found.append([(_local(item), key) for item, key in dataset])
    return found
