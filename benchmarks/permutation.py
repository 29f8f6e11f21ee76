"""The keyed permutation in batches of 100,000 positions, beside NumPy's permutation and a shuffled Python list.

Theirs is the time to make the whole permutation, divided by its length; ours has no such step. Runs are interleaved,
so that a busy machine disturbs all alike. The list is made for fewer elements, since its cost per element is the same
or higher for more.

    python benchmarks/permutation.py --repeat 7
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from _common import parse, spread, table
from penstock.order import BlockShuffle, Permutation

BATCH = 100_000
BARS = {1000: 20, 50_000_000: 40, 1_000_000_000: 40}


def ours(n: int, batches: int) -> float:
    """Indices per second of lookups at random places of the order, in batches."""
    order = Permutation(n, key=1)
    starts = np.random.default_rng(0).integers(0, max(1, n - BATCH), batches)
    positions = [(np.arange(BATCH) + start) % n for start in starts.tolist()]
    order[positions[0]]
    begin = time.perf_counter()
    for each in positions:
        order[each]
    return batches * BATCH / (time.perf_counter() - begin)


def block(n: int, batches: int) -> float:
    """The same for the block shuffle with its default sizes."""
    order = BlockShuffle(n, key=1)
    begin = time.perf_counter()
    for start in range(batches):
        order[np.arange(start * BATCH, (start + 1) * BATCH)]
    return batches * BATCH / (time.perf_counter() - begin)


def numpy_permutation(n: int) -> float:
    begin = time.perf_counter()
    np.random.permutation(n)
    return n / (time.perf_counter() - begin)


def python_list(n: int) -> float:
    begin = time.perf_counter()
    indices = list(range(n))
    random.shuffle(indices)
    return n / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--batches", type=int, default=40, help="batches of 100,000 in one run")
    parser.add_argument("--numpy", type=int, default=50_000_000, help="elements of NumPy's permutation")
    parser.add_argument("--list", type=int, default=1_000_000, help="elements of the Python list")
    options = parse(parser, {"repeat": 2, "batches": 4, "numpy": 1_000_000, "list": 100_000})
    runs: dict[tuple[str, int], Callable[[], float]] = {
        ("Permutation", n): lambda n=n: ours(n, options.batches) for n in BARS
    }
    runs["block shuffle", 1_000_000_000] = lambda: block(1_000_000_000, options.batches)
    runs["numpy.random.permutation", options.numpy] = lambda: numpy_permutation(options.numpy)
    runs["list, random.shuffle", options.list] = lambda: python_list(options.list)
    rates: dict[tuple[str, int], list[float]] = {name: [] for name in runs}
    for _ in range(options.repeat):
        for name, run in runs.items():
            rates[name].append(run() / 1e6)
    peer = statistics.median(rates["numpy.random.permutation", options.numpy])
    rows = []
    for (what, n), values in rates.items():
        median = statistics.median(values)
        bar = f">= {BARS[n]}: {'met' if median >= BARS[n] else 'MISSED'}" if what == "Permutation" else ""
        rows.append([what, f"{n:,}", *spread(values), f"{median / peer:.2f}", bar])
    columns = ["what", "elements", "M/s: min", "median", "max", "to NumPy", "bar"]
    table(f"Indices per second, {options.repeat} interleaved runs", columns, rows, peer="numpy")


if __name__ == "__main__":
    main()
