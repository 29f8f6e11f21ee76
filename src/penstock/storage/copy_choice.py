"""Choose which objects of an epoch are copied, and which are read by ranges; jobs and planning share this arithmetic.

all objects fit the cache, or the objects in use at a time take half of it:   all are copied when they are needed
else (a global shuffle):                                                      as many as fit stay; ranges of others
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.storage.futures import NEVER

__all__ = ["come_and_go", "stay", "usable"]

_IN_USE = 2  # all objects are copied if the objects in use at a time take at most 1/2 of the cache
_SPARE = 100  # 1/100 of the cache stays free, for its other files

Ints = npt.NDArray[np.int64]


def usable(limit: int) -> int:
    """Return the bytes of a cache's limit that are available for copies."""
    return limit * (_SPARE - 1) // _SPARE


def come_and_go(sizes: Ints, first: Ints, last: Ints, room: int) -> bool:
    """Return whether all objects can be copied at the time they are needed.

    Args:
        sizes: in bytes.
        first, last: the first and last position that needs each object; -1 for ``last`` if none does.
        room: bytes for copies.
    """
    return bool(sizes.sum() <= room or _in_use(first, last, sizes) <= room // _IN_USE)


def stay(sizes: Ints, again: Ints, there: npt.NDArray[np.bool_], names: list[int], room: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the objects that are copied and stay, if not all can be.

    Args:
        sizes: in bytes.
        again: the position that needs each object in the next epoch, `NEVER` if none does.
        there: mask of the objects already in the cache.
        names: hashes, so that all processes choose the same objects.
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
    """Return the maximum bytes of objects in use at the same time."""
    used = last >= 0
    at = np.concatenate([first[used], last[used] + 1])
    change = np.concatenate([sizes[used], -sizes[used]])
    order = np.lexsort((change, at))
    return int(np.cumsum(change[order]).max(initial=0))
