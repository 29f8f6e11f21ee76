"""`Collate`: the same results as torch's ``default_collate``, written directly into the memory of the batch.

Types that users registered with torch, and values that are not plain tensors, arrays or numbers, are collated by torch.

The memory of a batch, such as a slot of memory that processes share, is the `Arena` of the thread that makes it.
Datasets that fill the rows of a batch themselves call `place_ahead` before collation.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, Protocol

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

__all__ = ["Arena", "Collate", "Shared", "collate", "is_default", "place", "place_ahead", "thread"]

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")

_LARGE = 1 << 14
"""Size in bytes above which torch's copy, on all cores, is faster than NumPy's. Workers have one core each."""

_NUMBERS = {int: np.int64, float: np.float64}
"""The dtypes of torch for Python's numbers."""

_Map = dict[type | tuple[type, ...], Callable[..., Any]]


class Arena(Protocol):
    """Memory for the tensors of a batch."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return an uninitialised contiguous tensor; None if there is no room for it."""

    def ahead(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return the memory that `empty` will return for the same arguments, without allocating it."""


class Shared:
    """An arena for the first tensor of a batch, whose rows several threads fill. The first of them allocates it.

    Only for allocation ahead, since parts are not collated by themselves.

    Args:
        size: number of rows of the batch.
        arena: memory of the batch; None for ordinary memory.
    """

    def __init__(self, size: int, arena: Arena | None = None) -> None:
        self._size, self._begin, self._end = size, 0, size
        self._arena = arena
        self._lock = threading.Lock()
        self._whole: list[torch.Tensor] = []  # one, which all parts share

    def rows(self, begin: int, end: int) -> Shared:
        """Return an arena for some of the rows."""
        part = copy.copy(self)
        part._begin, part._end = begin, end
        return part

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """See `Arena`. Always None."""
        return None

    def ahead(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """See `Arena`. None unless shape and dtype are those of the first call."""
        with self._lock:
            if not self._whole:
                all_rows = self._size, *shape[1:]
                tensor = None if self._arena is None else self._arena.ahead(all_rows, dtype)
                self._whole.append(torch.empty(all_rows, dtype=dtype) if tensor is None else tensor)
        whole = self._whole[0]
        if whole.dtype is not dtype or whole.shape[1:] != shape[1:] or shape[0] != self._end - self._begin:
            return None
        return whole[self._begin : self._end]


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
    return None if arena is None else arena.empty(shape, dtype)


def place_ahead(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for the first tensor of the current batch before collation.

    Rows that are written there need no copy at collation. Without an arena it is ordinary memory.
    """
    arena = thread.arena
    tensor = None if arena is None else arena.ahead(shape, dtype)
    return torch.empty(shape, dtype=dtype) if tensor is None else tensor


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
    out = place((len(tensors), *first.shape), first.dtype)
    if out is not None and (len(set(map(type, tensors))) > 1 or len(set(map(_dtype, tensors))) > 1):
        out = None
    try:
        base = first._base if out is None else out
        # Usually the rows are elsewhere.
        if base is not None and base.data_ptr() == first.data_ptr() and _are_rows(tensors, base, out is None):
            return base.view(len(tensors), *first.shape)
        if out is not None:
            return torch.stack(tensors, 0, out=out)
    except RuntimeError:
        # Without memory, of several shapes or devices, or with a gradient: torch raises or handles that without `out`.
        pass
    return torch.stack(tensors, 0)


def _are_rows(tensors: Sequence[torch.Tensor], base: torch.Tensor, views: bool) -> bool:
    """Return whether tensors already are all rows of a base, whose memory begins with the first; as views of it."""
    first = tensors[0]
    begin, step, shape, count = base.data_ptr(), first.nbytes, first.shape, first.numel() * len(tensors)
    if not begin or base.numel() != count or base.dtype is not first.dtype:
        return False
    if not base.is_contiguous() or base.requires_grad:
        return False
    for number, tensor in enumerate(tensors):
        if type(tensor) is not torch.Tensor or tensor.dtype is not first.dtype:
            return False
        if tensor.data_ptr() != begin + number * step or tensor.shape != shape or not tensor.is_contiguous():
            return False
        if views and tensor._base is not base:
            return False
        # The values of a lazy conjugate or negative differ from its memory.
        if tensor.is_conj() or tensor.is_neg():
            return False
    return True


def _stack_images(batch: Sequence[Any], *, collate_fn_map: _Map | None = None) -> torch.Tensor:
    """Return stacked tensors. (C, H, W) with channels_last strides become (N, C, H, W) with channels_last strides."""
    if all(type(t) is torch.Tensor and t.dim() == 3 and not t.is_contiguous() for t in batch):
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
    tensor = None
    if dtype is not None and len(set(map(type, batch))) == 1:
        # After an OverflowError torch's function below raises.
        with suppress(OverflowError):
            # Faster than torch.tensor of a list.
            tensor = torch.from_numpy(np.array(batch, dtype))
    if tensor is not None:
        out = place(tuple(tensor.shape), tensor.dtype)
        # Memory that NumPy allocated cannot be resized.
        return tensor.clone() if out is None else out.copy_(tensor)
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
