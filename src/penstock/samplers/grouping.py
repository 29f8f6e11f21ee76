"""Pure, vectorised functions that form batches of one group each from a stream of indices.

`Rows` are pairs of int64 arrays ``(indices, ordinals)`` of shape (batches, batch size). An ordinal is the position of
an index in the stream. Blocks of rows are in the order of the batch numbers, full and partial batches alike (a block
of partial batches has one row).

Invariant: every index of the stream, repeats included, is in exactly one row, except for dropped partial batches. The
numbering does not depend on where the stream was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from penstock.errors import SamplerError
from penstock.order.permutation import Indices

__all__ = ["Groups", "Rows", "by_completion", "by_first"]

Rows = tuple[Indices, Indices]
GroupIds = npt.NDArray[np.integer]

_COUNT_CHUNK = 1 << 18
_LARGEST_BLOCK = 1 << 11
"""Batches in a block. Lists of very many more would trigger Python's garbage collector repeatedly."""


class Groups:
    """The group of every sample, as small integers.

    Args:
        ids: one integer per sample, in any range. Unsigned 16-bit numbers are stored unchanged (one or two bytes per
            sample); others are renumbered, in O(N log N) once.

    Raises:
        SamplerError: ids are not a one-dimensional array of integers.
    """

    def __init__(self, ids: npt.ArrayLike) -> None:
        array = np.asarray(ids)
        if array.size == 0:
            array = array.astype(np.uint8)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise SamplerError(
                f"group_ids must be a one-dimensional array of integers, one per sample, got {array.dtype} of shape "
                f"{array.shape}"
            )
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        if low < 0 or high >= 1 << 16:
            known, array = np.unique(array, return_inverse=True)
            high = len(known) - 1
        self.count = high + 1
        # NumPy sorts integers of 16 bits or fewer by radix, in linear time.
        self.ids: GroupIds = np.ascontiguousarray(array, dtype=np.min_scalar_type(high))

    def __len__(self) -> int:
        return len(self.ids)

    def of(self, indices: Indices) -> GroupIds:
        """Return the groups of samples.

        Raises:
            SamplerError: an index has no group.
        """
        if indices.size:
            low, high = int(indices.min()), int(indices.max())
            if low < 0 or high >= len(self.ids):
                raise SamplerError(
                    f"the sampler yielded index {low if low < 0 else high}, but group_ids has {len(self.ids)} entries: "
                    "pass one for every sample of the dataset"
                )
        return self.ids[indices]

    def sizes(self, chunks: Iterable[GroupIds] | None = None) -> Indices:
        """Return the number of samples of each group, or how often it occurs in chunks of groups: int64 (count,)."""
        if chunks is None:
            chunks = (self.ids[a : a + _COUNT_CHUNK] for a in range(0, len(self.ids), _COUNT_CHUNK))
        total = np.zeros(self.count, dtype=np.int64)
        for chunk in chunks:
            total += np.bincount(chunk, minlength=self.count)
        return total


def by_completion(
    chunks: Iterable[Indices], of: Callable[[Indices], GroupIds], batch_size: int, drop_partial: bool
) -> Iterator[Rows]:
    """Yield full batches in the order of their last members, then partial batches in the same order.

    Memory: a few arrays of the size of a chunk, plus ``batch_size`` samples of every group.
    """
    base = 0
    # Members of batches that are not full yet.
    indices = ordinals = np.empty(0, dtype=np.int64)
    for chunk in chunks:
        indices = np.concatenate([indices, chunk])
        ordinals = np.concatenate([ordinals, np.arange(base, base + len(chunk), dtype=np.int64)])
        base += len(chunk)
        batches = _arrange(of(indices), batch_size)
        full = np.flatnonzero(batches[:, -1] >= 0)
        order = np.argsort(ordinals[batches[full, -1]])
        for members in _in_blocks(batches[full[order]]):
            yield indices[members], ordinals[members]
        rest = batches[batches[:, -1] < 0]
        rest = rest[rest >= 0]
        indices, ordinals = indices[rest], ordinals[rest]
    if not drop_partial:
        batches = _arrange(of(indices), batch_size)
        order = np.argsort(ordinals[batches.max(axis=1)])
        for members in _in_blocks(batches[order]):
            yield indices[members], ordinals[members]


def by_first(
    chunks: Iterable[Indices], of: Callable[[Indices], GroupIds], batch_size: int, drop_partial: bool
) -> Iterator[Rows]:
    """Yield batches in the order of their first members, as in maskrcnn-benchmark.

    An earlier batch may be filled by the last index, so this holds the whole stream: about 40 bytes per index, and at
    least 8 x groups x ``batch_size`` bytes.
    """
    indices = np.concatenate([np.empty(0, dtype=np.int64), *chunks])
    batches = _arrange(of(indices), batch_size)
    if drop_partial:
        batches = batches[batches[:, -1] >= 0]
    for members in _in_blocks(batches[np.argsort(batches[:, 0])]):
        yield indices[members], members


def _arrange(groups: GroupIds, batch_size: int) -> Indices:
    """Return the places of the members of each batch, one batch a row. After a group's last member come -1."""
    places = np.argsort(groups, kind="stable")
    groups = groups[places]
    first = np.ones(len(groups), np.bool_)
    first[1:] = groups[1:] != groups[:-1]
    starts = np.flatnonzero(first)
    sizes = np.diff(starts, append=len(groups))
    missing = -sizes % batch_size
    batches = np.full(len(groups) + missing.sum(), -1)
    batches[np.repeat(np.tile([True, False], len(sizes)), np.ravel([sizes, missing], order="F"))] = places
    return batches.reshape(-1, batch_size)


def _in_blocks(batches: Indices) -> Iterator[Indices]:
    """Yield the members of batches of `_arrange` in blocks of batches of one size."""
    partial = np.flatnonzero(batches[:, -1] < 0)
    cuts = np.unique(np.concatenate([partial, partial + 1, np.arange(0, len(batches), _LARGEST_BLOCK)]))
    for block in np.split(batches, cuts):
        if len(block):
            yield block if block[0, -1] >= 0 else block[block >= 0][None]
