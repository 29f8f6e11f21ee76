"""The guide's code blocks, and the example's training, which is the same with a cluster and without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from test_code import ROOT, run_python

from interpreter_support import FULL


def test_python_blocks_run(ray_environment: None, tmp_path: Path) -> None:
    run_python(ROOT / "docs" / "guides" / "ray.md", tmp_path)


def test_training_is_the_same(ray_environment: None) -> None:
    """Every step's loss, with two ranks, or in full in all ways; the example itself compares them to the last bit."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "ray_train_cifar.py"), "--images", "400"]
    ways = [] if FULL else ["--ways", "DDP, 2 ranks"]
    done = subprocess.run([*command, "--epochs", "1", *ways], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("yes") == (6 if FULL else 2)
