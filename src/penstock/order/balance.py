"""`split_by_cost`: split tasks among ranks, the same number for each rank and with nearly equal costs."""

from __future__ import annotations

import numpy as np

from penstock.order.permutation import Indices

__all__ = ["split_by_cost"]

_SWAPS = 16  # at most, per rank
_CLOSE = 0.002  # of the mean cost


def split_by_cost(costs: Indices, ranks: int) -> Indices:
    """Return the tasks of each rank: int64 of shape (ranks, tasks / ranks).

    Args:
        costs: costs of the tasks: int64 of shape (tasks,); the number of tasks is a multiple of ``ranks``.
        ranks: number of ranks.

    Tasks are assigned in descending order of cost, to ranks in alternating direction. Then the rank with the highest
    cost swaps one task with another rank, always the pair that leaves the lowest maximum of the two. This repeats until
    the highest cost is close to the mean, or no swap helps. Each swap takes O(tasks * tasks / ranks).

    >>> split_by_cost(np.array([9, 5, 4, 8, 1, 3]), 2).tolist()
    [[0, 2, 4], [3, 1, 5]]
    """
    rounds = np.argsort(-costs, kind="stable").reshape(-1, ranks)
    rounds[1::2] = rounds[1::2, ::-1]
    dealt = np.ascontiguousarray(rounds.T)
    sums = costs[dealt].sum(axis=1)
    # Swaps do not change the mean.
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
