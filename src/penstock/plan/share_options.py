"""The options that all map-style data sets of ours have in common, and the check of what a program gave for them.

A data set checks them before it opens its source, so a wrong one costs nothing and is named by the class called.
"""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypedDict

import torch.distributed as dist

from penstock.errors import ConfigError

__all__ = ["DealOptions", "ShareOptions", "check_share", "wrong_share_option"]


class DealOptions(TypedDict, total=False):
    """How samples are dealt to ranks and mini-epochs.

    Keys:
        rank, world_size: by default from torch.distributed, else RANK and WORLD_SIZE, else 0 and 1; resolved at first
            use and fixed from then on.
        process_group: whose ranks share out the data, where that is not the default group.
        mini_epochs: into how many runs an epoch is cut; all are equally long, padding comes at the end of the epoch.
        seed: the order is a function of (seed, epoch); the same on all ranks. 0 by default.
        remainder: ``"pad"`` (default), ``"drop"`` or ``"uneven"``, see `penstock.order.Partition`. For exact evaluation
            use ``shuffle="none", remainder="uneven"``; for all rows on every rank ``world_size=1, rank=0``.
    """

    rank: int | None
    world_size: int | None
    process_group: dist.ProcessGroup | None
    mini_epochs: int
    seed: int
    remainder: str


class ShareOptions(DealOptions, total=False):
    """Which samples a rank gets, in which order: the options that all map-style data sets of ours have in common.

    Keys:
        shuffle: ``"global"`` (default), ``"block"`` or ``"none"``.
        block_size, window: belong to ``"block"``, see `penstock.order.make_order`.
        group: cut the rows into so many blocks, permute inside them and permute the blocks (short for
            ``shuffle="block"`` with that block size and ``window=1``).
        exclude: rows of the source that nobody gets any more, 100,000 at most, such as damaged ones found in mid-run.
            Their positions get other rows, drawn from (seed, epoch, excluded row); all other positions keep theirs, and
            a state from before fits. A state from then on has their number and a hash, and fits the same rows, or more.
        locality: ``"node"`` deals shards, or blocks of rows, to nodes, each of which keeps seven eighths of its own
            from epoch to epoch: caches of k nodes then hold k times as much. Every epoch is a permutation of all rows.
            ``"none"`` (default) deals rows anew to all ranks in each epoch.
        nodes: how many nodes the ranks lie on, in their order, equally many on each. By default as torchrun says
            (GROUP_WORLD_SIZE); a ConfigError where nothing says it. A state loads on any number of nodes: the epoch
            that it stands in keeps its order, and the next one is dealt to the nodes there are.
    """

    shuffle: str
    group: int | None
    block_size: int | None
    window: int | None
    exclude: Any
    locality: Literal["none", "node"]
    nodes: int | None


def check_share(
    owner: type,
    share: Mapping[str, Any],
    load: Callable[[Any], Any] | None = None,
    *,
    known: Collection[str] = ShareOptions.__annotations__,
) -> None:
    """Refuse options that a data set does not take, and values of another type.

    Args:
        owner: the class that was called.
        share: its keyword arguments beside those that it names.
        load: its argument of this name.
        known: the options that may be in ``share``.

    Raises:
        TypeError: an option that there is not, as of any function.
        ConfigError: a value of another type.
    """
    for name in share:
        if name not in known:
            raise TypeError(_unexpected(owner, name, [*known, *_parameters(owner)]))
    for name, value in share.items():
        wanted = wrong_share_option(name, value)
        if wanted is not None:
            raise ConfigError(f"{owner.__name__}: {name}= takes {wanted}, got {value!r}")
    if load is not None and not callable(load):
        raise ConfigError(f"{owner.__name__}: load= takes a function, or None, got {load!r}")


def wrong_share_option(name: str, value: Any) -> str | None:
    """Return what an option takes, in words, if that is not what it was given.

    >>> wrong_share_option("seed", "a"), wrong_share_option("seed", 3)
    ('an integer', None)
    """
    if name not in _TAKES:
        return None
    holds, wanted = _TAKES[name]
    return None if holds(value) else wanted


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def _is_integer_or_none(value: Any) -> bool:
    return value is None or _is_integer(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_TAKES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("mini_epochs", "seed"), (_is_integer, "an integer")),
    **dict.fromkeys(
        ("rank", "world_size", "group", "block_size", "window", "nodes"), (_is_integer_or_none, "an integer, or None")
    ),
    "shuffle": (_is_text, "the name of an order: 'global', 'block' or 'none'"),
    "remainder": (_is_text, "'pad', 'drop' or 'uneven'"),
    "locality": (_is_text, "'none' or 'node'"),
}


def _parameters(owner: type) -> list[str]:
    """Return the keyword arguments that a class and its bases name."""
    found = (inspect.signature(vars(base)["__init__"]) for base in owner.__mro__ if "__init__" in vars(base))
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [one for signature in found for one in [*signature.parameters.values()][1:]]
    return [one.name for one in parameters if one.kind in by_name]


def _unexpected(owner: type, name: str, known: list[str]) -> str:
    known = [one for one in known if one != name]  # of a base, which the class does not pass on
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(sorted(set(known)))}"
    return f"{owner.__name__}() got an unexpected keyword argument {name!r}: {hint}"
