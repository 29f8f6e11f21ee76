"""``penstock shuffle-quality`` of a program's data and of sources: what it says is what `measure_steps` finds."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from cli_support import refusal, said, write_program

from penstock import DataLoader, Mixture
from penstock.tools.quality.steps import measure_steps

PROGRAM = """
import numpy as np
import penstock as ps

def mixture():
    books = ps.Subset(range(4000), np.arange(4000) % 3 > 0)
    return ps.Mixture([(range(9000), 3), (books, 1)], stop=8000, names=["web", "books"], rank=0, world_size=1)

def loader():
    return ps.DataLoader(mixture(), batch_size=32)

def on_4_ranks():
    return ps.Mixture([(range(2048), 1), (range(2048), 1)], rank=0, world_size=4)

def packs():
    lengths = np.arange(5000) % 60 + 1
    return ps.PackedDataset(range(5000), 256, lengths=lengths, rank=0, world_size=1)
"""
invoke = functools.partial(said, "shuffle-quality")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return write_program(tmp_path, PROGRAM)


def test_of_a_program(program: str) -> None:
    options = ("--ranks", 4, "--batches", 20)
    report = json.loads(invoke(f"{program}:mixture", "--batch-size", 32, *options, "--json"))
    assert report == json.loads(invoke(f"{program}:loader", *options, "--json"))
    steps = report["steps"]
    assert (steps["ranks"], steps["batch_size"], steps["epochs"], steps["steps"]) == (4, 32, 2, 40)
    text = invoke(f"{program}:loader", *options)
    assert "40 steps of 4 ranks x 32 measured, in 2 epochs" in text
    web = steps["sources"][0]
    assert f" web 9,000 100.0% {web['looked_at']:,} {web['distance']:.4f} ({web['distance_random']:.4f}) " in text
    assert " books 4,000 66.6% " in text
    shares = steps["shares"]
    assert f" worst {shares['worst']:.2f} standard deviations ({shares['worst_random']:.2f}): " in text
    packs = invoke(f"{program}:packs", "--batch-size", 4)
    assert re.search(r" PackedDataset \d+ \d\.\d \d\d\.\d [\d.]+% \([\d.]+%\)", packs)
    assert "Shares" not in packs
    assert json.loads(invoke(f"{program}:on_4_ranks", "--json"))["steps"]["ranks"] == 4
    assert json.loads(invoke(f"{program}:on_4_ranks", "--ranks", 1, "--json"))["steps"]["ranks"] == 1


def test_plain_numbers_are_a_mixture() -> None:
    line = ("--source", "web=9k", "--source", "books=6k", "--keep", "books=50%", "--weights", "web=3,books=1")
    line += ("--stop", "8000", "--kind", "block", "--block-size", 100, "--window", 4, "--seed", 3, "--ranks", 4)
    report = json.loads(invoke(*line, "--json"))
    order = {"shuffle": "block", "block_size": 100, "window": 4, "seed": 3, "rank": 0, "world_size": 4}
    data = Mixture([(range(9000), 3), (range(3000), 1)], stop=8000, names=["web", "books"], **order)  # type: ignore[arg-type]
    found = json.loads(json.dumps(asdict(measure_steps(DataLoader(data, batch_size=256)))))
    found["sources"][1]["rows"] = 6000
    assert report == {"steps": found}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("{}:mixture", "--seed", 3), "--seed: .* defines them"),
        (("{}:mixture", "--seed", 0), "--seed: .* defines them"),
        (("{}:mixture", "--window", 64), "--window: .* defines them"),
        (("{}:mixture", "--kind", "none"), "--kind: .* defines them"),
        (("{}:mixture", "--buffer", 3), "--buffer: only for manifests"),
        (("{}:mixture", "--label", "str"), "--label: only for manifests"),
        (("{}:mixture", "--label", "int"), "--label: only for manifests"),
        (("{}:mixture", "--source", "a=3"), "use one of them"),
        (("{}:mixture", "train.txt"), "one dataset or loader, without files"),
        (("{}:loader", "--batch-size", 9), "has batches of 32"),
        (("{}:loader", "--batch-size", 256), "has batches of 32"),
        (("--source", "a=10k", "--kind", "torch"), "one order: use one of none, block and global"),
        (("--weights", "a=3"), "add --source NAME=ROWS"),
        ((), "add FILE, MODULE:NAME or --source"),
    ],
)
def test_what_makes_no_sense(options: tuple[object, ...], message: str, program: str) -> None:
    assert re.search(message, refusal("shuffle-quality", *(str(option).format(program) for option in options)))
