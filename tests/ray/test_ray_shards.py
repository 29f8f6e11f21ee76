"""Tar shards on a cluster: the matrix of shards and ranks, each sample once, the same as elsewhere; streams; resume."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from shard_support import write_shards
from torch.utils.data import ConcatDataset

import penstock as ps

pytestmark = pytest.mark.usefixtures("cluster")

COUNTS = {1: [50], 3: [20, 1, 29], 8: [6, 7, 6, 7, 6, 6, 6, 6]}
RANKS = 1, 2, 3


def numbers(batch: Any) -> list[int]:
    return [int(text) for text in batch["cls"]]


def test_every_sample_once(tmp_path: Path) -> None:
    """All combinations are the parts of one data set, so that workers start once."""
    parts, owners = [], []
    for shards, counts in COUNTS.items():
        (tmp_path / str(shards)).mkdir()
        paths = write_shards(tmp_path / str(shards), counts)
        for ranks in RANKS:
            for rank in range(ranks):
                parts.append(ps.ShardDataset(paths, rank=rank, world_size=ranks, seed=1))
                owners += [(shards, ranks)] * len(parts[-1])
    everything: ConcatDataset[Any] = ConcatDataset(parts)
    expected = [numbers(batch) for batch in ps.DataLoader(everything, batch_size=32)]
    with ps.DataLoader(everything, batch_size=32, num_workers=2, executor="ray") as loader:
        found = [numbers(batch) for batch in loader]
    assert found == expected
    seen: dict[tuple[int, int], Counter[int]] = {owner: Counter() for owner in owners}
    for owner, number in zip(owners, (n for batch in found for n in batch), strict=True):
        seen[owner][number] += 1
    for (_, ranks), counted in seen.items():
        assert set(counted) == set(range(50))
        assert counted.total() == 50 + -50 % ranks


def test_a_state_goes_from_a_cluster_to_processes(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, COUNTS[3])

    def make() -> ps.ShardDataset:
        return ps.ShardDataset(paths, seed=1, shuffle="block", block_size=8)

    whole = [numbers(batch) for batch in ps.DataLoader(make(), batch_size=4)]
    with ps.DataLoader(make(), batch_size=4, num_workers=2, executor="ray") as loader:
        batches = iter(loader)
        found = [numbers(next(batches)) for _ in range(5)]
        state = loader.state_dict()
    rest = ps.DataLoader(make(), batch_size=4, num_workers=1, executor="process")
    rest.load_state_dict(state)
    assert found + [numbers(batch) for batch in rest] == whole


def test_streams(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, COUNTS[8])
    with ps.DataLoader(ps.StreamShards(paths, seed=1), batch_size=4, num_workers=2, executor="ray") as loader:
        found = [numbers(batch) for batch in loader]
    processes = ps.DataLoader(ps.StreamShards(paths, seed=1), batch_size=4, num_workers=2, executor="process")
    assert found == [numbers(batch) for batch in processes]
    assert sorted(n for batch in found for n in batch) == list(range(50))
