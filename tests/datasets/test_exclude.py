"""``exclude=``: rows that nobody gets any more, and nothing else that changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import DataLoader, Ledger, Manifest, RankDataset, Subset
from penstock.errors import ConfigError, StateError


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: Any) -> Manifest:
    path: Path = tmp_path_factory.mktemp("manifest") / "train.txt"
    path.write_text("".join(f"{i:03}.jpg {i % 7}\n" for i in range(60)))
    return Manifest.open(path)


def rows(dataset: Any) -> list[int]:
    return [item[2] for item in dataset.__getitems__(range(len(dataset)))]


@given(st.sets(st.integers(-60, 59), min_size=1, max_size=50), st.integers(0, 3), st.sampled_from(["global", "block"]))
@settings(max_examples=25)
def test_excluded_rows_are_replaced_and_others_stay(
    manifest: Manifest, bad: set[int], epoch: int, shuffle: str
) -> None:
    excluded = {row % 60 for row in bad}
    plain = RankDataset(manifest, rank=0, world_size=1, seed=3, shuffle=shuffle)
    made = RankDataset(manifest, rank=0, world_size=1, seed=3, shuffle=shuffle, exclude=list(bad))
    for dataset in (plain, made):
        dataset.set_epoch(epoch)
    before, after = rows(plain), rows(made)
    assert not excluded & set(after)
    assert all(a == b for a, b in zip(before, after, strict=True) if a not in excluded)


def test_ranks_and_filters_agree(manifest: Manifest) -> None:
    whole = rows(RankDataset(manifest, rank=0, world_size=1, exclude=[3, 4, 5]))
    shares = [rows(RankDataset(manifest, rank=rank, world_size=3, exclude=[3, 4, 5])) for rank in range(3)]
    assert [shares[i % 3][i // 3] for i in range(60)] == whole
    kept = Subset(RankDataset(manifest, rank=0, world_size=1, exclude=[3, 4, 5]), np.arange(60) < 10)
    assert set(rows(kept)) <= {0, 1, 2, 6, 7, 8, 9}


def test_a_run_goes_on_without_rows(manifest: Manifest) -> None:
    plain = DataLoader(RankDataset(manifest, rank=0, world_size=1), batch_size=4)
    had = [next(iterator := iter(plain))[2].tolist(), *(next(iterator)[2].tolist() for _ in range(3))]
    state = plain.state_dict()
    bad = had[0][:2] + next(iterator)[2].tolist()
    without = DataLoader(RankDataset(manifest, rank=0, world_size=1, exclude=bad), batch_size=4)
    without.load_state_dict(state)
    rest = [row for batch in without for row in batch[2].tolist()]
    assert len(rest) == 44
    assert not set(bad) & set(rest)
    after = without.state_dict()
    with pytest.raises(StateError, match="left out other rows"):
        plain.load_state_dict(after)
    with pytest.raises(StateError, match="left out other rows"):
        DataLoader(RankDataset(manifest, rank=0, world_size=1, exclude=[1]), batch_size=4).load_state_dict(after)


def test_a_ledger_knows_them(manifest: Manifest) -> None:
    loader = DataLoader(RankDataset(manifest, rank=0, world_size=1, exclude=range(20)), batch_size=6)
    ledger = Ledger(loader)
    for step, batch in enumerate(loader):
        assert ledger.rows(step).rows.tolist() == batch[2].tolist()
        for row in batch[2].tolist():
            assert step in [found.step for found in ledger.steps(row, epoch=0)]
    assert ledger.steps(3, epoch=0) == []


@pytest.mark.parametrize(
    ("exclude", "error", "message"),
    [
        ([60], IndexError, "out of range"),
        ([0.5], ConfigError, "array of row numbers"),
        (range(60), ConfigError, "leaves none of 60 rows"),
    ],
)
def test_what_makes_no_sense(manifest: Manifest, exclude: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        RankDataset(manifest, rank=0, world_size=1, exclude=exclude)
