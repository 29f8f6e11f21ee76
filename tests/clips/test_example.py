"""``examples/train_clips.py``: it learns, and goes on from what it has saved."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_clips.py"


def run(folder: Path, *arguments: str) -> list[tuple[int, float]]:
    """Return the epochs that it went through, and how much was recognised after each."""
    command = [sys.executable, str(EXAMPLE), "--count", "10", "--workers", "0", *arguments]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return [(int(epoch), int(share) / 100) for epoch, share in re.findall(r"epoch (\d+): .* (\d+)%", done.stdout)]


def test_it_learns_and_goes_on(tmp_path: Path) -> None:
    first = run(tmp_path, "--epochs", "3")
    assert [epoch for epoch, _ in first] == [0, 1, 2]
    then = run(tmp_path, "--epochs", "6")
    assert [epoch for epoch, _ in then] == [3, 4, 5]
    assert max(share for _, share in then) > 0.6  # a fourth is chance
