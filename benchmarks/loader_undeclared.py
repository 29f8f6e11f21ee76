"""The DataLoader over datasets that declare nothing, compared with torch's.

All loaders run in turn over the same dataset, in torch's order without a seed and in ours with ``seed=``, which seeds
Python's, NumPy's and torch's global generators for the samples that draw from them. The consumer reads every byte of
every tensor, by xxh3. CPU time of the main process counts all its threads and the consumer's reading; that of the
workers is from /proc; both in microseconds per batch. Ratios are of rounds, one by one.

"Draws" draws from torch's global generator in every sample, as torchvision's transforms do; "work" computes in Python
for 100 us a sample.

    python benchmarks/loader_undeclared.py --repeat 5 --seconds 1
    python benchmarks/loader_undeclared.py --workers 0 --cases dicts lists
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import torch.utils.data
import xxhash
from torch.utils.data import Dataset

import penstock
from _common import parse, spread, table

BATCH = 64
LOADERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "torch": (torch.utils.data.DataLoader, {}),
    "penstock": (penstock.DataLoader, {}),
    "penstock seed=0": (penstock.DataLoader, {"seed": 0}),
}


def work(row: torch.Tensor, index: int) -> Any:
    """Return a row after 100 us in Python."""
    end = time.perf_counter() + 100e-6
    total = 0
    while time.perf_counter() < end:
        total += index
    return row, total & 1


CASES: dict[str, tuple[int, Callable[[torch.Tensor, int], Any]]] = {
    "1 KB tensors": (1 << 10, lambda row, index: row),
    "150 KB tensors": (3 * 224 * 224, lambda row, index: row),
    "dicts": (1 << 10, lambda row, index: {"data": row, "label": index}),
    "lists": (1 << 10, lambda row, index: [row, index, float(index)]),
    "strings": (1 << 10, lambda row, index: (f"sample {index}", index)),
    "arrays": (1 << 10, lambda row, index: (row.numpy(), index)),
    "nested": (1 << 10, lambda row, index: {"views": [row, row], "meta": {"name": str(index), "size": (1, index)}}),
    "draws": (1 << 10, lambda row, index: (row, torch.rand(2))),
    "work": (1 << 10, work),
}


class Rows(Dataset[Any]):
    """What a newcomer writes."""

    def __init__(self, case: str, megabytes: int) -> None:
        width, self._make = CASES[case]
        count = max(BATCH, megabytes * 10**6 // width)
        self._rows = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, width), np.uint8))

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        return self._make(self._rows[index % len(self._rows)], index)


class Round(NamedTuple):
    """What one loader did in one round: batches/s, and microseconds of CPU time per batch."""

    rate: float
    main: float
    workers: float


def read(batch: Any) -> int:
    """Read all bytes of a batch."""
    if isinstance(batch, torch.Tensor):
        return xxhash.xxh3_64_intdigest(batch.numpy())
    if isinstance(batch, Mapping):
        return sum(map(read, batch.values()))
    return sum(map(read, batch)) if isinstance(batch, list | tuple) else len(batch)


def run(name: str, dataset: Any, workers: int, seconds: float) -> Round:
    """One round: some batches to get going, then as many as come within ``seconds``."""
    make, options = LOADERS[name]
    others = set(psutil.Process().children(recursive=True))
    loader = make(dataset, batch_size=BATCH, shuffle=True, num_workers=workers, **options)
    iterator = iter(loader)
    for batch in itertools.islice(iterator, 40):
        read(batch)
    made = [child for child in psutil.Process().children(recursive=True) if child not in others]
    before, main, count = cpu_seconds(made), time.process_time(), 0
    start = time.perf_counter()
    while time.perf_counter() < start + seconds:
        read(next(iterator))
        count += 1
    took, main = time.perf_counter() - start, time.process_time() - main
    after = cpu_seconds(made)
    del iterator, batch
    getattr(loader, "close", lambda: None)()
    gc.collect()
    return Round(count / took, 1e6 * main / count, 1e6 * (after - before) / count)


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """CPU time of processes that live, in steps of 10 ms."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(case: str, workers: int, options: argparse.Namespace) -> list[tuple[object, ...]]:
    """Rows of the table for one case."""
    dataset = Rows(case, options.megabytes)
    rounds: dict[str, list[Round]] = {name: [] for name in LOADERS}
    for _, name in itertools.product(range(options.repeat), LOADERS):
        rounds[name].append(run(name, dataset, workers, options.seconds))
    rows: list[tuple[object, ...]] = []
    for name, results in rounds.items():
        ratio = [ours.rate / peer.rate for ours, peer in zip(results, rounds["torch"], strict=True)]
        share = [ours.main / peer.main for ours, peer in zip(results, rounds["torch"], strict=True)]
        cpu = [statistics.median(getattr(result, part) for result in results) for part in ("main", "workers")]
        rate = spread([result.rate for result in results], 4)
        rows.append((case, name, *rate, *map("{:.0f}".format, cpu), *spread(ratio, unit="x"), *spread(share, 2)))
    return rows


HEADER = ["case", "loader", "batches/s: min", "median", "max", "CPU us: main", "CPU: workers"]
HEADER += ["ratio: min", "median", "max", "main CPU of torch's: min", "median", "max"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", default=tuple(CASES), choices=tuple(CASES), help="which to measure")
    parser.add_argument("--workers", nargs="+", type=int, default=(2, 0), help="numbers of workers (default: 2 and 0)")
    parser.add_argument("--repeat", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one loader in a round (default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=400, help="of samples (default: %(default)s)")
    options = parse(parser, {"cases": ["dicts"], "repeat": 1, "seconds": 0.1, "megabytes": 10})
    for workers in options.workers:
        rows = [row for case in options.cases for row in measure(case, workers, options)]
        where = f"{workers} workers" if workers else "inline"
        table(f"Datasets that declare nothing, {where}, batches of {BATCH}", HEADER, rows, peer="torch")


if __name__ == "__main__":
    main()
