"""Programs in an interpreter that looks like one on macOS (support/no_linux): the executors give the batches of Linux.

The system below is Linux all the same: its calls, its linker and torch's build are not macOS's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import interpreter_support
import pytest
from busy_support import HANG

import penstock as ps

NO_LINUX = Path(__file__).parent / "support" / "no_linux"

PROGRAM = """
import json
import multiprocessing
import os
import sys

import numpy as np


def batches(manifest, executor, workers):
    import penstock as ps

    found = []
    dataset = ps.RankDataset(manifest, seed=5, rank=1, world_size=2, load=loaded)
    options = {"num_workers": workers, "executor": executor, "persistent_workers": workers > 0}
    with ps.DataLoader(dataset, batch_size=8, **options) as loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            for batch in loader:
                found.append([batch["number"].tolist(), float(batch["row"].sum())])
    return found


def main():
    if sys.argv[2] == "macos":
        assert sys.platform == "darwin" and not hasattr(os, "memfd_create") and not os.path.exists("/proc/self")
        assert multiprocessing.get_start_method() == "spawn"
    print(json.dumps([batches(sys.argv[1], *executor) for executor in json.loads(sys.argv[3])]))


def loaded(record):
    return {"number": int(record.path), "row": np.full(3000, record.label, np.float32)}


if __name__ == "__main__":
    main()
"""


def run_without_linux(*arguments: str, folder: Path) -> str:
    """Run an interpreter that has nothing of Linux; return what it prints."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(ps.__file__).parents[1]), str(NO_LINUX)]),
        # sysconfig has a file named after the system.
        "_PYTHON_SYSCONFIGDATA_NAME": sysconfig._get_sysconfigdata_name(),  # type: ignore[attr-defined]
    }
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="takes away what only Linux has")
def test_the_executors_give_the_batches_of_linux(tmp_path: Path) -> None:
    manifest = tmp_path / "rows.jsonl"
    manifest.write_text("".join(json.dumps({"path": str(number), "label": number % 7}) + "\n" for number in range(48)))
    (tmp_path / "program.py").write_text(PROGRAM)

    arguments = ["program.py", str(manifest)]
    done = interpreter_support.run([*arguments, "linux", '[["inline", 0]]'], cwd=tmp_path, timeout=HANG)
    assert done.returncode == 0, done.stderr
    expected = json.loads(done.stdout)
    assert [len(batches) for batches in expected] == [6]
    executors = json.dumps([("inline", 0), ("thread", 2), ("process", 2)])
    found = json.loads(run_without_linux(*arguments, "macos", executors, folder=tmp_path))
    assert found == 3 * expected


@pytest.mark.skipif(sys.platform != "linux", reason="takes away what only Linux has")
def test_the_doctor_looks_at_a_machine_without_proc(tmp_path: Path) -> None:
    found = json.loads(run_without_linux("-m", "penstock", "doctor", "--json", folder=tmp_path))
    assert found["ok"]
    assert found["shared_memory"] is None
