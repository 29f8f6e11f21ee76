"""The command line, and ``penstock demo`` from end to end as a user runs it."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import demo_history
import numpy as np
import psutil
import pytest
from busy_support import HANG
from demo_history import count_samples, read_attempt, surviving
from demo_report import _print_verdict, print_results
from full_run import full_only
from interpreter_support import FULL
from rich.console import Console

from demo import Data, Plan

CHECKOUT = Path(__file__).resolve().parents[3]
PLAIN = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "100"}


def penstock(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *arguments]
    return subprocess.run(command, cwd=cwd, env=PLAIN, capture_output=True, text=True, timeout=HANG)


def processes_with(text: str) -> list[psutil.Process]:
    """Running processes that have this text in an argument."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and any(text in argument for argument in process.info["cmdline"] or [])
    ]


def test_version(tmp_path: Path) -> None:
    result = penstock("--version", cwd=tmp_path)
    assert (result.returncode, result.stdout.strip()) == (0, f"penstock {version('penstock')}")


def test_missing_data_is_one_line_on_stderr(tmp_path: Path) -> None:
    result = penstock("demo", "--data", "nowhere", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "nowhere" in result.stderr
    assert "--data" in result.stderr
    assert not (tmp_path / "demo-output").exists()


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = penstock("--debug", "demo", "--data", "nowhere", cwd=tmp_path)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "ConfigError" in result.stderr


def test_senseless_command_line_is_exit_code_2(tmp_path: Path) -> None:
    assert penstock("demo", "--epochs", "0", cwd=tmp_path).returncode == 2


def test_out_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    result = penstock("demo", "--out", "out", cwd=tmp_path)
    assert result.returncode == 1
    assert "out" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(not FULL, reason="trains on two ranks three times, for most of a minute; PENSTOCK_TEST_FULL=1")
@pytest.mark.slow
def test_quick_demo(tmp_path: Path) -> None:
    result = penstock("demo", "--quick", "--out", str(tmp_path / "out"), cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Each sample was seen exactly once per epoch" in result.stdout
    assert "All 40 batches are those of a run that was never killed" in result.stdout
    assert result.stdout.count("killed in step") == 2
    # epoch, ranks, samples, min, max, loss, test images, accuracy
    rows = re.findall(r"^│ +(\d) │ (\S.*?) │ +1,000 │ 1 x │ 1 x │ +[\d.]+ │ +500 │", result.stdout, re.MULTILINE)
    assert rows == [("1", "2 -> 1"), ("2", "1 -> 2")]

    # The same from the logs, by other means than the program's own.
    runs = tmp_path / "out" / "runs"
    attempts = [read_attempt(runs / f"attempt-{n}.jsonl", ranks) for n, ranks in ((1, 2), (2, 1), (3, 2))]
    assert [attempt.start for attempt in attempts] == [0, 10, 25]
    assert sum(len(attempt.steps) for attempt in attempts) == 46  # 6 of them were lost and done again
    rows_seen = np.concatenate([step.rows for step in surviving(attempts)])
    assert np.array_equal(np.bincount(rows_seen), np.full(1000, 2))
    assert all(size is not None and 20 << 20 < size < 4 << 30 for attempt in attempts for size in attempt.memory)

    image = (tmp_path / "out" / "demo.png").read_bytes()
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    assert image[-8:-4] == b"IEND"
    width, height = (int.from_bytes(image[place : place + 4], "big") for place in (16, 20))
    assert width > 800
    assert height > 400
    assert processes_with(str(tmp_path)) == []


def test_no_thread_of_the_ranks_outlives_their_group(tmp_path: Path) -> None:
    """One that does may want the interpreter's lock while that ends, and aborts the process."""
    program = (
        "import os, sys, torch, train_ddp\n"
        "import torch.distributed as dist\n"
        "train_ddp.join_ranks(None)\n"
        "model = torch.nn.Linear(2, 2)\n"
        "torch.optim.AdamW(model.parameters())\n"
        "dist.all_reduce(torch.ones(1))\n"
        "dist.destroy_process_group()\n"
        "names = [open(f'/proc/self/task/{task}/comm').read() for task in os.listdir('/proc/self/task')]\n"
        "sys.exit(sum('gloo' in name for name in names))\n"
    )
    environment = {**PLAIN, "PYTHONPATH": os.pathsep.join([str(CHECKOUT / "examples"), str(CHECKOUT / "src")])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr


@full_only("a training on two ranks; test_commands.py interrupts a command")
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), *([(signal.SIGTERM, 143)] if FULL else [])])
def test_interrupted_demo_leaves_no_process(tmp_path: Path, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "penstock", "demo", "--quick", "--out", str(tmp_path / "out")]
    demo = subprocess.Popen(command, cwd=tmp_path, env=PLAIN, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + HANG
        while len(processes_with(str(tmp_path))) < 3:  # the demo and two ranks
            assert time.monotonic() < deadline, "the two ranks have not been started"
            assert demo.poll() is None
            time.sleep(0.05)
        demo.send_signal(number)
        assert demo.wait(timeout=HANG) == code
        assert processes_with(str(tmp_path)) == []
    finally:
        for process in processes_with(str(tmp_path)):
            process.kill()


def test_lost_and_repeated_samples_are_counted(tmp_path: Path) -> None:
    """Two jobs, the second from step 2: step 3 of the first was lost, and a sample is missing in what replaced it."""
    lines = ['{"event": "start", "step": 0}']
    lines += [
        f'{{"event": "step", "step": {n}, "epoch": 0, "loss": 1, "rows": [{2 * n - 2}, {2 * n - 1}],'
        f' "seconds": {n}, "waited": 0.25, "memory": null}}'
        for n in (1, 2, 3)
    ]
    (tmp_path / "a.rank0").write_text("\n".join(lines) + '\n{"event": "step", "st')  # killed while it wrote
    resumed = [lines[0].replace("0", "2"), lines[3].replace("[4, 5]", "[4, 4]")]
    (tmp_path / "b.rank0").write_text("\n".join(resumed) + "\n")
    attempts = [read_attempt(tmp_path / name, 1) for name in ("a", "b")]
    steps = surviving(attempts)
    assert [step.number for step in steps] == [1, 2, 3]
    assert count_samples(steps, samples=6, epochs=1).tolist() == [[1, 1, 1, 1, 2, 0]]

    plan = Plan(1, 2, per_class=1, test_per_class=0, checkpoint_every=1, seeds=(0,))
    data = Data(tmp_path, tmp_path, tmp_path, tmp_path, samples=6, test_samples=0)
    output = io.StringIO()
    runs = dict.fromkeys(("none", "global", "torch"), attempts[:1])
    assert not print_results(Console(file=output), plan, data, attempts, runs, dict.fromkeys(runs, ""))
    assert "WRONG: samples were lost or repeated" in output.getvalue()


def test_training_that_fails_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "examples" / "data").mkdir(parents=True)
    archive = "cifar10-small.tar.xz"
    (tmp_path / "examples" / "data" / archive).symlink_to(CHECKOUT / "examples" / "data" / archive)
    (tmp_path / "examples" / "demo").symlink_to(CHECKOUT / "examples" / "demo")
    (tmp_path / "examples" / "train_ddp.py").write_text("raise SystemExit('the dog ate the gradients')")
    result = penstock("demo", "--quick", "--data", "examples/data", cwd=tmp_path)
    assert result.returncode == 1
    assert "the dog ate the gradients" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("ours", "torchs", "unshuffled", "says"),
    [
        ((0.50, 0.52, 0.51), (0.51, 0.50, 0.53), (0.11, 0.12, 0.10), ("within noise", "learned badly")),
        ((0.50, 0.52, 0.51), (0.61, 0.60, 0.63), (0.11, 0.12, 0.10), ("more than noise explains", "learned badly")),
        ((0.50, 0.52, 0.51), (0.51, 0.50, 0.53), (0.51, 0.50, 0.52), ("within noise", "made no difference")),
        ((0.50,), (0.51,), (0.11,), ("One seed says nothing", "for a verdict")),
    ],
)
def test_the_verdict_on_the_orders(
    ours: tuple[float, ...], torchs: tuple[float, ...], unshuffled: tuple[float, ...], says: tuple[str, str]
) -> None:
    """By Student's t at 95 % confidence."""

    def attempts(accuracies: tuple[float, ...]) -> list[demo_history.Attempt]:
        return [
            demo_history.Attempt(0, 1, [], [demo_history.Test(0, 1, accuracy, 100)], 1.0, 0.0)
            for accuracy in accuracies
        ]

    console = Console(file=io.StringIO(), width=100)
    runs = {"global": attempts(ours), "torch": attempts(torchs), "none": attempts(unshuffled)}
    _print_verdict(console, runs)
    assert isinstance(console.file, io.StringIO)
    told = console.file.getvalue()
    assert all(word in told for word in says), told
