"""Batches within a budget of tokens: padding, speed, and the way to the middle of an epoch, beside the usual ways.

Lengths are drawn: web pages, chats, code (log-normal), and two kinds of documents, up to 8,192 tokens. Each way makes
one epoch of batches whose longest x count is at most the budget. The others are plain functions after well-known code:

    bucket by length    a stream of shuffled samples falls into buckets whose bounds grow by 10 % (tf.data)
    sorted pools        a hundred batches of shuffled samples at a time are sorted and cut (torchtext, "sortish")
    sorted list         all samples are sorted and cut, and the batches shuffled (fairseq's batch_by_size)
    random              shuffled samples are taken until the next one does not fit (torch's BatchSampler, with a budget)

*Middle* is the time until the batch in the middle of an epoch is there, for who has a state: the others go through what
comes before. *Private memory* is what a process has of its own in the middle of an epoch, beyond its imports. The last
table has many samples.

    python benchmarks/token_budget.py --samples 1000000 --many 100000000
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from _common import folder, parse, smaps_rollup, spread, table
from _lengths import DRAWN, write_lengths

BUDGET, LONGEST = 65_536, 8_192
MIB = 1 << 20
Batches = Iterator[list[int]]


# The usual ways.


def _shuffled(n: int) -> list[int]:
    order = list(range(n))
    random.Random(0).shuffle(order)
    return order


def bucket_by_length(lengths: list[int]) -> Batches:
    """Yield a bucket's samples when there are as many as fit at its bound."""
    bounds = [8]
    while bounds[-1] < LONGEST:
        bounds.append(max(bounds[-1] + 1, min(LONGEST, int(bounds[-1] * 1.1))))
    which = np.searchsorted(bounds, np.arange(LONGEST + 1)).tolist()
    sizes = [max(1, BUDGET // bound) for bound in bounds]
    buckets: list[list[int]] = [[] for _ in bounds]
    for sample in _shuffled(len(lengths)):
        number = which[lengths[sample]]
        buckets[number].append(sample)
        if len(buckets[number]) == sizes[number]:
            yield buckets[number]
            buckets[number] = []
    yield from filter(None, buckets)


def _cut(order: list[int], lengths: list[int]) -> Batches:
    """Yield runs of samples as long as their longest times their number is within the budget."""
    batch: list[int] = []
    longest = 0
    for sample in order:
        longest = max(longest, lengths[sample])
        if longest * (len(batch) + 1) > BUDGET:
            yield batch
            batch, longest = [], lengths[sample]
        batch.append(sample)
    yield batch


def sorted_pools(lengths: list[int]) -> Batches:
    """Sort a hundred batches' samples at a time."""
    order, rng = _shuffled(len(lengths)), random.Random(1)
    size = 100 * BUDGET // max(1, sum(lengths) // len(lengths))
    for a in range(0, len(order), size):
        batches = list(_cut(sorted(order[a : a + size], key=lengths.__getitem__), lengths))
        rng.shuffle(batches)
        yield from batches


def sorted_list(lengths: list[int]) -> Batches:
    """Sort all samples, cut, and shuffle the batches."""
    batches = list(_cut(sorted(range(len(lengths)), key=lengths.__getitem__), lengths))
    random.Random(1).shuffle(batches)
    yield from batches


def at_random(lengths: list[int]) -> Batches:
    """Cut the samples in random order."""
    yield from _cut(_shuffled(len(lengths)), lengths)


PEERS = {
    "bucket by length": bucket_by_length,
    "sorted pools": sorted_pools,
    "sorted list": sorted_list,
    "random": at_random,
}


# Measuring, each in a fresh process.


def _private() -> int:
    """Return the bytes of this process that no file holds, without what was freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return smaps_rollup(os.getpid())["Anonymous"]


def _make(name: str, path: str, cache: str) -> Any:
    """Return what one way iterates; ours by its number of classes."""
    if name in PEERS:
        return PEERS[name](np.load(path).tolist())
    import penstock as ps

    return ps.TokenBudgetBatchSampler(path, BUDGET, classes=int(name), world_size=1, rank=0, cache_dir=cache)


def epoch_of(name: str, path: str, cache: str) -> dict[str, float]:
    """Measure an epoch of one way, and the way to its middle."""
    lengths = np.load(path, mmap_mode="r")
    costs = [int(lengths[batch].max()) * len(batch) for batch in _make(name, path, cache)]  # makes the index, too
    assert max(costs) <= BUDGET
    before = _private()
    walked = iter(_make(name, path, cache))
    next(itertools.islice(walked, len(costs) // 2, None))
    memory = _private() - before
    del walked
    begin = time.perf_counter()
    for _ in _make(name, path, cache):
        pass
    seconds, begin = time.perf_counter() - begin, time.perf_counter()
    batches = _make(name, path, cache)
    if name in PEERS:
        next(itertools.islice(batches, len(costs) // 2, None))
    else:
        batches.load_state_dict({**batches.state_dict(), "consumed": len(costs) // 2})
        next(iter(batches))
    real = int(lengths.sum(dtype=np.int64))
    return {
        "padding": 100 * (1 - real / sum(costs)),
        "use": 100 * real / len(costs) / BUDGET,
        "rate": len(costs) / seconds,
        "middle": 1e3 * (time.perf_counter() - begin),
        "memory": memory / MIB,
    }


def seeks(name: str, path: str, cache: str) -> dict[str, float]:
    """Measure seeking in a table of many samples."""
    _make(name, str(Path(path).with_name("few.npy")), cache).batch(0)  # imports
    before, begin = _private(), time.perf_counter()
    sampler = _make(name, path, cache)
    made, begin = time.perf_counter() - begin, time.perf_counter()
    sampler.batch(0)
    first, state, times = time.perf_counter() - begin, sampler.state_dict(), []
    for place in np.linspace(0, sampler.total - 1, 200).astype(int).tolist():
        begin = time.perf_counter()
        sampler.load_state_dict({**state, "consumed": place})
        next(iter(sampler))
        times.append(time.perf_counter() - begin)
    return {
        "make": made,
        "first": first,
        "seek": 1e3 * statistics.median(times),
        "worst": 1e3 * max(times),
        "state": len(json.dumps(sampler.state_dict())),
        "memory": (_private() - before) / MIB,
    }


def fresh(what: str, name: str, path: Path, cache: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", what, "--name", name, "--path", str(path), "--cache", str(cache)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    return dict(json.loads(done.stdout))


def measure(kind: str, samples: int, repeat: int, where: Path) -> None:
    path = where / f"{kind}.npy"
    write_lengths(path, kind, samples, longest=LONGEST, dtype=np.uint16)
    names = ["64", "128", "256", *PEERS]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(repeat):
        for name in names:
            runs[name].append(fresh("epoch", name, path, where))
    rows = []
    for name, results in runs.items():
        padding, use, rate, middle, memory = ([result[key] for result in results] for key in results[0])
        bar = f"< 1.5 %: {'met' if max(padding) < 1.5 else 'MISSED'}" if name == "256" else ""
        label = name if name in PEERS else f"TokenBudgetBatchSampler, {name} classes"
        rows.append(
            [
                label,
                *(spread(values)[1] for values in (padding, use)),
                *spread(rate),
                *(spread(values)[1] for values in (middle, memory)),
                bar,
            ]
        )
    columns = ["batches", "padding, %", "of the budget, %", "batches/s: min", "median", "max"]
    columns += ["middle, ms", "private memory, MiB", "bar"]
    table(f"{kind}: {samples:,} samples, {BUDGET:,} tokens a batch", columns, rows, peer="bucket by length")


def measure_many(samples: int, where: Path) -> None:
    write_lengths(where / "few.npy", "web", 1000, longest=LONGEST, dtype=np.uint16)
    path = where / "many.npy"
    write_lengths(path, "web", samples, longest=LONGEST, dtype=np.uint16)
    rows = []
    for what in ("makes the index", "finds the index"):
        found = fresh("seeks", "256", path, where)
        bar = "< 10 ms, < 20 MiB: " + ("met" if found["seek"] < 10 and found["memory"] < 20 else "MISSED")
        make, first, seek, worst, state, memory = (f"{value:.3g}" for value in found.values())
        rows.append([what, make, first, seek, worst, state, memory, bar])
    columns = ["256 classes", "sampler, s", "first batch, s", "seek, ms: median", "max", "state, bytes"]
    table(f"web: {samples:,} samples", [*columns, "private memory, MiB", "bar"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--many", type=int, default=100_000_000)
    parser.add_argument("--kinds", nargs="*", default=list(DRAWN), choices=DRAWN)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dir", default=None, help="folder for the files (default: a temporary one)")
    for name in ("child", "name", "path", "cache"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parse(parser, {"samples": 20_000, "many": 100_000, "kinds": ["web"], "repeat": 1})
    if options.child:
        run = epoch_of if options.child == "epoch" else seeks
        print(json.dumps(run(options.name, options.path, options.cache)))
        return
    with folder(options.dir) as where:
        for kind in options.kinds:
            measure(kind, options.samples, options.repeat, where)
        measure_many(options.many, where)


if __name__ == "__main__":
    main()
