"""`measure`: displacement, classes per batch, repeated batches, and runs read, for any order.

Batches are the same as in training: ranks get strided positions (`penstock.order.Partition`), divided into batches. For
a large dataset, only a few hundred whole batches are measured, spread evenly over the epoch. So the cost does not
depend on the number of rows, and results have a sampling error: with 256 batches of 256, displacement has two correct
digits.

Memory is bounded by some thousand samples or one batch, and by one window of positions for counting runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.order import BlockShuffle, Order, Partition
from penstock.order.permutation import Indices
from penstock.wording import counted

__all__ = [
    "Invertible",
    "Labels",
    "Make",
    "Quality",
    "TableOrder",
    "classes_in",
    "measure",
    "runs_in",
    "sorted_labels",
]

Labels = Callable[[Indices], npt.NDArray[Any]]
"""A function that returns the labels of rows: an array of numbers or strings of the same length."""

_GROUP = 1 << 14  # positions per look-up
_WIDEST = 1 << 22  # largest window for counting runs, in positions (32 MB)
_EXACT = 1 << 20  # most rows for which a random batch is drawn without repetition


class Invertible(Order, Protocol):
    """An order with an inverse."""

    @property
    def inverse(self) -> Order:
        """``inverse[order[position]] == position``."""


Make = Callable[[int], Invertible]
"""A function from an epoch to its order."""


class TableOrder:
    """An order from an array of rows: `numpy.random.permutation`, torch's, or your own. O(n) memory.

    Args:
        rows: the row at each position, int64 of shape (n,), each row once.

    >>> int(TableOrder(np.array([2, 0, 1])).inverse[2])
    0
    """

    def __init__(self, rows: Indices) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    @cached_property
    def inverse(self) -> TableOrder:
        """The position of each row."""
        places = np.empty_like(self.rows)
        places[self.rows] = np.arange(len(self.rows))
        return TableOrder(places)


@dataclass(frozen=True)
class Quality:
    """The measurements: means over the measured batches.

    Attributes:
        rows, batch_size, ranks, epochs: the measured job.
        batches: measured batches of each epoch.
        displacement: mean distance of a sample from its place in the file, as a share of the file; 1/3 if random.
        classes: number of different labels in a batch; None without labels.
        classes_low: the 5th percentile of this number over batches.
        classes_random: this number for batches of random rows.
        commonest: share of the most frequent label in a batch.
        pairs_again: share of the pairs in a batch that share a batch again in the next epoch; None for one epoch.
        pairs_random: the same share expected of a random order.
        overlap: largest number of samples that a batch shares with one batch of the next epoch.
        overlap_random: the same for random batches.
        streams: whether the file is read from start to end, as for a shuffle buffer.
        window: number of positions (of all ranks) for which runs were counted; all if the file is streamed.
        runs: number of runs of consecutive rows that are read for that many positions.
    """

    rows: int
    batch_size: int
    ranks: int
    epochs: int
    batches: int
    displacement: float
    classes: float | None
    classes_low: float | None
    classes_random: float | None
    commonest: float | None
    pairs_again: float | None
    pairs_random: float
    overlap: float | None
    overlap_random: float
    streams: bool
    window: int
    runs: float

    @property
    def rows_a_run(self) -> float:
        """Mean length of a run in rows."""
        return self.window / self.runs


def classes_in(labels: npt.NDArray[Any]) -> tuple[int, int]:
    """Return the number of different labels in a batch, and the count of the most frequent one.

    >>> classes_in(np.array([3, 1, 3]))
    (2, 2)
    """
    counts = np.unique(labels, return_counts=True)[1]
    return len(counts), int(counts.max())


def runs_in(rows: Indices) -> int:
    """Return the number of runs of consecutive rows in a set of rows.

    >>> runs_in(np.array([7, 3, 8, 4]))
    2
    """
    return int(np.count_nonzero(np.diff(np.sort(rows)) > 1)) + 1


def sorted_labels(n: int, classes: int) -> Labels:
    """Return the labels of a file of n rows, sorted by class, with classes of equal size: the worst case for mixing."""
    if n * classes < 1 << 62:
        return lambda rows: rows * classes // max(n, 1)
    each = -(-n // classes)  # some classes are a row shorter, which avoids an overflow
    return lambda rows: rows // each


class _Batches:
    """The full batches of an epoch over all ranks, by number: batch b of rank r is ``b * ranks + r``."""

    def __init__(self, n: int, batch_size: int, ranks: int) -> None:
        if batch_size < 1 or ranks < 1:
            raise ConfigError(f"batch size and ranks must be positive, got {batch_size} and {ranks}")
        self.n, self.size, self.ranks = n, batch_size, ranks
        self.count = n // ranks // batch_size * ranks
        if not self.count:
            raise ConfigError(
                f"{counted(n, 'row')} are too few for {counted(ranks, 'rank')} with a batch of {batch_size} each: use "
                "smaller batches or fewer ranks"
            )

    def positions(self, number: int) -> Indices:
        """Return the positions in a batch."""
        batch, rank = divmod(number, self.ranks)
        share = Partition(self.n, self.ranks, rank, remainder="drop")
        return share.positions(batch * self.size, (batch + 1) * self.size)

    def of(self, positions: Indices) -> Indices:
        """Return the batch number of each position; short batches at the end have their own numbers."""
        return positions // (self.ranks * self.size) * self.ranks + positions % self.ranks

    def some(self, most: int | None) -> list[int]:
        """Return numbers of batches, spread evenly over the epoch and the ranks."""
        if most is None or most >= self.count:
            return list(range(self.count))
        stride = self.count / most
        draw = np.random.default_rng(0).random(most)
        return [min(int((k + draw[k]) * stride), self.count - 1) for k in range(most)]


def measure(
    make: Make,
    *,
    batch_size: int,
    ranks: int = 1,
    epochs: int = 2,
    labels: Labels | None = None,
    batches: int | None = 256,
    window: int = 65_536,
    windows: int | None = 16,
    progress: Callable[[int, int], object] | None = None,
) -> Quality:
    """Measure how well an order mixes and how it reads.

    Args:
        make: returns the order of an epoch, counted from 0; wrap an order without ``inverse`` in a `TableOrder`.
        batch_size: samples in a batch of one rank.
        ranks: number of ranks, which get strided positions.
        epochs: number of epochs, 1 or more; batches are compared with the batches of the next epoch.
        labels: returns the labels of rows. None: classes are not measured.
        batches: batches to measure in each epoch; None for all.
        window: positions in a window for counting runs; limited to 4 million, and to half an epoch if that is shorter.
        windows: windows to measure; None for all.
        progress: called with the numbers of finished and of all batches.

    Raises:
        ConfigError: too few rows for a batch on each rank, or a number that is not positive.

    Cost: two look-ups of ``batch_size`` positions for each batch and epoch, and one of ``window`` positions for each
    window: about 0.3 s by default for a global shuffle of any size.
    """
    if epochs < 1 or window < 1 or (batches is not None and batches < 1):
        raise ConfigError(f"epochs, window and batches must be positive, got {epochs}, {window} and {batches}")
    order = make(0)
    n = len(order)
    dealt = _Batches(n, batch_size, ranks)
    chosen = dealt.some(batches)
    group = max(1, _GROUP // batch_size)
    found = _Found()
    done, todo = 0, epochs * len(chosen)
    for epoch in range(epochs):
        following = make(epoch + 1) if epoch + 1 < epochs else None
        for k in range(0, len(chosen), group):
            positions = np.concatenate([dealt.positions(number) for number in chosen[k : k + group]])
            rows = order[positions]
            found.look(dealt, positions, rows, labels, following)
            done += len(positions) // batch_size
            if progress is not None:
                progress(done, todo)
        order = following or order
    return found.summary(dealt, epochs, len(chosen), labels, _runs(order, window, windows))


class _Found:
    """Collects measurements, batch by batch."""

    def __init__(self) -> None:
        self.moved: list[float] = []
        self.classes: list[tuple[int, int]] = []
        self.again: list[Indices] = []

    def look(
        self, dealt: _Batches, positions: Indices, rows: Indices, labels: Labels | None, following: Invertible | None
    ) -> None:
        """Add the batches in these arrays, one after the other."""
        size = dealt.size
        self.moved += (np.abs(rows - positions).reshape(-1, size).mean(axis=1) / dealt.n).tolist()
        if labels is not None:
            self.classes += [classes_in(some) for some in labels(rows).reshape(-1, size)]
        if following is not None:
            places = dealt.of(following.inverse[rows]).reshape(-1, size)
            self.again += [np.unique(some, return_counts=True)[1] for some in places]

    def summary(
        self, dealt: _Batches, epochs: int, batches: int, labels: Labels | None, runs: tuple[bool, int, float]
    ) -> Quality:
        streams, window, mean_runs = runs
        classes = [count for count, _ in self.classes]
        pairs = dealt.size * (dealt.size - 1) / 2
        by_chance = list(_random_batches(dealt))
        again = [float((c * (c - 1)).sum()) / 2 / pairs for c in self.again] if pairs else [0.0] * len(self.again)
        return Quality(
            rows=dealt.n,
            batch_size=dealt.size,
            ranks=dealt.ranks,
            epochs=epochs,
            batches=batches,
            displacement=float(np.mean(self.moved)),
            classes=float(np.mean(classes)) if classes else None,
            classes_low=float(np.percentile(classes, 5)) if classes else None,
            classes_random=None
            if labels is None
            else float(np.mean([classes_in(labels(rows))[0] for rows in by_chance])),
            commonest=float(np.mean([most for _, most in self.classes])) / dealt.size if classes else None,
            pairs_again=float(np.mean(again)) if again else None,
            pairs_random=(dealt.size - 1) / max(dealt.n - 1, 1),
            overlap=float(np.mean([c.max() for c in self.again])) if self.again else None,
            overlap_random=float(np.mean([_largest(dealt, rows) for rows in by_chance])),
            streams=streams,
            window=window,
            runs=mean_runs,
        )


def _random_batches(dealt: _Batches, count: int = 128) -> Iterator[Indices]:
    """Yield batches of random rows, the same at each call."""
    rng = np.random.default_rng(1)
    for _ in range(count):
        if dealt.n <= _EXACT:
            yield rng.choice(dealt.n, dealt.size, replace=False).astype(np.int64)
        else:
            yield rng.integers(0, dealt.n, dealt.size)


def _largest(dealt: _Batches, positions: Indices) -> int:
    """Return the largest number of these positions that fall into one batch."""
    return int(np.unique(dealt.of(positions), return_counts=True)[1].max())


def _runs(order: Order, window: int, windows: int | None) -> tuple[bool, int, float]:
    """Return whether the file is streamed, the size of the window, and the mean number of runs in a window.

    A window of the whole epoch would be a single run in any order.
    """
    n = len(order)
    if getattr(order, "streams", False):
        return True, n, 1.0
    window = min(window if window < n else -(-n // 2), _WIDEST)
    whole = n // window
    chosen = range(whole) if windows is None or whole <= windows else [k * whole // windows for k in range(windows)]
    counts = []
    for begin in (k * window for k in chosen):
        bounds = (begin, begin + window)
        if isinstance(order, BlockShuffle) and window == order.block_size * order.window:
            bounds = order.window_at(begin)  # the shuffle's own windows; a short block shifts them
        counts.append(runs_in(order[np.arange(*bounds)]))
    return False, window, float(np.mean(counts))
