"""`measure_shares`: whether every rank sees each source of a mixture by its weight.

A periodic mixture can alias with the strided positions of ranks: the job as a whole has the right shares, but a rank
may get only one source. So the shares in windows of single ranks are compared with the weights. The unit is the
standard deviation that sources drawn at random for each position would have.

>>> periodic = measure_shares(lambda positions: positions % 2, [[0.5, 0.5]], 100_000, ranks=2)
>>> periodic.worst > 50 and periodic.rank in (0, 1)
True
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.order.permutation import Indices

__all__ = ["ShareQuality", "measure_shares"]

_RANKS = 64  # largest number of measured ranks, spread evenly
_LEAST = 10  # counts are about normal if a source and the others each have this many expected samples


@dataclass(frozen=True)
class ShareQuality:
    """The largest deviation of a rank's share of a source from its weight.

    Attributes:
        ranks: number of measured ranks.
        window: positions of a rank in each window.
        compared: number of shares compared, over all windows.
        worst: the largest deviation, in standard deviations of randomly drawn sources.
        worst_random: the median largest deviation of the same number of random shares.
        rank, source, begin: rank, source and first position in the epoch of the window with the largest deviation.
        share, expected: measured and expected share of the source there.
    """

    ranks: int
    window: int
    compared: int
    worst: float
    worst_random: float
    rank: int
    source: int
    begin: int
    share: float
    expected: float


def measure_shares(
    sources: Callable[[Indices], Indices],
    weights: npt.ArrayLike,
    length: int,
    *,
    stages: Callable[[Indices], Indices] | None = None,
    ranks: int = 1,
    window: int = 10_000,
    windows: int = 8,
) -> ShareQuality | None:
    """Compare each rank's share of each source with the weights.

    Args:
        sources: returns the source number at each given position of an epoch: int64, in the shape of its argument.
        weights: shares of all sources, which add up to 1: shape (stages, sources).
        length: number of positions in the epoch.
        stages: returns the stage of each position; by default, all positions are in the first stage.
        ranks: number of ranks, which get strided positions.
        window: positions of a rank in one window; limited to all its positions.
        windows: number of windows for each rank, spread evenly.

    Returns:
        The largest deviation; None if fewer than 10 samples are expected of each source, or of all others.

    Raises:
        ConfigError: numbers that are not positive, or fewer positions than ranks.

    Cost: ``windows * window`` positions for each of up to 64 ranks: about two seconds by default.
    """
    if min(ranks, window, windows) < 1 or length < ranks:
        told = (
            f"ranks, window and windows must be positive, and each rank needs a position: {ranks}, {window}, {windows}"
        )
        raise ConfigError(f"{told} for {length} positions")
    shares = np.asarray(weights, dtype=np.float64)
    window = min(window, length // ranks)
    spread = length // ranks - window
    begins = sorted({k * spread // max(1, windows - 1) for k in range(windows)})
    chosen = sorted({k * ranks // min(ranks, _RANKS) for k in range(min(ranks, _RANKS))})
    found, compared = None, 0
    for rank in chosen:
        for begin in begins:
            positions = rank + ranks * np.arange(begin, begin + window)
            at = np.bincount(positions * 0 if stages is None else stages(positions), minlength=len(shares))
            mean, variance = at @ shares, at @ (shares * (1 - shares))
            counts = np.bincount(sources(positions), minlength=shares.shape[1])
            enough = (np.minimum(mean, window - mean) >= _LEAST) & (variance > 0)
            compared += int(enough.sum())
            if not enough.any():
                continue
            deviations = np.where(enough, np.abs(counts - mean) / np.sqrt(np.where(enough, variance, 1)), 0)
            worst = int(deviations.argmax())
            here = (float(deviations[worst]), rank, worst, int(positions[0]), counts[worst] / window)
            if found is None or here[0] > found[0][0]:
                found = here, float(mean[worst] / window)
    if found is None:
        return None
    (deviation, rank, source, first, share), expected = found
    return ShareQuality(
        ranks=len(chosen),
        window=window,
        compared=compared,
        worst=deviation,
        worst_random=NormalDist().inv_cdf((1 + 0.5 ** (1 / compared)) / 2),
        rank=rank,
        source=source,
        begin=first,
        share=float(share),
        expected=expected,
    )
