"""Large tensors on their way through Ray's object store: `Buffers` in the worker, `ReceiveBuffer` in the program.

    batch -> pack -> pickle + arrays, without a copy -> object store -> one copy into reused memory -> unpack -> batch

Ray returns read-only views of objects that other readers may share. A tensor over such a view would be writable, and
would change the object. So views are never passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.loader.executors.process.ring import Ring
from penstock.loader.executors.process.transport import ALIGNMENT, Memory, Slot, unpack

__all__ = ["Buffers", "ReceiveBuffer"]


class Buffers:
    """The large tensors and arrays of one batch, which Ray writes to the object store from where they are.

    Attributes:
        arrays: their memory.
        offsets: where each is to be in the program's memory.
    """

    def __init__(self) -> None:
        self.arrays: list[npt.NDArray[np.uint8]] = []
        self.offsets: list[int] = []
        self._used = 0

    def put(self, address: int, nbytes: int, read: Callable[[], npt.NDArray[np.uint8]]) -> int:
        """See `penstock.loader.executors.process.transport.Target`."""
        offset = self._used
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.arrays.append(read())
        self.offsets.append(offset)
        return offset


class ReceiveBuffer:
    """The memory for arriving batches of one loader. A batch belongs to the user while anything refers to it."""

    def __init__(self) -> None:
        self._ring = Ring()
        self._memory = Memory(self._ring.file)

    def land(self, data: bytes, offsets: Sequence[int], arrays: Sequence[npt.NDArray[np.uint8]]) -> tuple[Any, str]:
        """Return the batch, and its way: "message" if nothing in it is large, else "ring", or "refused".

        Raises:
            RingError: too little memory.
            Exception: an error of unpickling.
        """
        if not arrays:
            return unpack(data, None), "message"
        used, memory, way = offsets[-1] + arrays[-1].nbytes, None, "ring"
        number, extent = self._ring.lend()
        slot = Slot(self._memory, number, extent)
        try:
            if slot.empty((used,), torch.uint8) is not None:
                memory = self._ring.lease(number, slot.extent, used)
        finally:
            if memory is None:
                self._ring.give_back(number, slot.extent)
        if memory is None:
            memory, way = np.empty(used, np.uint8), "refused"
        for offset, array in zip(offsets, arrays, strict=True):
            memory[offset : offset + array.nbytes] = array
        return unpack(data, memory), way
