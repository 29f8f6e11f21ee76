"""What statistics cost a batch, as a share of the time that batches take where nothing else takes time.

Statistics cannot be switched off, so their cost is measured by itself, in loops over batches like those that the loader
makes: in the consumer's thread the clock, the size of the batch and the counting; in the worker the clocks around data
set and collate function. Beside that, how long a batch takes when the dataset only hands out rows of an array and the
consumer does nothing: the worst case. Everywhere the least of several times is taken, which other programs disturbed
least. The bar is 1 %, of the consumer's thread, which sets the pace. A named stage is extra, and given on its own.

    python benchmarks/loader_statistics.py --repeat 5 --seconds 1
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

import penstock
from _common import parse, remark, table
from penstock.loader.config import LoaderConfig
from penstock.loader.messages import BatchMetrics, BatchResult
from penstock.loader.statistics import Statistics, size_of
from penstock.stages import collect, stage

BATCH = 64
SHAPES = {"1 KB samples": (1024,), "150 KB samples": (3, 224, 224)}
EXECUTORS = {"inline": 0, "thread": 2, "process": 2}
_LOOPS = 500


class Rows(Dataset[Any]):
    """Rows of an array, and their numbers."""

    pure = True

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index], index


def seconds_each(function: Callable[[], object], repeat: int) -> float:
    """Per call, of the loop that was disturbed least."""
    times = []
    for _ in range(10 * repeat):
        start = time.perf_counter()
        for _ in range(_LOOPS):
            function()
        times.append((time.perf_counter() - start) / _LOOPS)
    return min(times)


def consumer(batch: Any) -> Callable[[], None]:
    """What a batch costs in the consumer's thread."""
    counted = Statistics()
    counted.begin(LoaderConfig(num_workers=2))
    metrics = BatchMetrics()
    metrics.samples, metrics.fetch, metrics.stages = BATCH, 0.01, {"read": 0.001, "decode": 0.005}
    made = BatchResult(batch, metrics, 0, way="ring")

    def once() -> None:
        start = time.perf_counter()
        counted.delivered(made, size_of(made.batch), time.perf_counter() - start, 1, 4)

    return once


def worker() -> None:
    """What a batch costs in the worker's thread: the clocks around fetch, collate and packing, and the record."""
    metrics = BatchMetrics()
    collect()
    start, cpu = time.perf_counter(), time.thread_time()
    metrics.fetch += time.perf_counter() - start
    metrics.cpu += time.thread_time() - cpu
    for name, seconds in collect().items():
        metrics.stages[name] = seconds
    start = time.perf_counter()
    metrics.collate += time.perf_counter() - start
    start = time.perf_counter()
    metrics.hand_over += time.perf_counter() - start


def one_stage() -> None:
    """A stage around nothing."""
    with stage("nothing"):
        pass


def time_of_batch(rows: torch.Tensor, executor: str, seconds: float) -> tuple[float, Any]:
    """Seconds per batch, after the first ones; and a batch."""
    order = list(range(len(rows))) * 100  # more than is taken: no worker is started on the clock
    loader = penstock.DataLoader(
        Rows(rows), batch_size=BATCH, sampler=order, executor=executor, num_workers=EXECUTORS[executor]
    )
    with loader:
        batches = iter(loader)
        for _ in range(8):
            next(batches)
        start, count, batch = time.perf_counter(), 0, None
        while (elapsed := time.perf_counter() - start) < seconds:
            batch = next(batches)
            count += 1
    return elapsed / count, batch


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeat", type=int, default=5, help="how often each is measured (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each loader run (default: %(default)s)")
    options = parse(parser, {"repeat": 1, "seconds": 0.1})
    in_worker = seconds_each(worker, options.repeat)
    rows = []
    for name, shape in SHAPES.items():
        data = torch.randint(0, 256, (100 * BATCH, *shape), dtype=torch.uint8)
        for executor in EXECUTORS:
            taken, batch = [], None
            for _ in range(options.repeat):
                each, batch = time_of_batch(data, executor, options.seconds)
                taken.append(each)
            least, cost = min(taken), seconds_each(consumer(batch), options.repeat)
            figures = (f"{1e6 * least:,.0f}", f"{1e6 * cost:.2f}", f"{cost / least:.2%}")
            both = (f"{1e6 * in_worker:.2f}", f"{(cost + in_worker) / least:.2%}")
            rows.append((name, executor, *figures, *both))
    columns = ("64 of", "executor", "µs a batch", "consumer, µs", "share", "worker, µs", "both, share")
    table("Statistics: cost per batch", columns, rows)
    remark(f"a named stage: {1e9 * seconds_each(one_stage, options.repeat):.0f} ns")


if __name__ == "__main__":
    main()
