"""``penstock plan`` of sources and of a program's data: what it prints is what `data_plan` computes."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import asdict
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_support import refusal, said, write_program

from penstock import DataLoader, Mixture
from penstock.errors import ConfigError
from penstock.tools.cli.expressions import parse_expression
from penstock.tools.cli.plan_data import _colours, _fill
from penstock.tools.planning.data import data_plan

PROGRAM = """
import penstock as ps

def mixture():
    sources = [range(9000), range(4000), range(2500)]
    schedule = [(0, [1, 0, 0]), (2000, [1, 1, 0]), (15_000, [0.2, 0.3, 0.5])]
    return ps.Mixture(sources, schedule=schedule, stop=10_000, names=["web", "books", "code"], rank=0, world_size=1)

def loader():
    return ps.DataLoader(mixture(), batch_size=32)

def on_4_ranks():
    return ps.Mixture([(range(2048), 1), (range(2048), 1)], rank=0, world_size=4)

def excluding():
    share = {"names": ["web", "books"], "rank": 0, "world_size": 1}
    return ps.Mixture([(range(90), 1), (range(90), 1)], exclude={"web": [1, 2]}, **share)

name = 3
"""
PLAIN = ("--source", "web=9k", "--source", "books=6k", "--keep", "books=50%", "--weights", "web=3,books=1")
PLAIN += ("--weights", "10k:web=1,books=1", "--stop", "8000", "--ranks", "4", "--batch-size", "10")
invoke = functools.partial(said, "plan")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return write_program(tmp_path, PROGRAM)


def test_of_a_program(program: str, tmp_path: Path) -> None:
    options = ("--ranks", 4, "--batch-size", 32, "--epochs", 4)
    report = json.loads(invoke(f"{program}:mixture", *options, "--json"))
    assert report == json.loads(invoke(f"{program}:loader", "--ranks", 4, "--epochs", 4, "--json"))
    text = invoke(f"{program}:mixture", *options, "--html", tmp_path / "a.html", "--plot", tmp_path / "a.png")
    assert "10,000 samples an epoch of 3 sources; 4 ranks x 32: 79 steps an epoch, 316 in 4 epochs" in text
    assert " code 2,500 100.0% 31.25% 12,500 5.00 0 158 " in text
    assert " 15,000 118 20,000 20.00% 30.00% 50.00% " in text
    assert f" a state {report['data']['state_bytes']} bytes" in text
    assert cv2.imread(str(tmp_path / "a.png")).shape[1] > 1000
    page = (tmp_path / "a.html").read_text()
    assert "<td>2,500</td><td>100.0%</td>" in page
    assert page.count("<polygon") == 3
    assert all(f"<{part} id=" in page for part in ("title", "desc"))
    assert json.loads(page.split('id="plan">')[1].split("</script>")[0]) == report["data"]


def test_a_number_that_is_the_usual_one(program: str) -> None:
    planned = json.loads(invoke(f"{program}:on_4_ranks", "--json"))["data"]
    assert planned["ranks"] == 4
    alone = json.loads(invoke(f"{program}:on_4_ranks", "--ranks", 1, "--json"))["data"]
    assert (alone["ranks"], alone["steps_per_epoch"]) == (1, 4 * planned["steps_per_epoch"])


def test_excluded_rows(program: str, tmp_path: Path) -> None:
    told = invoke(f"{program}:excluding", "--batch-size", 10, "--html", tmp_path / "a.html")
    assert re.search(
        r" rows kept excluded share .* web 90 100.0% 2 50.00% .* books 90 100.0% 0 50.00%", told, re.DOTALL
    )
    note = "web: its 2 excluded rows are replaced by others"
    assert note in told
    assert note in (tmp_path / "a.html").read_text()
    assert "excluded" not in invoke(f"{program}:mixture")


def test_plain_numbers_are_a_mixture() -> None:
    report = json.loads(invoke(*PLAIN, "--epochs", 2, "--json"))
    pairs = [(range(9000), 3), (range(3000), 1)]
    data = Mixture(pairs, schedule=[(10_000, [1, 1])], stop=8000, names=["web", "books"], rank=0, world_size=4)
    plan = json.loads(json.dumps(asdict(data_plan(DataLoader(data, batch_size=10), epochs=2))))
    plan["sources"][1]["rows"] = 6000
    assert report == {"data": plan}
    job = json.loads(invoke(*PLAIN, "--bytes", "1kB", "--json"))
    assert (job["job"]["samples"], job["job"]["ranks"]) == (8000, 4)
    assert job["dealing"]["batches"] == job["data"]["steps_per_epoch"] == 200
    assert "Memory" in invoke(*PLAIN, "--bytes", "1kB")


def test_pictures_of_any_names(tmp_path: Path) -> None:
    names = ["a$\\bad$", "_hidden", *(f"a long name of a source, number {k}" for k in range(4))]
    sources = [word for name in names for word in ("--source", f"{name}=10k")]
    invoke(*sources, "--html", tmp_path / "a.html", "--plot", tmp_path / "a.png")
    assert cv2.imread(str(tmp_path / "a.png")).shape[1] > 1000
    legend = re.findall(r'<text x="(\d+)" y="(\d+)">([^<]*)</text>', (tmp_path / "a.html").read_text())
    assert [name for *_, name in legend] == names
    # Names stand beside one another, and not on top.
    assert len({(x, y) for x, y, _ in legend}) == len(names)
    assert len({y for _, y, _ in legend}) > 1


@pytest.mark.parametrize("count", [1, 10, 11, 20, 21, 60])
def test_each_source_has_a_colour(count: int) -> None:
    assert len(set(_colours(count))) == count
    assert len({_fill(number, count) for number in range(count)}) == count


def test_steps_of_a_short_run_are_whole(tmp_path: Path) -> None:
    invoke("--source", "a=10", "--batch-size", 10, "--epochs", 2, "--plot", tmp_path / "a.svg")
    # A comment in the picture says what each text is.
    drawn = (tmp_path / "a.svg").read_text()
    ticks = re.findall(r"<!-- ([0-9.]+) -->", drawn.split("<!-- step -->")[0])
    assert ticks == ["0", "1", "2"]


def test_filters_of_a_table(tmp_path: Path) -> None:
    table = pa.table({"score": np.arange(100) / 100, "lang": ["en", "de", "fr", "en"] * 25})
    pq.write_table(table, tmp_path / "web.parquet")
    np.save(tmp_path / "mask.npy", np.arange(50) < 20)
    sources = ("--source", f"web={tmp_path / 'web.parquet'}", "--source", "books=50", "--source", "code=1e3")
    keep = ("--keep", "web=score >= 0.5 and lang in ('en', 'de')", "--keep", f"books={tmp_path / 'mask.npy'}")
    (web, books, code) = json.loads(invoke(*sources, *keep, "--keep", "code=1e2", "--json"))["data"]["sources"]
    assert [(one["rows"], one["kept"]) for one in (web, books, code)] == [(100, 37), (50, 20), (1000, 100)]
    assert web["samples"] == 37  # weights are by rows, so an epoch has each once
    assert [one["passes"] for one in (web, books, code)] == [3, 3, 3]


def test_expressions() -> None:
    assert str(parse_expression("not a == 3 or 0 < b <= 2")) == "(invert((a == 3)) or ((b > 0) and (b <= 2)))"
    for text in ("a ==", "open('x')", "1 < 2", "a.b > 3", "a in 3", "a + 1 > 3"):
        with pytest.raises(ConfigError, match="is not a filter"):
            parse_expression(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("{}:mixture", "--seed", 3), "--seed: for .* only the use of its sources is planned"),
        (("{}:mixture", "--seed", 0), "--seed: for .* only the use of its sources is planned"),
        (("{}:mixture", "--bytes", "3kB"), "--bytes: for .* only the use of its sources is planned"),
        (("{}:mixture", "--source", "a=3"), "use one of them"),
        (("{}:loader", "--batch-size", 9), "has batches of 32"),
        (("{}:loader", "--batch-size", 256), "has batches of 32"),
        (("{}:name",), "is an int"),
        (("{}",), "names no data"),
        (("--source", "a=10", "--step-ms", 3), "--step-ms: the plan of the job needs --bytes"),
        (("--source", "a=10", "--workers", 4), "--workers: the plan of the job needs --bytes"),
        (("--source", "a=10", "--import-s", 3), "--import-s: the plan of the job needs --bytes"),
        (("--source", "a=10", "--samples", 3), "the sources determine"),
        (("--source", "a=10", "--source", "a=10"), "write it once for each source"),
        (("--source", "a=10", "--max-tokens", 10), "--lengths and --max-tokens are for a plan without"),
        (("--source", "a=10", "--packing", "x.npy", "--capacity", 3), "leave the data out"),
        (("--weights", "a=3"), "add --source NAME=ROWS"),
        (("--stop", "all"), "add --source NAME=ROWS"),
        (("--source", "a=10", "--keep", "b=3"), "no --source has this name"),
        (("--source", "a=10", "--keep", "a=11"), "has 10 rows"),
        (("--source", "a=10", "--keep", "a=b > 3"), "this data has no columns"),
        (("--source", "a=0"), "--source a=...: a is empty: leave it out"),
        (("--source", "a=10", "--source", "b=0", "--weights", "a=1,b=1"), "b is empty: leave it out"),
        (("--source", "a=10", "--keep", "a=0%"), "--keep a=0%: this keeps none of 10 rows: keep some"),
        (("--source", "a=10", "--weights", "a"), "500M:web=0.7"),
        (("--source", "a=10", "--weights", "b=1"), "there is no source 'b'"),
        (("--source", "a=10", "--weights", "a=1,a=2"), "a has two weights"),
        (("--source", "a=10", "--batch-size", 0), "--batch-size must be positive, got 0"),
        (("{}:mixture", "--ranks", 0), "--ranks must be positive, got 0"),
        (("--source", "a=10", "--weights", "5:a=1"), "a schedule needs mode='proportion'"),
        (("--source", "a=10", "--html", "nowhere/a.html"), "the folder .* does not exist"),
    ],
)
def test_what_makes_no_sense(options: tuple[object, ...], message: str, program: str) -> None:
    assert re.search(message, refusal("plan", *(str(option).format(program) for option in options)))
