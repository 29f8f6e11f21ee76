"""Send batches between processes: a small pickle, with large tensors and arrays in the slot of the batch.

    worker     Slot   memory for the tensors of one batch, taken from the file as far as they need it
               pack   batch -> pickle; plain tensors and arrays become places in the slot
    consumer   unpack pickle + memory of the slot -> batch; its tensors are views

The memory of CPU tensors and arrays of more than `SMALL` bytes is written to the slot, unless the collate function has
put it there. Everything else (strings, small tensors, any object) is pickled, and so is what does not fit, which takes
one copy more. This is the idea of PEP 574 (out-of-band buffers), for tensors.

Values arrive as with torch: dtype, shape, subclass, attributes and ``requires_grad``. Memory with gaps becomes
contiguous; otherwise tensors keep the order of their dimensions in memory, and arrays Fortran order. Tensors that
shared memory do not share it any more.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock.loader.executors.process.ring import paged, slot_bytes
from penstock.loader.memory import SharedFile

__all__ = ["ALIGNMENT", "SMALL", "Memory", "Slot", "Target", "pack", "unpack"]

SMALL = 4096
"""Tensors of up to this many bytes are pickled: users collect labels, and each would occupy a slot."""

ALIGNMENT = 64
"""Offsets of tensors are multiples of it: a cache line, which also suits vector instructions."""

_POPULATE_WRITE = 23  # Linux's MADV_POPULATE_WRITE, which `mmap` does not name
_GROWTH = 8
"""Slots grow by at least this fraction of their size, so that a batch of many tensors extends them rarely."""

_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NUMPY = {name: np.dtype(name) for name in _NAMES.values() if name in np.sctypeDict}


class Memory:
    """The file as one worker sees it: the memory of all slots."""

    def __init__(self, file: SharedFile) -> None:
        self.file = file
        self.room = slot_bytes(file)
        self.address: int = np.ndarray(1, np.uint8, file.map).__array_interface__["data"][0]
        self.mapped: dict[int, int] = {}
        """Bytes of each slot for which this process has page tables."""


class Target(Protocol):
    """Where `pack` puts the memory of large tensors and arrays."""

    def put(self, address: int, nbytes: int, read: Callable[[], npt.NDArray[np.uint8]]) -> int | None:
        """Take some memory, and return the offset that it has for `unpack`; None leaves it to the pickle.

        Args:
            address, nbytes: where it is, and its size.
            read: returns it as an array.
        """


class Slot:
    """Memory for the tensors of one batch, an `penstock.loader.arena.Arena`.

    Args:
        memory: the file.
        number: number of the slot; 0 has no memory.
        extent: bytes of memory it has.

    Attributes:
        extent: bytes of memory it has now.
        used: bytes up to the end of the last tensor.
        refused: whether the system refused memory.

    Raises:
        RingError: from `empty`, if the machine has less memory left than a tensor needs.
    """

    __slots__ = ("_begin", "_memory", "extent", "number", "refused", "used")

    def __init__(self, memory: Memory, number: int, extent: int) -> None:
        self._memory = memory
        self._begin = number * memory.room
        self.number = number
        self.extent = extent
        self.used = 0
        self.refused = False
        if extent < memory.mapped.get(number, 0):
            # The consumer has given memory back.
            memory.mapped[number] = extent

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return an uninitialised tensor; None if it has no bytes, or there is no memory for it."""
        begin = -(-self.used // ALIGNMENT) * ALIGNMENT
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes or not self.number or not self._extend(begin + nbytes):
            return None
        self.used = begin + nbytes
        return _tensor(self._memory.file.map, self._begin + begin, _NAMES[dtype], shape)

    def ahead(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return the tensor that `empty` will return for the same arguments, without taking its memory."""
        used = self.used
        try:
            return self.empty(shape, dtype)
        finally:
            self.used = used

    def put(self, address: int, nbytes: int, read: Callable[[], npt.NDArray[np.uint8]]) -> int | None:
        """See `Target`. What is in the slot already is not copied."""
        offset = self.offset_of(address)
        if offset is None and (copy := self.empty((nbytes,), torch.uint8)) is not None:
            copy.numpy()[:] = read()
            offset = self.offset_of(copy.data_ptr())
        return offset

    def offset_of(self, address: int) -> int | None:
        """Return the offset of an address in the slot; None if it is elsewhere."""
        offset = address - self._memory.address - self._begin
        return offset if 0 <= offset < self.used else None

    def _extend(self, needed: int) -> bool:
        """Return whether the slot has so many bytes of memory, after it was extended if necessary."""
        memory, number = self._memory, self.number
        if needed > self.extent:
            larger = min(paged(max(needed, self.extent + self.extent // _GROWTH)), memory.room)
            if needed > larger:
                return False
            try:
                memory.file.reserve(self._begin + self.extent, larger - self.extent)
            except OSError:
                self.refused = True
                return False
            self.extent = larger
        mapped = memory.mapped.get(number, 0)
        if self.extent > mapped:
            # In one system call, instead of by a page fault for each page; older kernels cannot.
            with contextlib.suppress(OSError):
                memory.file.map.madvise(_POPULATE_WRITE, self._begin + mapped, self.extent - mapped)
            memory.mapped[number] = self.extent
        return True


_SLOT = pickle.PickleBuffer(bytearray())
"""Stands for the slot in a pickle. It is writable, since pickle wraps what replaces a buffer that is not."""


def _in_band(buffer: Any) -> bool:
    """Return whether a buffer belongs into the pickle, such as one of an array's subclass."""
    return buffer is not _SLOT


class _Packer(pickle.Pickler):
    """Pickles one batch."""

    def __init__(self, file: io.BytesIO, slot: Target) -> None:
        super().__init__(file, 5, buffer_callback=_in_band)
        self._slot = slot

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor:
            return self._reduced_tensor(value)
        if kind is np.ndarray and not value.dtype.hasobject and value.nbytes:
            return self._reduced_array(value)
        # A part of other tensors. torch's own way is slow, and cannot load what it writes for newer dtypes.
        if kind is torch.TypedStorage and value._untyped_storage.device.type == "cpu":
            return self._reduced_storage(value._untyped_storage, value.dtype)
        if kind is torch.UntypedStorage and value.device.type == "cpu":
            return self._reduced_storage(value, torch.uint8)
        return NotImplemented

    def _reduced_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided or not tensor.is_cpu or tensor.is_quantized or tensor.is_nested:
            return NotImplemented
        if tensor.__dict__:
            return NotImplemented
        if tensor.requires_grad:
            return _require_gradient, (tensor.detach(),)
        if tensor.is_conj() or tensor.is_neg():
            return NotImplemented
        order = None
        if not tensor.is_contiguous():
            if tensor.untyped_storage().nbytes() < tensor.nbytes:
                # Expanded: what it is made of is smaller.
                return NotImplemented
            # Dimensions in another order, or gaps between them.
            strides = tensor.stride()
            outwards = sorted(range(len(strides)), key=lambda dimension: (-strides[dimension], dimension))
            dense = tensor.permute(outwards)
            if dense.is_contiguous():
                order = sorted(range(len(outwards)), key=outwards.__getitem__)
            tensor = dense if order is not None else tensor.contiguous()
        kind, shape = _NAMES[tensor.dtype], tuple(tensor.shape)
        place = self._place(
            *(tensor.data_ptr(), tensor.nbytes),
            lambda: _bytes_of(tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes),
        )
        return _rebuild_tensor, (*place, kind, shape, order)

    def _reduced_storage(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
        nbytes = storage.nbytes()
        place = self._place(storage.data_ptr(), nbytes, partial(_bytes_of, storage, 0, nbytes))
        return _rebuild_storage, (*place, nbytes, dtype)

    def _reduced_array(self, array: npt.NDArray[Any]) -> Any:
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        ordered = array.T if fortran else np.asarray(array, order="C")
        raw = ordered.reshape(-1).view(np.uint8)
        place = self._place(raw.__array_interface__["data"][0], raw.nbytes, lambda: raw)
        return _rebuild_array, (*place, array.dtype, ordered.shape, fortran)

    def _place(self, address: int, nbytes: int, read: Callable[[], npt.NDArray[np.uint8]]) -> tuple[Any, int]:
        """Return what stands for some memory in the pickle, and its offset there: the slot, or its bytes."""
        if nbytes > SMALL and (offset := self._slot.put(address, nbytes, read)) is not None:
            return _SLOT, offset
        return bytearray(read()), 0


def _bytes_of(storage: torch.UntypedStorage, begin: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return a part of a storage as bytes.

    ``view(torch.uint8)`` of a contiguous tensor does not always work: its dimensions of size 1 may have any stride.
    """
    return torch.empty(0, dtype=torch.uint8).set_(storage, begin, (nbytes,), (1,)).numpy()


def _require_gradient(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_()


def _rebuild_storage(memory: Any, offset: int, nbytes: int, dtype: torch.dtype) -> torch.TypedStorage:
    memory = _tensor(memory, offset, "uint8", (nbytes,)) if nbytes else torch.empty(0, dtype=torch.uint8)
    return torch.TypedStorage(wrap_storage=memory.untyped_storage(), dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _tensor(memory: Any, offset: int, kind: str, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor over memory, which it keeps alive."""
    if kind in _NUMPY:
        # A third of the time of the other way.
        return torch.from_numpy(np.ndarray(shape, _NUMPY[kind], memory, offset))
    dtype, count = getattr(torch, kind), math.prod(shape)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def _rebuild_tensor(
    memory: Any, offset: int, kind: str, shape: tuple[int, ...], order: list[int] | None
) -> torch.Tensor:
    if not math.prod(shape):
        tensor = torch.empty(shape, dtype=getattr(torch, kind))
    else:
        tensor = _tensor(memory, offset, kind, shape)
    return tensor if order is None else tensor.permute(order)


# Instead of the function's name, pickles have a number, which is found without an import.
copyreg.add_extension(__name__, "_rebuild_tensor", 0x70737461)


def _rebuild_array(memory: Any, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool) -> Any:
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, memory, offset)
    return array.T if fortran else array


def pack(batch: Any, slot: Target) -> bytes:
    """Return a batch as a pickle, with its large tensors and arrays in the slot as far as they fit.

    Raises:
        Exception: an error of pickling.
    """
    file = io.BytesIO()
    _Packer(file, slot).dump(batch)
    return file.getvalue()


def unpack(data: bytes, memory: npt.NDArray[np.uint8] | None) -> Any:
    """Return a batch.

    Args:
        data: the pickle.
        memory: the memory of its slot, which its large tensors and arrays keep alive; None if it has no such.
    """
    return pickle.loads(data, buffers=itertools.repeat(memory))
