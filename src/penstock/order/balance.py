"""`deal_by_cost`: tasks dealt to ranks such that each has as many, and hardly more to do than another."""

from __future__ import annotations

import numpy as np

from penstock.order.permutation import Indices

__all__ = ["deal_by_cost"]

_SWAPS = 16  # a rank, at most
_CLOSE = 0.002  # of the mean


def deal_by_cost(costs: Indices, ranks: int) -> Indices:
    """Return the tasks of each rank: int64 of shape (ranks, tasks / ranks).

    Args:
        costs: of the tasks: int64 of shape (tasks,), a multiple of ``ranks``.
        ranks: among which they are dealt.

    The dearest tasks are dealt first, to and fro. Then the rank with most to do swaps a task with another rank, the
    pair that leaves the dearer of the two with least, until it is close to the mean, or no swap helps. Cost: for each
    swap O(tasks * tasks / ranks).

    >>> deal_by_cost(np.array([9, 5, 4, 8, 1, 3]), 2).tolist()
    [[0, 2, 4], [3, 1, 5]]
    """
    rounds = np.argsort(-costs, kind="stable").reshape(-1, ranks)
    rounds[1::2] = rounds[1::2, ::-1]
    dealt = np.ascontiguousarray(rounds.T)
    sums = costs[dealt].sum(axis=1)
    # Swaps leave the mean as it is.
    enough = (1 + _CLOSE) * sums.mean()
    for _ in range(_SWAPS * ranks):
        high = int(sums.argmax())
        if sums[high] <= enough:
            break
        moved = costs[dealt[high]][:, None, None] - costs[dealt][None]
        dearer = np.maximum(sums[high] - moved, sums[None, :, None] + moved)
        dearer[:, high] = sums[high]
        mine, rank, theirs = np.unravel_index(dearer.argmin(), dearer.shape)
        if dearer[mine, rank, theirs] >= sums[high]:
            break
        dealt[high, mine], dealt[rank, theirs] = dealt[rank, theirs], dealt[high, mine]
        sums[high] -= moved[mine, rank, theirs]
        sums[rank] += moved[mine, rank, theirs]
    return dealt
