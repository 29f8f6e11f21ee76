"""Ctrl-C at any moment of a command: exit code 130, and nothing is said."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = os.environ.get("PENSTOCK_TEST_FULL") == "1"

PROGRAM = """
import os, sys
when, *arguments = sys.argv[1:]
before = set(sys.modules)
from penstock.tools.cli import main
print(*sorted(set(sys.modules) - before), file=sys.stderr) if when == "modules" else None
sys.argv = ["penstock", *arguments]
seen = 0
def interrupt():
    os.kill(os.getpid(), 2)
def hook(event, found):
    global seen
    if event == "import":
        seen += 1
        if when in (found[0], str(seen)):
            interrupt()
import atexit
if when == "exit":
    atexit.register(interrupt)
if when == "count":
    atexit.register(lambda: print(seen, file=sys.stderr))
if when == "ignored":
    import signal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    when = "typer"
sys.addaudithook(hook)
main()
"""
"""The command, with a Ctrl-C as it imports a module: one of this name, or the one with this number."""


def interrupted(when: str, *arguments: str) -> tuple[int, str]:
    """Exit code and what was said."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, when, *arguments], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    path = tmp_path / "train.txt"
    path.write_text("0.jpg 0\n1.jpg 1\n")
    return str(path)


@pytest.mark.parametrize(
    "module",
    [
        *(
            "penstock.tools.cli.interrupt",
            "enum",
            "penstock.tools.cli.app",
            "typer",
            "typing",
            "penstock.tools.cli.layout",
        ),
        *("penstock.tools.cli.manifest_options", "penstock.manifest", "numpy._core._multiarray_umath"),
    ],
)
def test_while_modules_are_imported(module: str, manifest: str) -> None:
    assert interrupted(module, "manifest", "head", manifest) == (130, "")


@pytest.mark.parametrize("module", ["torch", "dill.__info__"])
def test_while_torch_is_imported(module: str) -> None:
    """It imports dill, if that is there, and that makes another error of any."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    assert interrupted(module, "profile", "nowhere/nothing.py:loader") == (130, "")


@pytest.mark.skipif(not FULL, reason="minutes: PENSTOCK_TEST_FULL=1")
def test_at_every_import(manifest: str) -> None:
    command = ["manifest", "head", manifest]
    interrupted("never", *command)  # it makes the index, for which it imports more
    count = int(interrupted("count", *command)[1])
    found = {number: interrupted(str(number), *command) for number in range(1, count)}
    assert {number: said for number, said in found.items() if said != (130, "")} == {}


def test_while_the_interpreter_ends(manifest: str) -> None:
    assert interrupted("exit", "manifest", "head", manifest) == (130, "")


def test_not_where_a_shell_has_it_ignored() -> None:
    assert interrupted("ignored", "--version") == (0, "")


def test_next_to_nothing_is_imported_before() -> None:
    """What comes before `main` cannot be made quiet."""
    code, said = interrupted("modules", "--version")
    assert code == 0
    known = {"__future__", "importlib", "warnings", "penstock", "penstock.lazy", "penstock.tools", "penstock.tools.cli"}
    assert {name for name in said.split() if not name.startswith("importlib.")} <= known
