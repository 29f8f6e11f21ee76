"""Expected hit rates of a node's least-recently-used (LRU) cache, epoch by epoch.

A node reads a random share f of each epoch, a new one each time (strided positions of a new order). Its cache holds a
fraction c of the data, in units of r rows; one read fetches a unit. A unit is cached if it is among the most recently
touched distinct units that fit. Look back from the moment at which a fraction v of an epoch is done:

* in the current epoch, each row was touched with probability f v;
* in each earlier epoch, with probability f, independently.

The cache spans the window in which a random unit was touched with probability c. The row that is read now was not
touched in this epoch, but its r - 1 neighbours may have been. So if the window reaches back beyond this epoch, the unit
is missed with probability ``max(1 - c, untouched so far) / (1 - f v)``. For one node and r = 1 the mean is
``c + (1 - c) ln(1 - c)``. Within the epoch the probability is ``(1 - c) ** ((r - 1) / r)``.

A block shuffle has the same reuse between epochs, and the units of its current window also stay in the cache until the
window is consumed. Without a shuffle each node reads the same rows in the same order, so an LRU cache always hits if
they all fit, and never if they do not.

The tests compare this with simulations of the real order, within 0.03. The model ignores that a page cache is not
exactly LRU (Linux keeps pages used twice for longer), and uses the mean size of samples.
"""

from __future__ import annotations

import math

import numpy as np

from penstock.tools.planning.job import Job

__all__ = ["hit_rates"]

_GRID = (np.arange(2048) + 0.5) / 2048  # points of time in an epoch or a window


def hit_rates(job: Job, shuffle: str | None = None) -> tuple[float, ...]:
    """Return the share of sample reads that a node's cache answers, for each epoch of the job.

    Args:
        job: its sizes, cache and epochs are used; limits of storage are ignored.
        shuffle: replaces the job's shuffle. User-defined shuffles count as global.

    >>> job = Job(samples=1_000_000, sample_bytes=100_000, cache_bytes=50_000_000_000, epochs=2)
    >>> [round(rate, 3) for rate in hit_rates(job)]
    [0.0, 0.153]
    """
    kind = job.shuffle if shuffle is None else shuffle
    data = job.samples * job.sample_bytes
    unit = min(job.read_rows, job.samples)
    c = min(1.0, job.cache_bytes / data) if job.cache_bytes >= unit * job.sample_bytes else 0.0
    if kind == "none":
        return tuple(_in_order(job, unit, c, epoch) for epoch in range(job.epochs))
    if kind == "block":
        return tuple(_by_blocks(job, unit, c, epoch) for epoch in range(job.epochs))
    return tuple(_anywhere(job.share, unit, c, epoch) for epoch in range(job.epochs))


def _anywhere(f: float, r: int, c: float, epoch: int) -> float:
    fresh = 1 - f * _GRID  # share of rows not yet touched in this epoch
    touched = 1 - fresh**r  # share of units touched in this epoch
    untouched = fresh**r * (1 - f) ** (epoch * r)  # share of units never touched
    beyond = 1 - np.maximum(1 - c, untouched) / fresh
    within = 1 - (1 - c) ** ((r - 1) / r)
    return float(np.where(touched < c, np.maximum(beyond, 0), within).mean())


def _by_blocks(job: Job, r: int, c: float, epoch: int) -> float:
    """Return hits within the window of the shuffle, plus hits from earlier epochs among its misses."""
    f = job.share
    rows = min(job.block_size * job.window, job.samples)
    held = min(1.0, c * job.samples / rows)  # share of the window's units in the cache
    fresh = 1 - f * _GRID
    in_window = np.where(1 - fresh**r <= held, 1 - fresh ** (r - 1), 1 - (1 - held) ** ((r - 1) / r)).mean()
    unit_share = 1 - (1 - f) ** r  # share of units that this node touches in an epoch
    unseen = 1 - unit_share * _GRID
    before = 1 - np.maximum(1 - c, unseen * (1 - unit_share) ** epoch) / unseen
    return float(in_window + (1 - in_window) * np.maximum(before, 0).mean())


def _touched(r: int, here: int, ranks: int) -> float:
    """Return the share of units of r rows with one of the rows 0 .. here - 1 modulo ``ranks``.

    In this pattern, units begin at multiples of ``gcd(r, ranks)``, the same number at each.
    """
    step = math.gcd(r, ranks)
    places = ranks // step
    inside = -(-here // step)  # units that begin among these rows
    reaching = max(0, places - 1 - (ranks - r) // step) if r < ranks else places  # units that reach them
    return min(1.0, (inside + reaching) / places)


def _in_order(job: Job, r: int, c: float, epoch: int) -> float:
    f = job.share
    touched = _touched(r, job.ranks_here, job.ranks)
    again = max(0.0, 1 - touched / (f * r)) if c else 0.0
    return 1.0 if epoch and c >= touched else again
