"""`run.py`: what fails beside others and passes alone is no failure, unless other tests were left out for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from full_run import full_only

SOMETIMES = """
from pathlib import Path

def test_sometimes():
    mark = Path(__file__).with_name("mark")
    had = mark.exists()
    mark.touch()
    assert had
"""
ALWAYS = """
def test_always():
    assert False
"""


@full_only("a run of tests for each", but=["sometimes"])
@pytest.mark.parametrize(
    ("body", "arguments", "code", "last"),
    [
        (SOMETIMES, [], 0, "failed beside others, passed alone: tests/test_it.py::test_sometimes"),
        (SOMETIMES + ALWAYS, ["-x"], 1, None),
        (ALWAYS, [], 1, "failed twice: tests/test_it.py::test_always"),
        ("import no_such_module", [], 2, None),
    ],
    ids=["sometimes", "stopped", "always", "not imported"],
)
def test_what_failed_is_run_again(body: str, arguments: list[str], code: int, last: str | None, tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    for folder in ("ray", "integration", "tables", "storage", "loader", "faults", "datasets"):
        (tests / folder).mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tests / "test_it.py").write_text(body)
    shutil.copy(Path(__file__).with_name("run.py"), tests)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV"))}
    done = subprocess.run(
        [sys.executable, "tests/run.py", "-q", *arguments],
        cwd=tmp_path,
        env={**environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist.plugin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("failed ")]
    assert said == ([] if last is None else [last])
