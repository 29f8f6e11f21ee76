"""The dimensions of a device mesh decide which ranks get other batches, and which get the same."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gloo_support import start_ranks, write_rows
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import penstock as ps
from penstock import distributed
from penstock.errors import ConfigError, PartitionError

ROWS, BATCH = 64, 4
NUMBERS: Any = range(ROWS)


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def row(record: Any) -> int:
    return int(record[2])


def read_by_mesh(path: Path, mesh: DeviceMesh) -> dict[str, list[list[int]]]:
    """The batches of this rank from everything that splits, in one epoch or 64 samples of all ranks."""
    manifest, numbers = ps.Manifest.open(path), NUMBERS
    data = ps.RankDataset(manifest, seed=1, mesh=mesh, load=row)
    shuffled = ps.DistributedSampler(numbers, shuffle="global", mesh=mesh)
    endless = iter(ps.InfiniteSampler(numbers, mesh=mesh))
    share = ROWS // distributed.current(mesh=mesh).world_size
    grouped = ps.GroupedBatchSampler(ps.SequentialSampler(numbers), [n % 2 for n in numbers], BATCH, mesh=mesh)
    budget = ps.TokenBudgetBatchSampler([1] * ROWS, BATCH, mesh=mesh)
    return {
        "data set": batches(ps.DataLoader(data, BATCH)),
        "stream": batches(
            ps.DataLoader(ps.MPDataset(manifest, batch_size=BATCH, seed=1, mesh=mesh, load=row), batch_size=BATCH)
        ),
        "loader": batches(ps.DataLoader(numbers, BATCH, shuffle=True, seed=1, mesh=mesh)),
        "loader of torch's order": batches(ps.DataLoader(numbers, BATCH, mesh=mesh)),
        "sampler": batches(ps.DataLoader(numbers, BATCH, sampler=shuffled)),
        "endless": [[next(endless) for _ in range(share)]],
        "grouped": list(grouped),
        "budget": list(budget),
        "pickled": batches(ps.DataLoader(numbers, BATCH, sampler=pickle.loads(pickle.dumps(shuffled)))),
        "opened": batches(ps.DataLoader(ps.open(path, seed=1, mesh=mesh, load=row), BATCH)),
    }


def read_2_x_2_x_2(rank: int, path: Path) -> tuple[tuple[int, int], dict[str, list[list[int]]]]:
    del rank
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    return distributed.current(mesh=mesh), read_by_mesh(path, mesh)


def test_replicas_and_shards_split_and_tensor_parallel_peers_do_not(tmp_path: Path) -> None:
    found = start_ranks(8, read_2_x_2_x_2, write_rows(tmp_path, ROWS))
    assert [world for world, _ in found] == [(n // 2, 4) for n in range(8)]
    for name in found[0][1]:
        for rank in range(0, 8, 2):
            assert found[rank][1][name] == found[rank + 1][1][name], name
        rows = Counter(row for _, ways in found[::2] for batch in ways[name] for row in batch)
        assert rows == Counter(range(ROWS)), name
    assert all(ways["sampler"] == ways["pickled"] for _, ways in found)


def shape_worlds(rank: int) -> None:
    def world(*shape: int, names: tuple[str, ...] | None = None) -> tuple[int, int]:
        return distributed.current(mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))

    # Without names, as for FSDP: shards, or replicas of shards.
    assert world(8) == world(2, 4) == (rank, 8)
    # As torchtitan, Lightning and torch's tutorials name them. One dimension of any other name splits.
    assert world(2, 2, 2, names=("pp", "dp_shard", "tp")) == (rank // 2 % 2, 2)
    assert world(2, 2, 2, names=("pp", "batch", "cp")) == (rank // 2 % 2, 2)
    assert world(4, 2, names=("data_parallel", "tensor_parallel")) == (rank // 2, 4)
    assert world(2, 4, names=("replicate", "shard")) == (rank, 8)
    assert world(2, 4, names=("dp", "cp")) == (rank // 4, 2)
    assert world(8, names=("workers",)) == (rank, 8)
    # Accelerate leaves out dimensions of size 1.
    assert world(8, names=("tp",)) == (0, 1)

    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_shard", "ep", "tp"))
    with pytest.raises(
        PartitionError, match=r"'ep' of this mesh splits data\. These do: dp, .* as in mesh=mesh\[\"dp\"\]"
    ):
        distributed.current(mesh=mesh)
    assert distributed.current(mesh=mesh["dp_shard"]) == (rank // 4, 2)
    assert distributed.current(mesh=mesh["dp_shard", "ep"]) == (rank // 2, 4)
    assert distributed.current(mesh=mesh["dp_shard", "tp"]) == (rank // 4, 2)
    half = DeviceMesh("cpu", [0, 1, 2, 3])
    if rank < 4:
        assert distributed.current(mesh=half) == (rank, 4)
    else:
        with pytest.raises(PartitionError, match="not in mesh"):
            distributed.current(mesh=half)


def test_meshes_as_people_build_them() -> None:
    start_ranks(8, shape_worlds)


def build_with_accelerate(rank: int) -> tuple[list[list[int]], list[list[int]]]:
    from accelerate import ParallelismConfig

    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2)
    mesh = config.build_device_mesh("cpu")
    assert distributed.current(mesh=mesh) == distributed.current(mesh=mesh["dp"]) == (rank // 2, 4)
    with_context = ParallelismConfig(dp_shard_size=4, cp_size=2).build_device_mesh("cpu")
    assert distributed.current(mesh=with_context) == (rank // 2, 4)
    one, other = (ps.DataLoader(NUMBERS, BATCH, shuffle=True, seed=1, mesh=one) for one in (mesh, mesh["dp"]))
    return batches(one), batches(other)


def test_meshes_of_accelerate() -> None:
    pytest.importorskip("accelerate")
    found = start_ranks(8, build_with_accelerate)
    assert all(one == other for one, other in found)
    assert sorted(row for one, _ in found[::2] for batch in one for row in batch) == list(range(ROWS))


def build_with_lightning(rank: int) -> None:
    import torch
    from lightning.fabric.strategies.model_parallel import _setup_device_mesh

    mesh = _setup_device_mesh(2, 2, 4, torch.device("cpu"))
    assert distributed.current(mesh=mesh) == (rank // 2, 2)


def test_meshes_of_lightning() -> None:
    pytest.importorskip("lightning.fabric")
    start_ranks(4, build_with_lightning)


def pass_ranks(rank: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    numbers: Any = range(8)
    by_numbers: Any = ps.DataLoader(numbers, 2, rank=rank, world_size=2)
    by_group: Any = ps.DataLoader(numbers, 2, process_group=mesh.get_group())
    assert batches(by_numbers) == batches(by_group) == batches(ps.DataLoader(numbers, 2, mesh=mesh))
    assert by_numbers.splits == "the loader"
    assert batches(ps.DataLoader(numbers, 4, rank=0, world_size=1)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(PartitionError, match="give both rank and world_size"):
        ps.DataLoader(numbers, rank=0)
    with pytest.raises(PartitionError, match=r"mesh takes a DeviceMesh of torch\.distributed, got 'dp'"):
        ps.DataLoader(numbers, mesh="dp")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="split=False lets every rank read all samples"):
        ps.DataLoader(numbers, split=False, mesh=mesh)
    with pytest.raises(ConfigError, match=r"a RankDataset determines .*: pass the ranks there"):
        ps.DataLoader(ps.RankDataset(path), mesh=mesh)
    with pytest.raises(ConfigError, match=r"Sampler determines .*: pass the ranks there"):
        ps.DataLoader(numbers, sampler=ps.DistributedSampler(numbers), mesh=mesh)
    with pytest.raises(ps.errors.SamplerError, match="come from the DistributedSampler"):
        ps.GroupedBatchSampler(ps.DistributedSampler(numbers, shuffle="global"), [0] * 8, 2, mesh=mesh)


def test_a_loader_splits_among_the_ranks_that_it_is_given(tmp_path: Path) -> None:
    start_ranks(2, pass_ranks, write_rows(tmp_path, 8))


def use_a_pickle(rank: int, sent: dict[str, bytes]) -> None:
    for name, data in sent.items():
        late = pickle.loads(data)
        assert (late.rank, getattr(late, "num_replicas", None) or late.world_size) == (rank, 2), name


def test_a_pickled_sampler_reads_the_ranks_where_it_is_used(tmp_path: Path) -> None:
    manifest = ps.Manifest.open(write_rows(tmp_path, 8))
    made: dict[str, Any] = {
        "sampler": ps.DistributedSampler(range(8)),
        "endless": ps.InfiniteSampler(range(8)),
        "grouped": ps.GroupedBatchSampler(ps.SequentialSampler(range(8)), [0] * 8, 2),
        "budget": ps.TokenBudgetBatchSampler([1] * 8, 2),
        "data set": ps.RankDataset(manifest),
    }
    start_ranks(2, use_a_pickle, {name: pickle.dumps(one) for name, one in made.items()})


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE"])
def test_half_of_the_environment_is_one_error_at_the_first_use(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = ps.Manifest.open(write_rows(tmp_path, 8))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(variable, "1")
    numbers: Any = range(8)
    made: list[Any] = [
        ps.DistributedSampler(numbers),
        ps.InfiniteSampler(numbers),
        ps.GroupedBatchSampler(ps.SequentialSampler(numbers), [0] * 8, 2),
        ps.TokenBudgetBatchSampler([1] * 8, 2),
        ps.DataLoader(numbers, 2),
        ps.DataLoader(numbers, 2, split=True),
        ps.DataLoader(ps.RankDataset(manifest), 2),
        ps.DataLoader(ps.MPDataset(manifest, batch_size=2), batch_size=2),
        ps.StreamShards([str(tmp_path / "0.tar.gz")]),
    ]
    for one in made:
        with pytest.raises(PartitionError, match=f"only {variable} is set of RANK and WORLD_SIZE"):
            next(iter(one))
    given: list[Any] = [
        ps.DataLoader(numbers, 8, rank=0, world_size=1),
        ps.DistributedSampler(numbers, 1, 0, shuffle=False),
    ]
    assert [len(list(one)) for one in given] == [1, 8]
