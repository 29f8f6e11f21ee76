"""``penstock ledger``: the answers of `penstock.Ledger`, for a loader in a program and a state in a file."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from penstock import DataLoader, DistributedSampler
from penstock.tools.cli.app import app

PROGRAM = """
from penstock import DataLoader, DistributedSampler

def loader():
    sampler = DistributedSampler(range(100), num_replicas=2, rank=0, shuffle="global", seed=1)
    return DataLoader(range(100), batch_size=10, sampler=sampler)
"""

NUMBERS = itertools.count()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    # A process imports a module of each name once.
    name = f"job_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return f"{name}.py:loader"


def ask(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["ledger", *arguments])


def test_rows_of_a_step_and_steps_of_a_row(program: str) -> None:
    said = json.loads(ask(program, "--step", "7", "--json").stdout)
    assert (said["epoch"], said["world_size"], len(said["rows"]), len(said["keys"])) == (1, 2, 20, 20)
    one = json.loads(ask(program, "--step", "7", "--rank", "1", "--json").stdout)
    assert said["rows"][10:] == one["rows"]
    found = json.loads(ask(program, "--row", str(one["rows"][0]), "--epoch", "1", "--until", "8", "--json").stdout)
    assert (found["steps"], found["ranks"], found["seen"]) == ([7], [1], 2)
    text = ask(program, "--step", "7").stdout
    assert "20 in total" in text


@pytest.mark.parametrize("kind", ["json", "pt"])
def test_a_state_says_where_the_job_is(program: str, kind: str, tmp_path: Path) -> None:
    import runpy

    loader = runpy.run_path(str(tmp_path / program.removesuffix(":loader")))["loader"]()
    loader.set_epoch(3)
    state = loader.state_dict()
    path = tmp_path / f"run.{kind}"
    if kind == "json":
        path.write_text(json.dumps(state))
    else:
        torch.save({"model": torch.zeros(3), "data": {"loader": state}}, path)
    said = json.loads(ask(program, "--row", "5", "--state", str(path), "--json").stdout)
    assert said["steps"][0] // 5 == 3


def test_a_state_says_how_the_job_changed(program: str, tmp_path: Path) -> None:
    first = DataLoader(range(100), 10, sampler=DistributedSampler(range(100), 3, 0, shuffle="global", seed=1))
    next(iter(first))
    sampler = DistributedSampler(range(100), 2, 0, shuffle="global", seed=1)
    loader = DataLoader(range(100), 5, sampler=sampler)
    loader.load_state_dict(first.state_dict())
    rows = next(iter(loader)).tolist()
    (tmp_path / "run.json").write_text(json.dumps(loader.state_dict()))
    said = [json.loads(ask(program, "--step", str(n), "--state", "run.json", "--json").stdout) for n in range(4)]
    assert [(one["world_size"], one["batch_size"]) for one in said] == [(3, 10), (2, 5), (2, 5), (2, 5)]
    assert said[1]["rows"][:5] == rows
    row = str(said[2]["rows"][0])
    found = ask(program, "--row", row, "--epoch", "0", "--until", "9", "--state", "run.json", "--json").stdout
    assert [json.loads(found)[name] for name in ("steps", "seen")] == [[2], 1]
    refused = ask(program, "--step", "2", "--state", "run.json", "--world-size", "3")
    assert "omit world_size=" in str(refused.exception)


def test_what_makes_no_sense(program: str, tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "cut.json").write_text('{"penstock": "{')
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04")
    (tmp_path / "old.json").write_text('{"version": 2, "sampler": {}}')
    for arguments, message in [
        ([program], "either --step or --row"),
        (["train.py", "--step", "1"], "names no loader"),
        ([program, "--step", "1", "--state", "empty.json"], "holds no state"),
        ([program, "--step", "1", "--state", "cut.json"], "cut.json is neither JSON nor"),
        ([program, "--step", "1", "--state", "cut.pt"], "cut.pt is neither JSON nor"),
        ([program, "--step", "1", "--state", "old.json"], "has version 2 of states"),
        ([program, "--step", "1", "--rank", "9"], "outside the world"),
    ]:
        result = ask(*arguments)
        assert result.exit_code
        assert message in f"{result.output} {result.exception}"
