"""A batch on its way between processes: a small pickle, and its large tensors and arrays as raw memory.

Tensors and arrays of more than `SMALL` bytes go into the slot that the consumer lent for the batch (those that the
collate function has put there already are not touched again), and beside the pickle if they do not fit. Whatever else
pickles, travels in the pickle: quantised tensors, strings, any object. Tensors that share their memory share it
afterwards, too. This is the idea of PEP 574 (out-of-band buffers), for tensors.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.loader.arena import Slot

__all__ = ["SMALL", "Packed", "pack", "unpack"]

SMALL = 4096
"""Bytes up to which a tensor travels in the pickle: users collect labels, and each would keep a slot from its use."""


class Packed(NamedTuple):
    """A batch, ready to travel.

    Attributes:
        data: the pickle.
        table: for each large buffer its offset in the slot and its size; offset -1 for those that did not fit.
        beside: the memory of those, in order.
    """

    data: bytes
    table: list[tuple[int, int]]
    beside: list[memoryview]


def pack(batch: Any, slot: Slot | None) -> Packed:
    """Get a batch ready, its large buffers in the slot as far as they fit.

    Raises:
        Exception: whatever pickling raises for objects that cannot be pickled.
    """
    used = 0 if slot is None else slot.used
    packer = _Packer(slot, frozenset())
    packer.dump(batch)
    if shared := packer.shared():
        if slot is not None:
            slot.used = used  # what the first try has put there is put there again, in wholes
        packer = _Packer(slot, shared)
        packer.dump(batch)
    return Packed(packer.stream.getvalue(), packer.table, packer.beside)


class _Storage(NamedTuple):
    """Which memory a tensor is a view of. NumPy makes storages of any size over the same address."""

    address: int
    nbytes: int


class _Packer(pickle.Pickler):
    def __init__(self, slot: Slot | None, whole: frozenset[_Storage]) -> None:
        self.stream = io.BytesIO()
        super().__init__(self.stream, protocol=5)
        self.table: list[tuple[int, int]] = []
        self.beside: list[memoryview] = []
        self._slot = slot
        self._whole = whole  # storages that travel as one
        self._storages: dict[_Storage, int | bytearray] = {}
        self._seen: list[tuple[_Storage, int]] = []  # storage and bytes of every tensor

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor:
            return self._tensor(value)
        if kind is np.ndarray and not value.dtype.hasobject and value.nbytes:
            return self._array(value)
        if issubclass(kind, torch.Tensor) and _is_dressed(kind):
            return self._dressed(value)
        return NotImplemented

    def shared(self) -> frozenset[_Storage]:
        """Storages of which several tensors are views; not those of which the tensors are but a small part."""
        if len({storage for storage, _ in self._seen}) == len(self._seen):
            return frozenset()
        views, total = Counter[_Storage](), Counter[_Storage]()
        for storage, nbytes in self._seen:
            views[storage] += 1
            total[storage] += nbytes
        return frozenset(s for s, count in views.items() if count > 1 and s.nbytes <= 2 * total[s])

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if not _is_plain(tensor):
            return self._dressed(tensor)
        nbytes = tensor.nbytes
        if not nbytes:
            return _nothing, (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        memory = tensor.untyped_storage()
        storage = _Storage(memory.data_ptr(), memory.nbytes())
        self._seen.append((storage, nbytes))
        if storage in self._whole or storage.nbytes < nbytes:  # the latter is expanded
            if storage not in self._storages:
                whole = torch.empty(0, dtype=torch.uint8).set_(memory)
                self._storages[storage] = self._buffer(whole)
            place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
            return _view, (tuple(storage), self._storages[storage], tensor.dtype, *place, tensor.requires_grad)
        return self._compact(tensor, tensor.requires_grad)

    def _dressed(self, tensor: torch.Tensor) -> Any:
        """A tensor that is more than memory, as a plain one and the rest; in torch's way if its memory is not plain."""
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
            return tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        return _dress, (plain, type(tensor), tensor.requires_grad, tensor.__dict__)

    def _compact(self, tensor: torch.Tensor, requires_grad: bool) -> Any:
        """A tensor by itself, its dimensions in memory in the order that they have."""
        dense, inverse = tensor, None
        if not tensor.is_contiguous():
            tensor = tensor.detach()
            strides = tensor.stride()
            order = sorted(range(len(strides)), key=lambda d: (-strides[d], d))
            dense = tensor.permute(order)
            if dense.is_contiguous():
                inverse = tuple(sorted(range(len(order)), key=order.__getitem__))
            else:
                dense = tensor.contiguous()
        return _dense, (self._buffer(dense), tensor.dtype, tuple(dense.shape), inverse, requires_grad)

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        ordered = array.T if fortran else array
        raw = np.ascontiguousarray(ordered).reshape(-1).view(np.uint8)
        if not raw.flags.writeable:  # torch warns of such
            raw = raw.copy()
        return _rebuild_array, (self._buffer(torch.from_numpy(raw)), array.dtype, ordered.shape, fortran)

    def _buffer(self, tensor: torch.Tensor) -> int | bytearray:
        """The memory of a contiguous tensor: itself if small, else its number in the table."""
        nbytes = tensor.nbytes
        slot = self._slot
        offset = None
        if nbytes > SMALL and slot is not None:
            offset = slot.offset_of(tensor.data_ptr(), nbytes)
        if offset is None:
            raw = tensor.detach().reshape(-1).view(torch.uint8)
            if nbytes <= SMALL:
                return bytearray(raw.numpy())
            if slot is not None and (offset := slot.reserve(nbytes)) is not None:
                torch.frombuffer(slot.memory, dtype=torch.uint8, count=nbytes, offset=offset).copy_(raw)
            else:
                self.beside.append(raw.numpy().data)
        self.table.append((-1 if offset is None else offset, nbytes))
        return len(self.table) - 1


@lru_cache(maxsize=64)
def _is_dressed(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of a subclass are plain ones with attributes: it changes nothing of how they pickle."""
    names = "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__torch_dispatch__"
    if any(getattr(kind, name) != getattr(torch.Tensor, name) for name in names):
        return False
    return not any("__slots__" in vars(base) for base in kind.__mro__[: kind.__mro__.index(torch.Tensor)])


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but memory, type, shape and strides."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.grad_fn is not None:
        return False
    return not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor.__dict__)


class _Arriving(threading.local):
    """The buffers of the batch that this thread is unpacking."""

    buffers: Sequence[Any] = ()
    storages: dict[tuple[int, int], torch.Tensor]


_arriving = _Arriving()


def unpack(data: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    """The batch.

    Args:
        data: its pickle.
        buffers: one writable buffer for each entry of the table; tensors keep them, and are views of them.
    """
    _arriving.buffers, _arriving.storages = buffers, {}
    try:
        return pickle.loads(data)
    finally:
        _arriving.buffers, _arriving.storages = (), {}


def _resolve(buffer: int | bytearray) -> Any:
    return _arriving.buffers[buffer] if isinstance(buffer, int) else buffer


def _dense(
    buffer: int | bytearray,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    inverse: tuple[int, ...] | None,
    requires_grad: bool,
) -> torch.Tensor:
    tensor = torch.frombuffer(_resolve(buffer), dtype=dtype).view(shape)
    if inverse is not None:
        tensor = tensor.permute(inverse)
    return tensor.requires_grad_() if requires_grad else tensor


def _view(
    storage: tuple[int, int],
    buffer: int | bytearray,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    storages = _arriving.storages
    if storage not in storages:
        storages[storage] = torch.frombuffer(_resolve(buffer), dtype=torch.uint8)
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(storages[storage].untyped_storage(), offset, shape, stride)
    return tensor.requires_grad_() if requires_grad else tensor


def _dress(
    plain: torch.Tensor, kind: type[torch.Tensor], requires_grad: bool, attributes: dict[str, Any]
) -> torch.Tensor:
    tensor = plain if kind is torch.Tensor else plain.as_subclass(kind)
    tensor.__dict__.update(attributes)
    return tensor.requires_grad_() if requires_grad else tensor


def _nothing(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)


def _rebuild_array(buffer: int | bytearray, dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool) -> Any:
    # NumPy makes the base of a view the base of its base, but stops at a memoryview: so the buffer lives as long.
    array = np.frombuffer(memoryview(_resolve(buffer)), dtype=np.uint8).view(dtype).reshape(shape)
    return array.T if fortran else array
