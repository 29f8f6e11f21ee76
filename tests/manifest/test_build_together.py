"""Several processes that open the same new file, and a builder that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from busy_support import HANG
from full_run import full_only

from penstock.manifest import Manifest

WriteFile = Callable[..., Path]

OPEN = """
import os, sys
from penstock.manifest import Manifest
print("ready", flush=True)
sys.stdin.readline()
manifest = Manifest.open(sys.argv[1], cache_dir=sys.argv[2])
made = [os.path.join(sys.argv[2], name) for name in os.listdir(sys.argv[2]) if not name.endswith(".tmp")]
print(len(manifest), manifest[-1].label, os.stat(made[0]).st_ino, manifest.fingerprint, flush=True)
sys.stdin.readline()
"""


def open_together(path: Path, cache: Path, count: int = 3) -> list[str]:
    """What each of several processes prints that all begin to open the file at one moment."""
    command = [sys.executable, "-c", OPEN, str(path), str(cache)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    streams = [(process.stdin, process.stdout) for process in processes]
    assert all(out is not None and out.readline() == "ready\n" for _, out in streams)
    results = []
    for write, _ in streams:
        assert write is not None
        write.write("go\n")
        write.flush()
    for _, out in streams:  # nobody ends before all have looked, so that no inode is used again
        assert out is not None
        results.append(out.readline())
    for process in processes:
        process.communicate("end\n", timeout=HANG)
    return results


def test_one_process_builds_and_the_others_wait(write: WriteFile, tmp_path: Path) -> None:
    path = write("".join(f"d/{k}.jpg {k}\n" for k in range(500_000)))
    cache = tmp_path / "cache"
    results = open_together(path, cache)
    assert len(set(results)) == 1, results
    assert results[0].startswith("500000 499999 ")
    assert len(list(cache.iterdir())) == 1


def test_one_process_converts(tmp_path: Path) -> None:
    path, cache = tmp_path / "t.parquet", tmp_path / "cache"
    pq.write_table(pa.table({"path": [f"d/{k}.jpg" for k in range(100_000)], "label": range(100_000)}), path)
    results = open_together(path, cache)
    assert len(set(results)) == 1, results
    assert len(list(cache.iterdir())) == 1


@full_only("processes in a race")
def test_another_process_takes_over_from_a_builder_that_is_killed(write: WriteFile, tmp_path: Path) -> None:
    with open(path := tmp_path / "big.txt", "wb") as file:
        for k in range(40):
            file.write(b"".join(b"d/%d.jpg %d\n" % (i, k) for i in range(100_000)))
    os.utime(path, ns=(0, 0))
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", OPEN, str(path), str(cache)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        process.stdin.write("go\n")
        process.stdin.flush()
        while not (cache.exists() and list(cache.iterdir())):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    left = [p for p in cache.iterdir() if p.suffix == ".tmp"]
    if not left:
        pytest.skip("the builder was faster than the signal")
    os.utime(left[0], ns=(0, 0))  # as if it had been killed long ago
    start = time.monotonic()
    manifest = Manifest.open(path, cache_dir=cache)
    assert time.monotonic() - start < 20
    assert manifest[-1].label == 39
    assert [p.suffix for p in cache.iterdir()] == [".pstk"]
