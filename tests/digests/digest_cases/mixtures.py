"""Mixtures: a part of their own, since their order has changed once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import Dataset

import penstock as ps

from .data import draw
from .loaders import Loader
from .passes import batch_cases, key_cases, tail_cases

__all__ = ["mixture_cases"]

Cases = dict[str, Callable[[], Any]]
SIZES = 61, 23, 7
KINDS: dict[str, dict[str, Any]] = {
    "proportion all": {"weights": (0.5, 0.3, 0.2)},
    "proportion first": {"weights": (0.5, 0.3, 0.2), "stop": "first"},
    "proportion 50": {"weights": (0.5, 0.3, 0.2), "stop": 50},
    "repeat": {"weights": (1, 2, 3), "mode": "repeat"},
    "choose": {"weights": (20, 20, 5), "mode": "choose"},
    "block": {"weights": (0.5, 0.3, 0.2), "shuffle": "block", "block_size": 5, "window": 2},
    "none": {"weights": (0.5, 0.3, 0.2), "shuffle": "none"},
    "mini_epochs=2": {"weights": (0.5, 0.3, 0.2), "mini_epochs": 2},
    "drop": {"weights": (0.5, 0.3, 0.2), "remainder": "drop"},
    "uneven": {"weights": (0.5, 0.3, 0.2), "remainder": "uneven"},
}


class Part(Dataset[Any]):
    """Numbers of one source, with a draw."""

    pure = True

    def __init__(self, number: int, n: int) -> None:
        self.base, self.n = 1000 * number, n
        self.fingerprint = f"part {number} of {n}"

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"index": self.base + index, "own": draw()}


def mixture_cases() -> Cases:
    """Return items, batches, keys and tails of mixtures of map-style data sets."""
    loaders = {name: Loader(partial(_loader, name), elastic=True) for name in KINDS}
    cases: Cases = {
        f"items {name} world={world}": partial(_items, name, world) for name in KINDS for world in (1, 2, 3)
    }
    few = {name: loaders[name] for name in ("proportion all", "mini_epochs=2", "choose")}
    for kind, found in (
        ("batches", batch_cases(few)),
        ("keys", key_cases(few, ("own",))),
        ("tails", tail_cases({name: few[name] for name in ("proportion all", "mini_epochs=2")})),
    ):
        cases |= {f"{kind} {name}": case for name, case in found.items()}
    return cases


def _mixture(name: str, rank: int, world: int) -> Any:
    options = dict(KINDS[name])
    weights = options.pop("weights")
    sources = [(Part(number, n), weight) for number, (n, weight) in enumerate(zip(SIZES, weights, strict=True))]
    return ps.Mixture(sources, seed=3, rank=rank, world_size=world, **options)


def _loader(name: str, rank: int, world: int) -> ps.DataLoader[Any]:
    return ps.DataLoader(_mixture(name, rank, world), batch_size=4)


def _items(name: str, world: int) -> list[Any]:
    found = []
    for rank in range(world):
        mixture = _mixture(name, rank, world)
        for epoch, mini in itertools.product((0, 1, 7), range(mixture.mini_epochs)):
            mixture.set_epoch(epoch)
            mixture.set_mini_epoch(mini)
            found.append([mixture[index]["index"] for index in range(len(mixture))])
    return found
