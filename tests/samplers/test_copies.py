"""A copy of a sampler is one by itself."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch.utils.data

import penstock as ps


def pickled(sampler: Any) -> Any:
    return pickle.loads(pickle.dumps(sampler))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_has_epochs_of_its_own(copied: Callable[[Any], Any]) -> None:
    first = ps.RandomSampler(range(10), shuffle="global", seed=1)
    orders = []
    for epoch in (0, 3):
        first.set_epoch(epoch)
        orders.append(list(first))
    first.set_epoch(0)
    other = copied(first)
    other.set_epoch(3)
    assert [list(first), list(other)] == orders


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_draws_for_itself(copied: Callable[[Any], Any]) -> None:
    first = ps.RandomSampler(range(100))
    state = first.state_dict()  # which draws what the next pass begins with
    other = copied(first)
    again = ps.RandomSampler(range(100))
    again.load_state_dict(state)
    expected = list(again)
    assert list(other) != expected
    assert list(first) == expected


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_copied_loader_follows_the_epoch_of_torchs_sampler(seed: int | None, before: bool) -> None:
    """Set before the copy or after it."""
    sampler: Any = torch.utils.data.DistributedSampler(range(8), 1, 0)  # type: ignore[arg-type]
    loader: ps.DataLoader[Any] = ps.DataLoader(range(8), 4, sampler=sampler, seed=seed)
    sampler.set_epoch(1)
    first = [batch.tolist() for batch in loader]
    if before:
        sampler.set_epoch(2)
    other = copy.copy(loader)
    sampler.set_epoch(2)
    assert (other.epoch, loader.epoch) == (2, 2)
    second = [batch.tolist() for batch in other]
    assert second == [batch.tolist() for batch in loader]
    assert second != first
