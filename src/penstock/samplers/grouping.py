"""Batches of one group each, formed from a stream of indices.

A block of batches is two int64 arrays of shape (batches, batch size): the indices, and their positions in the stream.
Blocks are in the order of the batch numbers, full and partial batches alike (a partial batch is a block of its own).

Invariant: every index of the stream, repeats included, is in exactly one batch, except for dropped partial batches. The
numbering does not depend on where the stream was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import SamplerError
from penstock.order.permutation import Indices
from penstock.plan.class_plan import SampleClasses

__all__ = ["ORDERS", "Groups", "form_batches"]

ORDERS = ("completion", "first")
"""The orders of `form_batches`."""

GroupIds = npt.NDArray[np.integer]

_COUNT_CHUNK = 1 << 18
_LARGEST_BLOCK = 1 << 11
"""Batches in a block. Lists of very many more would trigger Python's garbage collector repeatedly."""


class Groups(SampleClasses):
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
        # NumPy sorts integers of 16 bits or fewer by radix, in linear time.
        self.ids: GroupIds = np.ascontiguousarray(array, dtype=np.min_scalar_type(high))
        super().__init__(self.ids, high + 1, digest=xxhash.xxh3_64_hexdigest(self.ids.view(np.uint8).data))

    def of(self, indices: Indices) -> GroupIds:
        """Return the groups of samples.

        Raises:
            SamplerError: an index has no group.
        """
        if indices.size:
            low, high = int(indices.min()), int(indices.max())
            if low < 0 or high >= len(self):
                raise SamplerError(
                    f"the sampler yielded index {low if low < 0 else high}, but group_ids has {len(self)} entries: "
                    "pass one for every sample of the dataset"
                )
        return self.ids[indices]

    @cached_property
    def sizes(self) -> Indices:
        """Number of samples of each group: int64 of shape (count,)."""
        return self.count_in(self.ids[a : a + _COUNT_CHUNK] for a in range(0, len(self.ids), _COUNT_CHUNK))

    def count_in(self, chunks: Iterable[GroupIds]) -> Indices:
        """Return how often each group occurs in chunks of groups: int64 of shape (count,)."""
        total = np.zeros(self.count, dtype=np.int64)
        for chunk in chunks:
            total += np.bincount(chunk, minlength=self.count)
        return total


def form_batches(
    chunks: Iterable[Sequence[Indices]], groups: Groups, batch_size: int, order: str, *, drop_partial: bool
) -> Iterator[tuple[Indices, Indices]]:
    """Yield blocks of batches.

    Args:
        chunks: indices and positions of the stream, one part after the other.
        groups: of all samples.
        batch_size: number of samples in a full batch.
        order: ``"completion"``: full batches in the order of their last members, then partial batches in the same
            order. Memory: a few arrays of the size of a chunk, plus ``batch_size`` samples of every group.
            ``"first"``: in the order of their first members. An earlier batch may be filled by the last index, so this
            holds the whole stream: about 40 bytes per index, and at least 8 x groups x ``batch_size`` bytes.
        drop_partial: leave out partial batches.
    """
    # Samples that are in no batch yet, in the order of the stream.
    stream: Indices = np.empty((2, 0), np.int64)
    if order == "first":
        stream, chunks = np.hstack([stream, *chunks]), ()
    for chunk in chunks:
        stream = np.hstack([stream, chunk])
        batches = _arrange(groups.of(stream[0]), batch_size)
        full = batches[:, -1] >= 0
        yield from _in_blocks(batches[full], batches[full, -1], stream)
        rest = np.sort(batches[~full], axis=None)
        stream = stream[:, rest[rest >= 0]]
    batches = _arrange(groups.of(stream[0]), batch_size)
    if drop_partial:
        batches = batches[batches[:, -1] >= 0]
    yield from _in_blocks(batches, batches[:, 0] if order == "first" else batches.max(axis=1), stream)


def _arrange(groups: GroupIds, batch_size: int) -> Indices:
    """Return the places of the members of each batch, one batch a row. After a group's last member come -1."""
    sizes = np.bincount(groups)
    missing = -sizes % batch_size
    batches = np.full(len(groups) + missing.sum(), -1)
    filled = np.repeat(np.tile([True, False], len(sizes)), np.ravel([sizes, missing], order="F"))
    batches[filled] = np.argsort(groups, kind="stable")
    return batches.reshape(-1, batch_size)


def _in_blocks(batches: Indices, keys: Indices, stream: Indices) -> Iterator[tuple[Indices, Indices]]:
    """Yield batches of `_arrange` in ascending order of their keys, in blocks of batches of one size."""
    indices, positions = stream
    batches = batches[np.argsort(keys)]
    partial = np.flatnonzero(batches[:, -1] < 0)
    cuts = np.unique(np.concatenate([partial, partial + 1, np.arange(0, len(batches), _LARGEST_BLOCK)]))
    for block in np.split(batches, cuts):
        if len(block):
            members = block if block[0, -1] >= 0 else block[block >= 0][None]
            yield indices[members], positions[members]
