"""`packing_plan`: its figures are those of packs that are made, and of the usual ways carried out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed_support import Documents

from penstock import PackedDataset
from penstock.errors import ConfigError, DataFileError
from penstock.tools.planning import packing_plan


def drawn(path: Path, n: int = 3000) -> Any:
    lengths = np.maximum(np.random.default_rng(0).lognormal(4.2, 1.1, n).astype(np.int64), 1)
    np.save(path, lengths)
    return lengths


@pytest.mark.parametrize("most", [None, 4])
def test_the_last_way_is_that_of_the_data_set(tmp_path: Path, most: int | None) -> None:
    lengths = drawn(tmp_path / "lengths.npy")
    plan = packing_plan(tmp_path / "lengths.npy", 512, max_documents=most)
    packs = PackedDataset(Documents(lengths), 512, max_documents=most, rank=0, world_size=1)
    found = plan.ways[-1]
    assert (found.packs, found.fill, found.documents) == pytest.approx((packs.packs, packs.fill, packs.density))
    assert (plan.documents, plan.tokens) == (3000, lengths.sum())
    assert plan.cut == (lengths > 512).sum()


def test_the_usual_ways(tmp_path: Path) -> None:
    lengths = np.array([3, 1, 4, 2, 2, 9, 0])
    np.save(tmp_path / "lengths.npy", lengths)
    alone, following, windows, ours = packing_plan(tmp_path / "lengths.npy", 4, ranks=2, batch=2).ways
    assert (alone.packs, alone.documents, alone.cost) == (8, 1.0, 1.0)
    assert alone.fill == 21 / 32
    assert windows.packs == ours.packs == 6
    assert 6 <= following.packs <= 8


def test_no_way_has_more_documents_than_are_allowed(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.ones(100, np.int64))
    plan = packing_plan(tmp_path / "lengths.npy", 64, max_documents=4)
    assert [(way.packs, way.documents) for way in plan.ways[1:]] == [(25, 4.0)] * 3


def test_ways_get_better(tmp_path: Path) -> None:
    drawn(tmp_path / "lengths.npy", 20_000)
    plan = packing_plan(tmp_path / "lengths.npy", 1024, look_at_most=5000)
    assert plan.looked_at < 5001
    alone, following, windows, ours = (way.fill for way in plan.ways)
    assert alone < following < windows < ours
    assert ours > 0.999
    assert windows > 0.98
    for way in plan.ways[1:]:
        assert way.balanced < 1.02 < way.cost


@pytest.mark.parametrize(
    ("lengths", "capacity", "options", "error", "message"),
    [
        ([1, 2], 0, {}, ConfigError, "capacity must be positive"),
        ([1, 2], 4, {"ranks": 0}, ConfigError, "ranks must be positive"),
        ([1, -2], 4, {}, ConfigError, "document 1 has a length of -2"),
        ([0, 0], 4, {}, ConfigError, "no document with a token"),
        ([[1]], 4, {}, ConfigError, "one integer for each document"),
        ([0.5], 4, {}, ConfigError, "one integer for each document"),
        (None, 4, {}, DataFileError, "lengths.npy"),
    ],
)
def test_what_makes_no_sense(
    tmp_path: Path, lengths: Any, capacity: int, options: Any, error: Any, message: str
) -> None:
    if lengths is not None:
        np.save(tmp_path / "lengths.npy", np.array(lengths))
    with pytest.raises(error, match=message):
        packing_plan(tmp_path / "lengths.npy", capacity, **options)
