"""``examples/train_from_server.py`` as it stands: two ranks, two servers, both of which are killed on the way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from busy_support import HANG

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_from_server.py"


@pytest.mark.clock
@pytest.mark.slow
def test_train_from_server(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--epochs", "2"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" killed\n") == 2
    assert re.findall(r"epoch (\d): 5,000 of 5,000 samples, 5,000 times", done.stdout) == ["1", "2"]
    assert "each sample exactly once an epoch" in done.stdout
    (streams,) = re.findall(r"server 1 sent (\d+) streams, server 2 sent (\d+) streams", done.stdout)
    assert min(map(int, streams)) > 0
    (longest,) = re.findall(r"longest step, a killed server included: ([\d.]+) s", done.stdout)
    assert float(longest) < 10
    left = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if any(str(tmp_path) in argument for argument in process.info["cmdline"] or [])
    ]
    assert left == []
