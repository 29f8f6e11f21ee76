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

__all__ = ["Groups", "Rows", "batch_count", "by_completion", "by_first", "fill", "rank_rows"]

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

    def sizes(self) -> Indices:
        """Return the number of samples of each group: int64 of shape (count,), in one pass."""
        return self.sizes_in(self.ids[a : a + _COUNT_CHUNK] for a in range(0, len(self.ids), _COUNT_CHUNK))

    def sizes_in(self, chunks: Iterable[GroupIds]) -> Indices:
        """Return how many times each group occurs in chunks of group numbers."""
        total = np.zeros(self.count, dtype=np.int64)
        for chunk in chunks:
            total += np.bincount(chunk, minlength=self.count)
        return total


def batch_count(sizes: Indices, batch_size: int, drop_partial: bool) -> int:
    """Return the number of batches of groups of these sizes."""
    full = int((sizes // batch_size).sum())
    return full if drop_partial else full + int(np.count_nonzero(sizes % batch_size))


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


def rank_rows(blocks: Iterable[Rows], world_size: int, rank: int, consumed: int, remainder: str) -> Iterator[Rows]:
    """Yield the rows of one rank: batch g of the job goes to rank ``(g - consumed) % world_size``.

    Args:
        blocks: all batches of the epoch, from its first.
        consumed: number of first batches that the job has consumed.
        remainder: ``"pad"`` repeats the first batches of the epoch until all ranks have the same number (with ordinals
            after those of the stream), ``"drop"`` leaves the last ones out, ``"uneven"`` does neither.
    """
    number = samples = 0  # batches and samples so far
    # The first batches, which may have to be repeated.
    head: list[Rows] = []
    # Holds at most one batch, whose round is not complete yet.
    held: list[tuple[int, Rows]] = []
    for indices, ordinals in blocks:
        begin, number = number, number + len(indices)
        samples = max(samples, int(ordinals.max()) + 1)
        head += [
            (indices[i : i + 1], ordinals[i : i + 1]) for i in range(min(len(indices), world_size - 1 - len(head)))
        ]
        first = consumed + rank
        first += max(0, -(-(begin - first) // world_size)) * world_size
        own = slice(first - begin, None, world_size)
        if first >= number:
            mine: Rows | None = None
        else:
            mine = indices[own], ordinals[own]
        if remainder != "drop":
            if mine is not None:
                yield mine
            continue
        complete = consumed + (number - consumed) // world_size * world_size
        if held and held[0][0] < complete:
            yield held.pop()[1]
        if mine is not None:
            ready = max(0, -(-(complete - first) // world_size))
            if ready:
                yield mine[0][:ready], mine[1][:ready]
            if ready < len(mine[0]):
                held.append((first + ready * world_size, (mine[0][ready:], mine[1][ready:])))
    if remainder == "pad" and number > consumed:
        missing = consumed + rank + (-(-(number - consumed - rank) // world_size)) * world_size
        if missing < number + -(number - consumed) % world_size:
            indices, ordinals = head[missing % number]
            yield indices, ordinals + missing // number * samples


def fill(counts: int, world_size: int, consumed: int) -> list[int]:
    """Return the numbers of the batches that `rank_rows` repeats to fill the last round."""
    missing = -(counts - consumed) % world_size if counts > consumed else 0
    return [(counts + i) % counts for i in range(missing)]
