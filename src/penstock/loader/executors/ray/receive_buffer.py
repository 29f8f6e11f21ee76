"""From the object store to memory that is the user's: one copy, into slots that are used again.

What Ray returns are read-only views of an object that other readers may share; a tensor over one would be writable all
the same, and would change the object. So nothing of it is ever handed out.
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
    """Where batches of one loader arrive. A batch is the user's as long as anything refers to it."""

    def __init__(self) -> None:
        self._ring = Ring(1, 1, head=0)  # one for the batch that arrives, and those that the user may hold

    def land(self, data: bytes, arrays: Sequence[npt.NDArray[np.uint8]]) -> tuple[Any, str]:
        """The batch, and how it came: "message" with nothing large in it, "ring", or "fresh" memory, where the user
        holds on to so many batches that no slot is free.

        Raises:
            RingError: there is too little memory.
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
