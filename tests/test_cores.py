"""How many cores there are, and how busy they are."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from penstock.cores import cores, ticks
from penstock.loader.config import LoaderConfig
from penstock.loader.statistics import Statistics


@pytest.fixture(autouse=True)
def _anew() -> None:
    cores.cache_clear()


def test_cores_are_those_that_the_process_may_run_on() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)


def test_cores_of_a_container_with_a_quota(tmp_path: Path) -> None:
    everything = cores(tmp_path / "missing")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/container\n")
    folder = tmp_path / "sys/fs/cgroup/pod/container"
    folder.mkdir(parents=True)
    (folder / "cpu.max").write_text("max 100000\n")
    assert cores(tmp_path) == everything
    cores.cache_clear()
    (folder.parent / "cpu.max").write_text("50000 100000\n")
    assert cores(tmp_path) == 1


@pytest.mark.clock
@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux")
def test_work_makes_cores_busy() -> None:
    statistics = Statistics()
    assert statistics.stats()["cores_busy"] is None
    statistics.begin(LoaderConfig())
    end = time.perf_counter() + 0.5
    while time.perf_counter() < end:
        pass
    busy = statistics.stats()["cores_busy"]
    assert 0.4 / (os.cpu_count() or 1) < busy <= 1


def test_only_cores_of_this_process_count(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    mine = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    lines = ["cpu 9 9 9 9 9 9 9 9 9 9", f"cpu{mine} 10 1 5 100 20 2 3 4 7 7", "cpu9999 1 1 1 1 1 1 1 1 1 1", "intr 5"]
    (tmp_path / "proc/stat").write_text("\n".join(lines))
    assert ticks(tmp_path) == ((25, 145) if hasattr(os, "sched_getaffinity") else None)
    assert ticks(tmp_path / "missing") is None
