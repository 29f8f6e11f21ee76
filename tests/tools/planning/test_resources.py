"""Memory, the index and start-up beside those of real manifests and loaders."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from full_run import full_only

import penstock as ps
from penstock.loader.config import LoaderConfig
from penstock.loader.executors.process.ring import BOARD
from penstock.manifest import Manifest
from penstock.tools.planning import Assumptions, Job, deal, epochs_of, make_plan, memory_of, needs_of, start_up_of
from penstock.tools.planning.resources import LIGHT_FACTOR


@pytest.mark.parametrize("rows", [1, 777, 4000])
def test_the_index_is_as_large_as_planned(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "train.txt"
    path.write_text("".join(f"{row:08d}.jpg {row % 10}\n" for row in range(rows)))
    Manifest.open(path)
    memory = memory_of(Job(samples=rows, sample_bytes=1, line_bytes=15), Assumptions())
    assert memory.index_bytes == (tmp_path / "train.txt.pstk").stat().st_size
    assert memory.manifest_bytes == path.stat().st_size


class Rows(torch.utils.data.Dataset[np.ndarray]):
    pure = True

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full(self.size, index % 256, np.uint8)


@pytest.mark.parametrize(("size", "workers", "prefetch"), [(150_528, 2, 2), (100_000, 1, 3)])
def test_the_ring_is_no_larger_than_planned(size: int, workers: int, prefetch: int) -> None:
    job = Job(samples=400, sample_bytes=size, batch_size=16, workers=workers, prefetch=prefetch)
    memory = memory_of(job, Assumptions())
    assert memory.ring == memory.slot_bytes * memory.slots
    with ps.DataLoader(Rows(size), batch_size=16, num_workers=workers, prefetch_factor=prefetch) as loader:
        iterator = iter(loader)
        for _ in range(6):
            next(iterator)
        file = iterator._batches.executor.ring.file
        used = os.fstat(file.fd).st_blocks * 512 - BOARD
    assert 0 < used <= memory.ring
    assert used % memory.slot_bytes == 0


def test_small_batches_are_made_ahead_as_the_loader_does() -> None:
    config = LoaderConfig(executor="process", num_workers=3)
    assert (config.depth, config.small_batch_depth) == (3 * 2, 3 * 2 * LIGHT_FACTOR)
    small = memory_of(Job(samples=10**6, sample_bytes=10, batch_size=64, workers=3), Assumptions())
    assert small.slots == config.small_batch_depth + 3
    assert memory_of(Job(samples=10**6, sample_bytes=10**6, workers=3), Assumptions()).slots == config.depth + 3


def test_a_node_has_all_its_processes() -> None:
    job = Job(samples=1000, sample_bytes=1000, ranks=12, ranks_per_node=5, workers=3)
    memory = memory_of(job, Assumptions(rank_memory=1_000_000, worker_memory=1000))
    assert job.nodes == 3
    assert memory.node == 5 * (1_000_000 + 3000 + memory.ring)
    assert memory_of(Job(samples=10, sample_bytes=1, ranks=2), Assumptions()).node < 2 * 8 * 10**9


def test_start_and_resume() -> None:
    job = Job(samples=10**6, sample_bytes=10**5, batch_size=100, cpu_s=0.01, node_bandwidth=10**8, ranks=2)
    assumed = Assumptions(import_s=2, open_s=0.5, workers_s=0.25, index_rate=10**6)
    start = start_up_of(job, assumed, epoch_s=500)
    assert start.index == 38
    assert start.first_batch == pytest.approx(100 * 0.01 + 100 * 10**5 / (10**8 / 2))
    assert start.start == start.resume == pytest.approx(2.75 + start.first_batch)
    assert start.replay == 250


def test_resume_does_not_depend_on_the_place(tmp_path: Path) -> None:
    """What the plan says of resuming: near the end it takes no longer than at the start."""
    order = ps.make_order("global", 10**12, seed=1)
    seconds = []
    for consumed in (0, 10**12 - 10**6):
        began = time.perf_counter()
        part = ps.Partition(10**12, 8, 3, consumed=consumed)
        assert len(order[part.positions(0, 256)]) == 256
        seconds.append(time.perf_counter() - began)
    assert max(seconds) < 0.1


class TestRates:
    def test_each_thing_can_limit(self) -> None:
        common = {"samples": 10**6, "sample_bytes": 10**5, "ranks": 8, "batch_size": 100}
        for limit, options in {
            "storage": {"node_bandwidth": 10**8, "cpu_s": 0.0001},
            "CPU": {"cpu_s": 0.1},
            "hand-over": {"cpu_s": 0.0, "delivered_bytes": 10**9},
            "step": {"step_s": 10.0},
        }.items():
            job = Job(**common, **options)  # type: ignore[arg-type]
            (first, *_) = make_plan(job).epochs
            assert first.limit == limit
            assert first.seconds == pytest.approx(10**6 / first.ceilings[limit])

    def test_bandwidth_is_shared_by_nodes(self) -> None:
        job = Job(samples=10**6, sample_bytes=10**5, ranks=64, total_bandwidth=8 * 10**8, cpu_s=0.0)
        assert make_plan(job).epochs[0].ceilings["storage"] == pytest.approx(1000)

    def test_cores_and_workers(self) -> None:
        job = Job(samples=10**6, sample_bytes=1, ranks=8, workers=4, cpu_s=0.01, batch_size=100, step_s=0.1)
        assert make_plan(job).epochs[0].ceilings["CPU"] == pytest.approx(3200)
        needs = needs_of(job, (0.0,))
        assert (needs.cores, needs.workers) == (pytest.approx(80), 10)
        few = Job(samples=10**6, sample_bytes=1, ranks=8, workers=4, cpu_s=0.01, cores=16)
        assert make_plan(few).epochs[0].ceilings["CPU"] == pytest.approx(1600)

    def test_enough_of_what_is_needed_is_enough(self) -> None:
        job = Job(samples=10**6, sample_bytes=10**5, ranks=8, batch_size=100, step_s=0.1)
        needs = needs_of(job, (0.0,))
        enough = {"node_bandwidth": needs.bandwidth, "workers": needs.workers}
        first = make_plan(Job(**{**job.__dict__, **enough})).epochs[0]
        assert (first.limit, first.waiting) == ("step", 0)
        less = {"node_bandwidth": 0.5 * (needs.bandwidth or 0)}
        first = make_plan(Job(**{**job.__dict__, **enough, **less})).epochs[0]
        assert (first.limit, first.waiting) == ("storage", pytest.approx(0.5))

    def test_reads_of_many_rows_read_more(self) -> None:
        job = Job(samples=10**6, sample_bytes=10**5, ranks=64, read_rows=100, cpu_s=0)
        hits = (0.25,)
        (epoch,) = epochs_of(job, Assumptions(), deal(job), hits)
        assert epoch.amplification == pytest.approx(75)
        assert epoch.read_bytes == pytest.approx(75 * deal(job).node_samples * 10**5)


class Slow(torch.utils.data.Dataset[int]):
    pure = True

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)
        return index


@full_only("an epoch in real time")
def test_an_epoch_takes_as_long_as_planned() -> None:
    """Workers that sleep have a core each, however busy the machine is."""
    job = Job(samples=240, sample_bytes=8, batch_size=12, workers=2, cpu_s=0.01)
    planned = make_plan(job).epochs[0]
    with ps.DataLoader(Slow(), batch_size=12, num_workers=2, persistent_workers=True) as loader:
        assert sum(len(batch) for batch in loader) == 240  # starts the workers
        began = time.perf_counter()
        assert len(list(loader)) == deal(job).batches
        seconds = time.perf_counter() - began
    assert planned.limit == "CPU"
    assert planned.seconds == pytest.approx(1.2)
    assert 0.95 * planned.seconds < seconds < 1.6 * planned.seconds


def test_a_step_of_a_small_share_takes_as_long_as_any() -> None:
    """Sixteen samples of each of 64 ranks, in batches of up to 256: one step."""
    plan = make_plan(Job(samples=1000, sample_bytes=100, ranks=64, step_s=0.2))
    assert plan.dealing.batches == 1
    assert [epoch.seconds for epoch in plan.epochs] == pytest.approx([0.2] * 3)
    assert plan.needs.samples_per_s == pytest.approx(8 * 16 / 0.2)
