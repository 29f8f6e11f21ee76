"""What `report` says of a run."""

from __future__ import annotations

import io
import re
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.loader.config import LoaderConfig
from penstock.loader.messages import BatchMetrics, BatchResult
from penstock.loader.statistics import Statistics
from penstock.tools.report import diagnose, print_report, summarize


def run(*, metrics: float, train: float, workers: int, seconds: float = 1.2, way: str = "local") -> dict[str, Any]:
    """Statistics of a real loop: threads that sleep over each batch, a consumer that sleeps over each as well."""

    def make(number: int) -> BatchResult:
        record = BatchMetrics()
        start = time.perf_counter()
        time.sleep(metrics)
        record.samples, record.fetch, record.cpu = 8, time.perf_counter() - start, 1e-6
        return BatchResult(None, record, number, way=way)

    statistics = Statistics()
    depth = 2 * workers
    statistics.begin(LoaderConfig(executor="thread", num_workers=workers))
    end = time.perf_counter() + seconds
    with ThreadPoolExecutor(max(1, workers)) as pool:
        begun = deque(pool.submit(make, number) for number in range(depth))
        while time.perf_counter() < end:
            start = time.perf_counter()
            ready = sum(batch.done() for batch in begun)
            if workers:
                batch = begun.popleft().result()
                begun.append(pool.submit(make, 0))
            else:
                batch = make(0)
            statistics.delivered(batch, 1000, time.perf_counter() - start, ready, depth)
            time.sleep(train)
    return statistics.stats()


def stats_of(**changes: Any) -> dict[str, Any]:
    """Statistics of a run of 100 s: 1000 batches of 10 samples, half of the time waiting, 4 busy workers."""
    statistics = Statistics()
    statistics.begin(LoaderConfig(num_workers=4))
    stats: dict[str, Any] = {
        **statistics.stats(),
        "cores": 8,
        "cores_busy": 0.6,
        "batches": 1000,
        "batches_per_second": 10.0,
        "samples": 10_000,
        "samples_per_second": 100.0,
        "bytes": 10**9,
        "bytes_per_second": 1e7,
        "seconds": 100.0,
        "first_batch_seconds": 0.1,
        **waits(0.5),
        "stages": {"fetch": 10.0, "decode": 300.0, "collate": 70.0, "hand-over": 1.0},
        "cpu_seconds": 300.0,
        "queue": queue(0.4),
        "ways": {"ring": 1000},
    }
    assert changes.keys() <= stats.keys()
    return {**stats, **changes}


def waits(share: float) -> dict[str, Any]:
    wait = 100.0 * share
    return {"wait_seconds": wait, "wait_share": share, "train_seconds": 100.0 - wait, "train_share": 1 - share}


IDLE = {"stages": {"fetch": 40.0, "collate": 4.0, "hand-over": 1.0}, "cpu_seconds": 40.0}
"""Workers that are busy 11 % of the time."""


def queue(ready: float, depth: float = 8.0) -> dict[str, Any]:
    return {"requests": 999, "ready": ready, "depth": depth, "prefetch": 8, "occupancy": ready / depth}


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("100 samples/s · waiting 50% · limited by decode", {}),
        ("1,240 samples/s · waiting 4% · limited by training", {**waits(0.04), "samples_per_second": 1240.3}),
        ("100 samples/s · waiting 50%", {"batches": 19}),
        ("100 samples/s · waiting 50% · limited by decode", {"executor": "inline", "workers": 0}),
        ("100 samples/s · waiting 50% · limited by data", {**IDLE, "queue": queue(0.2)}),
        ("100 samples/s · waiting 50% · limited by memory", {**IDLE, "ways": {"ring": 300, "refused": 700}}),
        (
            "100 samples/s · waiting 50% · limited by hand-over",
            {**IDLE, "stages": {"fetch": 4.0, "collate": 1.0, "hand-over": 30.0}},
        ),
        ("100 samples/s · waiting 9% · limited by first batches", {"passes": 50, "first_batch_seconds": 45.0}),
    ],
)
def test_summaries(line: str, changes: dict[str, Any]) -> None:
    assert summarize(stats_of(**changes)) == line


@pytest.mark.clock
def test_real_loops() -> None:
    verdict = diagnose(run(metrics=0.002, train=0.02, workers=2))
    assert verdict.limit == "training"
    verdict = diagnose(run(metrics=0.04, train=0.005, workers=2))
    assert verdict.limit == "data"
    if "without time to spare" not in verdict.sentence:  # of cores that other programs keep busy
        assert "waiting for storage" in verdict.sentence  # threads that sleep
        more = re.search(r"num_workers=(\d+) ", verdict.sentence)
        assert more is not None
        assert 4 <= int(more[1]) <= 8  # four times as many are suggested at most; fewer if training had to wait itself
    assert diagnose(run(metrics=0.01, train=0.01, workers=0)).limit == "data"
    assert diagnose(run(metrics=0.001, train=0.001, workers=1, seconds=0.02)).limit == "unknown"


@pytest.mark.parametrize(
    ("limit", "says", "changes"),
    [
        ("unknown", "Too early", {"batches": 19}),
        ("unknown", "Too early", {"seconds": 0.9}),
        ("training", "nothing needs to change", waits(0.04)),
        ("training", "num_workers=1 instead of 4", {**waits(0.04), **IDLE}),
        ("data", "num_workers=8 ", {}),
        ("data", "up to 2.2x faster", {"cores": 100, "train_seconds": 45.0, "wait_seconds": 55.0}),
        ("data", "num_workers=6 can make it up to 1.6x faster, and a cheaper 'decode' (79% of", {"cores": 6}),
        ("data", "make 'decode' (79% of the work) cheaper, or give it more cores", {"cores": 4}),
        (
            "data",
            "(90%) waiting for storage or a lock; num_workers=9",
            {"cores": 2, "cpu_seconds": 31.0},
        ),
        ("data", "on 8 cores without time to spare, so more workers", {"cores_busy": 0.95, "cpu_seconds": 62.0}),
        ("data", "(96%) waiting for storage", {"cores_busy": 0.95, "cpu_seconds": 12.0}),
        ("data", "on 8 cores without time to spare; make", {**IDLE, "cores_busy": 0.95, "queue": queue(0.2)}),
        (
            "data",
            "without time to spare",
            {"workers": 32, "processes": 32, "stages": {"fetch": 3e3}, "cpu_seconds": 7e2},
        ),
        ("data", "num_workers=9", {"cores_busy": None, "cpu_seconds": 31.0}),
        ("data", "4 threads used 0.9 cores of 8: if", {"executor": "thread", "processes": 0, "cpu_seconds": 90.0}),
        ("data", "each batch is made only when the training asks", {"executor": "inline", "workers": 0}),
        ("data", "prefetch_factor=4 would bridge that", {**IDLE, "queue": queue(5.0)}),
        ("data", "the sampler", {**IDLE, "queue": queue(0.2)}),
        (
            "data",
            "took only 5.00 s; num_workers=0 makes them without a hand-over, which can make the run up to 1.8x faster",
            {**IDLE, "stages": {"fetch": 4.0, "collate": 1.0, "hand-over": 30.0}},
        ),
        ("data", "the hand-over of batches took 30.0 s", {**IDLE, "stages": {"fetch": 40.0, "hand-over": 30.0}}),
        ("memory", "refused shared memory for 70% of the batches", {**IDLE, "ways": {"ring": 300, "refused": 700}}),
        ("data", "num_workers=", {"ways": {"ring": 300, "refused": 700}}),  # busy workers would not do more
        ("training", "nothing", {**waits(0.04), "ways": {"ring": 300, "refused": 700}}),
        ("memory", "only 1.5 of the 8 batches", {**IDLE, "queue": queue(0.3, 1.5)}),
        ("data", "the sampler", {**IDLE, "ways": {"ring": 500, "pipe": 500}, "queue": queue(0.2)}),
        ("start", "persistent_workers=True", {"passes": 50, "first_batch_seconds": 30.0}),
        ("start", "longer passes", {"passes": 50, "first_batch_seconds": 30.0, "persistent_workers": True}),
        ("data", "num_workers=", {"passes": 1, "first_batch_seconds": 30.0}),  # said of the rest of the pass
    ],
)
def test_verdict(limit: str, says: str, changes: dict[str, Any]) -> None:
    verdict = diagnose(stats_of(**changes))
    assert verdict.limit == limit, verdict.sentence
    assert says in verdict.sentence
    assert verdict.sentence.endswith(".")


@pytest.mark.parametrize("share", [0.0, 0.04, 0.06, 0.5, 1.0])
@pytest.mark.parametrize("workers", [0, 1, 7])
@pytest.mark.parametrize("stages", [{}, {"fetch": 0.0}, {"decode": 400.0, "collate": 1.0, "hand-over": 90.0}])
@pytest.mark.parametrize("cpu", [0.0, 200.0])
def test_there_is_always_something_to_say(share: float, workers: int, stages: dict[str, float], cpu: float) -> None:
    stats = stats_of(**waits(share), workers=workers, processes=workers, stages=stages, cpu_seconds=cpu)
    out = io.StringIO()
    print_report(stats, out)
    assert diagnose(stats).sentence.split() == out.getvalue().split("┘")[1].split()


def test_report_of_nothing() -> None:
    out = io.StringIO()
    print_report(Statistics().stats(), out)
    assert "Too early to say" in out.getvalue()


def test_report_shows_it_all_within_80_columns() -> None:
    out = io.StringIO()
    errors = {"samples": 10_000, "failed": 12, "skipped": 12, "replaced": 0, "types": {"ImageError": 10, "[x]": 2}}
    print_report(stats_of(passes=3, errors=errors, failed_batches=2, restarts=1), out)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert lines[0].strip() == "DataLoader: process, 4 workers, 8 cores"
    assert ["batches", "1,000", "10.0/s", "3 passes"] in rows
    assert ["data", "1.0 GB", "10.0 MB/s", ""] in rows
    assert ["waiting", "50.0 s", "50.0%", "100 ms of it for first batches"] in rows
    assert ["decode", "300 s", "78.7%", "30.0 ms a sample"] in rows
    assert ["ready on request", "0.4", "5%", "of 8.0 in flight"] in rows
    assert ["via ring", "1,000", "100.0%", ""] in rows
    assert ["bad samples", "12", "0.12%", "ImageError 10, [x] 2"] in rows
    assert ["failed batches", "2", "", ""] in rows
    assert ["workers replaced", "1", "", ""] in rows


def test_names_of_stages_are_no_markup() -> None:
    out = io.StringIO()
    print_report(stats_of(stages={"[bold]x[/]": 300.0, "collate": 90.0}), out)
    assert "[bold]x[/]" in out.getvalue().split("┘")[0]
    assert "'[bold]x[/]'" in out.getvalue().split("┘")[1]
