"""What `Statistics` count, by the clock."""

from __future__ import annotations

import collections
import json
import pickle
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from penstock.loader.config import LoaderConfig
from penstock.loader.messages import BatchMetrics, BatchResult
from penstock.loader.statistics import Statistics, size_of

pytestmark = pytest.mark.clock


def made(samples: int = 4, *, way: str = "local", **seconds: float) -> BatchResult:
    """A batch, and seconds of work on it by stage."""
    metrics = BatchMetrics()
    metrics.samples = samples
    metrics.collate = seconds.pop("collate", 0.0)
    metrics.hand_over = seconds.pop("hand_over", 0.0)
    metrics.cpu = seconds.pop("cpu", 0.0)
    rest = seconds.pop("fetch", 0.0)
    metrics.fetch = sum(seconds.values()) + rest
    metrics.stages = seconds
    return BatchResult(None, metrics, 0, way=way)


def consume(
    statistics: Statistics, batches: int, *, wait: float, train: float, end: bool = True, first: float = 0.0
) -> None:
    """One pass of a consumer that waits and trains."""
    statistics.begin(LoaderConfig(executor="thread", num_workers=2))
    for number in range(batches):
        start = time.perf_counter()
        time.sleep(wait + (0.0 if number else first))
        statistics.delivered(made(), 100, time.perf_counter() - start, ready=1, depth=4)
        time.sleep(train)
    if end:
        statistics.ended(0.0)


def test_waiting_and_training_are_told_apart() -> None:
    statistics = Statistics()
    begin = time.perf_counter()
    consume(statistics, 10, wait=0.01, train=0.02)
    elapsed = time.perf_counter() - begin
    stats = statistics.stats()
    assert 0.1 <= stats["wait_seconds"] < 0.2
    assert 0.2 <= stats["train_seconds"] < 0.3  # that of the last batch included
    assert stats["seconds"] == pytest.approx(elapsed, abs=0.005)
    assert stats["seconds"] == stats["wait_seconds"] + stats["train_seconds"]
    assert stats["wait_share"] + stats["train_share"] == pytest.approx(1)
    assert (stats["batches"], stats["samples"], stats["bytes"], stats["passes"]) == (10, 40, 1000, 1)
    assert stats["batches_per_second"] == pytest.approx(10 / elapsed, rel=0.05)
    assert stats["samples_per_second"] == pytest.approx(40 / elapsed, rel=0.05)
    assert stats["bytes_per_second"] == pytest.approx(1000 / elapsed, rel=0.05)


@pytest.mark.parametrize("end", [True, False])
def test_a_pause_between_passes_is_neither(end: bool) -> None:
    statistics = Statistics()
    for _ in range(2):
        consume(statistics, 3, wait=0.005, train=0.005, end=end)
        time.sleep(0.2)  # validation
    stats = statistics.stats()
    assert stats["passes"] == 2
    assert stats["seconds"] < 0.2


def test_the_first_batch_of_a_pass_is_counted_apart() -> None:
    statistics = Statistics()
    for _ in range(2):
        consume(statistics, 3, wait=0.005, train=0.0, first=0.1)
    stats = statistics.stats()
    assert 0.2 <= stats["first_batch_seconds"] < 0.3
    assert stats["wait_seconds"] > stats["first_batch_seconds"] + 0.02
    assert stats["queue"]["requests"] == 4  # a first request finds nothing, whatever limits the run


def test_an_error_costs_time_and_is_no_batch() -> None:
    statistics = Statistics()
    statistics.begin(LoaderConfig())
    statistics.delivered(made(), 1, 0.0, 0, 0)
    time.sleep(0.02)
    statistics.failed(0.0)
    time.sleep(0.03)
    statistics.waited(0.0)  # a time-out
    statistics.delivered(made(), 1, 0.01, 0, 0)
    stats = statistics.stats()
    assert (stats["batches"], stats["failed_batches"]) == (2, 1)
    assert stats["wait_seconds"] == pytest.approx(0.01)
    assert 0.04 <= stats["train_seconds"] < 0.2


def test_stages_add_up_to_the_work() -> None:
    statistics = Statistics()
    statistics.begin(LoaderConfig(num_workers=2))
    for _ in range(3):
        batch = made(fetch=0.25, read=1.0, decode=2.0, collate=0.5, hand_over=0.125, cpu=2.5)
        statistics.delivered(batch, 1, 0.0, 0, 4)
    stats = statistics.stats()
    assert stats["stages"] == {"fetch": 0.75, "read": 3.0, "decode": 6.0, "collate": 1.5, "hand-over": 0.375}
    assert stats["cpu_seconds"] == 7.5


def test_stages_named_like_ours_are_added_to_ours() -> None:
    statistics = Statistics()
    metrics = BatchMetrics()
    metrics.fetch, metrics.collate, metrics.stages = 3.0, 1.0, {"fetch": 1.0, "collate": 0.5}
    statistics.delivered(BatchResult(None, metrics, 0), 1, 0.0, 0, 0)
    assert statistics.stats()["stages"] == {"fetch": 2.5, "collate": 1.5, "hand-over": 0.0}


def test_the_queue_is_what_requests_found() -> None:
    statistics = Statistics()
    statistics.begin(LoaderConfig(executor="thread", num_workers=2))
    for ready, depth in ((0, 4), (1, 4), (3, 4), (2, 2)):
        statistics.delivered(made(), 1, 0.0, ready, depth)
    queue = statistics.stats()["queue"]
    assert queue == {"requests": 3, "ready": 2.0, "depth": 10 / 3, "prefetch": 4, "occupancy": 0.6}


def test_ways_errors_and_restarts() -> None:
    statistics = Statistics()
    statistics.begin(LoaderConfig(num_workers=2, threads_per_worker=3))
    for way in ("pipe", "ring", "ring", "copy"):
        statistics.delivered(made(way=way), 1, 0.0, 0, 4)
    statistics.restarts = 1  # as the loader says
    stats = statistics.stats({"failed": 2, "types": {"OSError": 2}})
    assert stats["ways"] == {"pipe": 1, "ring": 2, "copy": 1}
    assert stats["errors"] == {"failed": 2, "types": {"OSError": 2}}
    assert stats["restarts"] == 1
    assert (stats["workers"], stats["threads_per_worker"], stats["processes"]) == (2, 3, 2)


def test_stats_are_json_and_statistics_travel() -> None:
    statistics = Statistics()
    assert json.loads(json.dumps(statistics.stats()))["batches_per_second"] == 0
    consume(statistics, 3, wait=0.001, train=0.0)
    stats = statistics.stats()
    assert json.loads(json.dumps(stats)) == stats
    copy = pickle.loads(pickle.dumps(statistics)).stats()
    assert {**copy, "cores_busy": 0} == {**stats, "cores_busy": 0}
    stats["ways"]["local"] = stats["stages"]["fetch"] = 0  # a copy
    assert statistics.stats()["ways"] == {"local": 3}


def test_reset_counts_from_zero() -> None:
    statistics = Statistics()
    before = statistics.stats()
    consume(statistics, 3, wait=0.001, train=0.001)
    statistics.reset()
    assert statistics.stats() == before


def test_two_iterators_in_turn_share_the_clock() -> None:
    statistics = Statistics()
    for _ in range(2):
        statistics.begin(LoaderConfig())
    begin = time.perf_counter()
    for _ in range(10):  # zip(loader, loader): both wait, then the consumer trains
        for _ in range(2):
            start = time.perf_counter()
            time.sleep(0.003)
            statistics.delivered(made(), 1, time.perf_counter() - start, 0, 0)
        time.sleep(0.004)
    statistics.ended(0.0)
    assert statistics.stats()["seconds"] == pytest.approx(time.perf_counter() - begin, abs=0.005)


def test_the_cost_of_a_batch() -> None:
    statistics = Statistics()
    batch = made(read=1.0, decode=2.0, augment=1.0)
    best = float("inf")
    for _ in range(20):  # about a microsecond on a quiet machine
        start = time.perf_counter()
        for _ in range(200):
            statistics.delivered(batch, 100, 0.0, 1, 4)
        best = min(best, (time.perf_counter() - start) / 200)
    assert best < 5e-6


Point = collections.namedtuple("Point", "x y")


@dataclass
class Labelled:
    image: torch.Tensor
    name: str


class Odd(collections.UserDict[str, Any]):
    def values(self) -> Any:
        raise RuntimeError("not now")


SIZES = [
    (torch.zeros(4, 3), 48),
    (torch.zeros(2, 8)[:, ::2], 32),
    (np.zeros((2, 2)), 32),
    ((torch.zeros(4), {"a": np.float32(1), "names": ["ab", b"cde"]}), 16 + 4 + 5),
    (Point(torch.zeros(2, dtype=torch.int64), 3), 24),
    (Labelled(torch.zeros(2), "xy"), 10),
    (torch.eye(3).to_sparse(), 3 * 2 * 8 + 3 * 4),
    (["four"] * 1000, 4000),
    (None, 0),
    (object(), 0),
    (Odd(a=torch.zeros(2)), 0),
]


@pytest.mark.parametrize(("batch", "size"), SIZES, ids=lambda value: type(value).__name__)
def test_size_of(batch: Any, size: int) -> None:
    assert size_of(batch) == size


def test_the_size_of_long_lists_is_an_estimate() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 5000)
    exact = int(lengths.sum())
    assert size_of(["x" * n for n in lengths]) == pytest.approx(exact, rel=0.5)


def test_a_structure_that_contains_itself_has_no_size() -> None:
    batch: list[Any] = [torch.zeros(1)]
    batch.append(batch)
    assert size_of(batch) == 0
