"""What a loader says of itself, and that asking changes nothing."""

from __future__ import annotations

import inspect
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from loader_support import Range
from torch.utils.data import Subset, TensorDataset

import penstock as ps
from penstock.errors import ConfigError


def test_a_loader_names_its_data_batches_and_state() -> None:
    loader = ps.DataLoader(Range(20), 4, shuffle=True, seed=3, drop_last=True)
    lines = repr(loader).splitlines()
    assert lines[0].startswith("DataLoader of ")
    assert lines[1:] == [
        "  batches: of 4 samples, full ones only, made in the caller's thread",
        "  state: epoch 0, 0 batches delivered, seed 3; split by nobody",
    ]
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    assert "epoch 0, 2 batches delivered" in repr(loader)
    list(iterator)
    assert "epoch 1, 0 batches delivered" in repr(loader)


def test_workers_are_named() -> None:
    assert "made in 2 processes" in repr(ps.DataLoader(Range(20), 4, num_workers=2))
    assert "made in 2 processes of 3 threads" in repr(
        ps.DataLoader(Range(20), 4, num_workers=2, threads_per_worker=3, executor="process")
    )
    assert "made in 1 thread" in repr(ps.DataLoader(Range(20), 4, executor="thread", num_workers=1))


def test_asking_changes_nothing() -> None:
    torch.manual_seed(0)
    expected = [batch.tolist() for batch in ps.DataLoader(Range(20), 4, shuffle=True)]
    torch.manual_seed(0)
    loader = ps.DataLoader(Range(20), 4, shuffle=True)
    repr(loader)
    assert [batch.tolist() for batch in loader] == expected


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Range(20), "Range"),
        (Subset(Range(20), range(5)), "Subset of Range"),
        (TensorDataset(torch.zeros(3)), "TensorDataset"),
        (list(range(100_000)), "[0, 1, 2, 3, 4, 5, ...]"),
        (torch.zeros(2, 2), "tensor([[0., 0.],"),
    ],
    ids=["own", "subset", "tensors", "list", "tensor"],
)
def test_the_data_is_named_in_one_short_line(dataset: Any, words: str) -> None:
    assert repr(ps.DataLoader(dataset)).splitlines()[0] == f"DataLoader of {words}"


def test_tools_may_read_every_attribute() -> None:
    """Only the truth of Accelerate's question is refused, not the attribute that it asks for."""
    loader = ps.DataLoader(Range(20), 4, shuffle=True, seed=3)
    found = dict(inspect.getmembers(loader))
    assert found["batch_size"] == 4
    assert "refused" in repr(found["_is_accelerate_prepared"])
    assert callable(create_autospec(loader).load_state_dict)
    with pytest.raises(ConfigError, match=r"from penstock\.integrations\.accelerate import Accelerator"):
        bool(loader._is_accelerate_prepared)
