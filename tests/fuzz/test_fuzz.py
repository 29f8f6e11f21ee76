"""The fuzz targets for a few seconds, from all seeds on: inputs that once found a fault among them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SECONDS = 15
MISSING = 3

sys.path.insert(0, str(HERE))

import corpus  # noqa: E402  -- the folder that it is in is on the path now


@pytest.mark.slow
@pytest.mark.parametrize("target", ["decode", "transcode"])
def test_nothing_is_found(target: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PENSTOCK_FUZZ": str(tmp_path)}
    command = [sys.executable, str(HERE / "run"), "system", str(SECONDS), target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == MISSING:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-5000:]
    assert "number_of_executed_units" in done.stderr


def test_seeds_are_the_same_each_time(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        corpus.main(tmp_path / folder)
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    assert len(files) >= len(corpus.inputs())
    assert max(map(len, files.values())) < 4096  # what libFuzzer is told to be the most
