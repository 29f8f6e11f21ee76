"""torchtitan's form under a real torchrun: a `Stateful` loader in a checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from busy_support import HANG
from example_support import LIBRARIES, output, run_ranks
from full_run import full_only

import penstock as ps

PROGRAM = Path(__file__).parent / "two_ranks" / "run_torchtitan.py"
ROWS, BATCH, SEED, STOP, EPOCHS = 72, 12, 3, 4, 2
pytestmark = pytest.mark.slow


def torchrun(folder: Path, ranks: int, arguments: list[str]) -> None:
    """Start the program as users do."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(PROGRAM), *arguments],
        cwd=folder,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def forked(folder: Path, ranks: int, arguments: list[str]) -> None:
    """Start its ranks by themselves, with the variables that torchrun sets."""
    codes = run_ranks([str(PROGRAM), *arguments], folder, ranks, imports=LIBRARIES, told=True)
    assert codes == [0] * ranks, output(folder)


def check(folder: Path, form: str, ranks: tuple[int, int], start: Callable[[Path, int, list[str]], None]) -> None:
    """Stop within an epoch on some ranks, go on on others: each step has the rows that the seed says."""
    (folder / "rows.txt").write_text("".join(f"{row}.jpg {row}\n" for row in range(ROWS)))
    start(folder, ranks[0], [form, str(folder), "--steps", str(STOP)])
    begun = steps(folder, ranks[0])
    start(folder, ranks[1], [form, str(folder)])
    ended = steps(folder, ranks[1])
    assert list(begun) == list(range(1, STOP + 1))
    assert list(ended) == list(range(STOP + 1, EPOCHS * ROWS // BATCH + 1))
    for epoch in range(EPOCHS):
        order = ps.RankDataset(str(folder / "rows.txt"), seed=SEED, rank=0, world_size=1)
        order.set_epoch(epoch)
        rows = [int(order[place][1]) for place in range(ROWS)]
        for number in range(ROWS // BATCH):
            step = epoch * ROWS // BATCH + number + 1
            assert sorted({**begun, **ended}[step]) == sorted(rows[number * BATCH : (number + 1) * BATCH])


def steps(folder: Path, ranks: int) -> dict[int, list[int]]:
    """Take each step's rows, of all ranks."""
    found: dict[int, list[int]] = {}
    for rank in range(ranks):
        path = folder / f"rows.{ranks}.{rank}"
        for step, rows in map(json.loads, path.read_text().splitlines()):
            found.setdefault(step, []).extend(rows)
        path.unlink()
    return found


def test_one_state_for_the_job_on_another_number_of_ranks(tmp_path: Path) -> None:
    check(tmp_path, "job", (2, 1), forked)


@full_only("two ranks for each, in fresh interpreters")
@pytest.mark.parametrize(("form", "ranks"), [("job", (2, 3)), ("rank", (2, 2))])
def test_by_torchrun(form: str, ranks: tuple[int, int], tmp_path: Path) -> None:
    """The state of each rank, as torchtitan's own loader of torchdata has it, goes on on as many ranks."""
    check(tmp_path, form, ranks, torchrun)
