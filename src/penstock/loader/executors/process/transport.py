"""What goes through the pipes between the consumer and its workers: batches as small pickles, and messages.

    worker     pack      batch -> pickle; large plain tensors and arrays become places in the slot of the batch
    consumer   unpack    pickle + memory of the slot -> batch; its tensors are views
    both       Channel  pickles, each after its length

The memory of CPU tensors and arrays of more than `SMALL` bytes is written to the slot, unless the collate function has
put it there. Everything else (strings, small tensors, any object) is pickled, and so is what does not fit, which takes
one copy more. This is the idea of PEP 574 (out-of-band buffers), for tensors.

The consumer's ends of the pipes never block: a worker that does not read, or stops within a message, cannot delay the
consumer beyond its deadline. Workers may block, since they have nothing else to do.

Values arrive as with torch: dtype, shape, subclass, attributes and ``requires_grad``. Memory with gaps becomes
contiguous; otherwise tensors keep the order of their dimensions in memory, and arrays Fortran order. Tensors that
shared memory do not share it any more.
"""

from __future__ import annotations

import copyreg
import io
import itertools
import math
import operator
import os
import pickle
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock.loader.executors.process.ring import NAMES, tensor_at

__all__ = ["SMALL", "Channel", "Target", "pack", "unpack"]

SMALL = 4096
"""Tensors of up to this many bytes are pickled: users collect labels, and each would occupy a slot."""

_LENGTH = struct.Struct("<Q")
_READ = 1 << 18


class Target(Protocol):
    """Where `pack` puts the memory of large tensors and arrays."""

    def put(self, address: int, nbytes: int, read: Callable[[], npt.NDArray[np.uint8]]) -> int | None:
        """Take some memory, and return the offset that it has for `unpack`; None leaves it to the pickle.

        Args:
            address, nbytes: where it is, and its size.
            read: returns it as an array.
        """


_SLOT = pickle.PickleBuffer(bytearray())
"""Stands for the slot in a pickle. It is writable, since pickle wraps what replaces a buffer that is not."""

# Other buffers, such as one of an array's subclass, belong into the pickle.
_in_band = partial(operator.is_not, _SLOT)


class _Packer(pickle.Pickler):
    """Pickles one batch.

    Attributes:
        slot: where large memory goes.
    """

    slot: Target

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is np.ndarray and not value.dtype.hasobject and value.nbytes:
            return self._reduced_array(value)
        # A part of other tensors. torch's own way is slow, and cannot load what it writes for newer dtypes.
        if kind is torch.TypedStorage and value._untyped_storage.device.type == "cpu":
            return self._reduced_storage(value._untyped_storage, value.dtype)
        if kind is torch.UntypedStorage and value.device.type == "cpu":
            return self._reduced_storage(value, torch.uint8)
        if kind is not torch.Tensor or value.layout is not torch.strided or not value.is_cpu:
            return NotImplemented
        if value.is_quantized or value.is_nested or value.__dict__:
            return NotImplemented
        if value.requires_grad:
            return _require_gradient, (value.detach(),)
        if value.is_conj() or value.is_neg():
            return NotImplemented
        order = None
        if not value.is_contiguous():
            if value.untyped_storage().nbytes() < value.nbytes:
                # Expanded: what it is made of is smaller.
                return NotImplemented
            # Dimensions in another order, or gaps between them.
            strides = value.stride()
            outwards = sorted(range(len(strides)), key=lambda dimension: (-strides[dimension], dimension))
            dense = value.permute(outwards)
            if dense.is_contiguous():
                order = sorted(range(len(outwards)), key=outwards.__getitem__)
            value = dense if order is not None else value.contiguous()
        nbytes, name, shape = value.nbytes, NAMES[value.dtype], tuple(value.shape)
        place = self._place(value.data_ptr(), nbytes, partial(_bytes_of, value))
        if order or not nbytes:
            return _rebuild_tensor, (*place, name, shape, order)
        return tensor_at, (*place, name, shape)

    def _reduced_storage(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
        nbytes = storage.nbytes()
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        place = self._place(storage.data_ptr(), nbytes, whole.numpy)
        return _rebuild_storage, (*place, nbytes, dtype)

    def _reduced_array(self, array: npt.NDArray[Any]) -> Any:
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        ordered = array.T if fortran else np.asarray(array, order="C")
        raw = ordered.reshape(-1).view(np.uint8)
        place = self._place(raw.__array_interface__["data"][0], raw.nbytes, lambda: raw)
        return _rebuild_array, (*place, array.dtype, ordered.shape, fortran)

    def _place(self, address: int, nbytes: int, read: Callable[[], npt.NDArray[np.uint8]]) -> tuple[Any, int]:
        """Return what stands for some memory in the pickle, and its offset there: the slot, or its bytes."""
        if nbytes > SMALL and (offset := self.slot.put(address, nbytes, read)) is not None:
            return _SLOT, offset
        return bytearray(read()), 0


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the memory of a contiguous tensor as bytes.

    ``view(torch.uint8)`` does not always work: dimensions of size 1 may have any stride.
    """
    begin = int(tensor.storage_offset()) * tensor.itemsize
    part = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), begin, (tensor.nbytes,), (1,))
    return part.numpy()


def _require_gradient(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_()


def _rebuild_storage(memory: Any, offset: int, nbytes: int, dtype: torch.dtype) -> torch.TypedStorage:
    memory = tensor_at(memory, offset, "uint8", (nbytes,)) if nbytes else torch.empty(0, dtype=torch.uint8)
    return torch.TypedStorage(wrap_storage=memory.untyped_storage(), dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _rebuild_tensor(
    memory: Any, offset: int, kind: str, shape: tuple[int, ...], order: list[int] | None
) -> torch.Tensor:
    if not math.prod(shape):
        tensor = torch.empty(shape, dtype=getattr(torch, kind))
    else:
        tensor = tensor_at(memory, offset, kind, shape)
    return tensor if order is None else tensor.permute(order)


# Instead of the functions' names, pickles have numbers, which are found without an import.
copyreg.add_extension(__name__, "_rebuild_tensor", 0x70737461)
copyreg.add_extension(tensor_at.__module__, "tensor_at", 0x70737462)


def _rebuild_array(memory: Any, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool) -> Any:
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, memory, offset)
    return array.T if fortran else array


def pack(batch: Any, slot: Target) -> bytes:
    """Return a batch as a pickle, with its large tensors and arrays in the slot as far as they fit.

    Raises:
        Exception: an error of pickling.
    """
    file = io.BytesIO()
    packer = _Packer(file, 5, buffer_callback=_in_band)
    packer.slot = slot
    packer.dump(batch)
    return file.getvalue()


def unpack(data: bytes | slice, memory: npt.NDArray[np.uint8] | None) -> Any:
    """Return a batch.

    Args:
        data: the pickle, or its place in the memory.
        memory: the memory of its slot, which its large tensors and arrays keep alive; None if it has no such.
    """
    if isinstance(data, slice):
        assert memory is not None
        return pickle.loads(memory[data].data, buffers=itertools.repeat(memory))
    return pickle.loads(data, buffers=itertools.repeat(memory))


class Channel:
    """Messages between the consumer and one worker, through a pipe each way.

    If the pipe for writing does not block, the channel keeps what the pipe does not accept.

    Attributes:
        reads, writes: descriptors of the pipes.
        ended: whether the other end was closed. Earlier messages are delivered; an incomplete one is lost.
        empty: whether there was nothing to read.
        waiting: what `send` has to write when the pipe is writable.
        closed: whether nothing more is written: the reader is gone, or the pipe was closed, so that its number may be
            another file's.
    """

    def __init__(self, reads: int, writes: int) -> None:
        self.reads, self.writes = reads, writes
        self.ended = self.empty = self.closed = False
        self.waiting = b""
        self._parts: list[bytes] = []
        self._missing = 0

    def receive(self) -> list[Any]:
        """Read once, and return the messages that are complete now. It waits if the pipe blocks and is empty."""
        messages: list[Any] = []
        try:
            data = os.read(self.reads, _READ)
        except BlockingIOError:
            self.empty = True
            return messages
        self.ended = self.empty = not data
        # The parts of a long message are joined once, when it is complete.
        self._parts.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return messages
        data = b"".join(self._parts)
        begin, missing = 0, _LENGTH.size - len(data)
        while missing <= 0:
            end = begin + _LENGTH.size + _LENGTH.unpack_from(data, begin)[0]
            missing = end - len(data)
            if missing <= 0:
                messages.append(pickle.loads(memoryview(data)[begin + _LENGTH.size : end]))
                begin, missing = end, end + _LENGTH.size - len(data)
        self._parts, self._missing = [data[begin:]], missing
        return messages

    def send(self, data: bytes = b"") -> None:
        """Write a pickle after what is waiting, as far as the pipe accepts it now, and keep the rest."""
        if self.closed:
            return
        if data:
            self.waiting += _LENGTH.pack(len(data)) + data
        try:
            while self.waiting:
                self.waiting = self.waiting[os.write(self.writes, self.waiting) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.waiting, self.closed = b"", True
