"""Copy batches once from the object store to memory of the user, in reused slots.

Ray returns read-only views of objects that other readers may share. A tensor over such a view would be writable, and
would change the object. So views are never passed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.loader.arena import aligned
from penstock.loader.executors.process.pack import unpack
from penstock.loader.executors.process.ring import Ring

__all__ = ["ReceiveBuffer"]


class ReceiveBuffer:
    """The memory for arriving batches of one loader. A batch belongs to the user while anything refers to it."""

    def __init__(self) -> None:
        self._ring = Ring(1, 1, head=0)  # one slot for the arriving batch, and those that the user may hold

    def land(self, data: bytes, arrays: Sequence[npt.NDArray[np.uint8]]) -> tuple[Any, str]:
        """Return the batch, and how it was transferred.

        That is "message" if nothing in it is large, "ring", or "fresh" memory if the user holds so many batches that no
        slot is free.

        Raises:
            RingError: too little memory.
        """
        if not arrays:
            return unpack(data, ()), "message"
        sizes = [array.nbytes for array in arrays]
        nbytes = sum(map(aligned, sizes))
        self._ring.learn(nbytes)
        slot = None if self._ring.short else self._ring.lend(nbytes)
        if slot is None:
            return unpack(data, [array.copy() for array in arrays]), "fresh"
        offsets = np.cumsum([0, *map(aligned, sizes)]).tolist()
        here = self._ring.lease(slot, list(zip(offsets, sizes, strict=False)))
        for target, array in zip(here, arrays, strict=True):
            target[:] = array
        return unpack(data, here), "ring"
