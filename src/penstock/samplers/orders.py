"""Arguments that several samplers take (numbers, flags, and the names of shuffles), and their orders."""

from __future__ import annotations

import operator
from typing import Any, cast

import numpy as np
import torch

from penstock.errors import SamplerError
from penstock.order.permutation import Indices
from penstock.order.shuffle import SHUFFLES, Order, make_order

__all__ = ["epoch_order", "flag", "order_kind", "positive"]


def epoch_order(kind: str, block: dict[str, int], n: int, seed: int, epoch: int) -> Order | Indices:
    """Return the order of an epoch, by its name from `order_kind` and the sizes of the block shuffle.

    torch's own takes 8 bytes per index.
    """
    if kind == "torch":
        return cast(Indices, torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).numpy())
    return make_order(kind, n, seed=seed, epoch=epoch, **block)


def order_kind(shuffle: bool | str) -> str:
    """Return the name of an order: ``"torch"`` for True, ``"none"`` for False, else one of ``penstock.order.SHUFFLES``.

    Raises:
        SamplerError: any other value.
    """
    if isinstance(shuffle, str):
        if shuffle not in SHUFFLES:
            known = ", ".join(map(repr, SHUFFLES))
            raise SamplerError(f"unknown shuffle {shuffle!r}: use True (torch's order), False, or one of {known}")
        return shuffle
    # torch accepts 0 and 1 as a bool.
    if not isinstance(shuffle, bool | int | np.bool_) or shuffle not in (0, 1):
        raise SamplerError(f"shuffle takes True, False, or one of {', '.join(map(repr, SHUFFLES))}, got {shuffle!r}")
    return "torch" if shuffle else "none"


def positive(name: str, value: Any) -> int:
    """Return an argument that is a positive integer.

    Raises:
        SamplerError: it is anything else (torch's message).
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise SamplerError(f"{name} should be a positive integer value, but got {name}={value}")
    return number


def flag(name: str, value: Any) -> bool:
    """Return an argument that is a bool.

    Raises:
        SamplerError: it is anything else (torch's message).
    """
    if not isinstance(value, bool):
        raise SamplerError(f"{name} should be a boolean value, but got {name}={value}")
    return value
