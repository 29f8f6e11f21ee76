"""Data sets and samplers in real process groups: who is who, and loops that end on all ranks together."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_run import full_only
from gloo_support import start_ranks, write_rows
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader as TorchDataLoader

from penstock import DataLoader, DistributedSampler, Manifest, MPDataset, RankDataset, distributed
from penstock.errors import PartitionError


def find_rows(rank: int, path: Path) -> dict[str, list[int]]:
    """The rows of this rank by every way to get them, all told their rank by the process group."""
    assert distributed.current() == (rank, dist.get_world_size())
    manifest = Manifest.open(path)
    data = RankDataset(manifest, seed=1)
    stream = MPDataset(manifest, batch_size=4, seed=1)
    sampler = DistributedSampler(manifest, shuffle="global", seed=1)
    workers: Any = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": True}
    found = {
        "alone": [row for _, _, row in data.__getitems__(range(len(data)))],
        "loader": [row for batch in DataLoader(data, batch_size=4) for row in batch[2].tolist()],
        "stream": [row for batch in TorchDataLoader(stream, 4, **workers) for row in batch[2].tolist()],
        "sampler": list(sampler),
    }
    data.set_epoch(0)
    found["workers"] = [row for batch in TorchDataLoader(data, 4, **workers) for row in batch[2].tolist()]
    return found


def test_ranks_come_from_the_process_group(tmp_path: Path) -> None:
    path = write_rows(tmp_path, 50)
    found = start_ranks(3, find_rows, path)
    for rank, ways in enumerate(found):
        expected = [row for _, _, row in RankDataset(path, rank=rank, world_size=3, seed=1)]  # type: ignore[attr-defined]
        assert all(rows == expected for rows in ways.values()), ways
    together = Counter(row for ways in found for row in ways["alone"])
    assert set(together) == set(range(50))
    assert together.total() == 51


def split_in_groups(rank: int, path: Path) -> list[Any]:
    """A 2 x 2 mesh: data parallel over rows, so that both ranks of a column see the same data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ways: list[Any] = [{"mesh": mesh}, {"mesh": mesh["dp"]}, {"process_group": mesh["dp"].get_group()}]
    shares = []
    for way in ways:
        data = RankDataset(path, **way, seed=1)
        stream = MPDataset(path, batch_size=3, **way, seed=1)
        assert [row for _, _, row in stream] == [row for _, _, row in data]  # type: ignore[attr-defined]
        shares.append((data.rank, data.world_size, [row for _, _, row in data]))  # type: ignore[attr-defined]
    assert shares[0] == shares[1] == shares[2]
    pair = dist.new_group([0, 2])
    if rank in (0, 2):
        assert RankDataset(path, process_group=pair).world_size == 2
    else:
        with pytest.raises(PartitionError, match="not in process_group"):
            RankDataset(path, process_group=pair)
    with pytest.raises(PartitionError, match="not both"):
        RankDataset(path, rank=0, world_size=1, process_group=pair)
    with pytest.raises(PartitionError, match="either mesh or process_group, not both"):
        RankDataset(path, mesh=mesh, process_group=pair)
    with pytest.raises(PartitionError, match="pass the DeviceMesh as mesh="):
        RankDataset(path, process_group=mesh["dp"])  # type: ignore[arg-type]
    return list(shares[0])


def test_the_data_parallel_rank_need_not_be_the_global_one(tmp_path: Path) -> None:
    path = write_rows(tmp_path, 20)
    found = start_ranks(4, split_in_groups, path)
    assert [share[0] for share in found] == [0, 0, 1, 1]
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert sorted(found[0][2] + found[2][2]) == list(range(20))


def read_all(rank: int, path: Path) -> dict[str, Any]:
    """Two epochs of loaders that no sampler was given to."""
    del rank

    def rows(data: Any, **options: Any) -> list[list[int]]:
        loader = DataLoader(data, batch_size=4, collate_fn=row_numbers, **options)
        return [[row for batch in loader for row in batch] for _ in range(2)]

    manifest = Manifest.open(path)
    return {
        "loader": rows(manifest, shuffle=True),
        "sampler": rows(manifest, sampler=DistributedSampler(manifest, shuffle="global")),
        "data set": rows(RankDataset(manifest), shuffle=True),
        "in order": rows(manifest, split=True),
        "everything": rows(manifest, split=False),
    }


def row_numbers(records: Any) -> list[int]:
    return [record[2] for record in records]


def test_loaders_split_by_the_process_group(tmp_path: Path) -> None:
    first, second = start_ranks(2, read_all, write_rows(tmp_path, 50))
    assert first["loader"] == first["sampler"]
    assert second["loader"] == second["sampler"]
    for way in ("loader", "data set", "in order"):
        for epoch in range(2):
            assert sorted(first[way][epoch] + second[way][epoch]) == list(range(50))
    for way in ("loader", "data set"):
        assert first[way][0] != first[way][1]
    assert first["everything"] == second["everything"] == [list(range(50))] * 2


def disagree(rank: int, path: Path) -> str:
    """Used alone, then with a group of two: refused. Given ranks stay as they were given."""
    group = dist.group.WORLD
    dist.destroy_process_group()
    late, given = RankDataset(path), RankDataset(path, rank=0, world_size=1)
    assert len(late) == len(given) == 20
    dist.init_process_group("gloo", store=dist.FileStore(str(path) + ".store", 2), rank=rank, world_size=2)
    assert group is not dist.group.WORLD
    assert len(given) == 20
    fresh = RankDataset(path)
    assert len(fresh) == 10
    with pytest.raises(PartitionError) as caught:
        len(late)
    loader = DataLoader(fresh, batch_size=5)
    assert len(list(loader)) == 2
    with pytest.raises(PartitionError, match=r"initialise torch\.distributed first"):
        iter(DataLoader(late, batch_size=5))
    return str(caught.value)


def test_a_group_that_disagrees_later_is_an_error(tmp_path: Path) -> None:
    for rank, said in enumerate(start_ranks(2, disagree, write_rows(tmp_path, 20))):
        assert "first used as rank 0 of 1" in said
        assert f"process group says rank {rank} of 2" in said


def train(rank: int, path: Path, remainder: str, kind: str) -> tuple[list[int], list[float]]:
    """One all_reduce for each batch: a rank with fewer batches would leave the others waiting."""
    rows: list[int] = []
    sums = []
    for epoch in range(2):
        if kind == "stream":
            data: Any = MPDataset(path, batch_size=4, remainder=remainder, seed=1)
        else:
            data = RankDataset(path, mini_epochs=2, remainder=remainder, seed=1)
        loader = DataLoader(data, batch_size=4, num_workers=2, executor="thread")
        loader.set_epoch(epoch)
        while loader.epoch == epoch:
            for batch in loader:
                total = torch.tensor(float(len(batch[2])))
                dist.all_reduce(total)
                sums.append(total.item())
                rows += batch[2].tolist()
    return rows, sums


@full_only("two ranks for each", but=["rank-pad", "stream-drop"])
@pytest.mark.parametrize("remainder", ["pad", "drop"])
@pytest.mark.parametrize("kind", ["rank", "stream"])
def test_a_loop_with_all_reduce_ends(tmp_path: Path, remainder: str, kind: str) -> None:
    first, second = start_ranks(2, train, write_rows(tmp_path, 51), remainder, kind)
    assert first[1] == second[1]
    count = Counter(first[0] + second[0])
    size = {"pad": 52, "drop": 50 if kind == "stream" else 48}[remainder]
    assert count.total() == 2 * size
    assert max(count.values()) <= (2 if remainder == "drop" else 4)
    if remainder == "pad":
        assert set(count) == set(range(51))


def evaluate(rank: int, path: Path) -> tuple[int, int, int]:
    """Shares differ by one: a rank that has no more takes part with nothing until all are through."""
    data = RankDataset(path, shuffle="none", remainder="uneven")
    loader = DataLoader(data, batch_size=1)
    batches = 0
    iterator = iter(loader)
    total = torch.zeros(2)
    while True:
        batch = next(iterator, None)
        here = torch.tensor([0.0 if batch is None else 1.0, 0.0 if batch is None else float(batch[2])])
        dist.all_reduce(here)
        if here[0] == 0:
            return batches, int(total[0]), int(total[1])
        total += here
        batches += batch is not None


def test_exact_evaluation_ends_too(tmp_path: Path) -> None:
    found = start_ranks(2, evaluate, write_rows(tmp_path, 7))
    assert [batches for batches, _, _ in found] == [4, 3]
    assert all((count, rows) == (7, 21) for _, count, rows in found)
