"""Batches of one group each, formed from a stream of indices: pure functions over chunks, vectorised.

Rows are pairs of int64 arrays ``(indices, ordinals)`` of shape (batches, batch size); an ordinal is the place of an
index in the stream. Blocks of rows come in the order in which batches are numbered, full ones and partial ones alike
(a block of partial batches has one row).

Invariant: every index of the stream is in exactly one row, repeats included (but for partial batches that are to be
dropped), and the numbering does not depend on where the stream was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from penstock.errors import SamplerError
from penstock.order.permutation import Indices

__all__ = ["Groups", "Rows", "batch_count", "by_completion", "by_first", "deal", "fill"]

Rows = tuple[Indices, Indices]
GroupIds = npt.NDArray[np.integer]

_COUNT_CHUNK = 1 << 18
_FULL_ROWS = 1 << 13


class Groups:
    """The group of every sample, as small integers.

    Args:
        ids: one integer per sample, in any range. Those that fit 16 bits without a sign are kept as they are (one or
            two bytes a sample); others are numbered anew, at O(N log N) once.

    Raises:
        SamplerError: not a one-dimensional array of integers.
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
        # NumPy sorts integers of 16 bits and less by radix, in linear time.
        self.ids: GroupIds = np.ascontiguousarray(array, dtype=np.min_scalar_type(high))

    def __len__(self) -> int:
        return len(self.ids)

    def of(self, indices: Indices) -> GroupIds:
        """The groups of samples.

        Raises:
            SamplerError: an index without a group.
        """
        if indices.size:
            low, high = int(indices.min()), int(indices.max())
            if low < 0 or high >= len(self.ids):
                raise SamplerError(
                    f"the sampler gave index {low if low < 0 else high}, but group_ids has {len(self.ids)} entries: "
                    "there must be one for every sample of the data set"
                )
        return self.ids[indices]

    def sizes(self) -> Indices:
        """How many samples each group has: int64 of shape (count,), in one pass."""
        return self.sizes_in(self.ids[a : a + _COUNT_CHUNK] for a in range(0, len(self.ids), _COUNT_CHUNK))

    def sizes_in(self, chunks: Iterable[GroupIds]) -> Indices:
        """How many indices of each group chunks of group numbers hold."""
        total = np.zeros(self.count, dtype=np.int64)
        for chunk in chunks:
            total += np.bincount(chunk, minlength=self.count)
        return total


def batch_count(sizes: Indices, batch_size: int, drop_partial: bool) -> int:
    """How many batches groups of these sizes make."""
    full = int((sizes // batch_size).sum())
    return full if drop_partial else full + int(np.count_nonzero(sizes % batch_size))


def by_completion(
    chunks: Iterable[Indices], of: Callable[[Indices], GroupIds], batch_size: int, drop_partial: bool
) -> Iterator[Rows]:
    """Batches in the order in which their last member comes, then the partial ones likewise.

    Memory: a few arrays of the size of a chunk, plus fewer than ``batch_size`` samples of every group.
    """
    base = 0
    indices = ordinals = np.empty(0, dtype=np.int64)  # members of batches that are not full yet
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
    """Batches in the order in which their first member comes, as in maskrcnn-benchmark.

    A batch cannot be given out before it is known to be full, so this keeps the whole stream: about 40 bytes an index.
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
    """Places of the members of full batches (one a row), places of the others by group, and where each group ends."""
    places = np.argsort(groups, kind="stable")
    groups = groups[places]
    starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]])) if len(groups) else np.empty(0, int)
    sizes = np.diff(starts, append=len(groups))
    whole = sizes // batch_size * batch_size
    within = np.arange(len(groups)) - np.repeat(starts, sizes)
    in_full = within < np.repeat(whole, sizes)
    left = sizes - whole
    return places[in_full].reshape(-1, batch_size), places[~in_full], np.cumsum(left[left > 0])


def deal(blocks: Iterable[Rows], world_size: int, rank: int, consumed: int, remainder: str) -> Iterator[Rows]:
    """The rows of one rank: batch number g of the job goes to rank ``(g - consumed) % world_size``.

    Args:
        blocks: all batches of the epoch, from its first.
        consumed: batches at the front that the job has had.
        remainder: ``"pad"`` repeats the first batches of the epoch until all ranks have equally many (in ordinals that
            lie behind the stream's), ``"drop"`` leaves the last ones out, ``"uneven"`` does neither.
    """
    number = samples = 0  # batches and samples so far
    head: list[Rows] = []  # what may have to be repeated
    held: list[tuple[int, Rows]] = []  # at most one batch whose round is not complete yet
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
    """Numbers of the batches that `deal` repeats to fill up the last round."""
    missing = -(counts - consumed) % world_size if counts > consumed else 0
    return [(counts + i) % counts for i in range(missing)]
