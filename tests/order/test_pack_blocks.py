"""`PackBlockOrder`: each pack once, block after block, and an order that is frozen."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.order.packing import PackBlockOrder


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 9), st.integers(0, 9))
def test_each_pack_comes_once_and_blocks_stay_together(sizes: list[int], seed: int, epoch: int) -> None:
    firsts = np.cumsum([0, *sizes])
    order = PackBlockOrder(firsts, seed, epoch)
    packs = order[np.arange(len(order))]
    assert sorted(packs.tolist()) == list(range(sum(sizes)))
    blocks = [block for block, _ in itertools.groupby((firsts.searchsorted(packs, "right") - 1).tolist())]
    assert len(blocks) == len(set(blocks))
    assert [order[i] for i in range(len(order))] == packs.tolist()
    some = np.random.default_rng(seed).permutation(len(order))[:5]
    assert order[some].tolist() == packs[some].tolist()
    assert order.inverse[packs].tolist() == list(range(len(order)))
    assert [order.inverse[int(pack)] for pack in packs] == list(range(len(order)))


def test_the_order_is_frozen() -> None:
    firsts = np.array([0, 4, 4, 9, 12])
    assert PackBlockOrder(firsts, 7, 2)[np.arange(12)].tolist() == FROZEN
    assert PackBlockOrder(firsts, 7, 3)[np.arange(12)].tolist() != FROZEN


FROZEN = [9, 10, 11, 2, 1, 3, 0, 5, 7, 4, 6, 8]
