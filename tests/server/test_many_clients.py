"""64 clients at once, of two jobs that have nothing in common: every row once an epoch, and a server that stays small.

``PENSTOCK_TEST_SECONDS=60`` lets it run for a minute.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import pytest
from dataset_support import eventually
from full_run import full_only
from jobs_support import Job, Truth, anonymous, descriptors, serving_many

SECONDS = float(os.environ.get("PENSTOCK_TEST_SECONDS", "1.5"))


@full_only("many clients; test_faults.py has some")
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
def test_64_clients(tmp_path: Path) -> None:
    truth = Truth(tmp_path / "train.txt", 10_007)
    with serving_many(truth.path, alone=True) as [server]:
        files = descriptors(server.pid)
        jobs = [
            Job(truth, [server.address], seed=1, world_size=40, mini_epochs=3, seconds=SECONDS),
            Job(truth, [server.address], seed=2, world_size=24, remainder="uneven", seconds=SECONDS),
        ]
        for job in jobs:
            job.start()
        memory: list[float] = []  # once both jobs have an epoch behind them
        while any(job.running for job in jobs):
            time.sleep(0.1)
            if all(job.epoch for job in jobs):
                memory.append(anonymous(server.pid))
        for job in jobs:
            job.join()
        print(*jobs, sep="; ")
        third = max(1, len(memory) // 3)
        first, last = statistics.median(memory[:third]), statistics.median(memory[-third:])
        print(f"memory of the server: {first:.1f} MiB, later {last:.1f}, at most {max(memory):.1f}")
        assert last < first + 8
        assert max(memory) < 150
        eventually(lambda: descriptors(server.pid) <= files + 2)
