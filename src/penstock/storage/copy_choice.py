"""Which objects of an epoch become copies, and of which ranges are read: arithmetic that jobs and plans share.

all of them fit the cache, or those in use at a time take half of it:   copies come and go
else (a global shuffle):                                                as many stay as fit, ranges of the others
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.storage.futures import NEVER

__all__ = ["come_and_go", "stay", "usable"]

_IN_USE = 2  # objects come and go as copies where those in use take one part of so many of the cache
_SPARE = 100  # one part of so many of the cache stays free, for what it writes beside copies

Ints = npt.NDArray[np.int64]


def usable(limit: int) -> int:
    """Return how many bytes of a cache's bound are for copies."""
    return limit * (_SPARE - 1) // _SPARE


def come_and_go(sizes: Ints, first: Ints, last: Ints, room: int) -> bool:
    """Return whether all objects can be copied when they are needed.

    Args:
        sizes: in bytes.
        first, last: the positions that need each of them first and last; -1 for ``last`` where none does.
        room: bytes for copies.
    """
    return bool(sizes.sum() <= room or _in_use(first, last, sizes) <= room // _IN_USE)


def stay(sizes: Ints, again: Ints, there: npt.NDArray[np.bool_], names: list[int], room: int) -> npt.NDArray[np.bool_]:
    """Return which objects are copied and stay, where not all of them can.

    Args:
        sizes: in bytes.
        again: the position that needs each of them in the next epoch, `NEVER` where none does.
        there: which are in the cache already.
        names: hashes, by which all processes choose alike.
        room: bytes for copies.
    """
    order = sorted(range(len(sizes)), key=lambda at: (not there[at], again[at] == NEVER, names[at]))
    kept = np.zeros(len(sizes), np.bool_)
    for at in order:
        if sizes[at] <= room:
            kept[at] = True
            room -= int(sizes[at])
    return kept


def _in_use(first: Ints, last: Ints, sizes: Ints) -> int:
    """Return the bytes of the objects that are in use at the same time, at most."""
    used = last >= 0
    at = np.concatenate([first[used], last[used] + 1])
    change = np.concatenate([sizes[used], -sizes[used]])
    order = np.lexsort((change, at))
    return int(np.cumsum(change[order]).max(initial=0))
