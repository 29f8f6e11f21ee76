"""``examples/numpy_loop.py``: it learns, by the same steps whoever makes the batches."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from busy_support import HANG

EXAMPLE = Path(__file__).parents[2] / "examples" / "numpy_loop.py"


def run(folder: Path, *arguments: str) -> str:
    """Return what it says."""
    command = [sys.executable, str(EXAMPLE), "--epochs", "2", *arguments]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=HANG)
    return done.stdout


def test_it_learns(tmp_path: Path) -> None:
    said = run(tmp_path)
    first, second = (float(loss) for loss in re.findall(r"loss (\S+)", said))
    assert second < first < 2.3  # ln(10), by chance
    (accuracy,) = re.findall(r"accuracy (\S+),", said)
    assert float(accuracy) > 0.25
    assert run(tmp_path, "--workers", "2") == said
