"""A batch made in chunks by several workers: its columns, and how chunks are joined.

Only results of the default collate function over tensors, arrays, numbers and strings have rows: dicts, lists and named
tuples of lists of strings and of tensors whose first dimension is the batch. One worker makes all other batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from penstock.loader.arena import Column, aligned

__all__ = ["Layout", "flatten", "join", "layout_of", "unflatten"]

Spec = Any
"""The structure of a batch: nested tuples that can be compared and pickled."""


class Layout(NamedTuple):
    """The layout of a loader's batches.

    Attributes:
        spec: their structure.
        rows: dtype and shape of one row of each tensor, in memory order.
    """

    spec: Spec
    rows: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    def columns(self, count: int) -> list[Column]:
        """Return the offset of each tensor in the slot, for a batch of ``count`` samples."""
        columns, offset = [], 0
        for dtype, row in self.rows:
            nbytes = math.prod(row) * dtype.itemsize
            columns.append(Column(offset, dtype, row, nbytes))
            offset += aligned(count * nbytes)
        return columns

    def nbytes(self, count: int) -> int:
        """Return the bytes of a batch of ``count`` samples."""
        last = self.columns(count)[-1]
        return last.offset + aligned(count * last.row_bytes)


def flatten(batch: Any, tensors: list[torch.Tensor], texts: list[Sequence[Any]]) -> Spec | None:
    """Return the structure of a batch, and append its tensors (contiguous, batch dimension first) and lists of strings.

    None if it has parts whose chunks cannot be joined.
    """
    kind = type(batch)
    if kind is torch.Tensor:
        return _flatten_tensor(batch, tensors)
    if kind in (list, tuple) and batch and set(map(type, batch)) <= {str, bytes}:
        texts.append(batch)
        return "texts", kind
    names: tuple[Any, ...]
    if kind is dict:
        names, parts = tuple(batch), list(batch.values())
    elif kind in (list, tuple) or (isinstance(batch, tuple) and hasattr(batch, "_fields")):
        names, parts = (), list(batch)
    else:
        return None
    specs = [flatten(part, tensors, texts) for part in parts]
    return None if None in specs else (kind, names, tuple(specs))


def _flatten_tensor(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> Spec | None:
    if tensor.layout is not torch.strided or tensor.requires_grad or not tensor.dim() or tensor.__dict__:
        return None
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():  # their memory does not hold the values
        return None
    order: list[int] | None = None
    if not tensor.is_contiguous():
        strides = tensor.stride()
        order = sorted(range(len(strides)), key=lambda d: (-strides[d], d))
        tensor = tensor.permute(order)
        if order[0] != 0 or not tensor.is_contiguous():
            return None
    tensors.append(tensor)
    return "tensor", None if order is None else tuple(sorted(range(len(order)), key=order.__getitem__))


def unflatten(spec: Spec, tensors: list[torch.Tensor], texts: list[Sequence[Any]]) -> Any:
    """Return a batch of this structure; tensors and texts are consumed from the front."""
    if spec[0] == "tensor":
        tensor = tensors.pop(0)
        return tensor if spec[1] is None else tensor.permute(spec[1])
    if spec[0] == "texts":
        return texts.pop(0)
    kind, names, parts = spec
    values = [unflatten(part, tensors, texts) for part in parts]
    if kind is dict:
        return dict(zip(names, values, strict=True))
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def layout_of(batch: Any, count: int) -> Layout | None:
    """Return the layout of a batch of ``count`` samples; None if it has none."""
    tensors: list[torch.Tensor] = []
    texts: list[Sequence[Any]] = []
    spec = flatten(batch, tensors, texts)
    if spec is None or not tensors:
        return None
    if any(t.shape[0] != count or not t.numel() for t in tensors) or any(len(text) != count for text in texts):
        return None
    return Layout(spec, tuple((t.dtype, tuple(t.shape[1:])) for t in tensors))


def join(chunks: Sequence[Any], counts: Sequence[int]) -> tuple[Any, Layout] | None:
    """Return the batch of separately collated chunks, and its layout; None if they do not fit together."""
    layouts = [layout_of(chunk, count) for chunk, count in zip(chunks, counts, strict=True)]
    first = layouts[0]
    if first is None or any(layout != first for layout in layouts):
        return None
    columns: list[list[torch.Tensor]] = []
    texts: list[list[Sequence[Any]]] = []
    for chunk in chunks:
        columns.append([])
        texts.append([])
        flatten(chunk, columns[-1], texts[-1])
    tensors = [torch.cat(parts) for parts in zip(*columns, strict=True)]
    return unflatten(first.spec, tensors, join_texts(texts)), first


def join_texts(chunks: Sequence[Sequence[Sequence[Any]]]) -> list[Sequence[Any]]:
    """Return the concatenated lists of strings of all chunks."""
    return [type(parts[0])(itertools.chain.from_iterable(parts)) for parts in zip(*chunks, strict=True)]
