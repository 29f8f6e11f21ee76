"""torch.distributed.checkpoint takes loaders, samplers and data sets as they are, and loads them on other meshes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo_support import start_ranks, write_rows
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps

GLOBAL, ROWS = 8, 96
PROGRAM = Path(__file__).parents[2] / "examples" / "resume_on_mesh.py"


def row(record: Any) -> int:
    return int(record[2])


def read(rank: int, folder: Path, shape: tuple[int, int], kind: str, steps: int | None, how: str) -> list[list[int]]:
    """Continue at the checkpoint, if there is one; save after ``steps``."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    data: Any = range(ROWS)
    sampler = None
    if kind == "data set":
        data = ps.RankDataset(folder / "meta.txt", seed=1, mini_epochs=2, mesh=mesh, load=row)
    elif kind == "sampler":
        sampler = ps.DistributedSampler(data, shuffle="global", mesh=mesh)
    options = {"shuffle": True, "seed": 0, "mesh": mesh} if kind == "loader" else {"sampler": sampler}
    loader: Any = ps.DataLoader(data, GLOBAL // shape[0], **options)
    objects: dict[str, Any] = {"loader": loader}
    checkpoint = folder / f"{kind} {how}"
    resumes = checkpoint.exists()
    dist.barrier()
    if resumes:
        dcp.load(objects, checkpoint_id=checkpoint)
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        if len(batches) == steps:
            if how == "async_save":
                dcp.async_save(objects, checkpoint_id=checkpoint).result()  # type: ignore[union-attr]
            else:
                dcp.save(objects, checkpoint_id=checkpoint)
            break
    dist.barrier()
    return batches


def joined(found: list[list[list[int]]], shape: tuple[int, int]) -> list[list[int]]:
    """The global batches: peers in the second dimension have the same."""
    data, peers = shape
    for rank in range(data * peers):
        assert found[rank] == found[rank - rank % peers]
    return [sorted(row for part in parts for row in part) for parts in zip(*found[::peers], strict=True)]


@pytest.mark.parametrize(
    ("kind", "shape", "other", "how"),
    [
        ("loader", (4, 1), (2, 1), "save"),
        ("loader", (2, 2), (4, 1), "async_save"),
        ("sampler", (2, 2), (4, 1), "save"),
        ("data set", (2, 2), (4, 1), "save"),
    ],
)
def test_a_checkpoint_continues_on_another_mesh(
    tmp_path: Path, kind: str, shape: tuple[int, int], other: tuple[int, int], how: str
) -> None:
    write_rows(tmp_path, ROWS)
    whole = joined(start_ranks(4, read, tmp_path, (4, 1), kind, None, "never"), (4, 1))
    head = joined(start_ranks(shape[0] * shape[1], read, tmp_path, shape, kind, 3, how), shape)
    tail = joined(start_ranks(other[0] * other[1], read, tmp_path, other, kind, None, how), other)
    if kind == "data set":
        # The rest of the epoch is split again, so its batches are others, of the same rows.
        assert head == whole[:3]
        assert len({row for batch in head + tail for row in batch}) == 3 * GLOBAL + sum(map(len, tail))
    else:
        assert head + tail == whole


def save_and_load(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def objects() -> dict[str, Any]:
        numbers = range(ROWS)
        return {
            "sampler": ps.DistributedSampler(numbers, shuffle="global", mesh=mesh),
            "endless": ps.InfiniteSampler(numbers, mesh=mesh),
            "grouped": ps.GroupedBatchSampler(ps.SequentialSampler(numbers), [0] * ROWS, 4, mesh=mesh),
            "budget": ps.TokenBudgetBatchSampler([1] * ROWS, 4, mesh=mesh),
            "data set": ps.RankDataset(folder / "meta.txt", seed=1, mesh=mesh),
        }

    begun, fresh = objects(), objects()
    assert all(isinstance(one, Stateful) for one in begun.values())
    for name in ("sampler", "endless", "grouped", "budget"):
        begun[name].set_epoch(1)
        iterator = iter(begun[name])
        next(iterator)
        next(iterator)
    begun["data set"].set_epoch(2)
    dcp.save(begun, checkpoint_id=folder / "objects")
    dcp.load(fresh, checkpoint_id=folder / "objects")
    for name, one in fresh.items():
        assert one.state_dict() == begun[name].state_dict(), name
    # Each is one entry, written by one rank.
    size = sum(path.stat().st_size for path in (folder / "objects").iterdir())
    assert size < 2_000 * len(begun)
    # What the ranks do not have in common is under keys of their own.
    own, other = (ps.DataLoader(range(ROWS), 2, split=False) for _ in range(2))  # type: ignore[arg-type]
    rest = iter(own)
    for _ in range(rank):
        next(rest)
    dcp.save({f"loader {rank}": own}, checkpoint_id=folder / "own")
    dcp.load({f"loader {rank}": other}, checkpoint_id=folder / "own")
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in rest]


def test_samplers_and_data_sets_are_stateful(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    start_ranks(4, save_and_load, tmp_path)


def run_program(folder: Path, shape: str, *die: str) -> list[list[list[int]]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(PROGRAM)]
    options = [str(folder), "--mesh", *shape.split("x"), *die]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*command, *options], timeout=120, capture_output=True, text=True, env=environment)
    assert (done.returncode != 0) == bool(die), done.stderr
    assert ("SIGKILL" in done.stderr) == bool(die), done.stderr
    return [[json.loads(line) for line in (folder / f"{shape}.{rank}").open()] for rank in range(4)]


def test_the_example_has_the_batches_of_a_run_that_never_stopped(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = joined(run_program(tmp_path / "whole", "4x1"), (4, 1))
    head = joined([log[:5] for log in run_program(tmp_path / "killed", "2x2", "--die-at", "7")], (2, 2))
    tail = joined(run_program(tmp_path / "killed", "4x1"), (4, 1))
    assert head + tail == whole
    assert len(whole) == 12
