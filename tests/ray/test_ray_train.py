"""The example of Ray Train: workers that are killed are started again, and go on at the next batch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from busy_support import HANG
from example_support import BATCH, EXAMPLES, ROWS, Run, made_by_penstock, read, write_images
from full_run import full_only
from interpreter_support import FULL, run

import penstock as ps


def train(folder: Path, address: str, record: str, *more: str) -> None:
    sizes = ["--batch-size", str(BATCH), "--checkpoint-every", "3"]
    files = ["--data", str(folder / "cifar10"), "--checkpoint", str(folder / "run"), "--record", str(folder / record)]
    command = ["-W", "ignore", str(EXAMPLES / "ray_train.py"), *files, *sizes, "--address", address, *more]
    environment = {**os.environ, "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}
    done = run(command, timeout=HANG, cwd=folder, env=environment, imports=["ray.train", "ray.train.torch"])
    assert done.returncode == 0, done.stdout + done.stderr


def order() -> list[list[int]]:
    rows = list(ps.RandomSampler(range(ROWS), shuffle="global", seed=0))
    return [sorted(rows[first : first + BATCH]) for first in range(0, ROWS, BATCH)]


def has(job: Run, steps: range, ranks: int) -> None:
    assert [sorted(job.rows(step)) for step in steps] == [order()[step - 1] for step in steps]
    assert all(len(job.steps[step]) == ranks for step in steps)
    made_by_penstock(job)


@full_only(
    "two controllers of Ray Train; test_ray_faults.py has lost workers and nodes, test_examples.py the same loop"
)
def test_killed_workers_start_again_at_the_checkpoint(cluster: Any, tmp_path: Path) -> None:
    """Eight steps an epoch, saved after three and six: a second run has the last two steps again."""
    write_images(tmp_path / "cifar10")
    train(tmp_path, cluster.address, "first", "--stop-after", "5")
    begun, ended = read(tmp_path, "first")
    assert (begun.start, ended.start) == (0, 3)
    has(begun, range(1, 5), 2)  # one may be ended by the other's death before it says more
    has(ended, range(4, 9), 2)
    assert (5 in begun.steps, max(ended.steps)) == (True, 8)
    assert abs(begun.loss(4) - ended.loss(4)) < 1e-5

    if not FULL:  # another controller and worker to start, for what the example of DDP shows too
        return
    train(tmp_path, cluster.address, "second", "--workers", "1")
    (rest,) = read(tmp_path, "second")
    assert rest.start == 6
    has(rest, range(7, 9), 1)
    assert abs(rest.loss(7) - ended.loss(7)) < 1e-5
