"""Documents that draw at random: what a pack holds is the same wherever, and next to what, it is made."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_support import plain
from packed_support import Documents

from penstock import DataLoader, Mixture, PackedDataset, Subset, generator

# Of long documents a batch has several pieces.
LENGTHS = [*np.random.default_rng(1).integers(1, 12, 40).tolist(), 90, 70, 33]


class Drawing(Documents):
    """Every token is drawn."""

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.from_numpy(generator().integers(0, 1 << 30, int(self.lengths[row])))


class Bulk(Drawing):
    """The same, for many documents at once."""

    def __getitems__(self, rows: list[int]) -> list[torch.Tensor]:
        return [self[row] for row in rows]


def filtered(lengths: list[int]) -> Any:
    return Subset(Bulk(lengths), range(len(lengths)))


KINDS = pytest.mark.parametrize("kind", [Drawing, Bulk, filtered])


def packs(kind: Any, **options: Any) -> Any:
    return PackedDataset(kind(LENGTHS), 16, lengths=LENGTHS, rank=0, world_size=1, seed=3, **options)


def mixture(kind: Any) -> Any:
    parts = [(kind(LENGTHS), 2), (kind([9] * 20), 1)]
    return PackedDataset(Mixture(parts, stop=80, rank=0, world_size=1, seed=4), 16, lengths=[LENGTHS, [9] * 20])


@KINDS
@given(cuts=st.sets(st.integers(1, 25)), exclude=st.sets(st.integers(0, 42), max_size=20))
@settings(max_examples=15)
def test_requests_may_be_cut_anywhere(kind: Any, cuts: set[int], exclude: set[int]) -> None:
    dataset = packs(kind, exclude=sorted(exclude))
    whole = dataset.__getitems__(range(26))
    bounds = [0, *sorted(cuts), 26]
    parts = [dataset.__getitems__(range(begin, end)) for begin, end in itertools.pairwise(bounds)]
    assert [plain(pack) for part in parts for pack in part] == [plain(pack) for pack in whole]


@KINDS
@pytest.mark.parametrize("make", [packs, mixture])
@pytest.mark.parametrize(
    "workers",
    [
        {"num_workers": 2, "executor": "process"},
        {"num_workers": 1, "executor": "process", "threads_per_worker": 2},
        {"num_workers": 2, "executor": "thread"},
    ],
    ids=str,
)
def test_every_executor_draws_the_same(kind: Any, make: Any, workers: dict[str, Any]) -> None:
    expected = [plain(batch) for batch in DataLoader(make(kind), batch_size=6)]
    with DataLoader(make(kind), batch_size=6, **workers) as loader:
        iterator = iter(loader)
        begun = [plain(next(iterator)) for _ in range(2)]
        state = loader.state_dict()
    assert begun == expected[:2]
    with DataLoader(make(kind), batch_size=6, **workers) as loader:
        loader.load_state_dict(state)
        assert [plain(batch) for batch in loader] == expected[2:]


def test_rows_that_a_filter_asks_for_together_draw_by_themselves() -> None:
    rows = Subset(Bulk([3] * 20), range(20))
    expected = [plain(batch) for batch in DataLoader(rows, batch_size=5, shuffle="global", seed=1)]
    with DataLoader(rows, batch_size=5, shuffle="global", seed=1, num_workers=2) as loader:
        assert [plain(batch) for batch in loader] == expected
