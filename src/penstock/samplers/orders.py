"""Names and options of the samplers' shuffles, and torch's own order."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch

from penstock.errors import SamplerError
from penstock.order.permutation import Indices
from penstock.order.shuffle import DEFAULT_BLOCK_SIZE, DEFAULT_WINDOW, SHUFFLES

__all__ = ["TorchOrder", "block_options", "order_kind"]


class TorchOrder:
    """``torch.randperm`` with a generator seeded with ``seed + epoch``: torch's own order, 8 bytes per index."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        generator = torch.Generator()
        generator.manual_seed(seed + epoch)
        self._indices: Indices = torch.randperm(n, generator=generator).numpy()

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._indices[index]


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


def block_options(kind: str, block_size: int | None, window: int | None) -> dict[str, int]:
    """Return the sizes of the block shuffle; an empty dict for the other kinds.

    Raises:
        SamplerError: sizes were passed for another kind, or are not positive integers.
    """
    if kind != "block":
        if block_size is not None or window is not None:
            raise SamplerError(f"block_size and window belong to shuffle='block', not to shuffle={kind!r}")
        return {}
    try:
        sizes = {
            "block_size": DEFAULT_BLOCK_SIZE if block_size is None else operator.index(block_size),
            "window": DEFAULT_WINDOW if window is None else operator.index(window),
        }
    except TypeError:
        raise SamplerError(f"block_size and window must be integers, got {block_size!r} and {window!r}") from None
    if min(sizes.values()) < 1:
        raise SamplerError(f"block_size and window must be positive, got {block_size} and {window}")
    return sizes
