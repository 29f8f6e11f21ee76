"""`split_by_cost`: as many tasks for each rank, and hardly more to do for one than for another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.order.packing import split_by_cost


@given(st.integers(1, 8), st.integers(0, 6), st.data())
def test_each_task_goes_to_one_rank(ranks: int, tasks: int, data: st.DataObject) -> None:
    costs = np.array(data.draw(st.lists(st.integers(0, 9), min_size=ranks * tasks, max_size=ranks * tasks)), np.int64)
    dealt = split_by_cost(costs, ranks)
    assert dealt.shape == (ranks, tasks)
    assert sorted(dealt.reshape(-1).tolist()) == list(range(ranks * tasks))


def test_a_task_dearer_than_a_share_gets_the_cheapest_others() -> None:
    costs = np.random.default_rng(0).integers(100, 200, 64)
    costs[17] = 5_000
    sums = costs[split_by_cost(costs, 8)].sum(axis=1)
    assert sums.max() == 5_000 + np.sort(costs)[:7].sum()


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_no_rank_has_much_more_to_do(ranks: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        costs = np.minimum(rng.lognormal(10, 1, ranks * 8), 60_000).astype(np.int64)
        sums = costs[split_by_cost(costs, ranks)].sum(axis=1)
        assert sums.max() <= 1.02 * sums.mean()
