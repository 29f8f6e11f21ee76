"""How long opening takes, and how much memory of its own each of 8 ranks x 4 workers needs.

Memory is anonymous memory (Pss_Anon): mapped pages of the file are the system's cache, there once for all processes.
Each figure is what a process has more than the same process with an empty manifest. Beside it: the list of lines.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from _common import arguments, folder, make_manifest, parse, smaps_rollup, spread, table
from penstock.manifest import Manifest

BATCH, BATCHES = 256, 200
PEER_LINES = 10_000_000
MIB = 2**20


def open_once(path: str, connection: Connection) -> None:
    """In a fresh process: seconds to open, and anonymous memory that came with it."""
    before = smaps_rollup(os.getpid())["Anonymous"]
    start = time.perf_counter()
    manifest = Manifest.open(path, progress=False)
    seconds = time.perf_counter() - start
    memory = smaps_rollup(os.getpid())["Anonymous"] - before
    connection.send((seconds, memory / MIB, len(manifest)))


def open_manifest(path: str) -> Callable[[Any], Any]:
    """What reads a batch."""
    return Manifest.open(path, progress=False).records


def open_list(path: str) -> Callable[[Any], Any]:
    """The same from a list of lines."""
    lines = Path(path).read_text().splitlines()
    return lambda batch: [lines[k].rsplit(None, 1) for k in batch.tolist()]


def worker(read: Callable[[Any], Any], count: int, seed: int, connection: Connection) -> None:
    """Read shuffled batches, then wait to be measured."""
    random = np.random.default_rng(seed)
    for _ in range(BATCHES):
        indices = random.integers(0, max(count, 1), BATCH if count else 0)
        read(indices)
    connection.send(os.getpid())
    connection.recv()


def rank(opener: Callable[[str], Any], path: str, count: int, workers: int, seed: int, connection: Connection) -> None:
    """Open, fork workers, and tell who is who once all have read."""
    context = multiprocessing.get_context("fork")
    read = opener(path)
    ends = []
    for k in range(workers):
        here, there = context.Pipe()
        context.Process(target=worker, args=(read, count, seed * 100 + k, there), daemon=True).start()
        ends.append(here)
    connection.send((os.getpid(), [end.recv() for end in ends]))
    connection.recv()


def measure(opener: Callable[[str], Any], path: str, count: int, ranks: int, workers: int) -> dict[str, list[float]]:
    """Pss_Anon in MiB of all ranks and workers, while all of them are there."""
    context = multiprocessing.get_context("spawn")
    ends = []
    processes = []
    for k in range(ranks):
        here, there = context.Pipe()
        processes.append(context.Process(target=rank, args=(opener, path, count, workers, k, there)))
        processes[-1].start()
        ends.append(here)
    pids = [end.recv() for end in ends]
    result = {
        "rank": [smaps_rollup(pid)["Pss_Anon"] / MIB for pid, _ in pids],
        "worker": [smaps_rollup(pid)["Pss_Anon"] / MIB for _, children in pids for pid in children],
    }
    for end in ends:
        end.send("end")
    for process in processes:
        process.join()
    return result


def measure_opening(path: str, repeat: int) -> list[tuple[float, float]]:
    """Seconds and MiB of fresh processes that open the file."""
    context = multiprocessing.get_context("spawn")
    results = []
    for _ in range(repeat):
        here, there = context.Pipe()
        process = context.Process(target=open_once, args=(path, there))
        process.start()
        seconds, memory, _ = here.recv()
        results.append((seconds, memory))
        process.join()
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--workers", type=int, default=4)
    options = parse(parser, {"lines": 200_000, "repeat": 2, "ranks": 2, "workers": 2})
    with folder(options.dir) as where:
        path, empty = str(where / "meta.txt"), str(where / "empty.txt")
        make_manifest(path, options.lines)
        make_manifest(empty, 0)
        for name in (path, empty):
            Manifest.open(name, progress=False)
        opening = measure_opening(path, options.repeat)
        count = options.lines
        base = measure(open_manifest, empty, 0, options.ranks, options.workers)
        ours = measure(open_manifest, path, count, options.ranks, options.workers)
        # The list with one rank and 10 million lines at most: more would need more memory than there is.
        few = min(count, PEER_LINES)
        if few < count:
            make_manifest(path, few)
        peer = measure(open_list, path, few, 1, options.workers)
    seconds = spread([1000 * s for s, _ in opening])
    table(
        f"Opening an indexed file of {options.lines:,} lines in a fresh process, imports excluded",
        ["what", "min", "median", "max", "bar"],
        [("time, ms", *seconds, "50"), ("MiB anonymous", *spread([m for _, m in opening]), "5")],
    )
    rows = []
    cases = [
        (f"Manifest, {options.ranks} ranks x {options.workers} workers", ours, "15"),
        (f"list of {few:,} lines, 1 rank x {options.workers} workers", peer, "-"),
    ]
    for name, result, bar in cases:
        for kind in ("rank", "worker"):
            nothing = statistics.median(base[kind])
            rows.append((name, kind, *spread([value - nothing for value in result[kind]]), bar, f"{nothing:.1f}"))
    title = (
        f"Growth of Pss_Anon over an empty manifest, MiB: {options.lines:,} lines, {BATCHES} batches of {BATCH} each"
    )
    table(title, ["what", "process", "min", "median", "max", "bar", "empty has"], rows, peer="list of")


if __name__ == "__main__":
    main()
