"""Reading a manifest whose pages are not in memory, against one whose pages are.

Before each cold run the system is asked to drop the pages of the file and of its index (posix_fadvise); every run is
a process of its own, which has read a small manifest before the clock starts. Beside it: reading the whole file into a
list of lines, which has to be done before the first row.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from _common import arguments, folder, make_manifest, parse, spread, table
from penstock.manifest import Manifest

BATCH = 256


def drop(path: str) -> None:
    """Ask the system to forget the pages of a file. Only clean pages go, so it is synced first."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def read_manifest(path: str, order: str, batches: int, connection: Connection) -> None:
    """Seconds until the first batch, and rows a second of all of them."""
    Manifest.open(f"{path}.small", progress=False).records(np.arange(BATCH))  # from here on everything is imported
    start = time.perf_counter()
    manifest = Manifest.open(path, progress=False)
    random = np.random.default_rng(os.getpid())
    for k in range(batches):
        if order == "random":
            indices = random.integers(0, len(manifest), BATCH)
        else:
            indices = np.arange(k * BATCH, (k + 1) * BATCH) % len(manifest)
        manifest.records(indices)
        if k == 0:
            first = time.perf_counter() - start
    connection.send((first, batches * BATCH / (time.perf_counter() - start)))


def read_list(path: str, order: str, batches: int, connection: Connection) -> None:
    """The same from a list of lines."""
    start = time.perf_counter()
    lines = Path(path).read_text().splitlines()
    random = np.random.default_rng(os.getpid())
    for k in range(batches):
        _ = [lines[i].rsplit(None, 1) for i in random.integers(0, len(lines), BATCH).tolist()]
        if k == 0:
            first = time.perf_counter() - start
    connection.send((first, batches * BATCH / (time.perf_counter() - start)))


def run(target: Callable[..., None], path: str, order: str, batches: int, cold: bool) -> tuple[float, float]:
    """One run in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(path, order, batches, there))
    if cold:
        drop(path)
        drop(path + ".pstk")
    else:
        for name in (path, path + ".pstk"):
            Path(name).read_bytes()
    process.start()
    first, speed = here.recv()
    process.join()
    return 1000 * first, speed / 1000


def main() -> None:
    parser = arguments(__doc__, repeat=3)
    parser.add_argument("--batches", type=int, default=200, help="batches of a run (default: %(default)s)")
    options = parse(parser, {"lines": 200_000, "repeat": 1, "batches": 20})
    cases = [
        ("Manifest, random rows", read_manifest, "random", True),
        ("Manifest, random rows", read_manifest, "random", False),
        ("Manifest, rows in order", read_manifest, "in order", True),
        ("Manifest, rows in order", read_manifest, "in order", False),
        ("list of lines, random rows", read_list, "random", True),
        ("list of lines, random rows", read_list, "random", False),
    ]
    results: list[list[tuple[float, float]]] = [[] for _ in cases]
    with folder(options.dir) as where:
        path = str(where / "meta.txt")
        for name, lines in ((path, options.lines), (f"{path}.small", 1000)):
            make_manifest(name, lines)
            Manifest.open(name, progress=False)
        for _ in range(options.repeat):
            for result, (_, target, order, cold) in zip(results, cases, strict=True):
                result.append(run(target, path, order, options.batches, cold))
    rows = []
    for (name, _, _, cold), result in zip(cases, results, strict=True):
        first, speed = zip(*result, strict=True)
        rows.append((name, "cold" if cold else "warm", *spread(first), *spread(speed)))
    title = f"{options.lines:,} lines, {options.batches} batches of {BATCH}: open and first batch, and all batches"
    columns = ["what", "pages", "first batch ms min", "median", "max", "all: k rows/s min", "median", "max"]
    table(title, columns, rows, peer="list of lines")


if __name__ == "__main__":
    main()
