"""Batches, generator keys and tails after a resume, of the loaders in `loaders`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .loaders import Loader

__all__ = ["batch_cases", "key_cases", "tail_cases"]

Cases = dict[str, Callable[[], Any]]

_CHOSEN_INSIDE: dict[str, str] = {
    "distributed global pad loader's seed=None drop_last=False": "sampler",
    "batch_sampler batches": "batch_sampler",
    "batch_sampler grouped": "batch_sampler",
    "batch_sampler iterations": "batch_sampler",
    "rank mini_epochs=3": "dataset",
    "mp": "dataset",
}
"""Loaders whose programs may tell the epoch to what is inside, and by which attribute."""


def batch_cases(loaders: dict[str, Loader]) -> Cases:
    """Return the indices of all batches: epochs that follow by themselves, that are chosen, and after a break."""
    cases: Cases = {}
    for name, loader in loaders.items():
        cases[name] = partial(_in_a_row, loader, ("index",))
        if loader.epochs:
            cases[f"{name}, epochs 0, 1, 7"] = partial(_chosen, loader, ("index",))
        if name in _CHOSEN_INSIDE:
            cases[f"{name}, epochs chosen by sampler or data set"] = partial(
                _chosen_inside, loader, _CHOSEN_INSIDE[name]
            )
        if loader.take is None:
            cases[f"{name}, after a break"] = partial(_after_a_break, loader)
    return cases


def key_cases(loaders: dict[str, Loader], columns: tuple[str, ...]) -> Cases:
    """Return what the items of two epochs drew."""
    return {
        name: partial(_in_a_row, loader, columns, epochs=2)
        for name, loader in loaders.items()
        if loader.keys and not _missing(loader, columns)
    }


def tail_cases(loaders: dict[str, Loader]) -> Cases:
    """Return what follows states: on the same ranks, and on others."""
    cases: Cases = {}
    for name, loader in loaders.items():
        if loader.tails:
            cases[name] = partial(_tails, loader, loader.tails, 1, 1)
        for before, after in ((2, 3), (3, 1)) if loader.elastic else ():
            positions = tuple(position for position in loader.tails if position not in ("begin", "end"))
            cases[f"{name}, {before} ranks to {after}"] = partial(_tails, loader, positions, before, after)
    return cases


def _missing(loader: Loader, columns: tuple[str, ...]) -> bool:
    batch = next(iter(loader.make(0, 1)))
    return not any(column in batch for column in columns)


def _choose(made: Any, epoch: int) -> None:
    """Choose an epoch as programs do: torch's samplers by themselves, else the loader."""
    sampler = getattr(made, "sampler", None)
    (sampler if type(sampler) is torch.utils.data.DistributedSampler else made).set_epoch(epoch)


def _had(batches: Any, loader: Loader, columns: tuple[str, ...] = ("index", "own")) -> list[Any]:
    """Return chosen columns of the batches, as integers."""
    if not loader.keys:
        columns = ("index",)
    return [
        [_plain(batch[column]) for column in columns if column in batch]
        for batch in itertools.islice(batches, loader.take)
    ]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _in_a_row(loader: Loader, columns: tuple[str, ...], epochs: int = 3) -> list[Any]:
    torch.default_generator.manual_seed(11)
    made = loader.make(0, 1)
    return [_had(made, loader, columns) for _ in range(1 if loader.take else epochs)]


def _chosen(loader: Loader, columns: tuple[str, ...]) -> list[Any]:
    found = []
    for rank, world in ((0, 1), (1, 3)) if loader.elastic or loader.dealt else ((0, 1),):
        torch.default_generator.manual_seed(11)
        made = loader.make(rank, world)
        for epoch in 0, 1, 7:
            _choose(made, epoch)
            found.append(_had(made, loader, columns))
    return found


def _chosen_inside(loader: Loader, attribute: str) -> list[Any]:
    """Return two passes for each epoch that is set on the sampler or data set, mini-epochs included."""
    made = loader.make(0, 2)
    inside = getattr(made, attribute)
    found = []
    for epoch, mini in itertools.product((3, 1), range(getattr(inside, "mini_epochs", 1))):
        inside.set_epoch(epoch)
        if mini:
            inside.set_mini_epoch(mini)
        found += [_had(made, loader, ("index",)), _had(made, loader, ("index",))]
    return found


def _after_a_break(loader: Loader) -> list[Any]:
    torch.default_generator.manual_seed(11)
    made = loader.make(0, 1)
    head = _had(itertools.islice(made, 2), loader, ("index",))
    return [head, *(_had(made, loader, ("index",)) for _ in range(2))]


def _tails(loader: Loader, positions: tuple[str, ...], before: int, after: int) -> list[Any]:
    """Return the rest of the epoch and the next one, on every rank, from states of the first rank."""
    states = _states(loader, before)
    return [_resumed(loader, states[position], rank, after) for position in positions for rank in range(after)]


def _states(loader: Loader, world: int) -> dict[str, str]:
    """Return states of one run of the second epoch."""
    torch.default_generator.manual_seed(11)
    made = loader.make(0, world)
    if loader.epochs:
        _choose(made, 1)
    states = [] if "begin" not in loader.tails else [json.dumps(made.state_dict())]
    begin = len(states)
    for _ in itertools.islice(made, loader.take):
        states.append(json.dumps(made.state_dict()))
    batches = states[begin:]
    return {
        "begin": states[0],
        "first": batches[0],
        "middle": batches[len(batches) // 2],
        "last": batches[-1],
        "end": json.dumps(made.state_dict()),
    }


def _resumed(loader: Loader, state: str, rank: int, world: int) -> list[Any]:
    torch.default_generator.manual_seed(99)
    made = loader.make(rank, world)
    made.load_state_dict(json.loads(state))
    rest = _had(made, loader)
    if loader.take:
        return [rest]
    # An epoch without a seed draws one as it begins.
    torch.default_generator.manual_seed(5)
    if loader.epochs and not loader.keys:
        _choose(made, 2)
    return [rest, _had(made, loader)]
