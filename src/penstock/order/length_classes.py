"""`LengthClasses`: classes of similar lengths (buckets), cut so that batches of one class need the least padding.

On average, a sample is padded by half the width of its class. For a given number of classes, padding is smallest when
widths are in proportion to 1 / sqrt(density of lengths): the rule of companding quantisers (Gersho, "Asymptotically
optimal block quantization", IEEE Transactions on Information Theory, 1979) for an absolute error. Padding falls as
1 / classes, for any distribution of lengths.

The classes are computed from a histogram, in one pass over the lengths and a few MB of memory. Its bins are exact below
16,384 and 0.012 % wide above. Classes are numbered from the longest to the shortest, because `ClassBatches` fills a
batch at the end of a class with samples of the next class, which must not be longer. Class 0 has the misfits: lengths
above the limit.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import OrderError
from penstock.order.classes import ClassBatches
from penstock.order.permutation import Indices

__all__ = ["LengthClasses", "Lengths"]

_CHUNK = 1 << 18
_SHORT = 1 << 16
_NEAR = 16
"""The density at a length counts lengths that differ by at most 1/16 of it."""
_SHIFT = 52 - 13
"""A bin is defined by the highest bit of a length and the 13 bits below it."""
_ONE = 1023 << 13  # the bits of 1.0


class Lengths(Protocol):
    """Sample lengths, integers of 0 or more: an array, or an object whose slices are arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> npt.NDArray[Any]: ...


class LengthClasses:
    """At most ``count`` classes with little padding, and class 0 for lengths above the limit.

    Args:
        lengths: of all samples; a length of 0 counts as 1.
        limit: the longest length that is not a misfit, 1 or more.
        count: the largest number of classes, 1 or more.

    Raises:
        OrderError: a length is negative, or lengths are not integers.

    >>> classes = LengthClasses(np.array([3, 9, 4, 10, 3, 50]), 10, 2)
    >>> classes.longest.tolist(), classes.of(np.array([3, 9, 50])).tolist(), classes.misfit
    ([50, 10, 4], [2, 1, 0], (5, 50))
    """

    def __init__(self, lengths: Lengths, limit: int, count: int) -> None:
        self.limit = limit
        bins = int(_bins(np.array([limit]))[0]) + 1
        # The longest length in each bin.
        behind = (np.arange(1, bins + 1, dtype=np.int64) + _ONE) << _SHIFT
        ends = np.minimum(np.ceil(behind.view(np.float64)).astype(np.int64) - 1, limit)
        samples, too_long, longest, misfit = _histogram(lengths, limit, bins)
        self.misfit: tuple[int, int] | None = misfit
        """Row and length of the first sample above the limit; None if no sample is too long."""
        cuts = _cuts(samples, ends, count)
        self.longest: Indices = np.concatenate([[longest or limit], ends[cuts][::-1]])
        """The upper end of each class, descending. For class 0, the misfits, it is the longest length, or the limit if
        no sample is too long.
        """
        self.samples: Indices = np.concatenate([[too_long], np.diff(np.cumsum(samples)[cuts], prepend=0)[::-1]])
        """Number of samples of each class."""
        numbers = np.maximum(1, len(cuts) - np.searchsorted(cuts, np.arange(bins)))
        self._table = numbers.astype(np.min_scalar_type(len(cuts)))
        """The class of each bin of lengths up to the limit."""

    def __len__(self) -> int:
        return len(self.longest)

    def batches(
        self, *, max_batch: int | None = None, drop_too_long: bool = False, drop_last: bool = False
    ) -> ClassBatches:
        """Return batches whose padded size, longest length x number of samples, is at most the limit.

        Args:
            max_batch: the largest number of samples in a batch.
            drop_too_long: leave out samples above the limit; otherwise each is a batch of its own.
            drop_last: leave out the one batch that may be partial.
        """
        sizes = np.maximum(1, self.limit // self.longest)
        if max_batch is not None:
            sizes = np.minimum(sizes, max_batch)
        starts = np.concatenate([[0], np.cumsum(self.samples)])
        # Class 0 has the samples that are too long.
        first = 1 if drop_too_long else 0
        return ClassBatches(starts[first:], sizes[first:], fill=True, drop_last=drop_last)

    def of(self, lengths: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the class of each length: small integers of the same shape."""
        bins = np.minimum(_bins(lengths), len(self._table) - 1)
        return np.where(lengths > self.limit, self._table.dtype.type(0), self._table[bins])


def _cuts(samples: Indices, ends: Indices, count: int) -> Indices:
    """Return the last bin of each class, ascending: at most ``count`` classes, none of them empty."""
    filled = np.flatnonzero(samples)
    if not len(filled):
        return np.zeros(1, dtype=np.int64)
    # The density is averaged around each bin: a small dataset has few samples of each length, or none.
    low, high = _bins(ends - ends // _NEAR), np.minimum(_bins(ends + ends // _NEAR), len(ends) - 1)
    before, below = np.concatenate([[0], np.cumsum(samples)]), np.concatenate([[0], ends])
    density = (before[high + 1] - before[low]) / np.maximum(1, below[high + 1] - below[low])
    share = np.cumsum(np.sqrt(density) * np.diff(below))
    wanted = np.searchsorted(share, share[filled[-1]] * (np.arange(1, count) / count))
    # A class must end at the length of some sample.
    inside = np.searchsorted(filled, wanted, side="right") - 1
    return np.unique(np.append(filled[inside[inside >= 0]], filled[-1]))


def _histogram(lengths: Lengths, limit: int, bins: int) -> tuple[Indices, int, int, tuple[int, int] | None]:
    """Return the number of lengths up to the limit in each bin; the number and maximum of the lengths above; and row
    and length of the first one.
    """
    samples, count, longest, first = np.zeros(bins, dtype=np.int64), 0, 0, None
    # Counting short lengths directly takes a fifth of the time of computing their bins.
    short = np.zeros(min(_SHORT, limit + 1), dtype=np.int64)
    for begin in range(0, len(lengths), _CHUNK):
        chunk = np.asarray(lengths[begin : begin + _CHUNK])
        if chunk.ndim != 1 or chunk.dtype.kind not in "iu":
            raise OrderError(f"lengths must be integers, one per sample, got {chunk.dtype} of shape {chunk.shape}")
        if int(chunk.min()) < 0:
            row = int(np.flatnonzero(chunk < 0)[0])
            raise OrderError(f"sample {begin + row} has length {int(chunk[row])}: lengths must be 0 or more")
        if int(chunk.max()) > limit:
            long = np.flatnonzero(chunk > limit)
            first = first or (begin + int(long[0]), int(chunk[long[0]]))
            count, longest = count + len(long), max(longest, int(chunk.max()))
            chunk = chunk[chunk <= limit]
        if int(chunk.max(initial=0)) < len(short):
            short += np.bincount(chunk, minlength=len(short))
        else:
            samples += np.bincount(_bins(chunk), minlength=bins)
    np.add.at(samples, _bins(np.arange(len(short))), short)
    return samples, count, longest, first


def _bins(lengths: npt.NDArray[Any]) -> Indices:
    """Return the bin of each length, ascending with the length: its highest bit and the 13 bits below."""
    bits: Indices = np.maximum(lengths, 1).astype(np.float64).view(np.int64)
    bits >>= _SHIFT
    bits -= _ONE
    return bits
