"""A batch made in chunks by several workers: what its columns are, and how the chunks come together.

Only what the default collate function makes of tensors, arrays, numbers and strings has rows: dicts, lists and named
tuples of tensors whose first dimension is the batch, and of lists of strings. Everything else is made in one place.
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
"""The structure of a batch: nested tuples of plain things, to be compared and pickled."""


class Layout(NamedTuple):
    """What the batches of a loader look like.

    Attributes:
        spec: their structure.
        rows: type and shape of one row of each tensor, in the order of its memory.
    """

    spec: Spec
    rows: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    def columns(self, count: int) -> list[Column]:
        """Where each tensor of a batch of so many samples begins in its slot."""
        columns, offset = [], 0
        for dtype, row in self.rows:
            nbytes = math.prod(row) * dtype.itemsize
            columns.append(Column(offset, dtype, row, nbytes))
            offset += aligned(count * nbytes)
        return columns

    def nbytes(self, count: int) -> int:
        """Bytes of such a batch."""
        last = self.columns(count)[-1]
        return last.offset + aligned(count * last.row_bytes)


def flatten(batch: Any, tensors: list[torch.Tensor], texts: list[Sequence[Any]]) -> Spec | None:
    """Structure of a batch; its tensors (contiguous, the batch's dimension first) and lists of strings are appended.

    None if it has parts of which nobody knows how chunks of them come together.
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
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():  # their values are not what the memory holds
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
    """The batch; tensors and texts are consumed from the front."""
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
    """Layout of a batch of so many samples; None if it has none."""
    tensors: list[torch.Tensor] = []
    texts: list[Sequence[Any]] = []
    spec = flatten(batch, tensors, texts)
    if spec is None or not tensors:
        return None
    if any(t.shape[0] != count or not t.numel() for t in tensors) or any(len(text) != count for text in texts):
        return None
    return Layout(spec, tuple((t.dtype, tuple(t.shape[1:])) for t in tensors))


def join(chunks: Sequence[Any], counts: Sequence[int]) -> tuple[Any, Layout] | None:
    """The batch that separately collated chunks make, and its layout; None if they do not fit together."""
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
    """Lists of strings of all chunks, one behind the other."""
    return [type(parts[0])(itertools.chain.from_iterable(parts)) for parts in zip(*chunks, strict=True)]
