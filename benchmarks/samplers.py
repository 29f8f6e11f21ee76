"""Samplers at 50 million samples and 8 ranks beside torch's, and grouped batches at 10 million.

Every run is a fresh process: imports first, then the sampler is made and the first index (or batch) taken, then a
million samples in a ``for`` loop, by the clock and by the processor's time. Torch's lists are complete by then: the
first index waits for them. Memory is the growth of the peak resident set over what the process had after its imports,
so it counts what is freed again, too.

    python benchmarks/samplers.py --samples 50000000 --grouped 10000000 --repeat 3
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import parse, spread, table

RANKS, RANK = 8, 3
MIB = 1 << 20


def _cases(n: int) -> dict[str, Callable[[], Any]]:
    """name -> a function that makes the sampler. Only called in the fresh process."""
    import numpy as np
    import torch.utils.data as theirs

    import penstock.samplers as ours

    data = range(n)
    groups = (np.arange(n, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(30) == 0).astype(np.uint8)

    weights = np.random.default_rng(0).random(n) if n <= 20_000_000 else np.ones(1)

    def inner(shuffle: str = "global") -> Any:
        return ours.DistributedSampler(data, RANKS, RANK, shuffle)

    return {
        "DistributedSampler global": inner,
        "DistributedSampler block": lambda: inner("block"),
        "DistributedSampler shuffle=True": lambda: ours.DistributedSampler(data, RANKS, RANK),
        "torch DistributedSampler": lambda: theirs.DistributedSampler(data, RANKS, RANK),
        "RandomSampler global": lambda: ours.RandomSampler(data, shuffle="global"),
        "torch RandomSampler": lambda: theirs.RandomSampler(data),
        "InfiniteSampler": lambda: ours.InfiniteSampler(data, rank=RANK, world_size=RANKS),
        "BatchSampler(global, 256)": lambda: ours.BatchSampler(inner(), 256, False),
        "torch BatchSampler(Distributed, 256)": lambda: theirs.BatchSampler(
            theirs.DistributedSampler(data, RANKS, RANK), 256, False
        ),
        "GroupedBatchSampler, batches of 2": lambda: ours.GroupedBatchSampler(inner(), groups, 2),
        "GroupedBatchSampler, batches of 64": lambda: ours.GroupedBatchSampler(inner(), groups, 64),
        "GroupedBatchSampler order='first', 2": lambda: ours.GroupedBatchSampler(inner(), groups, 2, order="first"),
        "torch BatchSampler(Distributed, 2), ungrouped": lambda: theirs.BatchSampler(
            theirs.DistributedSampler(data, RANKS, RANK), 2, False
        ),
        "WeightedRandomSampler, builds the table": lambda: ours.WeightedRandomSampler(weights, 1_000_000, seed=0),
        "torch WeightedRandomSampler (its limit is 2**24)": lambda: theirs.WeightedRandomSampler(
            weights[: 2**24 - 1], 1_000_000
        ),
    }


INDEX_CASES = [
    "DistributedSampler global",
    "DistributedSampler block",
    "DistributedSampler shuffle=True",
    "torch DistributedSampler",
    "RandomSampler global",
    "torch RandomSampler",
    "InfiniteSampler",
    "BatchSampler(global, 256)",
    "torch BatchSampler(Distributed, 256)",
]
GROUPED_CASES = [
    "GroupedBatchSampler, batches of 2",
    "GroupedBatchSampler, batches of 64",
    "GroupedBatchSampler order='first', 2",
    "torch BatchSampler(Distributed, 2), ungrouped",
    "WeightedRandomSampler, builds the table",
    "torch WeightedRandomSampler (its limit is 2**24)",
]
BARS = {  # ms, MiB
    "DistributedSampler global": (50, 20),
    "GroupedBatchSampler, batches of 2": (500, 100),
    "GroupedBatchSampler, batches of 64": (500, 100),
}


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def child(name: str, n: int) -> dict[str, float]:
    """Measure one case in this process."""
    make = _cases(n)[name]
    make_small = _cases(1000)[name]
    next(iter(make_small()))  # code pages and caches of the libraries
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    begin = time.perf_counter()
    sampler = make()
    iterator = iter(sampler)
    first_item = next(iterator)
    first = time.perf_counter() - begin
    width = len(first_item) if isinstance(first_item, list) else 1
    count = 0
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for _ in itertools.islice(iterator, 1_000_000 // width):
        count += 1
    rate = count * width / (time.perf_counter() - begin)
    cpu = (time.process_time() - begin_cpu) / max(count * width, 1)
    begin = time.perf_counter()
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(1)
    next(iter(sampler))
    again = time.perf_counter() - begin
    return {
        "first_ms": first * 1e3,
        "next_epoch_ms": again * 1e3,
        "rate": rate / 1e6,
        "cpu_ns": cpu * 1e9,
        "memory": (_status("VmHWM") - before) / MIB,
    }


def measure(names: list[str], n: int, repeat: int) -> None:
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(repeat):
        for name in names:
            command = [sys.executable, __file__, "--child", name, "--samples", str(n)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stderr}")
            runs[name].append(json.loads(done.stdout))
    rows = []
    for name, results in runs.items():
        first = [result["first_ms"] for result in results]
        memory = [result["memory"] for result in results]
        median = {key: statistics.median(result[key] for result in results) for key in results[0]}
        bar = ""
        if name in BARS:
            met = median["first_ms"] < BARS[name][0] and median["memory"] < BARS[name][1]
            bar = f"< {BARS[name][0]} ms, < {BARS[name][1]} MiB: {'met' if met else 'MISSED'}"
        rows.append(
            [
                name,
                *spread(first),
                f"{median['next_epoch_ms']:.1f}",
                *spread([result["rate"] for result in results]),
                f"{median['cpu_ns']:.1f}",
                *spread(memory),
                bar,
            ]
        )
    columns = ["sampler", "first, ms: min", "median", "max", "next epoch, ms"]
    columns += ["M indices/s: min", "median", "max", "CPU, ns an index"]
    columns += ["extra peak, MiB: min", "median", "max", "bar"]
    table(f"{n:,} samples, rank {RANK} of {RANKS}, {repeat} fresh processes each", columns, rows, peer="torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50_000_000)
    parser.add_argument("--grouped", type=int, default=10_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parse(parser, {"samples": 100_000, "grouped": 20_000, "repeat": 1})
    if options.child:
        print(json.dumps(child(options.child, options.samples)))
        return
    few = 3 if options.quick else 1
    measure(INDEX_CASES[::few], options.samples, options.repeat)
    measure(GROUPED_CASES[::few], options.grouped, options.repeat)


if __name__ == "__main__":
    main()
