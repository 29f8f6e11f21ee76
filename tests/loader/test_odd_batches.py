"""Whatever batch a program makes: what the inline executor delivers, the others deliver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from full_run import full_only
from hypothesis import given
from hypothesis import strategies as st
from loader_support import EXECUTORS
from odd_batch_support import OddBatches, assert_alike, identity, last_column, odd_batches
from pack_support import ROOM, travel
from torch.utils.data import TensorDataset

import penstock as ps


@given(odd_batches(), st.sampled_from(list(ROOM.values())))
def test_any_odd_batch_arrives(make: Callable[[], Any], room: int | None) -> None:
    assert_alike(travel(make(), room)[0], make())


def test_a_masked_array_without_a_fill_value_arrives_without() -> None:
    """NumPy makes one of another type when it is asked."""
    array = np.ma.MaskedArray(np.zeros(3, np.float32), [True, False, False])
    assert travel(array, None)[0].fill_value.dtype == array.fill_value.dtype == np.float64


@full_only("all batches for each", but=["process"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_odd_batches_of_a_loader(executor: str) -> None:
    dataset = OddBatches(300)
    options = {"executor": executor, "num_workers": EXECUTORS[executor]}
    loader = ps.DataLoader(dataset, batch_size=None, collate_fn=identity, **options)
    count = 0
    for index, batch in enumerate(loader):
        assert_alike(batch, dataset[index])
        count += 1
    assert count == len(dataset)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_last_column_of_a_batch_of_one_row(executor: str) -> None:
    rows = torch.arange(7 * 5.0).view(7, 5)
    dataset = [row for (row,) in TensorDataset(rows)]
    options = {"executor": executor, "num_workers": EXECUTORS[executor]}
    loader = ps.DataLoader(dataset, batch_size=3, collate_fn=last_column, **options)  # 3 + 3 + 1
    assert [batch.tolist() for batch in loader] == [[4, 9, 14], [19, 24, 29], [34]]
