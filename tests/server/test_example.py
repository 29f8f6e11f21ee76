"""``examples/train_from_server.py``: what a rank does; and as it stands, with two servers that are killed meanwhile."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import cv2
import numpy as np
import psutil
import pytest
from busy_support import HANG
from full_run import full_only
from interpreter_support import FULL, run
from jobs_support import serving_many

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_from_server.py"


@full_only("whole programs")
def test_a_rank_sees_each_sample_once_an_epoch(tmp_path: Path) -> None:
    """One: torch takes seconds in each."""
    rng = np.random.default_rng(0)
    for row in range(40):
        cv2.imwrite(str(tmp_path / f"{row}.jpg"), rng.integers(0, 256, (32, 32, 3), dtype=np.uint8))
    meta = tmp_path / "train.txt"
    meta.write_text("".join(f"{tmp_path}/{row}.jpg {row % 10}\n" for row in range(40)))
    with serving_many(meta, meta) as servers:
        command = [str(EXAMPLE), "--from", *(server.address for server in servers), "--batch-size", "10"]
        command += ["--epochs", "2", "--rendezvous", str(tmp_path / "rendezvous")]
        environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = run(command, cwd=tmp_path, env=environment, timeout=HANG)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    for epoch in range(2):
        assert sorted(row for step in steps if step["epoch"] == epoch for row in step["rows"]) == list(range(40))


@pytest.mark.clock
@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="six interpreters, one after the other; PENSTOCK_TEST_FULL=1")
def test_train_from_server(tmp_path: Path) -> None:
    command = [str(EXAMPLE), "--epochs", "2"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = run(command, cwd=tmp_path, env=environment, timeout=HANG)
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
