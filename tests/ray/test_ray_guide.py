"""The guide's code blocks, and the example's training, which is the same with a cluster and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from busy_support import HANG
from full_run import full_only
from interpreter_support import FULL, run
from test_code import ROOT, run_python


def test_python_blocks_run(ray_environment: None, tmp_path: Path) -> None:
    run_python(ROOT / "docs" / "guides" / "ray.md", tmp_path)


@full_only("a controller of Ray Train; test_ray_batches.py has the same batches")
def test_training_is_the_same(cluster: Any) -> None:
    """Every step's loss, in one process, or in full in all ways and in a cluster that the example starts; the example
    itself compares them to the last bit. Two ranks, too: test_ray_cluster.
    """
    command = ["-W", "ignore", str(ROOT / "examples" / "ray_train_cifar.py"), "--images", "400", "--epochs", "1"]
    ways = [] if FULL else ["--ways", "DataParallel", "--address", cluster.address]
    done = run([*command, *ways], imports=["ray.train", "ray.train.torch"], timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("yes") == (6 if FULL else 2)
