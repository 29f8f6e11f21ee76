"""Send batches between processes: a small pickle, with large tensors and arrays as raw memory.

Tensors and arrays of more than `SMALL` bytes are written to the slot that the consumer lent for the batch, unless the
collate function has put them there. Buffers that do not fit are sent beside the pickle. Everything else is pickled:
quantised tensors, strings, any object. This is the idea of PEP 574 (out-of-band buffers), for tensors.

Values arrive unchanged. Further properties:

- Tensors keep dtype, shape, layout, subclass, attributes, ``requires_grad``, quantisation parameters, and the flags
  conjugated, negated and coalesced. Memory with gaps becomes contiguous; otherwise strides stay, except for dimensions
  of size 1. A tensor of a graph arrives as a leaf without ``grad``, and a tensor of inference mode as a normal one.
- Tensors that share a storage still share it: writing to one shows in the other. The exception are tensors that cover
  less than half of the memory they span, such as two views of one column of a large matrix.
- Arrays keep dtype (byte order, fields, alignment), shape, subclass, mask, and Fortran order. Each owns its memory, is
  contiguous and writable.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
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
    used = 0 if slot is None else slot.used
    packer = _Packer(slot, {})
    packer.dump(batch)
    if shared := _shared(packer.seen):
        if slot is not None:
            slot.used = used  # the first attempt's buffers are written again, as whole storages
        packer = _Packer(slot, shared)
        packer.dump(batch)
    return Packed(packer.stream.getvalue(), packer.table, packer.beside)


class _Piece(NamedTuple):
    """The bytes ``[begin, end)`` of a storage, which is identified by address and size."""

    storage: int
    size: int
    begin: int
    end: int


def _piece_of(tensor: torch.Tensor) -> _Piece:
    """Return the memory that a tensor spans, including gaps."""
    storage, itemsize = tensor.untyped_storage(), tensor.itemsize
    begin = int(tensor.storage_offset()) * itemsize
    if tensor.is_contiguous():
        end = begin + tensor.nbytes
    else:
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = begin + (last + 1) * itemsize
    return _Piece(storage.data_ptr(), storage.nbytes(), begin, end)


_LARGEST_ITEM = 16
"""Bytes of the largest dtype: elements of any dtype are aligned relative to a multiple of this."""


def _shared(seen: list[tuple[_Piece, int]]) -> dict[_Piece, _Piece]:
    """Return, for each range that overlaps or touches others, the range to send for all of them.

    Args:
        seen: the range of each tensor, and the bytes of its elements.
    """
    shared: dict[_Piece, _Piece] = {}
    if len({piece[:2] for piece, _ in seen}) == len(seen):  # the usual case: each has its own storage
        return shared
    seen = sorted(seen)
    group: list[_Piece] = []
    whole, covered = seen[0][0], 0
    for piece, nbytes in [*seen, (_Piece(-1, 0, 0, 0), 0)]:
        if piece[:2] == whole[:2] and piece.begin <= whole.end:
            whole = whole._replace(end=max(whole.end, piece.end))
        else:
            # If the tensors are a small part of the range, sending the rest costs more than sharing is worth.
            if len(group) > 1 and whole.end - whole.begin <= 2 * covered:
                whole = whole._replace(begin=whole.begin - whole.begin % _LARGEST_ITEM)
                shared.update(dict.fromkeys(group, whole))
            group, whole, covered = [], piece, 0
        group.append(piece)
        covered += min(nbytes, piece.end - piece.begin)
    return shared


def _bytes_of(storage: torch.UntypedStorage, begin: int, nbytes: int) -> torch.Tensor:
    """Return a part of a storage as bytes.

    ``view(torch.uint8)`` of a contiguous tensor does not always work: its dimensions of size 1 may have any stride.
    """
    return torch.empty(0, dtype=torch.uint8).set_(storage, begin, (nbytes,), (1,))


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class _Packer(pickle.Pickler):
    """Pickles one batch.

    Args:
        slot: receives large buffers.
        shared: ranges that are sent as parts of larger ones.

    Attributes:
        seen: the range of each tensor, and the bytes of its elements.
    """

    def __init__(self, slot: Slot | None, shared: dict[_Piece, _Piece]) -> None:
        self.stream = io.BytesIO()
        super().__init__(self.stream, protocol=5)
        self.table: list[tuple[int, int]] = []
        self.beside: list[memoryview] = []
        self.seen: list[tuple[_Piece, int]] = []
        self._slot = slot
        self._shared = shared
        self._wholes: dict[_Piece, int | bytearray] = {}  # buffers of the larger ranges

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor:
            return self._tensor(value)
        if kind is np.ndarray and not value.dtype.hasobject and value.dtype.itemsize:
            return self._array(value)
        # NumPy would lose a hard mask, or a missing one. `np.ma` is not named, since importing it costs each worker
        # 20 ms before its first batch.
        if issubclass(kind, np.ndarray) and kind is np.ma.MaskedArray:
            return _mask, (value.data, np.ma.getmask(value), value._fill_value, value.hardmask)
        if issubclass(kind, torch.Tensor) and _is_dressed(kind):
            return self._dressed(value)
        return NotImplemented

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if not _is_plain(tensor):
            return self._dressed(tensor)
        nbytes = tensor.nbytes
        if not nbytes:
            return _nothing, (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        piece = _piece_of(tensor)
        self.seen.append((piece, nbytes))
        whole = self._shared.get(piece)
        if whole is None:
            if nbytes <= piece.end - piece.begin:
                return self._compact(tensor, tensor.requires_grad)
            whole = piece  # an expanded tensor: its memory is smaller than its elements
        if whole not in self._wholes:
            raw = _bytes_of(tensor.untyped_storage(), whole.begin, whole.end - whole.begin)
            self._wholes[whole] = self._buffer(raw)
        offset = (piece.begin - whole.begin) // tensor.itemsize
        place = offset, tuple(tensor.shape), tensor.stride()
        return _view, (tuple(whole), self._wholes[whole], tensor.dtype, *place, tensor.requires_grad)

    def _dressed(self, tensor: torch.Tensor) -> Any:
        """Reduce a tensor with extra state to a plain tensor and the rest; in torch's way if it has no plain memory."""
        kind, attributes, requires_grad = type(tensor), tensor.__dict__, tensor.requires_grad
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
            if requires_grad and tensor.layout in _SPARSE and kind is torch.Tensor:  # torch would lose requires_grad
                return _dress, (tensor.detach(), kind, True, attributes, False, False)
            return tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            plain = tensor.detach().as_subclass(torch.Tensor)
            conjugated, negated = plain.is_conj(), plain.is_neg()
            # These return views without a copy.
            if conjugated:
                plain = plain.conj()
            if negated:
                plain = torch._neg_view(plain)
        return _dress, (plain, kind, requires_grad, attributes, conjugated, negated)

    def _compact(self, tensor: torch.Tensor, requires_grad: bool) -> Any:
        """Reduce a single tensor, keeping the memory order of its dimensions."""
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
        if not array.size:
            return _no_array, (array.shape, array.dtype)
        ordered = array.T if fortran else array
        raw = np.ascontiguousarray(ordered).reshape(-1).view(np.uint8)
        if not raw.flags.writeable:  # torch would warn
            raw = raw.copy()
        return _rebuild_array, (self._buffer(torch.from_numpy(raw)), array.dtype, ordered.shape, fortran)

    def _buffer(self, tensor: torch.Tensor) -> int | bytearray:
        """Return the bytes of a small contiguous tensor, or the table number of a large one."""
        nbytes = tensor.nbytes
        slot = self._slot
        offset = None
        if nbytes > SMALL and slot is not None:
            offset = slot.offset_of(tensor.data_ptr(), nbytes)
        if offset is None:
            start = int(tensor.storage_offset()) * tensor.itemsize
            raw = _bytes_of(tensor.untyped_storage(), start, nbytes)
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
    """Return whether tensors of a subclass are plain tensors with attributes: it does not customise pickling."""
    names = "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__torch_dispatch__"
    if any(getattr(kind, name) != getattr(torch.Tensor, name) for name in names):
        return False
    return not any("__slots__" in vars(base) for base in kind.__mro__[: kind.__mro__.index(torch.Tensor)])


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is only memory, dtype, shape and strides."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.grad_fn is not None:
        return False
    return not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor.__dict__)


class _Arriving(threading.local):
    """The buffers of the batch that this thread unpacks."""

    buffers: Sequence[Any] = ()
    wholes: dict[tuple[int, ...], torch.UntypedStorage]


_arriving = _Arriving()


def unpack(data: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    """Return an unpacked batch.

    Args:
        data: the pickle.
        buffers: one writable buffer for each entry of the table; tensors are views that keep them alive.
    """
    _arriving.buffers, _arriving.wholes = buffers, {}
    try:
        return pickle.loads(data)
    finally:
        _arriving.buffers, _arriving.wholes = (), {}


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
    whole: tuple[int, ...],
    buffer: int | bytearray,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    wholes = _arriving.wholes
    if whole not in wholes:
        wholes[whole] = torch.frombuffer(_resolve(buffer), dtype=torch.uint8).untyped_storage()
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(wholes[whole], offset, shape, stride)
    return tensor.requires_grad_() if requires_grad else tensor


def _dress(
    plain: torch.Tensor,
    kind: type[torch.Tensor],
    requires_grad: bool,
    attributes: dict[str, Any],
    conjugated: bool,
    negated: bool,
) -> torch.Tensor:
    tensor = plain
    if negated:
        tensor = torch._neg_view(tensor)
    if conjugated:
        tensor = tensor.conj()
    if kind is not torch.Tensor:
        tensor = tensor.as_subclass(kind)
    tensor.__dict__.update(attributes)
    return tensor.requires_grad_() if requires_grad else tensor


def _nothing(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)


def _no_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    return np.empty(shape, dtype)


def _mask(data: Any, mask: Any, fill_value: Any, hard: bool) -> Any:
    return np.ma.MaskedArray(data, mask, fill_value=fill_value, hard_mask=hard)


def _rebuild_array(buffer: int | bytearray, dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool) -> Any:
    # NumPy follows the base of views, but stops at a memoryview, which thus keeps the buffer alive.
    array = np.frombuffer(memoryview(_resolve(buffer)), dtype=np.uint8).view(dtype).reshape(shape)
    return array.T if fortran else array
