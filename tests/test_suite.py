"""What the tests do with the environment that they are started in, and which of their cases they run."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pairwise import covering, each_value, pairwise, product

TESTS = Path(__file__).parent
CODE = """
import runpy, signal, subprocess, sys
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
runpy.run_path(sys.argv[1])
child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
subprocess.run([sys.executable, "-c", child], check=True)
signal.raise_signal(signal.SIGINT)
"""


def test_ctrl_c_works_though_a_shell_has_it_ignored() -> None:
    """In the tests, and in programs that they start."""
    command = ["bash", "-c", "trap '' INT; exec \"$@\"", "bash", sys.executable, "-c", CODE]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("conftest.py"))], capture_output=True, text=True, check=False
    )
    assert done.stdout == "True\n"
    assert done.returncode == -signal.SIGINT
    assert done.stderr.endswith("KeyboardInterrupt\n")


# Cases of which any two values meet, and cases in which each value stands.

AXES: list[list[Any]] = [["inline", "thread", "process"], [1, 2, 5], [False, True], ["a", "b", "c", "d"]]


def inline_is_alone(executor: str, workers: int, persistent: bool, kind: str) -> bool:
    return executor != "inline" or (workers == 1 and not persistent and kind != "d")


@pytest.mark.parametrize("allowed", [None, inline_is_alone])
def test_every_pair_of_values_that_can_meet_meets(allowed: Any) -> None:
    def pairs(cases: list[tuple[Any, ...]]) -> set[Any]:
        return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}

    every, few = product(*AXES, allowed=allowed), covering(*AXES, allowed=allowed)
    assert pairs(few) == pairs(every)
    assert set(few) <= set(every)
    assert len(few) < len(every) / 3
    assert few == covering(*AXES, allowed=allowed), "the same cases in every process of a test run"


@pytest.mark.parametrize(("allowed", "cases"), [(None, 4), (inline_is_alone, 4)])
def test_each_value_stands_in_few_cases(allowed: Any, cases: int) -> None:
    few = covering(*AXES, allowed=allowed, meet=1)
    assert [set(column) for column in zip(*few, strict=True)] == [set(axis) for axis in AXES]
    assert set(few) <= set(product(*AXES, allowed=allowed))
    assert len(few) == cases
    assert few == covering(*AXES, allowed=allowed, meet=1), "the same cases in every process of a test run"


def test_values_of_short_axes_go_round() -> None:
    few = covering(range(12), "ab", "xy", meet=1)
    assert [few.count((place, *pair)) for place, pair in enumerate(["ax", "by", "ay", "bx"] * 3)] == [1] * 12


def test_a_value_that_is_never_allowed_stands_nowhere() -> None:
    assert covering([1, 2, 3], "ab", allowed=lambda number, _: number < 3, meet=1) == [(1, "a"), (2, "b")]


def test_values_that_are_equal_or_have_no_hash_are_cases_of_their_own() -> None:
    assert covering([{}, {}], [[1], [2]]) == product([{}, {}], [[1], [2]])


def test_all_cases_are_run_before_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    for full in (False, True):
        monkeypatch.setattr("pairwise.FULL", full)
        for choose, meet in ((pairwise, 2), (each_value, 1)):
            few = covering(*AXES, allowed=inline_is_alone, meet=meet)
            chosen = product(*AXES, allowed=inline_is_alone) if full else few
            assert choose(*AXES, allowed=inline_is_alone) == chosen


KEPT = """
import pytest
from full_run import examples, full_only

@full_only("slow", but=["2-b", "c"])
@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize("number", [1, 2])
def test_some(name, number):
    print("ran", name, number, examples(3, 50))

@full_only("slower")
class TestAll:
    def test_all(self):
        print("ran all")
"""


@pytest.mark.parametrize("full", [False, True])
def test_what_is_kept_for_a_full_run(tmp_path: Path, full: bool) -> None:
    def outcome() -> str:
        command = [sys.executable, "-m", "pytest", "-rs", "-s", "-p", "no:cacheprovider", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
        return done.stdout + done.stderr

    environment = {**os.environ, "PYTHONPATH": str(TESTS / "support"), "PENSTOCK_TEST_FULL": str(int(full))}
    hook = "from full_run import keep_for_full\ndef pytest_collection_modifyitems(items): keep_for_full(items)\n"
    (tmp_path / "conftest.py").write_text(hook)
    (tmp_path / "test_kept.py").write_text(KEPT)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full_only: kept\n")
    said = outcome()
    ran = sorted(re.findall(r"ran (.*?)[.s]*$", said, re.M))
    cases = ["a 1 50", "a 2 50", "all", "b 1 50", "b 2 50", "c 1 50", "c 2 50"]
    assert ran == (cases if full else ["b 2 3", "c 1 3", "c 2 3"]), said
    assert ("slower; PENSTOCK_TEST_FULL=1" in said) == (not full)

    (tmp_path / "test_kept.py").write_text(KEPT.replace('["2-b", "c"]', '["d"]'))
    assert "full_only names no case of test_kept.py::test_some" in outcome()


APART = {"tests/conftest.py", "tests/test_suite.py", "tests/support/pairwise.py", "tests/support/full_run.py"}
FULL = re.compile(
    r"^from (pairwise|full_run) import|^from interpreter_support import .*(FULL|METHODS)|environ.*PENSTOCK_TEST_FULL",
    re.M,
)


def test_the_list_of_what_a_full_run_adds_is_whole() -> None:
    text = (TESTS.parent / "CONTRIBUTING.md").read_text()
    [section] = re.findall(r"^### What `make test-full` adds$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    listed = set(re.findall(r"`(tests/[\w/]+\.py)`", section)) - APART
    found = {path.relative_to(TESTS.parent) for path in TESTS.rglob("*.py") if FULL.search(path.read_text())}
    assert listed == {str(path) for path in found} - APART
