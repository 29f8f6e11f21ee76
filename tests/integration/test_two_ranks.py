"""Each framework on two ranks, as its users write it, in interpreters that have not seen our loader before."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from busy_support import HANG
from full_run import full_only
from interpreter_support import FULL

import penstock as ps

PROGRAMS = Path(__file__).parent / "two_ranks"
pytestmark = pytest.mark.slow
KINDS = ("global", "shuffled", "share", "shards", "ours")
ROWS, BATCH, SEED, WORLD = 24, 4, 3, 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the rows that the programs read, as a manifest and as shards."""
    (tmp_path / "rows.txt").write_text("".join(f"{row}.jpg {row}\n" for row in range(ROWS)))
    with ps.ShardWriter(str(tmp_path / "rows-%d.tar"), maxcount=ROWS // 3) as shards:
        for row in range(ROWS):
            shards.write({"__key__": f"{row:03}", "txt": str(row)})
    return tmp_path


def run(arguments: list[str], folder: Path) -> None:
    """Run a program in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments, str(folder)],
        cwd=folder,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def found(folder: Path, case: str) -> list[Any]:
    """What a case wrote, of each rank."""
    return [json.loads((folder / f"{case}.rank{rank}.json").read_text()) for rank in range(WORLD)]


def check(folder: Path, case: str, *, ways: int, ordered: bool = False) -> None:
    """Each row came once in each of two epochs, in batches of our executor, by the loader as it was asked for.

    Args:
        ways: in which the case made a loader.
        ordered: in the order of the loader's seed, step by step.
    """
    ranks = found(folder, case)
    assert [len(each) for each in ranks] == [ways] * WORLD
    for way in range(ways):
        ours = [each[way] for each in ranks]
        for rank in ours:
            assert rank["class"] == "penstock.loader.dataloader.DataLoader"
            assert (rank["seed"], rank["executor"]) == (SEED, "thread")
            assert rank["made"] == ["thread", 2, 2 * ROWS // BATCH // WORLD]
        for epoch in range(2):
            batches = [rank["epochs"][epoch] for rank in ours]
            assert sorted(row for each in batches for batch in each for row in batch) == list(range(ROWS))
            if ordered:
                assert [sorted(a + b) for a, b in zip(*batches, strict=True)] == steps(epoch)
        assert ours[0]["epochs"][0] != ours[0]["epochs"][1]


def steps(epoch: int) -> list[list[int]]:
    """Rows of each step of the whole job."""
    sampler = ps.RandomSampler(range(ROWS), shuffle="global", seed=SEED)
    sampler.set_epoch(epoch)
    order, size = list(sampler), WORLD * BATCH
    return [sorted(order[begin : begin + size]) for begin in range(0, ROWS, size)]


@pytest.mark.skipif(not FULL, reason="a whole program; its example has two ranks, too; PENSTOCK_TEST_FULL=1")
def test_lightning(folder: Path) -> None:
    pytest.importorskip("lightning")
    run([str(PROGRAMS / "fit_lightning.py")], folder)
    for kind in KINDS:
        check(folder, kind, ways=2, ordered=kind in ("global", "shuffled", "ours"))
    check(folder, "fabric-global", ways=1, ordered=True)
    check(folder, "fabric-share", ways=1)
    ranks = found(folder, "again")
    for number, rank in enumerate(ranks):
        assert (rank["class"], rank["batch_size"]) == ("DpexDataLoader", BATCH)
        assert rank["checked"] == 2 * list(range(number, ROWS, WORLD))
    for epoch in range(2):
        assert sorted(row for rank in ranks for batch in rank["epochs"][epoch] for row in batch) == list(range(ROWS))


@pytest.mark.skipif(not FULL, reason="a whole program; its example has two ranks, too; PENSTOCK_TEST_FULL=1")
def test_accelerate(folder: Path) -> None:
    pytest.importorskip("accelerate")
    run([str(PROGRAMS / "prepare_accelerate.py")], folder)
    for kind in KINDS:
        check(folder, kind, ways=1, ordered=kind in ("global", "shuffled", "ours"))
    check(folder, "groups", ways=1)
    assert sorted(row for rows in found(folder, "dispatched") for row in rows) == list(range(ROWS))


@pytest.mark.skipif(not FULL, reason="a whole program; its example has two ranks, too; PENSTOCK_TEST_FULL=1")
def test_transformers(folder: Path) -> None:
    pytest.importorskip("transformers")
    run([str(PROGRAMS / "train_transformers.py")], folder)
    for kind in KINDS:
        check(folder, kind, ways=2, ordered=kind in ("global", "shuffled", "ours"))


@full_only("a whole program; the example of DDP is started by torchrun, too")
def test_torchrun(folder: Path) -> None:
    """Its ranks are told once, by whichever loader comes first, that they read the same batches."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = ["--master-addr", "127.0.0.1", "--master-port", port]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(WORLD), *address]
    run([*torchrun, str(PROGRAMS / "run_torchrun.py")], folder)
    for kind in KINDS:
        check(folder, kind, ways=1, ordered=kind in ("global", "ours"))
    first, second = found(folder, "undealt")
    assert first["rows"] == second["rows"]
    for rank in (first, second):
        assert [said for said in rank["said"] if "each of the 2 ranks reads all of this Rows" in said] == [
            "each of the 2 ranks reads all of this Rows, and the same batches if data and seed are the same "
            "everywhere. To split the data among the ranks, pass split=True to the DataLoader. If the data "
            "already are this rank's share, or if every rank should read all of them, pass split=False"
        ]
