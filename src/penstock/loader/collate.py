"""`Collate`: the same results as torch's ``default_collate``, written directly into the memory of the batch.

Types that users registered with torch, and values that are not plain tensors, arrays or numbers, are collated by torch.

The memory of a batch, such as a slot of memory that processes share, is the `Arena` of the thread that makes it.
Datasets that write the rows of a batch themselves get them from `batch_rows`; collation does not copy those again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import collate as collate_by_type
from torch.utils.data._utils.collate import (
    collate_float_fn,
    collate_int_fn,
    collate_numpy_array_fn,
    collate_numpy_scalar_fn,
    collate_str_fn,
    collate_tensor_fn,
    default_collate_fn_map,
)

__all__ = ["Arena", "Collate", "SharedRows", "batch_memory", "batch_rows", "collate", "is_default", "place", "thread"]

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")

_LARGE = 1 << 14
"""Size in bytes above which torch's copy, on all cores, is faster than NumPy's. Workers have one core each."""

_NUMBERS = {int: np.int64, float: np.float64}
"""The dtypes of torch for Python's numbers."""

_MARK = "_penstock_rows"
"""Attribute of the memory of rows until it is a batch. A tensor of the user never becomes a batch without a copy."""

_Map = dict[type | tuple[type, ...], Callable[..., Any]]


Arena = Callable[[tuple[int, ...], torch.dtype], torch.Tensor | None]
"""Memory of a batch: returns an uninitialised contiguous tensor for it; None if there is no room."""


class SharedRows:
    """The first tensor of a batch, whose rows several threads fill. The first of them allocates it.

    Args:
        size: number of rows of the batch.
        arena: memory of the batch; None for ordinary memory.
    """

    def __init__(self, size: int, arena: Arena | None = None) -> None:
        self._size, self._arena = size, arena
        self._lock = threading.Lock()
        self._whole: torch.Tensor | None = None

    def part(self, begin: int, end: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return some of the rows; None unless shape and dtype are those of the first call."""
        with self._lock:
            if self._whole is None:
                all_rows = self._size, *shape[1:]
                tensor = None if self._arena is None else self._arena(all_rows, dtype)
                self._whole = torch.empty(all_rows, dtype=dtype) if tensor is None else tensor
        alike = self._whole.dtype is dtype and self._whole.shape[1:] == shape[1:] and shape[0] == end - begin
        return self._whole[begin:end] if alike else None


class _Thread(threading.local):
    """The memory of the batch that a thread makes.

    Attributes:
        arena: None for ordinary memory.
    """

    arena: Arena | None = None


thread = _Thread()


def place(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """Return memory for a tensor of the current batch; None means ordinary memory."""
    arena = thread.arena
    return None if arena is None else arena(shape, dtype)


def batch_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor, in the memory of the current batch if possible."""
    tensor = place(shape, dtype)
    return torch.empty(shape, dtype=dtype) if tensor is None else tensor


def batch_rows(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor for rows of the current batch, which collation does not copy."""
    tensor = place(shape, dtype)
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype)
    setattr(tensor if tensor._base is None else tensor._base, _MARK, True)
    return tensor


def _stack(batch: Sequence[torch.Tensor], *, collate_fn_map: _Map | None = None) -> torch.Tensor:
    """Return stacked tensors, contiguous as with torch."""
    first = batch[0]
    # torch's function raises the error.
    if first.is_nested or first.layout is not torch.strided:
        special: torch.Tensor = collate_tensor_fn(list(batch), collate_fn_map=collate_fn_map)
        return special
    tensors = tuple(batch)
    # A quantized tensor has more than its memory: stacking into a tensor over reserved memory would crash.
    if type(first) is not torch.Tensor or first.is_quantized:
        return torch.stack(tensors, 0)
    if first._base is not None and first.is_contiguous() and (whole := _whole(tensors, first)) is not None:
        return whole
    if thread.arena is not None and len(set(map(type, tensors))) == 1 and len(set(map(_dtype, tensors))) == 1:
        out = place((len(tensors), *first.shape), first.dtype)
        if out is not None:
            # Of several shapes or devices, or with a gradient: torch raises or handles that without `out`.
            with suppress(RuntimeError):
                return torch.stack(tensors, 0, out=out)
    return torch.stack(tensors, 0)


def _whole(tensors: Sequence[torch.Tensor], first: torch.Tensor) -> torch.Tensor | None:
    """Return the memory of rows if tensors are all of them, in order; `first` is the first one, contiguous."""
    base = first._base
    # Usually the rows are elsewhere.
    if base is None or not hasattr(base, _MARK) or base.numel() != first.numel() * len(tensors):
        return None
    dtype, shape, stride = base.dtype, tensors[0].shape, tensors[0].stride()
    for address, row in zip(count(base.data_ptr(), first.nbytes), tensors, strict=False):
        alike = type(row) is torch.Tensor and row._base is base and row.dtype is dtype and row.shape == shape
        if not alike or row.stride() != stride or row.data_ptr() != address:
            return None
    delattr(base, _MARK)
    return base.view(len(tensors), *first.shape)


def _stack_images(batch: Sequence[Any], *, collate_fn_map: _Map | None = None) -> torch.Tensor:
    """Return stacked tensors. (C, H, W) with channels_last strides become (N, C, H, W) with channels_last strides."""
    if all(type(t) is torch.Tensor and t.dim() == 3 and not t.is_contiguous() for t in batch):
        first = batch[0].permute(1, 2, 0)
        if first.is_contiguous() and (whole := _whole(batch, first)) is not None:
            return whole.permute(0, 3, 1, 2)
        pixels = [tensor.permute(1, 2, 0) for tensor in batch]
        if all(p.is_contiguous() and p.shape == pixels[0].shape for p in pixels):
            return _stack(pixels).permute(0, 3, 1, 2)
    try:
        return _stack(batch, collate_fn_map=collate_fn_map)
    except RuntimeError as error:
        if len({tuple(tensor.shape) for tensor in batch}) > 1:
            error.add_note(
                "the samples of a batch need equal shapes: use size= or transform= of ImageDataset for images, and a "
                "collate_fn= for other data"
            )
        raise


@lru_cache(maxsize=64)
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """Return torch's dtype for a NumPy dtype; None if there is none."""
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):
        return None


def _stack_arrays(batch: Sequence[Any], *, any_dtype: bool = False, collate_fn_map: _Map | None = None) -> Any:
    """Return stacked arrays as a tensor, without creating a tensor for each of them.

    With ``any_dtype``, arrays of dtypes that torch lacks (times, text, records) become an array.
    """
    first = batch[0]
    dtype = _torch_dtype(first.dtype)
    if any_dtype and dtype is None:
        return np.stack(batch)
    try:
        alike = len(set(map(_dtype, batch))) == 1 and len(set(map(_shape, batch))) == 1
    # Not all of them are arrays.
    except AttributeError:
        alike = False
    if dtype is not None and alike:
        shape = (len(batch), *first.shape)
        out = place(shape, dtype)
        if out is None and first.nbytes >= _LARGE:
            return _stack([torch.as_tensor(a) for a in batch])
        if out is None:
            out = torch.empty(shape, dtype=dtype)
        # For small rows this takes half the time of np.stack.
        if first.ndim and first.size:
            np.concatenate(batch, out=out.numpy().reshape(shape[0] * shape[1], *shape[2:]))
        else:
            np.stack(batch, out=out.numpy())
        return out
    return collate_numpy_array_fn(batch, collate_fn_map=collate_fn_map)


def _numbers(batch: Sequence[Any], *, make: Callable[..., Any], collate_fn_map: _Map | None = None) -> Any:
    """Return numbers as a tensor, with the dtype that torch's function for their type chooses."""
    dtype = _NUMBERS.get(type(batch[0]))
    if dtype is not None and len(set(map(type, batch))) == 1:
        # After an OverflowError torch's function below raises.
        with suppress(OverflowError):
            # Faster than torch.tensor of a list.
            numbers = torch.from_numpy(np.array(batch, dtype))
            out = place(tuple(numbers.shape), numbers.dtype)
            # Memory that NumPy allocated cannot be resized.
            return numbers.clone() if out is None else out.copy_(numbers)
    tensor = make(batch, collate_fn_map=collate_fn_map)
    out = place(tuple(tensor.shape), tensor.dtype) if type(tensor) is torch.Tensor else None
    return tensor if out is None else out.copy_(tensor)


_SCALARS = (np.bool_, np.number, np.object_)
_TORCH: _Map = {
    torch.Tensor: collate_tensor_fn,
    np.ndarray: collate_numpy_array_fn,
    _SCALARS: collate_numpy_scalar_fn,
    float: collate_float_fn,
    int: collate_int_fn,
    str: collate_str_fn,
    bytes: collate_str_fn,
}
_OURS: _Map = {
    **_TORCH,
    torch.Tensor: _stack,
    np.ndarray: _stack_arrays,
    **{key: partial(_numbers, make=_TORCH[key]) for key in (_SCALARS, float, int)},
}


def _plain(batch: Sequence[Any], ours: _Map) -> Any:
    """Return the collated samples, if no user has registered a type with torch.

    torch's function tests each value for all kinds of types first, which takes as long as collating small samples.
    Types other than Python's own are left to it.
    """
    first = batch[0]
    kind = type(first)
    if (function := ours.get(kind)) is not None:
        return function(batch, collate_fn_map=ours)
    if kind is dict:
        return {key: _plain([sample[key] for sample in batch], ours) for key in first}
    if kind is list or kind is tuple:
        try:
            return [_plain(values, ours) for values in zip(*batch, strict=True)]
        # The samples have different lengths, so torch's function below raises.
        except (TypeError, ValueError):
            pass
    return collate_by_type(batch, collate_fn_map=ours)


class Collate:
    """Collates samples like ``torch.utils.data.default_collate``, including types that users registered there.

    Args:
        channels_last: keep the channels_last strides of images, unlike torch's function. For datasets that set
            ``channels_last = True``, such as `ImageDataset`.
        arrays: also stack arrays of dtypes that torch lacks, which torch's function refuses.
    """

    def __init__(self, *, channels_last: bool = False, arrays: bool = False) -> None:
        self._functions = _OURS | ({torch.Tensor: _stack_images} if channels_last else {})
        if arrays:
            self._functions[np.ndarray] = partial(_stack_arrays, any_dtype=True)

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of some samples."""
        ours = self._functions
        # As `is_default`.
        if default_collate_fn_map == _TORCH:
            return _plain(samples, ours)
        registered = {key: ours[key] if f is _TORCH.get(key) else f for key, f in default_collate_fn_map.items()}
        if registered.get(torch.Tensor) is not ours[torch.Tensor] and np.ndarray in registered:
            # torch's function for arrays converts them to tensors.
            registered[np.ndarray] = default_collate_fn_map[np.ndarray]
        return collate_by_type(samples, collate_fn_map=registered)


collate = Collate()


def is_default() -> bool:
    """Return whether no user has registered a type with torch."""
    return default_collate_fn_map == _TORCH
