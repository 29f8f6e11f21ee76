"""MPDataset: time to the first batch and memory of the workers at 10 M lines, 8 ranks x 4 workers.

Each rank is a fresh process with torch's own DataLoader and forked workers. ``one rank`` runs the ranks one after the
other, as if each had its own cores; ``all ranks`` runs them at the same time on this machine. The peer reads the whole
file in every worker and picks its lines, as stream datasets over a meta file do. Memory is ``Pss_Anon`` of a worker
beyond that of a worker of an empty dataset, which also shows what forking so many workers costs by itself.

    python benchmarks/mp_dataset.py --lines 10000000 --ranks 8
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from _common import make_manifest, parse, smaps_rollup, spread, table

WORKERS = 4
BATCH = 256
BATCHES = 40


class WholeFile(IterableDataset[Any]):
    """The peer: a permuted list of indices in the main process, and one walk through the file in every worker."""

    def __init__(self, path: str, rank: int, world_size: int) -> None:
        self.path = path
        with open(path) as file:
            n = sum(1 for _ in file)
        self.indices = np.random.default_rng(0).permutation(n).tolist()[rank::world_size]

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        mine = self.indices[info.id :: info.num_workers]
        wanted, rows = set(mine), {}
        with open(self.path) as file:
            for i, line in enumerate(file):
                if i in wanted:
                    rows[i] = line.rstrip("\n").rsplit(" ", 1)
        for i in mine:
            yield (*rows[i], i)


class Empty(IterableDataset[Any]):
    """What a worker costs by itself."""

    def __iter__(self) -> Iterator[Any]:
        for i in range(WORKERS * BATCH * BATCHES):
            yield "path", 0, i


def make_ours(path: str, rank: int, world_size: int) -> Any:
    from penstock import MPDataset

    return MPDataset(path, batch_size=BATCH, rank=rank, world_size=world_size)


def make_empty(path: str, rank: int, world_size: int) -> Any:
    return Empty()


def rank_process(make: Callable[..., Any], path: str, rank: int, world_size: int, connection: Any) -> None:
    next(iter(make_ours(f"{path}.small", 0, 1)))  # from here on everything is imported
    warnings.filterwarnings("ignore", "This DataLoader will create")
    begin = time.perf_counter()
    dataset = make(path, rank, world_size)
    iterator = iter(DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, multiprocessing_context="fork"))
    next(iterator)
    first = time.perf_counter() - begin
    for _ in range(BATCHES - 1):
        next(iterator)
    private = [smaps_rollup(w.pid)["Pss_Anon"] for w in iterator._workers]
    del iterator
    connection.send((first, max(private)))


def run(make: Callable[..., Any], path: str, ranks: int, together: int) -> list[tuple[float, float]]:
    """The ranks, ``together`` at a time."""
    context = multiprocessing.get_context("spawn")
    results = []
    for begin in range(0, ranks, together):
        group = []
        for rank in range(begin, min(begin + together, ranks)):
            end, other = multiprocessing.Pipe()
            process = context.Process(target=rank_process, args=(make, path, rank, 8, other))
            process.start()
            group.append((end, process))
        for end, process in group:
            results.append(end.recv())
            process.join()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lines", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--peer-ranks", type=int, default=1, help="the peer takes long: how many of its ranks to run")
    parser.add_argument("--dir", default=None)
    options = parse(parser, {"lines": 100_000, "ranks": 2})
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        path = str(Path(folder) / "meta.txt")
        make_manifest(path, options.lines)
        make_manifest(f"{path}.small", 1000)
        from penstock import Manifest

        for name in (path, f"{path}.small"):
            Manifest.open(name)
        empty = statistics.median(private for _, private in run(make_empty, path, 2, 1))
        measured = {
            f"empty dataset, all {options.ranks} ranks on {os.cpu_count()} cores": run(
                make_empty, path, options.ranks, 8
            ),
            "penstock, one rank at a time": run(make_ours, path, options.ranks, 1),
            f"penstock, all {options.ranks} ranks on {os.cpu_count()} cores": run(make_ours, path, options.ranks, 8),
            "whole file in each worker, one rank": run(WholeFile, path, options.peer_ranks, 1),
        }
    rows = []
    for name, results in measured.items():
        for what, unit, values in (
            ("first batch", "s", [first for first, _ in results]),
            ("private to a worker", "MiB", [(private - empty) / 2**20 for _, private in results]),
        ):
            rows.append((what, name, unit, *spread(values)))
    rows.sort(key=lambda row: row[0])
    title = f"MPDataset: {options.lines:,} lines, 8 ranks x {WORKERS} workers, batches of {BATCH}"
    table(title, ["what", "which", "unit", "min", "median", "max"], rows, peer="whole file")


if __name__ == "__main__":
    main()
