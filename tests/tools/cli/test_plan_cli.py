"""``penstock plan``: what it prints is what `penstock.tools.planning` computes, soon, at any size."""

from __future__ import annotations

import functools
import json
import re
import resource
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import typer
from busy_support import HANG
from cli_support import said
from typer.testing import CliRunner

from penstock.errors import ConfigError
from penstock.samplers import TokenBudgetBatchSampler
from penstock.tools.cli.app import app
from penstock.tools.cli.plan_options import AssumedOptions, JobOptions
from penstock.tools.cli.quantities import count, size
from penstock.tools.planning import Assumptions, Job, make_plan, packing_plan

SMALL = ("--samples", "1.28M", "--bytes", "110kB", "--ranks", "16", "--step-ms", "200", "--node-bandwidth", "1GB/s")

invoke = functools.partial(said, "plan")


def test_json_is_the_plan() -> None:
    options = ("--cache", "64GB", "--classes", 1000, "--shuffle", "block", "--mini-epochs", 3, "--cpu-ms", 4)
    options += ("--delivered", "150528", "--workers", 5, "--read-rows", 4, "--seed", 9, "--rank-memory", "1GiB")
    report = json.loads(invoke(*SMALL, *options, "--json"))
    job = Job(
        samples=1_280_000,
        sample_bytes=110_000,
        ranks=16,
        step_s=0.2,
        node_bandwidth=10**9,
        cache_bytes=64 * 10**9,
        classes=1000,
        shuffle="block",
        mini_epochs=3,
        cpu_s=0.004,
        delivered_bytes=150_528,
        workers=5,
        read_rows=4,
        seed=9,
    )
    plan = make_plan(job, Assumptions(rank_memory=1 << 30))
    expected: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    expected |= {"nodes": 2, "check": {**expected["check"], "ok": True}}
    assert report == expected


def test_defaults_are_those_of_the_library() -> None:
    given = {field.name: field.default for field in fields(AssumedOptions)}
    assert given == asdict(Assumptions())
    assert JobOptions(samples=5, sample_bytes=7).job() == Job(samples=5, sample_bytes=7)
    for few in (JobOptions(), JobOptions(samples=5), JobOptions(sample_bytes=7)):
        with pytest.raises(typer.BadParameter, match="needs --samples N and --bytes SIZE"):
            few.job()


def test_the_tables() -> None:
    text = invoke(*SMALL, "--cache", "64GB", "--classes", 1000)
    for line in (
        r"^1,280,000 samples of 110 kB \(141 GB\), 16 ranks on 2 nodes, global shuffle",
        r" batches per rank 313, the last one with 128 samples",
        r" checked 16 ranks, 128 rows of the real order: disjoint, complete, equal counts",
        r" ring 310 MB per rank: 11 slots of 28.2 MB",
        r" index on disk 10.2 MB beside a manifest of 48.6 MB",
        r" cores 25.6, so 4 workers per rank",
        r" epoch cache hits read storage CPU hand-over step limit time waiting ",
        r" 1 0.0% 70.4 GB 9,091 12,800 453,097 10,240 storage 70.4 s 11% ",
        r" 2 24.8% 53 GB 12,0\d\d 12,800 453,097 10,240 step 62.5 s 0% ",
        r" global 0.3\d+ 22\d\.\d 0.0% 24.8% ",
        r"^training waits for data in 11% of the first epoch: storage is the limit",
        r"^from epoch 2 on, the cache removes this wait",
    ):
        assert re.search(line, text, re.MULTILINE), line
    plain = invoke("--samples", 1000, "--bytes", 100)
    assert "Needs of training" not in plain
    assert "classes per batch" not in plain


@pytest.mark.parametrize("columns", ["80", "40"])
def test_no_figure_is_cut_on_a_narrow_terminal(columns: str) -> None:
    """80 columns are what a terminal has; `70.4…` and `12,…` are no numbers."""
    terminal = {"COLUMNS": columns, "FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}
    result = CliRunner().invoke(app, ["plan", *SMALL, "--cache", "64GB", "--classes", "1000"], env=terminal)
    text = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    assert "…" not in text
    assert re.search(r" 1 +0.0% +70.4 GB +9,091 +12,800 +453,097 +10,240 +storage +70.4 s +11% ", text)
    assert re.search(r" global +0.3\d+ +22\d\.\d +0.0% +24.8% +[\d,]+ in 65,536 rows", text)
    assert columns == "40" or max(map(len, text.split("Samples/s")[1].split("training waits")[0].splitlines())) <= 80


def test_what_stands_out_is_said() -> None:
    few = invoke("--samples", 100, "--bytes", 100, "--ranks", 3, "--remainder", "uneven", "--batch-size", 33)
    assert "fewest per rank" in few
    assert "only for evaluation" in few
    assert "counts differ by one at most" in few
    padded = invoke("--samples", 100, "--bytes", 100, "--ranks", 32, "--mini-epochs", 2, "--batch-size", 3)
    assert "28% of the samples repeat in an epoch: use fewer mini-epochs" in padded
    assert " repeated 28 samples" in padded
    assert ": disjoint before padding, complete" in padded
    often = invoke("--samples", 10, "--bytes", "1kB", "--ranks", 1000)
    assert " repeated each sample, 100.0 times in total" in often
    assert "each sample occurs 100.0 times in an epoch: use fewer ranks for less padding" in often
    pages = invoke("--samples", "1M", "--bytes", "10kB", "--ranks", 64, "--read-rows", 100)
    assert "times the bytes of its samples" in pages
    cores = invoke("--samples", "1M", "--bytes", "10kB", "--step-ms", 10, "--workers", 1, "--cores", 8)
    assert "the step needs 64 workers for each rank, and 64 cores per node" in cores


@pytest.mark.clock
def test_ten_to_the_twelve_in_two_seconds() -> None:
    """Of processor time, start of the program included, since the machine of a test may be busy."""
    arguments = [
        "--samples",
        "1e12",
        "--bytes",
        "110kB",
        "--ranks",
        "10000",
        "--mini-epochs",
        "3",
        "--classes",
        "20000",
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "plan", *arguments, "--shuffle", "block", "--json"],
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["check"]["ok"]
    assert report["check"]["ranks"] == 10_000
    assert report["dealing"]["share"] * 30_000 == 10**12 + report["dealing"]["padded"]
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_help_and_plans_import_no_torch() -> None:
    program = (
        "import sys\n"
        "from penstock.tools.cli.app import app\n"
        "for arguments in (['plan', '--help'], ['plan', '--samples', '1000', '--bytes', '10']):\n"
        "    try: app(arguments)\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
        "    heavy = {'torch', 'cv2', *(['numpy'] if '--help' in arguments else [])} & set(sys.modules)\n"
        "    if heavy: sys.exit(f'imported {heavy}')\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG)
    assert result.returncode == 0, result.stderr


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.png"
    invoke(*SMALL, "--cache", "64GB", "--plot", path)
    picture = cv2.imread(str(path))
    assert picture is not None
    assert picture.shape[1] > 1200
    for name, why in (
        ("nowhere/plan.png", "the folder 'nowhere' does not exist"),
        ("plan.xyz", "its extension must be one of"),
    ):
        result = CliRunner().invoke(app, ["plan", *SMALL, "--plot", str(tmp_path / name)])
        assert isinstance(result.exception, ConfigError)
        assert f"{name!r}: {why}" in str(result.exception).replace(f"{tmp_path}/", "")
        assert result.stdout == ""  # said before the plan, not after it
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        invoke(*SMALL, "--plot", tmp_path / "other.png")
    assert not (tmp_path / "other.png").exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("1_281_167", 1_281_167), ("1,281,167", 1_281_167), ("1.28M", 1_280_000), ("1e12", 10**12)],
)
def test_counts(text: str, value: int) -> None:
    assert count(text) == value
    assert count("4611686018427387904") == 2**62  # not by way of a float


@pytest.mark.parametrize(
    ("text", "value"),
    [("110kB", 110_000), ("2 GiB", 2 << 30), ("1.5GB/s", 1_500_000_000), ("7", 7), ("3B", 3), ("1T", 10**12)],
)
def test_sizes(text: str, value: int) -> None:
    assert size(text) == value


def test_what_makes_no_sense() -> None:
    for text in ("", "x", "-3", "12x", "5iB", "1.2.3"):
        with pytest.raises(typer.BadParameter, match="write it like"):
            size(text)
    with pytest.raises(typer.BadParameter):
        count("5kB")
    for text in ("2.5", "1.2811675M"):
        with pytest.raises(typer.BadParameter, match="not a whole number"):
            count(text)
    assert size("1.5") == 2  # an average may be
    for text, message in {"1e400": "too large", "0.4": "less than one", "0.5": "less than one", "0.0": ""}.items():
        if message:
            with pytest.raises(typer.BadParameter, match=message):
                size(text)
        else:
            assert size(text) == 0
    assert CliRunner().invoke(app, ["plan", "--samples", "many", "--bytes", "1"]).exit_code == 2
    assert CliRunner().invoke(app, ["plan", "--samples", "5"]).exit_code == 2
    for wrong in (["--shuffle", "random"], ["--remainder", "keep"], ["--cpu-ms", "-1"], ["--step-ms", "0"]):
        assert CliRunner().invoke(app, ["plan", "--samples", "5", "--bytes", "1", *wrong]).exit_code == 2
    for options, message in {
        ("--ranks", "0"): "--ranks must be positive",
        ("--shuffle", "block", "--read-rows", "5000"): "Make --block-size a multiple of --read-rows",
        ("--cpu-ms", "inf"): "--cache and --cpu-ms must be 0 or more",
        ("--batch-size", "0"): "--batch-size must be positive",
        ("--bytes", "0"): "--bytes must be positive",
        ("--index-rate", "0"): "--index-rate must be positive",
        ("--step-ms", "inf"): "--step-ms must be positive",
        ("--line-bytes", "nan"): "--line-bytes must be positive",
        ("--epochs", "1000000"): "use 1 to 1,000",
    }.items():
        done = CliRunner().invoke(app, ["plan", "--samples", "1000", "--bytes", "10", *options])
        assert (done.exit_code, done.stdout) == (2, "")
        assert message in " ".join(done.stderr.replace("│", "").split())


def test_batches_of_tokens(tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).integers(1, 500, 3_000)
    lengths[7] = 9_999
    np.save(tmp_path / "lengths.npy", lengths)
    options = ("--samples", 3_000, "--bytes", 1_000, "--ranks", 4, "--lengths", tmp_path / "lengths.npy")
    found = json.loads(invoke(*options, "--max-tokens", "4k", "--json"))["token_batches"]
    sampler = TokenBudgetBatchSampler(lengths, 4_000, longest="drop", world_size=4, rank=0)
    assert (found["batches"], found["batches_rank"]) == (sampler.total, len(sampler))
    assert (found["samples"], found["too_long"], found["tokens"]) == (2_999, 1, int(lengths.sum()) - 9_999)
    alone = TokenBudgetBatchSampler(lengths, 4_000, longest="drop", world_size=1, rank=0)
    padded = sum(int(lengths[batch].max()) * len(batch) for batch in alone)
    assert 0 < 1 - found["tokens"] / padded <= found["padding"] < 0.03
    assert found["use"] == pytest.approx(found["tokens"] / sampler.total / 4_000)
    text = invoke(*options, "--max-tokens", 4_000)
    assert f"batches per rank {len(sampler)} of {sampler.total}, with" in text
    assert "too long 1 sample, left out of this plan" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-tokens", 10), "--lengths FILE and --max-tokens N need each other"),
        (("--lengths", "lengths.npy"), "--lengths FILE and --max-tokens N need each other"),
        (("--lengths", "lengths.npy", "--max-tokens", 10), "has 2 lengths, but --samples is 3"),
    ],
)
def test_batches_of_tokens_that_make_no_sense(
    options: tuple[Any, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("lengths.npy", np.array([1, 2]))
    result = CliRunner().invoke(app, ["plan", "--samples", "3", "--bytes", "1", *map(str, options)])
    assert result.exit_code == 2
    assert message in re.sub(r"[\s│]+", " ", result.output)


def test_packs(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.npy"
    np.save(lengths, np.random.default_rng(0).integers(1, 700, 2000))
    line = ("--packing", lengths, "--capacity", "1Ki", "--ranks", 4, "--packs", 2, "--max-documents", 6)
    plan = packing_plan(lengths, 1024, ranks=4, batch=2, max_documents=6)
    assert json.loads(invoke(*line, "--json")) == json.loads(json.dumps({"packing": asdict(plan)}))
    text = invoke(*line, "--html", tmp_path / "a.html", "--plot", tmp_path / "a.png")
    ours = plan.ways[-1]
    assert f"2,000 documents of {plan.tokens:,} tokens, packs of 1,024 tokens" in text
    found = f"{ours.packs:,} {1 - ours.fill:.3%} {ours.documents:.1f} {ours.cost:.3f} {ours.balanced:.3f}"
    assert f" PackedDataset {found} " in text
    assert cv2.imread(str(tmp_path / "a.png")).shape[1] > 1000
    page = (tmp_path / "a.html").read_text()
    assert f"<td>PackedDataset</td><td>{ours.packs:,}</td>" in page
    assert page.count("<svg") == 3
    assert "8 ranks" in invoke(*line[:4])
    alone = json.loads(invoke(*line[:4], "--ranks", 1, "--json"))["packing"]
    assert alone == json.loads(json.dumps(asdict(packing_plan(lengths, 1024, ranks=1, batch=8))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--packing", "lengths.npy"), "--packing FILE and --capacity N need each other"),
        (("--capacity", 10), "--packing FILE and --capacity N need each other"),
        (("--html", "a.html"), "needs --packing FILE"),
        (("--packing", "lengths.npy", "--capacity", 10, "--samples", 3), "leave out --samples, or plan"),
        (("--packing", "lengths.npy", "--capacity", 10, "--workers", 4), "leave out --workers, or plan"),
        (("--packs", 8), "need --packing FILE"),
        (("--packing", "lengths.npy", "--capacity", 10, "--max-tokens", 3), "are for the plan of a job"),
    ],
)
def test_packs_that_make_no_sense(
    options: tuple[Any, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("lengths.npy", np.array([1, 2]))
    result = CliRunner().invoke(app, ["plan", *map(str, options)])
    assert result.exit_code == 2
    assert message in re.sub(r"[\s│]+", " ", result.output)
