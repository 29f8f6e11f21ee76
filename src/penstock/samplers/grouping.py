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

__all__ = ["Groups", "Rows", "by_completion", "by_first", "rank_rows"]

Rows = tuple[Indices, Indices]
GroupIds = npt.NDArray[np.integer]

_COUNT_CHUNK = 1 << 18
_FULL_ROWS = 1 << 13


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

    Memory: a few arrays of the size of a chunk, plus fewer than ``batch_size`` samples of every group.
    """
    base = 0
    # Members of batches that are not full yet.
    indices = ordinals = np.empty(0, dtype=np.int64)
    for chunk in chunks:
        indices = np.concatenate([indices, chunk])
        ordinals = np.concatenate([ordinals, np.arange(base, base + len(chunk), dtype=np.int64)])
        base += len(chunk)
        full, rest, _ = _arrange(of(indices), batch_size)
        if len(full):
            full = full[np.argsort(ordinals[full[:, -1]])]
            yield indices[full], ordinals[full]
        indices, ordinals = indices[rest], ordinals[rest]
    if not drop_partial and len(indices):
        _, rest, ends = _arrange(of(indices), batch_size)
        partial = np.split(rest, ends[:-1])
        for members in sorted(partial, key=lambda members: int(ordinals[members[-1]])):
            yield indices[members][None], ordinals[members][None]


def by_first(
    chunks: Iterable[Indices], of: Callable[[Indices], GroupIds], batch_size: int, drop_partial: bool
) -> Iterator[Rows]:
    """Yield batches in the order of their first members, as in maskrcnn-benchmark.

    An earlier batch may be filled by the last index, so this holds the whole stream: about 40 bytes per index.
    """
    indices = np.concatenate([np.empty(0, dtype=np.int64), *chunks])
    full, rest, ends = _arrange(of(indices), batch_size)
    full = full[np.argsort(full[:, 0])]
    partial = [] if drop_partial or not len(rest) else np.split(rest, ends[:-1])
    begin = 0
    for members in sorted(partial, key=lambda members: int(members[0])):
        stop = int(np.searchsorted(full[:, 0], members[0]))
        yield from _in_blocks(indices, full[begin:stop])
        yield indices[members][None], members[None]
        begin = stop
    yield from _in_blocks(indices, full[begin:])


def _in_blocks(indices: Indices, full: Indices) -> Iterator[Rows]:
    for a in range(0, len(full), _FULL_ROWS):
        yield indices[full[a : a + _FULL_ROWS]], full[a : a + _FULL_ROWS]


def _arrange(groups: GroupIds, batch_size: int) -> tuple[Indices, Indices, Indices]:
    """Return the places of the members of full batches (one batch a row), of the other members by group, and the ends
    of the groups among these others.
    """
    places = np.argsort(groups, kind="stable")
    groups = groups[places]
    starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]])) if len(groups) else np.empty(0, int)
    sizes = np.diff(starts, append=len(groups))
    whole = sizes // batch_size * batch_size
    within = np.arange(len(groups)) - np.repeat(starts, sizes)
    in_full = within < np.repeat(whole, sizes)
    left = sizes - whole
    return places[in_full].reshape(-1, batch_size), places[~in_full], np.cumsum(left[left > 0])


def rank_rows(
    blocks: Iterable[Rows], consumed: int, rank: int, world_size: int, *, end: int | None, pad: bool
) -> Iterator[Rows]:
    """Yield the rows of one rank: batch g of the job goes to rank ``(g - consumed) % world_size``.

    Args:
        blocks: all batches of the epoch, from its first.
        consumed: number of first batches that the job has consumed.
        rank, world_size: this rank, and the number of ranks.
        end: leave out the batches from this number on.
        pad: repeat the first batches of the epoch until all ranks have the same number, with ordinals after those of
            the stream.
    """
    mine = consumed + rank  # number of the next batch of this rank
    number = samples = 0  # batches and samples so far
    # The first batches, which may have to be repeated.
    head: list[Rows] = []
    for indices, ordinals in blocks:
        begin, number = number, number + len(indices)
        samples = max(samples, int(ordinals.max()) + 1)
        missing = min(len(indices), world_size - 1 - len(head))
        head += [(indices[i : i + 1], ordinals[i : i + 1]) for i in range(missing)]
        own = range(mine, number if end is None else min(number, end), world_size)
        if own:
            at = slice(own.start - begin, own.stop - begin, world_size)
            yield indices[at], ordinals[at]
            mine = own[-1] + world_size
    # If the last round is not full, this rank may have no batch in it.
    if pad and number > consumed and mine < number + -(number - consumed) % world_size:
        indices, ordinals = head[mine % number]
        yield indices, ordinals + mine // number * samples
