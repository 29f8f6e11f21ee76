"""A rank that is killed in mini-epoch 2 of 4: the job goes on as if nothing had happened, on any number of ranks."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_run import full_only
from gloo_support import die, start_ranks, write_rows

from penstock import DataLoader, RankDataset
from penstock.random import generator

N, MINI_EPOCHS, BATCH = 83, 4, 5


def augmented(record: Any) -> tuple[int, float]:
    return record.row, float(generator().random())


augmented.pure = True  # type: ignore[attr-defined]


def train(
    rank: int, folder: Path, name: str, how: dict[str, Any], resume: str | None, dies: tuple[int, int] | None
) -> None:
    """One epoch; every rank logs its batches, and rank 0 saves the state after each."""
    data = RankDataset(folder / "meta.txt", mini_epochs=MINI_EPOCHS, seed=3, load=augmented)
    loader = DataLoader(data, batch_size=BATCH, **how)
    if resume is not None:
        loader.load_state_dict(json.loads(resume))
    step = 0
    with (folder / f"{name}.{rank}").open("w") as log:
        while loader.epoch == 0:
            mini_epoch = data.mini_epoch
            for rows, draws in loader:
                dist.all_reduce(torch.ones(1))  # all ranks are at the same batch
                print(json.dumps([mini_epoch, rows.tolist(), draws.tolist()]), file=log, flush=True)
                step += 1
                if rank == 0:
                    written = folder / f"{name}.state.tmp"
                    written.write_text(json.dumps({"batches": step, "state": loader.state_dict()}))
                    os.replace(written, folder / f"{name}.state")
                if (rank, step) == dies:
                    die()


def train_and_tell(*args: Any) -> str:
    """The other ranks of a job in which one dies get an error from gloo, sooner or later."""
    try:
        train(*args)
    except RuntimeError:
        return "lost its peer"
    return "ended"


def logged(folder: Path, name: str, world: int) -> list[list[Any]]:
    return [[json.loads(line) for line in (folder / f"{name}.{rank}").open()] for rank in range(world)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What two ranks have in an epoch that nobody interrupts, inline: any executor makes the same."""
    folder = tmp_path_factory.mktemp("whole")
    write_rows(folder, N)
    start_ranks(2, train, folder, "whole", {}, None, None)
    found = logged(folder, "whole", 2)
    assert [len(log) for log in found] == [12, 12], "three batches in each mini-epoch"
    return found


@full_only("three jobs for each", but=["process-how2-1"])
@pytest.mark.parametrize(
    ("name", "how", "killed"),
    [
        ("inline", {}, 1),
        ("thread", {"num_workers": 2, "executor": "thread", "persistent_workers": True}, 0),
        ("process", {"num_workers": 1, "multiprocessing_context": "fork"}, 1),
    ],
)
def test_kill_and_resume(tmp_path: Path, whole: list[list[Any]], name: str, how: dict[str, Any], killed: int) -> None:
    write_rows(tmp_path, N)
    ends = start_ranks(2, train_and_tell, tmp_path, name, how, None, (killed, 4))
    assert ends[killed] == -signal.SIGKILL
    assert ends[1 - killed] == "lost its peer"
    saved = json.loads((tmp_path / f"{name}.state").read_text())
    done = saved["batches"]
    assert 3 <= done <= 5, "in the second mini-epoch, or right before it"
    head = [log[:done] for log in logged(tmp_path, name, 2)]
    assert head == [log[:done] for log in whole]

    state = json.dumps(saved["state"])
    start_ranks(2, train, tmp_path, f"{name} resumed", how, state, None)
    tail = logged(tmp_path, f"{name} resumed", 2)
    assert [first + rest for first, rest in zip(head, tail, strict=True)] == whole

    for world in (1, 3) if name == "inline" else ():
        start_ranks(world, train, tmp_path, f"{name} on {world}", how, state, None)
        rest = logged(tmp_path, f"{name} on {world}", world)
        rows = Counter(row for log in [*head, *rest] for _, rows, _ in log for row in rows)
        assert set(rows) == set(range(N))
        assert rows.total() - N < world * MINI_EPOCHS
        draws = {
            (row, draw)
            for log in [*head, *rest]
            for _, rows, drawn in log
            for row, draw in zip(rows, drawn, strict=True)
        }
        expected = {
            (row, draw) for log in whole for _, rows, drawn in log for row, draw in zip(rows, drawn, strict=True)
        }
        assert len(draws - expected) < world * MINI_EPOCHS, "only padding draws anew"
