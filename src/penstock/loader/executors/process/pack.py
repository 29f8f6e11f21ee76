"""Send batches between processes: a small pickle, with large tensors and arrays as raw memory.

Tensors and arrays of more than `SMALL` bytes are written to the slot that the consumer lent for the batch, unless the
collate function has put them there. Buffers that do not fit are sent beside the pickle. Everything else is pickled:
strings, any object. This is the idea of PEP 574 (out-of-band buffers), for tensors.

- Plain tensors keep dtype and shape, and their strides, except for dimensions of size 1. Memory with gaps becomes
  contiguous.
- Other tensors (subclasses, expanded, conjugated, sparse, quantised, with attributes) arrive as torch pickles them,
  with the whole storage that they are views of.
- A tensor of a graph arrives as a leaf without ``grad``, and a tensor of inference mode as a normal one.
- Arrays keep dtype (byte order, fields, alignment), shape and Fortran order. They are contiguous and writable.
- Each tensor and array has memory of its own. One that is in a batch twice is the same object twice.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.loader.arena import Slot

__all__ = ["SMALL", "Packed", "pack", "unpack"]

SMALL = 4096
"""Tensors of up to this many bytes are pickled: users collect labels, and each would occupy a slot."""


class Packed(NamedTuple):
    """A packed batch.

    Attributes:
        data: the pickle.
        table: offset in the slot and size of each large buffer; offset -1 if it did not fit.
        beside: the memory of buffers that did not fit, in order.
    """

    data: bytes
    table: list[tuple[int, int]]
    beside: list[memoryview]


def pack(batch: Any, slot: Slot | None) -> Packed:
    """Return a packed batch, with its large buffers in the slot as far as they fit.

    Raises:
        Exception: an error of pickling.
    """
    packer = _Packer(slot)
    packer.dump(batch)
    return Packed(packer.stream.getvalue(), packer.table, packer.beside)


def unpack(data: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    """Return an unpacked batch.

    Args:
        data: the pickle.
        buffers: one writable buffer for each entry of the table; tensors are views that keep them alive.
    """
    return pickle.loads(data, buffers=buffers)


class _Packer(pickle.Pickler):
    """Pickles one batch.

    Args:
        slot: receives large buffers.
    """

    def __init__(self, slot: Slot | None) -> None:
        self.stream = io.BytesIO()
        self.table: list[tuple[int, int]] = []
        self.beside: list[memoryview] = []
        self._slot = slot
        # Stands for each large buffer. It is writable: pickle would wrap the buffers that arrive for a read-only one.
        large = self._large = pickle.PickleBuffer(bytearray())
        super().__init__(self.stream, protocol=5, buffer_callback=lambda buffer: buffer is not large)

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor and value.requires_grad and not value.__dict__:
            return _require_gradient, (value.detach(),)
        if kind is torch.Tensor and _is_plain(value):
            return self._tensor(value)
        # A part of other tensors. torch's own way is slow, and cannot load what it writes for newer dtypes.
        if kind is torch.TypedStorage:
            return self._storage(value._untyped_storage, value.dtype)
        if kind is torch.UntypedStorage:
            return self._storage(value, torch.uint8)
        if kind is np.ndarray and not value.dtype.hasobject and value.dtype.itemsize:
            return self._array(value)
        return NotImplemented

    def _tensor(self, tensor: torch.Tensor) -> Any:
        """Reduce a tensor, keeping the memory order of its dimensions."""
        if not tensor.nbytes:
            return _empty_tensor, (tuple(tensor.shape), tensor.dtype)
        dense, inverse = tensor, None
        if not tensor.is_contiguous():
            if tensor.untyped_storage().nbytes() < tensor.nbytes:  # expanded: torch sends what it is made of
                return NotImplemented
            strides = tensor.stride()
            order = sorted(range(len(strides)), key=lambda d: (-strides[d], d))
            dense = tensor.permute(order)
            if dense.is_contiguous():
                inverse = tuple(sorted(range(len(order)), key=order.__getitem__))
            else:
                dense = tensor.contiguous()
        start = int(dense.storage_offset()) * dense.itemsize
        read = partial(_bytes_of, dense.untyped_storage(), start, dense.nbytes)
        buffer = self._buffer(dense.data_ptr(), dense.nbytes, read)
        return _rebuild_tensor, (buffer, tensor.dtype, tuple(dense.shape), inverse)

    def _storage(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
        if storage.device.type != "cpu":
            return NotImplemented
        nbytes = storage.nbytes()
        buffer = self._buffer(storage.data_ptr(), nbytes, partial(_bytes_of, storage, 0, nbytes))
        return _rebuild_storage, (buffer, dtype)

    def _array(self, array: npt.NDArray[Any]) -> Any:
        if not array.size:
            return _empty_array, (array.shape, array.dtype)
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        ordered = array.T if fortran else array
        raw = np.ascontiguousarray(ordered).reshape(-1).view(np.uint8)
        buffer = self._buffer(raw.__array_interface__["data"][0], raw.nbytes, lambda: raw)
        return _rebuild_array, (buffer, array.dtype, ordered.shape, fortran)

    def _buffer(
        self, address: int, nbytes: int, read: Callable[[], npt.NDArray[np.uint8]]
    ) -> bytearray | pickle.PickleBuffer:
        """Return small memory as it is, and what stands for large memory, which is put into the slot."""
        slot = self._slot
        if nbytes <= SMALL:
            return bytearray(read())
        offset = None if slot is None else slot.offset_of(address, nbytes)
        if offset is None and slot is not None and (offset := slot.reserve(nbytes)) is not None:
            slot.memory[offset : offset + nbytes] = read()
        if offset is None:
            self.beside.append(read().data)
        self.table.append((-1 if offset is None else offset, nbytes))
        return self._large


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is only memory, dtype, shape and strides."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.requires_grad:
        return False
    return not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor.__dict__)


def _bytes_of(storage: torch.UntypedStorage, begin: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return a part of a storage as bytes.

    ``view(torch.uint8)`` of a contiguous tensor does not always work: its dimensions of size 1 may have any stride.
    """
    return torch.empty(0, dtype=torch.uint8).set_(storage, begin, (nbytes,), (1,)).numpy()


def _rebuild_tensor(
    buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], inverse: tuple[int, ...] | None
) -> torch.Tensor:
    tensor = torch.frombuffer(buffer, dtype=dtype).view(shape)
    return tensor if inverse is None else tensor.permute(inverse)


def _require_gradient(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_()


def _rebuild_storage(buffer: Any, dtype: torch.dtype) -> torch.TypedStorage:
    memory = torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)
    return torch.TypedStorage(wrap_storage=memory.untyped_storage(), dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _empty_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _rebuild_array(buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool) -> Any:
    # NumPy follows the base of views, but stops at a memoryview, which thus keeps the buffer alive.
    array = np.frombuffer(memoryview(buffer), dtype=np.uint8).view(dtype).reshape(shape)
    return array.T if fortran else array


def _empty_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    return np.empty(shape, dtype)
