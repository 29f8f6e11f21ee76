"""Collation: torch's own, which keeps channels_last images as they are in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data._utils.collate import collate as collate_by_type
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

__all__ = ["collate"]


def _stack(
    batch: Sequence[torch.Tensor], *, collate_fn_map: dict[type | tuple[type, ...], Callable[..., Any]] | None = None
) -> torch.Tensor:
    """Stack (C, H, W) tensors with channels_last strides to (N, C, H, W) with channels_last strides."""
    first = batch[0]
    if type(first) is torch.Tensor and first.dim() == 3 and not first.is_contiguous():
        pixels = [tensor.permute(1, 2, 0) for tensor in batch]
        if all(p.is_contiguous() and p.shape == pixels[0].shape for p in pixels):
            stacked: torch.Tensor = collate_tensor_fn(pixels, collate_fn_map=collate_fn_map)
            return stacked.permute(0, 3, 1, 2)
    stacked = collate_tensor_fn(list(batch), collate_fn_map=collate_fn_map)
    return stacked


_COLLATE: dict[type | tuple[type, ...], Callable[..., Any]] = {torch.Tensor: _stack}


def collate(samples: list[Any]) -> Any:
    """What ``torch.utils.data.default_collate`` makes of the samples, types that users registered there included."""
    return collate_by_type(samples, collate_fn_map={**default_collate_fn_map, **_COLLATE})
