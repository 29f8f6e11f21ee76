"""Benchmarks as one command: what a script writes, how the runner goes on, and docs/performance.md made of it."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> Iterator[ModuleType]:
    """A script of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def runner() -> Iterator[ModuleType]:
    yield from load("run")


@pytest.fixture(scope="module")
def renderer() -> Iterator[ModuleType]:
    yield from load("render")


@pytest.fixture(scope="module")
def result(runner: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a real run, after one that fails."""
    out = tmp_path_factory.mktemp("bench")
    jobs = [runner.Job("broken", "no_such_script", "", 0), runner.Job("permutation", "permutation", "", 0)]
    assert runner.main(["--quick", "--out", str(out)], jobs) == 1
    assert not (out / "broken.json").exists()
    assert "Indices per second" in (out / "permutation.txt").read_text()
    found: dict[str, Any] = json.loads((out / "permutation.json").read_text())
    return found


def test_a_failure_is_named_and_the_others_go_on(
    runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [runner.Job("broken", "no_such_script", "", 0), runner.Job("other", "no_such_script_either", "", 0)]
    assert runner.main(["--out", str(tmp_path)], jobs) == 1
    printed = capsys.readouterr()
    assert "failed: broken: exit code 2" in printed.err
    assert "failed: other: exit code 2" in printed.err
    with pytest.raises(SystemExit):
        runner.main(["nothing-of-this-name"], jobs)


def test_every_script_has_a_job(runner: ModuleType) -> None:
    scripts = {path.stem for path in ROOT.glob("benchmarks/[!_]*.py")} - {"run", "render"}
    assert {job.script for job in runner.JOBS} == scripts
    assert len({job.name for job in runner.JOBS}) == len(runner.JOBS)
    assert sum(job.minutes for job in runner.JOBS) < 15


def test_a_result_has_values_ratios_and_where_it_was_measured(result: dict[str, Any]) -> None:
    assert result["quick"] is True
    assert result["command"] == "python benchmarks/permutation.py --quick"
    assert {"processor", "cores", "memory GiB", "kernel", "disk"} <= set(result["machine"])
    assert {"python", "penstock", "numpy"} <= set(result["versions"])
    [table] = result["tables"]
    assert len(table["measured"]) == len(table["rows"])
    for item in table["measured"]:
        assert item["unit"] == "M/s"
        assert item["min"] == min(item["values"]) <= item["median"] <= item["max"] == max(item["values"])
        assert item["ratio"]["to"].startswith("numpy.random.permutation")
    peer = next(item for item in table["measured"] if item["name"] == item["ratio"]["to"])
    for item in table["measured"]:
        assert item["ratio"]["of medians"] == pytest.approx(item["median"] / peer["median"])


def test_pages_are_made_of_the_stored_results(renderer: ModuleType) -> None:
    """`make bench-docs` writes them; edit those in benchmarks."""
    for path, page in renderer.pages(renderer.stored()).items():
        assert path.read_text() == page


def test_the_pictures_are_made_of_the_stored_results(renderer: ModuleType) -> None:
    """`make bench-docs` draws them, and no other picture lies beside them."""
    made = renderer.pictures(renderer.stored())
    for path, drawn in made.items():
        assert path.read_text() == drawn
    assert set((ROOT / "docs" / "charts").iterdir()) <= set(made)


def test_every_measured_row_of_images_has_its_bar_and_its_figure(renderer: ModuleType) -> None:
    table = renderer.stored()["images"]["tables"][0]
    drawn = (ROOT / "docs" / "images-peers.svg").read_text()
    rate = table["columns"].index("median")
    measured = {row[0]: float(row[rate].replace(",", "")) for row in table["rows"] if row[rate]}
    texts = [text.text for text in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    for name, images in measured.items():
        assert texts[texts.index(name) + 1] == f"{images:,.0f}"
    assert drawn.count("<rect") == 1 + len(measured)


def test_the_first_picture_has_images_and_tokens_of_every_peer(renderer: ModuleType) -> None:
    drawn = (ROOT / "docs" / "speed.svg").read_text()
    texts = [text.text for text in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    for name in ("Grain", "torch, OpenCV", "DALI on the CPU", "WebDataset", "LitData", "FFCV", "SPDL", "torch, Pillow"):
        assert name in texts
    table = next(t for t in renderer.stored()["tokens"]["tables"] if t["title"].endswith("batches of 64"))
    sequences = {row[0]: float(row[table["columns"].index("median")].replace(",", "")) for row in table["rows"]}
    for row, name in (("penstock, 0 workers", "Penstock, no workers"), ("torch, 2 workers", "torch, two workers")):
        shown = texts[texts.index(name) + 1]
        assert shown is not None
        assert float(shown.removesuffix(" M")) == pytest.approx(sequences[row] * 2048 / 1e6, rel=0.005)


def test_the_picture_of_stores_has_a_bar_for_each_that_did_not_fail(renderer: ModuleType) -> None:
    columns = ["peer", "first batch, s: min", "median", "max", "cold samples/s: min", "median", "max"]
    rows = [
        ["Penstock, tar", "0.5", "0.6", "0.7", "9,000", "9,500", "9,900"],
        ["WebDataset", "1.0", "1.1", "1.2", "800", "900", "1,000"],
        ["LitData (fails: gone)", *["-"] * 6],
    ]
    table = {"title": "20 JPEGs, 50 ms before each answer", "columns": columns, "rows": rows}
    result = {"tables": [table], "machine": {"processor": "P", "cores": 2}, "date": "2026-01-01T00:00:00"}
    [drawn] = renderer.pictures({"remote": result}).values()
    texts = [text.text for text in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert texts[texts.index("Penstock, tar") + 1] == "9,500; first batch 0.6 s"
    assert texts[texts.index("WebDataset") + 1] == "900; first batch 1.1 s"
    assert drawn.count("<rect") == 3
    assert drawn.count('class="ours"') == drawn.count('class="peer"') == 1


def test_a_peer_that_was_not_measured_has_no_bar(renderer: ModuleType) -> None:
    result = renderer.stored()["images_small"]
    table = result["tables"][0]
    less = {**table, "rows": [row if row[0] != "FFCV" else ["FFCV", *[""] * (len(row) - 1)] for row in table["rows"]]}
    [drawn] = renderer.pictures({"images_small": {**result, "tables": [less]}}).values()
    assert "FFCV" not in drawn
    assert drawn.count("<rect") == len(table["rows"])


def test_every_job_has_a_place_on_the_page(renderer: ModuleType, runner: ModuleType, result: dict[str, Any]) -> None:
    notes, line = "".join(path.read_text() for path in renderer.PAGES), f"Measured on {result['date'][:10]}"
    for job in runner.JOBS:
        made = "".join(renderer.pages({job.name: {**result, "quick": False}}).values())
        assert made.count(line) == 1 + notes.count(line)


def test_results_take_the_place_of_what_stood_there(renderer: ModuleType, result: dict[str, Any]) -> None:
    notes = "# Title\n\n<!-- results: one -->\nolder\n<!-- end -->\n\n<!-- results: two -->\nkept\n<!-- end -->\n"
    page = renderer.fill(notes, {"one": {**result, "quick": False, "remarks": ["a | b"]}})
    assert "older" not in page
    assert "kept" in page
    assert f"Measured on {result['date'][:10]}" in page
    assert "| block shuffle | 1,000,000,000 |" in page
    assert "a \\| b" in page


def test_results_without_a_place_or_of_quick_runs_are_refused(renderer: ModuleType, result: dict[str, Any]) -> None:
    notes = "<!-- results: one -->\n<!-- end -->\n"
    with pytest.raises(ValueError, match="0 blocks"):
        renderer.check([notes], {"two": {**result, "quick": False}})
    with pytest.raises(ValueError, match="--quick"):
        renderer.check([notes], {"one": result})
    with pytest.raises(ValueError, match="without its end"):
        renderer.check(["<!-- results: one -->\n"], {})
